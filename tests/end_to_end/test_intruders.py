"""A closed run that trains, and those who are no members at each of its doors, one after the other.

Who lies about itself comes too: it has a pass, publishes what is not so, and nobody follows it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, assert_agreed, committed, last_step, local_swarm, tiny_run, wait_for_step
from hivemind.p2p import P2P
from testbed.attacks.records import EPOCHS_AHEAD, RECORDS
from testbed.attacks.stranger import (
    STRANGERS,
    Attempt,
    Facts,
    Pretence,
    Stranger,
    Tried,
    facts_of,
    signer_of,
    try_door,
)
from testbed.passes import HOUR, Issuer, key_file

from tt_cli.identity.passes import CLOCK_LEEWAY
from tt_cli.run import RunConfig
from tt_cli.run.initial_peers import remember_met
from tt_cli.supervisor.events import Listening, Phase, Step, Synchronised, Trouble
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm
from tt_cli.swarm.membership.pass_guard import PassGuard
from tt_cli.swarm.membership.rsa_identity import claim_identity
from tt_cli.swarm.network.dht_node import addresses_of, dht_time, start_dht, stop_dht
from tt_cli.swarm.records.consensus import FASTER
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory
from tt_cli.swarm.reporting.round_log import BOASTING

NAMES = ("anna", "ben", "cleo")
LYING_STEPS = 2
SHORT_SECONDS = 35.0  # in which a busy machine starts a trainer, and it takes part
MOST_BAN_SECONDS = 60.0  # until a ban has reached every peer: what is promised, not how fast this machine is


@dataclass
class Training:
    """A closed run's swarm with three trainers that makes steps all the time."""

    run: RunConfig
    issuer: Issuer
    swarm: LocalSwarm
    folder: Path

    @property
    def trainers(self) -> list[LocalPeer]:
        return [self.swarm.members[name] for name in NAMES]

    @property
    def newest(self) -> Step:
        return max((step for member in self.trainers for step in member.of(Step)), key=lambda step: step.epoch)

    def facts(self) -> Facts:
        """What a member could tell a stranger."""
        return facts_of(self.trainers, self.newest)

    def goes_on(self, steps: int) -> None:
        """Fails unless all trainers make so many more steps, all the same ones."""
        wait_for_step(self.swarm, last_step(self.trainers[0]) + steps, *NAMES)
        assert_agreed(self.trainers)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder, issuer = tmp_path_factory.mktemp("closed"), Issuer()
    target = {"target_batch_size": 96}  # more than a liar may claim at once
    run = issuer.closed(tiny_run(model={"depth": 2}, schedule={"total_steps": 100_000}, swarm=target))
    with local_swarm(run, folder) as swarm:
        issuer.admit(folder / "aux", run, "aux", "organiser")
        swarm.start_aux()
        for seed, name in enumerate(NAMES):
            issuer.admit(folder / name, run, "trainer", name)
            swarm.start_trainer(name, batch_size=4, seed=seed)
        wait_for_step(swarm, 2, *NAMES)
        yield Training(run, issuer, swarm, folder)


def tried(
    training: Training, attempts: Collection[Attempt], key: Path | None = None, pass_text: str = ""
) -> list[Tried]:
    """What a bare node gets at these doors of every trainer. key: of its peer id; a fresh one without."""

    key = key or Path(tempfile.mkdtemp(dir=training.folder)) / "key"

    async def knock() -> list[Tried]:
        facts, signer = training.facts(), signer_of(key)
        p2p = await P2P.create(
            initial_peers=facts.peers,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            dht_mode="client",
            identity_path=str(key),
            check_if_identity_free=False,
        )
        PassGuard(Pretence(training.run, pass_text)).guard_calls(p2p)
        stranger = Stranger(training.run, p2p, signer, facts, pass_text)
        try:
            tries = [try_door(stranger, attempt, peer) for attempt in attempts for peer in stranger.peers]
            return list(await asyncio.gather(*tries))
        finally:
            await p2p.shutdown()

    return asyncio.run(knock())


def opened(found: list[Tried]) -> list[Tried]:
    """The doors that were not closed."""
    assert found
    return [one for one in found if not one.refused]


DOORS = {attempt.__name__: attempt for attempts in STRANGERS.values() for attempt in attempts}


@pytest.mark.promise("A member with a pass is served by every trainer", also="tests/swarm/test_door.py")
def test_a_member_finds_the_doors_open(training: Training, tmp_path: Path) -> None:
    """Or else the tests below would show nothing."""
    training.issuer.admit(tmp_path, training.run, "trainer", "visitor")
    key = key_file(tmp_path, training.run, "trainer")
    doors, deadline = [DOORS["find"], DOORS["state"]], time.monotonic() + WAIT
    while len({one.door for one in opened(tried(training, doors, key, key.with_suffix(".pass").read_text()))}) < 2:
        assert time.monotonic() < deadline, "not only because the trainers stepped on meanwhile"


@pytest.mark.promise("A stranger is refused at every door of a closed run", also="tests/swarm/test_door.py")
@pytest.mark.promise("A stranger is in no group while rounds are made")
def test_a_stranger_is_refused_at_every_door_and_is_in_no_group(training: Training) -> None:
    assert opened(tried(training, DOORS.values())) == []
    before = last_step(training.trainers[0])
    while last_step(training.trainers[0]) < before + 3:
        assert opened(tried(training, [DOORS["group"]])) == []
    members = {peer for member in training.trainers for event in committed(member) for peer in event.members}
    assert members <= {member.of(Listening)[0].peer_id for member in training.trainers}
    training.goes_on(1)


@pytest.mark.promise("A forged, expired, replayed or stolen pass opens no door", also="tests/identity/test_passes.py")
@pytest.mark.parametrize("bad_pass", ["forged pass", "expired pass", "replayed pass", "another's peer id"])
def test_a_pass_that_does_not_count_opens_no_door(training: Training, bad_pass: str, tmp_path: Path) -> None:
    run, victim = training.run, key_file(training.folder / "anna", training.run, "trainer")
    issuer = Issuer() if bad_pass == "forged pass" else training.issuer
    issuer.admit(tmp_path, run, "trainer", "mallory", lasts=-HOUR if bad_pass == "expired pass" else HOUR)
    key = key_file(tmp_path, run, "trainer")
    text = key.with_suffix(".pass").read_text()
    if bad_pass == "replayed pass":
        text = victim.with_suffix(".pass").read_text()
    elif bad_pass == "another's peer id":  # its own payload under the victim's signature
        kind, payload, _ = text.split(".")
        text = f"{kind}.{payload}.{victim.with_suffix('.pass').read_text().split('.')[2]}"
    assert opened(tried(training, DOORS.values(), key, text)) == []


class Liar:
    """A member without a trainer: it publishes what it likes under its own key."""

    def __init__(self, training: Training, home: Path, initial_peers: Sequence[str]):
        run = training.run
        training.issuer.admit(home, run, "trainer", "liar")
        self.training = training
        self.identity = claim_identity(key_file(home, run, "trainer").parent, "trainer")
        self.dht = start_dht(run, self.identity, initial_peers=initial_peers, host="127.0.0.1")
        self.board = PeerDirectory(run, self.dht, self.identity)

    def say(self, **lies: object) -> None:
        """Publish a record that is true but for the lies."""
        newest = self.training.newest
        facts = {
            "peer_id": self.identity.peer_id,
            "role": "trainer",
            "client_mode": False,
            "epoch": newest.epoch,
            "digest": newest.digest,
            "samples": 4,
            "samples_per_second": 4.0,
            "total_samples": 40,
            "micro_batch": 4,
            "vote": True,
            "time": dht_time(),
        }
        record = PeerRecord.model_validate(facts)
        sent = self.board._send(record.model_copy(update={**lies, "time": dht_time()}))
        sent.result(timeout=WAIT)

    def close(self) -> None:
        stop_dht(self.dht)


@pytest.fixture(scope="module")
def liar(training: Training, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    one = Liar(training, tmp_path_factory.mktemp("liar"), training.swarm.addresses)
    with closing(one):
        yield one


LIES = {
    "epoch 10^9": RECORDS["epoch 10^9"],
    "samples 10^12": RECORDS["samples 10^12"],
    "speed inf": RECORDS["speed inf"],
    "speed 10^12": lambda record, published: {"samples_per_second": 1e12},
    "false donor": lambda record, published: {"epoch": record.epoch + EPOCHS_AHEAD, "digest": "ab" * 32},
}


@pytest.mark.promise(
    "Nobody follows a record that lies about step, samples, speed or state", also="tests/swarm/test_view.py"
)
@pytest.mark.parametrize("lie", LIES)
def test_nobody_follows_who_lies_about_itself(training: Training, liar: Liar, lie: str) -> None:
    begun = {member.name: len(member.of(Phase)) for member in training.trainers}
    steps = {member.name: len(committed(member)) for member in training.trainers}
    until = last_step(training.trainers[0]) + LYING_STEPS
    deadline = time.monotonic() + WAIT
    while min(map(last_step, training.trainers)) < until and time.monotonic() < deadline:
        honest = PeerRecord.model_construct(epoch=training.newest.epoch)
        liar.say(**LIES[lie](honest, 1))
        reached = last_step(training.trainers[0])
        training.swarm.wait(lambda reached=reached: last_step(training.trainers[0]) > reached, 2.0)
    liar.say(left=True)
    training.goes_on(1)
    made = {(step.epoch, step.digest) for member in training.trainers for step in member.of(Step)}
    for member in training.trainers:  # on a busy machine one may miss a step, and takes it over from the others
        sought = [phase.reason for phase in member.of(Phase)[begun[member.name] :] if phase.phase == "syncing"]
        assert all(int(reason.rpartition(" ")[2]) <= training.newest.epoch for reason in sought), sought
        taken = [event for event in member.of(Synchronised) if event.epoch]
        assert all((event.epoch, event.digest) in made for event in taken)
        assert liar.identity.peer_id not in {event.source for event in taken}
        rounds = committed(member)[steps[member.name] :]
        least = training.run.swarm.target_batch_size - FASTER * 4  # what a liar may claim at once
        assert all(event.samples >= least for event in rounds), rounds


@pytest.mark.promise(
    "Who claims more samples than anybody can have computed is named by all", also="tests/swarm/test_plausible.py"
)
def test_who_claims_what_nobody_can_have_done_is_named_by_all(training: Training, liar: Liar) -> None:
    def all_name_it() -> bool:
        return all(any(BOASTING in event.words for event in member.of(Trouble)) for member in training.trainers)

    deadline = time.monotonic() + WAIT
    while not all_name_it() and time.monotonic() < deadline:
        liar.say(**LIES["samples 10^12"](PeerRecord.model_construct(epoch=training.newest.epoch), 1))
        training.swarm.wait(all_name_it, 2.0)
    liar.say(left=True)
    assert all_name_it()


@pytest.mark.promise(
    "A newcomer whose only initial peer shows it another swarm takes the run's state, through who the authority named",
    also="tests/auth/test_keeper.py",
)
def test_a_newcomer_is_not_shown_another_swarm(training: Training, tmp_path: Path) -> None:
    run, swarm, home = training.run, training.swarm, training.folder / "eva"
    training.issuer.admit(home, run, "trainer", "eva")
    remember_met(key_file(home, run, "trainer").parent, training.facts().peers[:1])
    with closing(Liar(training, tmp_path, ())) as liar:
        liar.say(epoch=training.newest.epoch + EPOCHS_AHEAD, digest="ab" * 32)
        eva = swarm.start_trainer("eva", batch_size=4, seed=5, initial_peers=addresses_of(liar.dht))
        assert swarm.wait(lambda: len(committed(eva)) > 1, WAIT), eva.events[-12:]
        assert_agreed([eva, *training.trainers])
        eva.worker.leave()
        eva.worker.wait(WAIT)
    training.goes_on(1)


@pytest.mark.promise("A ban closes every trainer's doors within a minute", also="tests/swarm/test_door.py")
@pytest.mark.promise(
    "A banned trainer is out of the rounds, though only the aux peer hears of it from the authority",
    also="tests/swarm/test_door.py",
)
@pytest.mark.promise("A trainer whose pass has expired is out of the rounds", also="tests/swarm/test_membership.py")
def test_who_counts_no_more_is_out_and_the_others_go_on(training: Training, tmp_path: Path) -> None:
    """cleo and mallory, who only knocks, are banned; dora, who comes now, has a pass for some seconds.

    The last test: two trainers are left then.
    """
    run, issuer, swarm = training.run, training.issuer, training.swarm
    *others, cleo = training.trainers
    issuer.admit(training.folder / "dora", run, "trainer", "dora", lasts=SHORT_SECONDS - CLOCK_LEEWAY)
    expired = time.time() + SHORT_SECONDS
    dora = swarm.start_trainer("dora", batch_size=4, seed=3)
    issuer.admit(tmp_path, run, "trainer", "mallory")
    key = key_file(tmp_path, run, "trainer")
    text = key.with_suffix(".pass").read_text()
    doors = [DOORS["find"], DOORS["state"]]
    assert opened(tried(training, doors, key, text))
    assert swarm.wait(lambda: bool(committed(dora)), WAIT), dora.worker.log.read_text()
    assert committed(dora)[0].at < expired, "it took part"
    issuer.ban([training.folder / "aux"], run, ["cleo", "mallory"])  # the others hear of it from the auxiliary peer
    deadline = time.monotonic() + MOST_BAN_SECONDS
    while opened(tried(training, doors, key, text)):
        assert time.monotonic() < deadline, "the ban did not reach every trainer"
    shut = max(expired, time.time())  # before, who was late in a round is handed its average
    closed = [one.of(Listening)[0].peer_id for one in (cleo, dora)]

    def both_are_out() -> bool:
        late = [[event for event in committed(member) if event.at > shut][-2:] for member in others]
        return all(len(two) == 2 and not any(set(closed) & set(one.members) for one in two) for two in late)

    assert swarm.wait(both_are_out, WAIT), [event.members for member in others for event in committed(member)]
    out_at = max(event.at for member in (*others, cleo, dora) for event in committed(member))
    wait_for_step(swarm, max(map(last_step, others)) + 3, "anna", "ben")
    assert_agreed(others)
    rounds = [event for member in others for event in committed(member) if event.at > out_at]
    assert rounds
    for out, peer_id in zip((cleo, dora), closed, strict=True):
        assert not any(peer_id in event.members for event in rounds)
        assert not [event for event in (*committed(out), *out.of(Synchronised)) if event.at > out_at]
