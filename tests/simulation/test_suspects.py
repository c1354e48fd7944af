"""What was suspected of the protocol, where no schedule comes to: very large groups, a fetch amid a round."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import pytest
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from simulation.averager import Control, HashSigner
from simulation.machine import Machine, key_of, run_of
from simulation.network import Line, Network
from simulation.state import SimulatedState, gradient_of
from simulation.virtual import in_virtual_time

from tt_cli.identity.rate_limit import RateLimit
from tt_cli.supervisor.events import Progress, Step
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.commit import CommitProtocol, LastVote
from tt_cli.swarm.allreduce.messages import Commitment, Inputs, Lock, RoundName, SignedJoin, SignedVote
from tt_cli.swarm.allreduce.rendezvous import SKEW, FalseGroup, entry_of, group_id_of, join_in, read_entry
from tt_cli.swarm.allreduce.round_plan import Contribution, RoundGroup, RoundPlan
from tt_cli.swarm.allreduce.votes import liars_among
from tt_cli.swarm.averager import JOIN_BYTES, Averager
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS, MAX_REDUCERS
from tt_cli.swarm.shared_state import StepFacts


def with_averager(check: Callable[[Averager], Awaitable[None]]) -> None:
    """Have the check made with the averager of the first member of a simulated swarm, in its process."""

    async def run() -> None:
        machine = Machine(Network(random.Random(0), Line(), (), {}), 0, run_of(3, "mean"), lambda *_: None)
        machine.start()
        await asyncio.sleep(0.1)
        await machine.process.run(check(machine.collaboration.averager))  # type: ignore[arg-type]
        machine.kill()

    in_virtual_time(run())


def joins_of(members: int) -> dict[PeerID, SignedJoin]:
    """What so many members that accept connections say."""
    join = SignedJoin("run", "0_00", "leader", 0.0, True, 0, True, "")
    return {PeerID.from_base58(key_of(number).peer_id): join for number in range(members)}


def group_of(members: int) -> GroupInfo:
    """A group of these, of which nobody looks at the joins."""
    return GroupInfo(b"group", tuple(joins_of(members)), (b"",) * members)


def test_of_more_members_than_may_reduce_the_first_reduce() -> None:
    async def check(averager: Averager) -> None:
        await averager._prepare_round(RoundPlan("0_00", swarm=300))
        await averager._contribute(Contribution(8, 8.0))
        allreduce = averager._begin(b"group", joins_of(300), 8.0).allreduce
        assert len(allreduce.members) == 300 and allreduce.reducers == allreduce.members[:MAX_REDUCERS]
        signed = Commitment(allreduce.name, str(allreduce.me), allreduce.group.shares, 63, 300, bytes(32), ())
        assert Commitment.read(signed.sign(averager.signer), averager.signer.opened) == signed

    with_averager(check)


def test_all_who_say_that_they_listen_reduce() -> None:
    async def check(averager: Averager) -> None:
        await averager._prepare_round(RoundPlan("0_00", swarm=5))
        await averager._contribute(Contribution(40, 8.0))
        joins = joins_of(5)
        deaf = next(peer for peer in joins if peer != averager.peer_id)
        joins[deaf] = replace(joins[deaf], listens=False)
        assert set(averager._begin(b"group", joins, 40.0).allreduce.reducers) == joins.keys() - {deaf}

    with_averager(check)


@pytest.mark.parametrize(("trainers", "repeated"), [(3, True), (4, False)])
def test_a_group_repeats_what_its_members_voted_for_unless_all_of_these_may_lie(trainers: int, repeated: bool) -> None:
    async def check(averager: Averager) -> None:
        await averager._prepare_round(RoundPlan("0_00", swarm=trainers))
        await averager._contribute(Contribution(40, 8.0))
        joins = joins_of(3)
        one, other, third = joins
        joins[one] = replace(joins[one], lock=Lock(0, 2, bytes(32)))
        joins[other] = replace(joins[other], lock=Lock(liars_among(trainers), 7))
        joins[third] = replace(joins[third], lock=Lock(liars_among(trainers)))
        name = RoundName(averager._run.identity, "0_00", bytes(32))
        shown = SignedVote(name, str(one), 1, (5, 1), (bytes(32),)).sign(HashSigner(str(one)))
        group = averager._begin(b"group", joins, 40.0, [shown, b"nonsense"]).allreduce.group
        assert (group.locked, group.attempt) == (bytes(32) if repeated else b"", 8)
        assert group.shares == ((5, 1) if repeated else (1, 1, 1)) and group.claims == (
            {str(one)} if repeated else set()
        )
        assert not averager._begin(b"group", joins, 40.0).allreduce.group.locked, "nobody's word is a vote"

    with_averager(check)


def test_who_precommitted_refuses_a_group_without_the_votes_that_it_showed() -> None:
    """It insists on no more than others can see: votes of too few of the group count for nobody."""

    async def check(averager: Averager) -> None:
        await averager._prepare_round(RoundPlan("0_00", swarm=4))
        await averager._contribute(Contribution(40, 8.0))
        claims = [bytes(31) + kind for kind in (b"a", b"b", b"c")] + [b""]
        joins = {
            peer: replace(join, lock=Lock(1, average=claim))
            for (peer, join), claim in zip(joins_of(4).items(), claims, strict=True)
        }
        peers, name = list(map(str, joins)), RoundName(averager._run.identity, "0_00", bytes(32))

        def signed(number: int, attempt: int, average: bytes) -> bytes:
            vote = SignedVote(name, peers[number], attempt, (1,), (average,))
            return vote.sign(HashSigner(peers[number]))

        mine, later = (
            [signed(n, attempt, bytes(31) + kind) for n in (0, 1, 2)] for attempt, kind in ((3, b"a"), (4, b"b"))
        )
        equal = [signed(number, 3, bytes(31) + b"c") for number in (1, 2)]
        averager._votes.last = LastVote("0_00", 3, (1,), (bytes(16),), shown=tuple(mine))
        for shown in ([], mine[:1], equal):
            with pytest.raises(FalseGroup, match="without the votes that this peer has shown"):
                averager._begin(b"group", joins, 40.0, shown)
        for shown, locked in ((mine, b"a"), (mine[1:], b"a"), (later[1:], b"b"), (mine + later, b"b")):
            assert averager._begin(b"group", joins, 40.0, shown).allreduce.group.locked == bytes(31) + locked
        unclaimed = {peer: replace(join, lock=Lock(1)) for peer, join in joins.items() if str(peer) != peers[0]}
        unclaimed |= {averager.peer_id: joins[averager.peer_id]}
        assert averager._begin(b"group", unclaimed, 40.0, mine + later).allreduce.group.locked == claims[0]
        few = {peer: join for peer, join in joins.items() if str(peer) not in peers[1:3]}
        assert not averager._begin(b"group", few, 40.0, mine).allreduce.group.locked

    with_averager(check)


def test_what_was_voted_for_before_the_organiser_took_the_run_back_counts_no_more() -> None:
    async def run() -> None:
        machine = Machine(Network(random.Random(0), Line(), (), {}), 0, run_of(3, "mean"), lambda *_: None)
        machine.start()
        await asyncio.sleep(0.1)
        averager: Averager = machine.collaboration.averager
        averager._votes.last, shown = LastVote("0_00", 3, (1,), (bytes(16),), shown=(b"vote",)), []
        for averager.era in (0, 2):
            averager.seek(RoundPlan("0_00", leader=key_of(1).peer_id))
            await asyncio.sleep(0.1)
            entry = averager._matchmaking.step_control.data_for_gather
            join = join_in(entry, averager.peer_id, averager.signer.opened)
            shown.append((join.state_key, join.lock.average, read_entry(entry)[1]))
        assert shown == [("0_00", averager._votes.last.average, (b"vote",)), ("0_00_2", b"", ())]
        machine.kill()

    in_virtual_time(run())


class Led:
    """A group of four that an averager leads. ask: has a member join, and show votes; entries: as it is handed out."""

    AVERAGE = bytes(32)

    def __init__(self, averager: Averager):
        self.peers, self.averager = [*joins_of(4)], averager
        self.name = RoundName(averager._run.identity, "0_00", bytes(32))
        now, me = averager.clock.dht_time(), str(averager.peer_id)
        self.join = SignedJoin(averager._run.identity, "0_00", me, now, True, 0, True, "", Lock(1, 2, self.AVERAGE))

    async def begin(self) -> None:
        me, everybody = str(self.averager.peer_id), frozenset(map(str, self.peers))
        await self.averager._prepare_round(RoundPlan("0_00", everybody, me, 4))
        self.averager._joined, self.averager._led, self.averager._led_key = {}, asyncio.Future(), "key"
        self.averager._matchmaking.step_control = leading = Control(0.0, 0.0)
        leading._data_for_gather = entry_of(replace(self.join, lock=Lock(1)).sign(self.averager.signer))

    def vote(self, number: int, attempt: int = 2, average: bytes = AVERAGE, **changes: object) -> bytes:
        signer = HashSigner(str(self.peers[number]))
        vote = SignedVote(self.name, signer.peer_id, attempt, (1,), (average,))
        return replace(vote, **changes).sign(signer)  # type: ignore[arg-type] # by name

    async def ask(self, number: int, *votes: bytes, **changes: object) -> int:
        join = replace(self.join, **changes).sign(HashSigner(str(self.peers[number])))  # type: ignore[arg-type] # too
        request = averaging_pb2.JoinRequest(gather=entry_of(join, votes), group_key="key")
        context = P2PContext("", "", self.peers[number])
        return (await anext(self.averager.rpc_join_group(request, context))).code

    async def entries(self) -> dict[int, tuple[bytes, tuple[bytes, ...]]]:
        """Number → signed join and votes."""
        mine = self.averager._matchmaking.step_control.data_for_gather
        gathered = {self.averager.peer_id: mine, **self.averager._joined}
        group = GroupInfo(b"group", tuple(gathered), tuple(gathered.values()))
        await self.averager._keys().update_key_on_group_assembled(group)
        numbers = map(self.peers.index, group.peer_ids)
        return dict(zip(numbers, map(read_entry, group.gathered), strict=True))


def test_a_leader_shows_all_members_each_vote_for_what_they_repeat_once() -> None:
    """Whatever it is asked first: that counts alone with which a member is in the group."""

    async def check(averager: Averager) -> None:
        led = Led(averager)
        await led.begin()
        newest = [led.vote(number) for number in range(3)]
        elsewhere = led.vote(1, 9, name=replace(led.name, state_key="1_00"))
        other, long = led.vote(2, 9, shares=(2,)), led.vote(1, 9, name=replace(led.name, group_id=bytes(2**12)))
        await led.ask(1, *newest[:2])
        await led.ask(2, led.vote(0, 1), led.vote(1, 1), newest[2], elsewhere, other, b"no vote", long)
        assert [len(read_entry(gathered)[1]) for gathered in averager._joined.values()] == [2, 7]
        entries = await led.entries()
        assert sorted(entries[0][1]) == sorted(newest) and not entries[1][1] and not entries[2][1]
        assert [led.join.read(join, averager.signer.opened)[0] for join, _ in entries.values()] == [
            str(peer) for peer in led.peers[:3]
        ]
        told = [entry_of(join, votes) for join, votes in entries.values()]
        assert averager._keys().formed[-1][0] == group_id_of(told), "the others compute the same"
        averager._joins = RateLimit(2.0, 0.0)
        for code in (averaging_pb2.ACCEPTED, averaging_pb2.PROTOCOL_VIOLATION):
            assert await led.ask(1, *[b"no vote"] * (JOIN_BYTES // 7)) == code, "large ones count for more"

    with_averager(check)


def test_votes_without_end_leave_room_for_those_of_who_is_locked() -> None:
    """One asks again and again, locked on another average each time, and shows votes of its own for that."""

    async def check(averager: Averager) -> None:
        led = Led(averager)
        await led.begin()
        honest = [led.vote(number) for number in range(3)]
        await led.ask(1, *honest)
        for number in range(60):
            invented = number.to_bytes(32, "big")
            votes = [led.vote(3, 10**9, invented, name=replace(led.name, group_id=bytes([k]))) for k in range(40)]
            await led.ask(3, *votes, lock=Lock(1, 2, invented))
        entries = await led.entries()
        assert sorted(entries[0][1]) == sorted(honest[:2]) and entries.keys() == {0, 1, 3}
        del averager._joined[led.peers[1]]
        assert (await led.entries())[0][1] == (), "it is not in the group"
        most = bytes(wire.MOST_JOIN), (bytes(wire.MOST_VOTE),) * MAX_MEMBERS
        assert read_entry(entry_of(*most)) == most, "all members' have room"

    with_averager(check)


def test_nobody_uses_up_the_numbers_of_attempts() -> None:
    """Of two rounds with one number, locked on unlike averages, members would refuse each other's groups for ever."""

    async def check(averager: Averager) -> None:
        led, began = Led(averager), averager.clock.dht_time()
        await led.begin()
        await averager._contribute(Contribution(40, 8.0))

        def group_of_locks(*locks: Lock, shown: Sequence[bytes] = ()) -> RoundGroup:
            joins = {peer: replace(led.join, lock=lock) for peer, lock in zip(led.peers, locks, strict=False)}
            return averager._begin(b"group", joins, 40.0, shown).allreduce.group

        async def pushed() -> int:
            """The attempt of a group in which one says the most that it can."""
            while True:
                for claimed in (2**32 - 1, int(averager.clock.dht_time())):
                    if await led.ask(3, lock=Lock(1, claimed)) == averaging_pb2.ACCEPTED:
                        return group_of_locks(Lock(1), Lock(1), Lock(1), Lock(1, claimed)).attempt
                await asyncio.sleep(0.1)

        other, attempts = bytes(31) + b"2", [await pushed()]
        averager._votes.last = LastVote("0_00", attempts[0])
        assert await led.ask(1) == averaging_pb2.NOT_LOOKING_FOR_GROUP, "it was in as many itself"
        attempts.append(await pushed())
        mine = [led.vote(number, attempts[0]) for number in (0, 1, 3)]
        later = [led.vote(number, attempts[1], other) for number in (1, 2, 3)]
        averager._votes.last = LastVote("0_00", attempts[0], (1,), (bytes(16),), shown=tuple(mine))
        await asyncio.sleep(1.0)
        locks = Lock(1, attempts[0], led.AVERAGE), Lock(1, attempts[1]), Lock(1, attempts[1], other)
        assert group_of_locks(*locks, shown=mine + later).locked == other, "this one was locked before, and goes on"
        assert averager.clock.dht_time() < began + 3.0
        now = averager.clock.dht_time()
        assert group_of_locks(Lock(1), Lock(1, int(now + SKEW))).attempt == int(now + SKEW) + 1, "clocks differ"
        with pytest.raises(FalseGroup, match=f"{averager.peer_id} led a group after more attempts"):
            group_of_locks(Lock(1), Lock(1, int(now + SKEW) + 1))

    with_averager(check)


def test_a_leader_takes_in_who_asks_for_its_own_group_and_nobody_else() -> None:
    async def check(averager: Averager) -> None:
        other, me, now = key_of(1).peer_id, str(averager.peer_id), averager.clock.dht_time()
        usual = SignedJoin(averager._run.identity, "0_00", me, now, True, 0, True, "")
        changes = ({"time": now - 600.0}, {"time": now + 600.0}, {"state_key": "1_00"}, {"leader": other}, {"run": "r"})
        await averager._prepare_round(RoundPlan("0_00", frozenset({me, other}), me, 2))
        averager._joined, averager._led, averager._led_key = {}, asyncio.Future(), "key"

        async def asked(join: SignedJoin, signer: str = other) -> int:
            request = averaging_pb2.JoinRequest(gather=entry_of(join.sign(HashSigner(signer))), group_key="key")
            context = P2PContext("", "", PeerID.from_base58(other))
            async for answer in averager.rpc_join_group(request, context):
                return answer.code
            raise AssertionError("no answer")

        for change in changes:
            assert await asked(replace(usual, **change)) == averaging_pb2.NOT_LOOKING_FOR_GROUP
        assert await asked(usual, signer=me) == averaging_pb2.PROTOCOL_VIOLATION, "for another peer"
        assert not averager._joined
        assert await asked(usual) == averaging_pb2.ACCEPTED and set(averager._joined) == {PeerID.from_base58(other)}
        await averager._prepare_round(RoundPlan("0_00", frozenset({me, other}), other, 2))
        assert await asked(replace(usual, leader=other)) == averaging_pb2.NOT_LOOKING_FOR_GROUP, "it does not lead"

    with_averager(check)


def test_a_leader_leaves_it_to_a_member_to_hang_up_when_it_has_the_group() -> None:
    """The daemon may reset a stream that this side ends, and the member would never hear of its group."""

    async def check(averager: Averager) -> None:
        other, me, now = key_of(1).peer_id, str(averager.peer_id), averager.clock.dht_time()
        await averager._prepare_round(RoundPlan("0_00", frozenset({me, other}), me, 2))
        averager._joined, averager._led, averager._led_key = {}, asyncio.Future(), "key"
        join = SignedJoin(averager._run.identity, "0_00", me, now, True, 0, True, "").sign(HashSigner(other))
        request = averaging_pb2.JoinRequest(gather=entry_of(join), group_key="key")
        answers = averager.rpc_join_group(request, P2PContext("", "", PeerID.from_base58(other)))
        assert (await anext(answers)).code == averaging_pb2.ACCEPTED
        averager._led.set_result(group_of(2))
        assert (await anext(answers)).code == averaging_pb2.BEGIN_ALLREDUCE
        ended = asyncio.ensure_future(anext(answers, None))
        await asyncio.sleep(averager.next_chunk_timeout - 0.1)
        assert not ended.done()
        await asyncio.sleep(0.2)
        assert ended.done() and ended.result() is None, "nobody keeps it for ever"

    with_averager(check)


def test_no_honest_reducer_has_more_inputs_than_a_judge_reads() -> None:
    plan = RoundPlan("0_00", swarm=MAX_MEMBERS + 1)
    plan.check(group_of(MAX_MEMBERS))
    assert len(Inputs.read(Inputs((b"opening",) * MAX_MEMBERS, (1,) * MAX_MEMBERS).pack()).used) == MAX_MEMBERS
    with pytest.raises(ValueError, match="members"):
        plan.check(group_of(MAX_MEMBERS + 1))


def test_a_leader_gathers_no_more_than_that() -> None:
    async def check(averager: Averager) -> None:
        await averager._prepare_round(RoundPlan("0_00", frozenset(map(str, range(2 * MAX_MEMBERS)))))
        assert averager._matchmaking.target_group_size == MAX_MEMBERS

    with_averager(check)


def test_a_round_signs_nothing_of_an_average_that_is_fetched_meanwhile() -> None:
    async def check(averager: Averager) -> None:
        await averager._prepare_round(RoundPlan("0_00", swarm=3))
        await averager._contribute(Contribution(8, 8.0))
        for name, gradient in gradient_of(0).items():
            averager.local.encode(name, gradient, 1)
        commit = averager._begin(b"group", joins_of(3), 8.0)
        abandoned = asyncio.create_task(commit.allreduce.run())
        await asyncio.sleep(0)  # it has opened the store, and nothing is averaged yet
        fetched = averager.store.open((1,))
        encoded = averager.store.get(0)
        averager.store.put(0, encoded, fetched)
        with pytest.raises(ExceptionGroup) as ended:
            await abandoned
        assert ended.value.subgroup(LookupError)
        assert averager.store.hashes is fetched and averager.store.get(0) == encoded
        assert not commit.allreduce.commitment and not commit.allreduce.inputs

    with_averager(check)


@pytest.mark.parametrize(
    ("failure", "raised", "words"),
    [
        (MemoryError(), WorkerBroken, "memory ran out in a round"),
        (torch.OutOfMemoryError("CUDA out of memory"), WorkerBroken, "memory ran out in a round"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
)
def test_what_breaks_the_thread_of_rounds_ends_training(
    failure: Exception, raised: type[Exception], words: str
) -> None:
    """Where memory ran out there it is no matter of the micro-batch, which smaller ones would mend."""

    class Failing(SimulatedState):
        def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
            raise failure

    async def run() -> None:
        machine = Machine(
            Network(random.Random(0), Line(), (), {}), 0, run_of(1, "mean"), lambda *_: None, state=Failing
        )
        machine.start()
        await asyncio.sleep(30)
        assert type(machine.error) is raised and str(machine.error).startswith(words)
        machine.kill()

    in_virtual_time(run())


def test_while_nobody_computes_no_time_to_the_next_step_is_told() -> None:
    async def run() -> None:
        network, told = Network(random.Random(0), Line(), (), {}), list[Any]()
        machine = Machine(network, 0, run_of(1, "mean"), lambda *_: None, idle=True)
        machine.start()
        await asyncio.sleep(30)
        machine.collaboration.emit = told.append
        machine.collaboration.report()
        machine.idle = False
        await asyncio.sleep(30)
        machine.collaboration.report()
        first, *_, last = [event for event in told if isinstance(event, Progress)]
        assert (first.swarm_samples_per_second, first.eta) == (0.0, None)
        assert last.swarm_samples_per_second and last.eta is not None
        machine.kill()

    in_virtual_time(run())


@pytest.mark.parametrize("waits", [False, True], ids=["", "computes nothing amid a round"])
def test_who_voted_for_an_average_of_nothing_gives_what_it_computes_later(waits: bool) -> None:
    """Who has all samples ends as the round begins, and the others vote for what nobody gave anything to."""

    async def work() -> tuple[int, int]:
        steps, network, run = list[int](), Network(random.Random(0), Line(), (), {}), run_of(4, "mean")

        def note(machine: Machine, step: Step, alone: bool) -> None:
            steps.append(step.epoch)

        *idle, last = [Machine(network, number, run, note, idle=number != 3, waits=waits) for number in range(4)]
        for machine in (*idle, last):
            machine.start()
        while len(steps) < 8 or not last.collaboration._averages:
            await asyncio.sleep(0.01)
        last.kill()
        await asyncio.sleep(5.0)
        before, idle[0].idle = len(steps), False
        assert all(machine.collaboration.averager._votes.last.votes for machine in idle)
        await asyncio.sleep(30.0)
        for machine in idle:
            machine.kill()
        return before, len(steps)

    before, after = in_virtual_time(work())
    assert before == 8 and after > 8


def test_who_breaks_off_just_before_it_had_to_say_what_it_has_stops_no_swarm() -> None:
    """Asked three times, each time for as long as the first, it outlasted the round, and nobody was told of it."""

    class JustTooLate(CommitProtocol):
        async def answer(self, peer: PeerID, request: runtime_pb2.ExpertInfo) -> runtime_pb2.ExpertInfo:
            await asyncio.sleep(self.patience - 0.2)
            raise ValueError("not today")

    async def work() -> list[Machine]:
        network, run = Network(random.Random(0), Line(), (), {}), run_of(4, "mean")
        *others, liar = [Machine(network, number, run, lambda *_: None) for number in range(4)]
        for machine in (*others, liar):
            machine.start()
        while liar.collaboration is None:
            await asyncio.sleep(0.01)
        liar.collaboration.averager.commit_type = JustTooLate
        await asyncio.sleep(40.0)
        for machine in (*others, liar):
            machine.kill()
        return others

    assert min(machine.state.epoch for machine in in_virtual_time(work())) > 2


def test_an_attempt_that_outlasted_its_round_is_one_all_the_same() -> None:
    """As where machines hang for long: its number would be that of the next attempt, too, in which they vote again."""
    attempts = list[int]()

    class Hanging(CommitProtocol):
        async def _precommit(self, calling: Set[str]) -> None:
            attempts.append(self.allreduce.group.attempt)
            await asyncio.sleep(100.0)

    async def work() -> None:
        network, run = Network(random.Random(0), Line(), (), {}), run_of(2, "mean")
        machines = [Machine(network, number, run, lambda *_: None) for number in range(2)]
        for machine in machines:
            machine.start()
        while any(machine.collaboration is None for machine in machines):
            await asyncio.sleep(0.01)
        for machine in machines:
            machine.collaboration.averager.commit_type = Hanging
        while len(attempts) < 6:
            await asyncio.sleep(1.0)
        for machine in machines:
            machine.kill()

    in_virtual_time(work())
    assert [attempt - attempts[0] for attempt in attempts] == [0, 0, 1, 1, 2, 2]
