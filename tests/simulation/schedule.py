"""A schedule: who takes part, what goes wrong, and when; drawn from one number, run, checked, and made smaller.

What is real: `Collaboration` with its threads; `PeerDirectory`, `SwarmState`, `Vote` and `ClaimLimits` (records,
consensus, what is believed); `ParticipantSelector` with no-shows and stragglers; `Matchmaker`, `RoundPlan`,
`LeaderRendezvous` and signed joins; `Averager` with `AllReduce`, `Reducer`, `CommitProtocol`, `fetch_parts`,
`KeptAverages`, `Audits`; `CatchUp`, `StepReplay`, `StateBridge` with `StateClient`, `StateServer` and `TrustedDigests`
(a state has four small chunks); what `ConnectivityMonitor` makes of pings.

In some scenarios (`keepers`) the DHT's nodes are real, too, and in some there are auxiliary peers, of which
`AuxiliaryMember` with `StateFollower` and `Lease` is real.

What stands in: hivemind's own matchmaking and futures, libp2p, RSA, the optimizer, the supervisor; the DHT elsewhere.
In closed runs records, joins and calls show real passes, and the organiser's notices are real. Where orders are given
one trainer has all of its states on its disk.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hivemind.dht.crypto import RSASignatureValidator
from simulation.auxiliary import NUMBERS, AuxiliaryMachine
from simulation.dht import RealDht
from simulation.invariants import Violation, Watch
from simulation.liars import liar
from simulation.machine import EXPIRATION, INITIAL, PARTS, ClaimedLine, Machine, SimulatedRun, key_of, run_of
from simulation.network import Cut, Line, Network
from simulation.organiser import Defiance, Organiser
from simulation.scenarios import SCENARIOS
from simulation.virtual import EPOCH, in_virtual_time

from tt_cli.swarm.records.publisher import peers_key

KEEPER = 0  # the member that has all of its states on its disk
FAULTS_FROM = 2.5  # seconds after the beginning: a swarm begins whole, for halves that never met are two swarms
STEPS_AFTER = 2  # that all make when the faults are over: the first may have been under way
PROGRESS_SECONDS = 90.0  # in which they make them: records of the dead expire, no-shows come again
LOOK_SECONDS = 0.25
WRITING_SECONDS = 2.0  # between two records of who does not exist
STALLS = (0.3, 1.0, 2.0, 4.0, 6.0, 10.0, 25.0)  # seconds in which a machine, or a process of it, hangs
DEFIED = 0.5  # of the schedules with orders: somebody says to have gone back and has not
UNEVEN = 0.5  # of the schedules have lines that differ, and half of these, without liars, somebody without samples
UPLOADS = (0, 1_000, 5_000, 20_000)  # kbit/s that a line says it carries
DEADLY = (*["rpc_aggregate_part"] * 3, "rpc_aggregate_part!", "rpc_settle", "rpc_settle!")
METHODS = ("rpc_join_group!", "rpc_aggregate_part", "rpc_aggregate_part!", "rpc_settle", "rpc_settle!")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    kind: cut, moment, death, silence, crash, stop, slow, client, skew, liar, phantoms, user, order, defy.
    about: numbers of members; of a death or a silence, who sends the message. how: of these and a moment, the method
    with whose message it begins, and its number; stop: after how many seconds it is over. Of a crash: "for good", or
    "newest" where the backup is of the state that the member held last. Of a stop: the process that hangs, "" for all.
    Of a user: about its peers. Of an order: about those who hear it from the authority; "pause", "ban NUMBER", or "back
    PART" and "published PART", of the states that there are until then.
    """

    kind: str
    about: tuple[int, ...] = ()
    start: float = 0.0
    stop: float = 0.0
    how: str = ""


@dataclass(frozen=True)
class Schedule:
    """Everything about one run of the simulator. It follows from its seed; `smaller` has fewer of it."""

    seed: int
    scenario: str
    members: int
    faults: tuple[Fault, ...]

    @classmethod
    def drawn(cls, seed: int, scenario: str, members: int | None = None) -> Schedule:
        """The schedule with this number."""
        most, entropy = SCENARIOS[scenario], random.Random(f"{scenario} {seed}")
        drawn = entropy.choice(most.sizes)
        count = members or drawn
        everybody, first, last = [*range(count), *NUMBERS[: most.auxiliaries]], FAULTS_FROM, most.seconds

        def times(longest: float) -> tuple[float, float]:
            start = entropy.uniform(first, last - 1.0)
            return start, min(last, start + entropy.uniform(most.least_seconds, longest))

        faults = []
        for _ in range(entropy.randint(min(1, most.cuts), most.cuts) if most.cuts else 0):
            group = tuple(sorted(entropy.sample(everybody, entropy.randint(1, len(everybody) - 1))))
            faults.append(Fault("cut", group, *times(most.cut_seconds), entropy.choice(["", "", "one way"])))
        for _ in range(entropy.randint(min(1, most.moments), most.moments) if most.moments else 0):
            group = tuple(sorted(entropy.sample(everybody, entropy.randint(1, count - 1))))
            what = f"{entropy.choice(most.methods or METHODS)} {entropy.randint(1, 16 * count)}"
            faults.append(Fault("moment", group, stop=entropy.uniform(0.3, 6.0), how=what))
        for _ in range(entropy.randint(0, most.crashes)):
            crash = (entropy.choice(everybody),), *times(6.0)
            faults.append(Fault("crash", *crash, "newest" if most.newest else entropy.choice(["", "for good"])))
        for _ in range(entropy.randint(0, most.stops)):
            faults.append(Fault("stop", (entropy.randrange(count),), *times(4.0)))
        for _ in range(entropy.randint(0, most.slow)):
            faults.append(Fault("slow", (entropy.randrange(count),), how=str(entropy.choice([5, 20]))))
        clients = entropy.sample(range(1, count), min(count - 2, entropy.randint(0, most.clients)))
        faults += [Fault("client", (number,)) for number in clients]
        if most.skew:
            faults += [Fault("skew", (n,), how=f"{entropy.uniform(-most.skew, most.skew):.2f}") for n in everybody]
        lying = []
        if most.users:
            one = sorted(entropy.sample(everybody, count + 1 - entropy.choice(most.users)))
            faults.append(Fault("user", tuple(one)))
            lying = one if entropy.random() < 0.5 else [next(number for number in everybody if number not in one)]
        elif most.liars:
            among = range(1 if most.keepers else 0, count)  # who joins through a liar alone need not come to the others
            lying = sorted(entropy.sample(among, entropy.randint(1, max(1, (count - 1) // 3))))
        for number in lying if most.liars else ():
            if number not in clients:
                how = f"{entropy.choice(most.liars)} {entropy.randrange(10**6)}"
                faults.append(Fault("liar", (number,), how=how))
        if most.phantoms:
            how = f"{entropy.randint(1, most.phantoms)}{entropy.choice(['', ' voting'])}"
            faults.append(Fault("phantoms", start=entropy.uniform(first, last - 1.0), how=how))
        for _ in range(entropy.randint(1, most.deaths) if most.deaths else 0):
            what = f"{entropy.choice(most.methods or DEADLY)} {entropy.randint(1, 4 * count * count)}"
            faults.append(Fault(entropy.choice(["death", "silence"]), stop=entropy.uniform(1.0, 6.0), how=what))
        for _ in range(most.stalls):
            start, part = entropy.uniform(first, last - 1.0), entropy.choice(["", "", *PARTS])
            stop = min(last, start + entropy.choice(STALLS))
            faults.append(Fault("stop", (entropy.choice(everybody),), start, stop, part))
        if most.orders:  # nobody but the keeper is sure to have the state of one
            faults = [replace(f, how="") if f.kind == "crash" and f.about == (KEEPER,) else f for f in faults]
            gone = {number for fault in faults if fault.how == "for good" for number in fault.about}
        for _ in range(entropy.randint(1, most.orders) if most.orders else 0):
            hearing = {*entropy.sample(everybody, entropy.randint(1, len(everybody)))}
            back = f"{entropy.choice(['back', 'back', 'published'])} {entropy.uniform(0.0, 1.0):.2f}"
            how = entropy.choice([back, back, back, "pause", f"ban {entropy.randrange(1, count)}"])
            faults.append(Fault("order", tuple(sorted(hearing)), *times(6.0), how))
        if most.orders:  # who died, or is banned, hands no order on
            gone |= {int(fault.how.split()[1]) for fault in faults if fault.how.startswith("ban")}
            faults = [
                replace(f, about=(KEEPER, *f.about)) if f.kind == "order" and gone.issuperset(f.about) else f
                for f in faults
            ]
        if most.orders and count > 3 and entropy.random() < DEFIED:
            defying = entropy.sample(range(1, count), entropy.randint(1, (count - 1) // 3))
            # who begins anew just then, or hung meanwhile, knows nobody, and may follow one who defies the order; and
            # where somebody is banned, too, those who defy it may be a third of the rest
            faults = [f for f in faults if f.kind not in ("crash", "stop") and not f.how.startswith("ban")]
            faults += [Fault("defy", (number,)) for number in defying]
        return cls(seed, scenario, count, tuple(faults))

    def smaller(self) -> Iterator[Schedule]:
        """Schedules with one fault less, then with one member less."""
        for index in range(len(self.faults)):
            yield replace(self, faults=self.faults[:index] + self.faults[index + 1 :])
        if self.members > 2:
            last = self.members - 1
            kept = tuple(
                replace(f, about=left) for f in self.faults if (left := tuple(n for n in f.about if n != last))
            )
            yield replace(self, members=last, faults=kept)

    def about(self, kind: str) -> Iterator[tuple[int, Fault]]:
        return ((number, fault) for fault in self.faults if fault.kind == kind for number in fault.about)


@dataclass
class Result:
    """What came of a schedule. violation: words, "" without. overruled: steps of a minority that were in vain.

    digest: of all messages with their times. log: (time, from, to, method, fate) of each, where it was asked for.
    """

    schedule: Schedule
    violation: str
    steps: int
    seconds: float
    messages: int
    overruled: int
    digest: str
    log: list[tuple[float, int, int, str, str]]


def run(schedule: Schedule, log: bool = False) -> Result:
    """Run one schedule. *Progress*: when the faults are over, all who live make some more steps together, in time."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.disable()  # a collection would end generators at times that do not follow from the seed
    try:
        return in_virtual_time(_run(schedule, log))
    finally:
        gc.collect()
        _freeze()


@functools.cache
def _freeze() -> None:
    """What was imported need not be looked at again."""
    gc.freeze()


async def _run(schedule: Schedule, log: bool) -> Result:
    scenario, loop = SCENARIOS[schedule.scenario], asyncio.get_running_loop()
    until = EPOCH + scenario.seconds
    cuts = tuple(
        Cut(frozenset(fault.about), EPOCH + fault.start, EPOCH + fault.stop, fault.how == "one way")
        for fault in schedule.faults
        if fault.kind == "cut"
    )
    slow: dict[tuple[int, int], float] = {}
    for number, fault in schedule.about("slow"):
        slow |= {
            pair: float(fault.how) for other in range(schedule.members) for pair in ((number, other), (other, number))
        }
    line = Line(loss=scenario.loss, twice=scenario.twice, since=EPOCH + FAULTS_FROM, until=until)
    network = Network(random.Random(f"network {schedule.seed}"), line, cuts, slow)
    network.log = [] if log else None
    for fault in schedule.faults:
        if fault.kind == "moment":
            method, number = fault.how.split()
            network.moments[method, int(number)] = frozenset(fault.about), fault.stop
    entropy = random.Random(f"members {schedule.seed}")
    closed, organiser = bool(scenario.users or scenario.orders), Organiser(SimulatedRun.identity)
    run_file = run_of(schedule.members, scenario.aggregation, closed)
    machines: list[Machine] = []
    watch = Watch(machines, scenario.aggregation == "mean", scenario.apart)
    ways: list[dict[str, Any]] = [
        {"pace": entropy.uniform(0.3, 0.6), "waits": scenario.waits} for _ in range(schedule.members)
    ]
    lines = random.Random(f"lines {schedule.seed}")
    if lines.random() < UNEVEN:
        for each in ways:
            each["line"] = ClaimedLine(lines.choice(UPLOADS))
        ways[-1]["idle"] = schedule.members > 2 and not scenario.liars and lines.random() < UNEVEN
    for number in range(schedule.members if closed else 0):
        ways[number]["user"] = f"user{number}"
    ways[KEEPER]["archives"] = bool(scenario.orders)
    initial = NUMBERS[: scenario.auxiliaries] or INITIAL
    for each in ways if scenario.keepers else ():
        each |= {"dht": RealDht, "initial": initial, "met": range(schedule.members)}
    for number, _ in schedule.about("defy"):
        ways[number]["orders"] = Defiance
    for number, _ in schedule.about("user"):
        ways[number]["user"] = "one"
    for number, _ in schedule.about("client"):
        ways[number]["client"] = True
    if scenario.seconds > 2 * EXPIRATION:
        ways[0]["joins"] = True  # who joined nobody is alone by the rules when the others' records have expired
    for number, fault in schedule.about("skew"):
        ways[number]["skew"] = float(fault.how)
    for number, fault in schedule.about("liar"):
        ways[number]["lie"] = liar(fault.how)
    for number in range(schedule.members):
        machines.append(Machine(network, number, run_file, watch, **ways[number]))
    auxiliaries = [
        AuxiliaryMachine(
            network, number, run_file, None, dht=RealDht, initial=initial, met=None, user="auxiliary" if closed else ""
        )
        for number in NUMBERS[: scenario.auxiliaries]
    ]
    there = {machine.number: machine for machine in (*auxiliaries, *machines)}
    for number, fault in schedule.about("stop"):
        there[number].stop(EPOCH + fault.start, EPOCH + fault.stop, fault.how)
    for machine in there.values():
        machine.start()
    crashes = [asyncio.create_task(_crash(there[number], fault)) for number, fault in schedule.about("crash")]
    for fault in (fault for fault in schedule.faults if fault.kind in ("death", "silence")):
        method, count = fault.how.split()
        outside = contextvars.copy_context()  # of the machine that sends the message
        network.deaths[method, int(count)] = functools.partial(outside.run, _die, machines, fault, until, crashes)
    written = [asyncio.create_task(_write(machines, f)) for f in schedule.faults if f.kind == "phantoms"]
    written += [asyncio.create_task(_order(watch, organiser, there, f)) for f in schedule.faults if f.kind == "order"]
    goal, words, deadline = 0, "", until + PROGRESS_SECONDS
    while not words:
        await asyncio.sleep(LOOK_SECONDS)
        honest = [machine for machine in machines if machine.honest and machine.alive]
        serving = [machine for machine in auxiliaries if machine.alive]
        broken = next((machine for machine in (*honest, *serving) if machine.error is not None), None)
        watch.check_states((*honest, *serving))
        if watch.violation is not None:
            words = str(watch.violation)
        elif broken is not None:
            words = f"a defect: {broken.number}: {broken.error!r}"
        elif network.defect is not None:
            words = f"a defect: of a liar: {network.defect!r}"
        elif loop.time() >= until:
            goal = goal or watch.top + STEPS_AFTER
            states = {(machine.era, *machine.position) for machine in honest}
            same = len(states) == 1 and min(states)[:2] >= (watch.era, goal)
            if len(honest) < 2 or (same and _serve(serving, goal - STEPS_AFTER)):
                break  # who is left alone may have to wait for the others for ever
            if not any(machine.joined and not machine.client for machine in (*honest, *serving)):
                break  # who begins anew finds nobody who accepts connections, and those in client mode find nobody
            if loop.time() > deadline:
                apart = sorted((m.number, m.era, m.state.epoch, m.state.digest[:6]) for m in honest)
                held = [(m.number, *m.position, m.leader[-6:]) for m in serving]
                words = f"progress: {apart}{held}, not {watch.era}, {goal}"
    overruled = 0
    try:
        overruled = watch.overruled() if not words else 0
        if overruled and not scenario.apart and not any(fault.kind == "phantoms" for fault in schedule.faults):
            words = f"agreement: {overruled} steps were overruled"
    except Violation as violation:
        words = str(violation)
    for machine in there.values():
        machine.kill()
    for task in written:
        task.cancel()
    await asyncio.gather(*crashes)
    return Result(
        schedule,
        words,
        watch.top,
        loop.time() - EPOCH,
        network.messages,
        overruled,
        network.digest.hexdigest(),
        network.log or [],
    )


def _serve(auxiliaries: Sequence[AuxiliaryMachine], epoch: int) -> bool:
    """Tell whether all of them hold this step or a later one, where one was due, and agree on which of them leads."""
    leaders = {machine.leader for machine in auxiliaries}
    agreed = not auxiliaries or (len(leaders) == 1 and leaders <= {machine.name for machine in auxiliaries})
    return agreed and all(machine.position[0] >= epoch or not machine.due for machine in auxiliaries)


async def _crash(machine: Machine, fault: Fault) -> None:
    await asyncio.sleep(fault.start / 2)
    machine.backup = machine.position
    await asyncio.sleep(fault.start / 2)
    if fault.how == "newest":
        machine.backup = machine.position
    machine.kill()
    await asyncio.sleep(fault.stop - fault.start)
    if fault.how != "for good":
        machine.start()


async def _order(watch: Watch, organiser: Organiser, there: Mapping[int, Machine], fault: Fault) -> None:
    await asyncio.sleep(fault.start)
    machines, (what, *which) = watch.machines, fault.how.split()
    hearing = [there[number] for number in fault.about]
    if what == "pause":
        organiser.say(hearing, paused="new data are coming")
        await asyncio.sleep(fault.stop - fault.start)
        organiser.say(hearing, paused="")
    elif what == "ban":
        machines[int(which[0])].honest = False  # from now on it is no member, whatever it does
        organiser.ban(hearing, machines[int(which[0])].name)
    elif machines[KEEPER].era == organiser.era and (states := sorted(machines[KEEPER].checkpoints)):
        step, digest = states[int(float(which[0]) * (len(states) - 1))]
        organiser.take_back(hearing, step, digest, "acme/run" if what == "published" else "")
        watch.taken_back(step)


async def _write(machines: list[Machine], fault: Fault) -> None:
    """Records of trainers that do not exist, once there is a swarm: each says what the newest one of a machine says.

    Who took a state over and made no step with the others yet is not told from them.
    """
    await asyncio.sleep(fault.start)
    while not all(machine.accompanied for machine in machines if machine.alive):
        await asyncio.sleep(LOOK_SECONDS)
    keys, (_, *votes) = [key_of(1000 + number) for number in range(int(fault.how.split()[0]))], fault.how.split()
    while True:
        directory = next(machine for machine in machines if machine.alive).collaboration.board
        newest = max(directory.view.records, key=lambda record: record.epoch, default=None)
        for key in keys if newest is not None else ():
            record = newest.changed(peer_id=key.peer_id, vote=bool(votes), time=machines[0].clock.dht_time())
            owner, until = RSASignatureValidator(key).local_public_key, record.time + EXPIRATION
            directory._dht.store(peers_key(machines[0].run.identity), owner, record.model_dump(), until, True)
        await asyncio.sleep(WRITING_SECONDS)


def _die(machines: list[Machine], fault: Fault, until: float, tasks: list[asyncio.Task[None]], number: int) -> None:
    machine = machines[number]

    async def begin_again() -> None:
        await asyncio.sleep(fault.stop)
        if not machine.alive:
            machine.start()

    now = asyncio.get_running_loop().time()
    if fault.kind == "silence":  # what it does until then comes late
        machine.stop(now, min(now + fault.stop, until))
    elif machine.alive and now < until:
        machine.backup = machine.position
        machine.kill()
        tasks.append(asyncio.create_task(begin_again()))


def shrunk(schedule: Schedule, tries: int = 60) -> Result:
    """The smallest schedule found that still breaks the same invariant, with its messages."""
    kind, smallest = run(schedule).violation.partition(":")[0], schedule
    smaller = smallest.smaller()
    while tries > 0 and (candidate := next(smaller, None)) is not None:
        tries -= 1
        if run(candidate).violation.partition(":")[0] == kind:
            smallest, smaller = candidate, candidate.smaller()
    return run(smallest, log=True)
