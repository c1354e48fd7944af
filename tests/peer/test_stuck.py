"""Why a peer makes no step: every cause by its facts, every ladder of remedies by a clock that the test turns."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swarm.made import SteppedClock, record

from tt_cli.peer.health import watchdog as room
from tt_cli.peer.health.diagnosis import Diagnosis, PeerFacts, Remedy, Treatment, diagnose, seconds
from tt_cli.peer.health.restart_marker import may_restart
from tt_cli.peer.health.watchdog import LEAST_USUAL, ObservedEmit, ProgressWatchdog, usual_step
from tt_cli.run import load_run
from tt_cli.run.initial_peers import MET, peers_met
from tt_cli.supervisor.events import Download, Event, Log, Phase, Progress, Round, Step, Synchronised, Trouble
from tt_cli.supervisor.reporter import Orders, WorkerBroken
from tt_cli.swarm.network.connectivity import DEAD_AFTER, Connectivity
from tt_cli.swarm.network.reachability import Astray
from tt_cli.swarm.records.peer_record import About
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.reporting.round_log import RoundLog

A, B, C = frozenset("a"), frozenset("b"), frozenset("abc")
LATE = 3 * 10.0 + 2 * 30.0 + 1
WELL = Connectivity(asked=C, answered=C, initial=A, clock=0.0)

CAUSES: dict[str, tuple[PeerFacts, str, str, Remedy, bool]] = {
    "averager": (PeerFacts(since_pulse=121), "averager", "averager process", Remedy.RESTART, True),
    "DHT": (PeerFacts(contact=Connectivity(C, unanswered=DEAD_AFTER)), "DHT", "DHT process", Remedy.WAIT, True),
    "data": (PeerFacts(reading=True, since_batch=121), "data stream", "given nothing for 2 min", Remedy.WAIT, True),
    "device": (PeerFacts(since_batch=301), "device", "no micro-batch has ended for 5 min", Remedy.RESTART, True),
    "clock ahead": (
        PeerFacts(contact=Connectivity(C, C, A, clock=240.0)),
        "clock",
        "clock is 4 min ahead of the others'",
        Remedy.WAIT,
        False,
    ),
    "clock behind, and nothing goes on": (
        PeerFacts(contact=Connectivity(C, C, A, clock=-5.5), since_step=LATE),
        "clock",
        "clock is 5.5 s behind the others'",
        Remedy.WAIT,
        True,
    ),
    "cut off": (
        PeerFacts(contact=Connectivity(C, frozenset(), A)),
        "connection",
        "cut off from the swarm: none of the 3 peers",
        Remedy.REJOIN,
        True,
    ),
    "DHT split": (
        PeerFacts(contact=Connectivity(C, B, A), since_step=LATE),
        "initial peers",
        "none of the 1 initial peers answers, 1 other peers do",
        Remedy.REJOIN,
        False,
    ),
    "another run": (
        PeerFacts(contact=WELL, unmet=301),
        "swarm",
        "alone in the run: who answers at the initial peers has no record of anybody",
        Remedy.WAIT,
        False,
    ),
    "state stands still": (
        PeerFacts(phase="syncing", since_phase=200, since_bytes=91, download=(120_000_000, 500_000_000, 0.0)),
        "state download",
        "stands still: 120 of 500 MB came, and no more for 91 s",
        Remedy.REJOIN,
        True,
    ),
    "nobody gives a state": (
        PeerFacts(phase="syncing", since_phase=200, since_bytes=91),
        "state download",
        "nothing came",
        Remedy.REJOIN,
        True,
    ),
    "state is slow": (
        PeerFacts(phase="syncing", since_phase=200, since_bytes=1, download=(120_000_000, 500_000_000, 1e6)),
        "state download",
        "120 of 500 MB so far, at 8.0 Mbit/s: about 6 min more",
        Remedy.WAIT,
        False,
    ),
    "client mode without a listener": (
        PeerFacts(phase="waiting", since_phase=20, client_mode=True, listening=False),
        "averaging",
        "no trainer that accepts connections",
        Remedy.REJOIN,
        True,
    ),
    "quorum": (
        PeerFacts(phase="waiting", since_phase=20, missing=("ben", "cleo")),
        "quorum",
        "waits for a quorum of the trainers: ben, cleo did not come",
        Remedy.REMATCH,
        True,
    ),
    "many are missing": (
        PeerFacts(phase="waiting", since_phase=20, missing=tuple("abcdef")),
        "quorum",
        "a, b, c, d and 2 others did not come",
        Remedy.REMATCH,
        True,
    ),
    "rounds fail": (
        PeerFacts(failed_rounds=3, problem="ben did not come"),
        "averaging",
        "3 rounds in a row failed, the last one: ben did not come",
        Remedy.REMATCH,
        True,
    ),
    "records": (
        PeerFacts(phase="waiting", since_phase=20, alone=True, contact=WELL),
        "records",
        "the DHT does not show their records",
        Remedy.REJOIN,
        True,
    ),
    "alone": (
        PeerFacts(lost_company=True, contact=Connectivity(C, A, A)),
        "alone",
        "alone in the swarm",
        Remedy.REJOIN,
        False,
    ),
    "slow": (
        PeerFacts(since_step=LATE, samples=60, target=100, samples_per_second=2.0, since_growth=5),
        "slow",
        "no step for 91 s, they usually take 10 s: the swarm is slow (60 of 100 samples, about 20 s more)",
        Remedy.WAIT,
        False,
    ),
    "nobody computes": (
        PeerFacts(since_step=LATE, samples=60, target=100, since_growth=80),
        "no samples",
        "nobody has computed anything for 80 s",
        Remedy.REJOIN,
        True,
    ),
    "unknown": (
        PeerFacts(since_step=LATE, samples=100, target=100, contact=WELL, unmet=301),
        "step",
        "the samples for it are there",
        Remedy.REMATCH,
        True,
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_every_cause_is_told_in_words_with_its_first_remedy(name: str) -> None:
    facts, what, words, first, stuck = CAUSES[name]
    found = diagnose(facts)
    assert found is not None
    assert (found.what, found.ladder[0], found.stuck) == (what, first, stuck)
    assert words in found.words


@pytest.mark.parametrize(
    "facts",
    [
        PeerFacts(),
        PeerFacts(contact=WELL),
        PeerFacts(since_step=LATE - 2, samples=100, target=100),
        PeerFacts(since_step=500, usual_step=200, samples=1, target=100, since_growth=100),
        PeerFacts(held=True, since_batch=1000, since_step=1000),
        PeerFacts(phase="syncing", since_phase=600, since_bytes=10, download=(1, 2, 0.0)),
        PeerFacts(phase="waiting", since_phase=2, missing=("ben",)),
        PeerFacts(failed_rounds=2),
        PeerFacts(contact=Connectivity(C, B, A)),  # the initial peers are gone, and nobody needs them now
        PeerFacts(contact=Connectivity(), unmet=301),  # the first peer of a run knows nobody
    ],
)
def test_who_is_well_or_only_slow_is_left_alone(facts: PeerFacts) -> None:
    assert diagnose(facts) is None


def test_a_ladder_is_climbed_and_its_last_rung_repeated_less_and_less_often() -> None:
    found = Diagnosis("averaging", "rounds fail", (Remedy.REMATCH, Remedy.REJOIN), pause=10.0)
    treatment = Treatment(longest=60.0)
    tried = [(now, remedy) for now in range(400) if (remedy := treatment.next(found, float(now)))]
    assert [remedy for _, remedy in tried[:3]] == [Remedy.REMATCH, Remedy.REJOIN, Remedy.REJOIN]
    gaps = [after - before for (before, _), (after, _) in zip(tried, tried[1:], strict=False)]
    assert gaps[0] == 10 and gaps == sorted(gaps) and gaps[-1] == 60


def test_another_cause_begins_its_own_ladder_and_one_that_comes_and_goes_is_not_told_each_time() -> None:
    treatment = Treatment()
    one, other = Diagnosis("a", "a", (Remedy.REJOIN,)), Diagnosis("b", "b", (Remedy.REMATCH, Remedy.RESTART))
    assert treatment.next(one, 0.0) == Remedy.REJOIN
    assert treatment.next(other, 1.0) == Remedy.REMATCH
    assert treatment.next(None, 2.0) is None and treatment.cause is None
    assert treatment.next(one, 3.0) is None
    assert treatment.next(one, 14.0) == Remedy.REJOIN
    assert [treatment.next(other, now) for now in (15.0, 25.0)] == [Remedy.REMATCH, Remedy.RESTART]


def test_what_keeps_nobody_from_going_on_is_told_less_often() -> None:
    treatment, found = Treatment(), Diagnosis("alone", "alone", stuck=False, pause=10.0)
    assert [now for now in range(31) if treatment.next(found, float(now))] == [0, 30]


def test_restarts_lie_apart_whatever_the_clock_and_the_disk_did(tmp_path: Path) -> None:
    marker = tmp_path / "restarted"
    assert [may_restart(marker, 60.0, now) for now in (1000.0, 1059.0, 1060.0)] == [True, False, True]
    assert may_restart(marker, 60.0, 900.0), "the clock was set back: the last one is not to come"
    assert not may_restart(marker, 60.0, 959.0)
    (tmp_path / "a file").touch()
    assert not may_restart(tmp_path / "a file" / "restarted", 60.0, 1000.0), "it would begin anew again and again"


def test_durations_are_said_as_a_person_would() -> None:
    assert [seconds(s) for s in (2.34, 91, 150, 9000)] == ["2.3 s", "91 s", "2 min", "2.5 h"]


def test_what_was_heard_tells_what_is_usual_and_what_grows() -> None:
    clock, told = SteppedClock(0.0), list[Event]()
    heard = ObservedEmit(told.append, clock)
    heard.state.enter("training", "", clock.now)
    for epoch in range(1, 6):
        clock.now += 20
        heard(Step(epoch, 1.0, 1e-3, 1.0, "aa"))
    assert usual_step(heard.state) == 20
    progress: dict[str, Any] = {"epoch": 5, "peers": 2, "my_samples": 1, "my_samples_per_second": 1.0, "my_share": 1.0}
    heard(
        Progress(samples=10, target_samples=100, swarm_samples_per_second=2.0, eta=1.0, loss=None, **_bytes, **progress)
    )
    assert usual_step(heard.state) == 50, "the swarm has become slower"
    clock.now += 7
    heard(
        Progress(samples=10, target_samples=100, swarm_samples_per_second=0.0, eta=1.0, loss=None, **_bytes, **progress)
    )
    assert usual_step(heard.state) == 20 and heard.state.samples_grew_at == 100.0
    heard(Download(5, 10))
    clock.now += 3
    heard(Download(5, 10))
    assert heard.state.download_grew_at == 107.0
    for _ in range(2):
        heard(Round(6, "failed", "round repeated: ben did not come", [], 0.0, 1, {}))
    assert heard.state.failed_rounds == 2
    heard(Round(6, "committed", "step 6 made with ben", [], 1.0, 1, {}))
    assert heard.state.failed_rounds == 0
    heard(Round(7, "failed", "round repeated: ben did not come", [], 0.0, 1, {}))
    clock.now += 5
    heard(Synchronised(7, "ben", "bb", 1.0, 10))
    assert (heard.state.failed_rounds, heard.state.samples_grew_at) == (0, 115.0)
    clock.now += 5
    heard(Step(8, 1.0, 1e-3, 1.0, "cc"))
    heard.state.enter("syncing", "", clock.now)
    assert heard.state.samples_grew_at == heard.state.download_grew_at == 120.0, "all begins anew"
    assert len(told) == 15, "everything was passed on"
    fresh = ObservedEmit(told.append, clock)
    assert usual_step(fresh.state) == math.inf, "nobody knows yet"
    fresh.state.enter("training", "", clock.now)
    fresh(Step(6, 1.0, 1e-3, 1.0, "aa"))
    assert usual_step(fresh.state) == LEAST_USUAL


_bytes: dict[str, Any] = {"bytes_sent": 0, "bytes_received": 0}


class Contacts:
    """Answers as the test says; `asked` grows with each time, True where it was over new connections."""

    def __init__(self) -> None:
        self.answer, self.asked, self.known = WELL, list[bool](), list[str]()

    def ask(self, peers: list[str], *, anew: bool = False) -> Connectivity:
        self.asked.append(anew)
        return self.answer

    def met(self) -> list[str]:
        return self.known


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A watch that looks when it is told to, over a swarm of "a" (this peer) and "b"."""
    clock, told = SteppedClock(0.0), list[Event]()
    clock.now = 1000.0
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=clock, time=time.time))
    heard = ObservedEmit(told.append, clock)
    view = SwarmState.of([record("a"), record("b", user="ben")])
    collaboration = SimpleNamespace(
        peer_id="a",
        client_mode=False,
        about=About(role="trainer"),
        orders=SimpleNamespace(paused=""),
        board=SimpleNamespace(view=view, trainers=lambda: frozenset("ab"), read_at=math.inf, era=0),
        contacts=Contacts(),
        round_log=RoundLog("a", heard, lambda: view),
        averager=SimpleNamespace(pulse=[1000.0]),
        missing=lambda: [],
        rematched=[],
        take_over=SimpleNamespace(ask_anew=threading.Event()),
    )
    collaboration.seek_anew = SimpleNamespace(set=lambda: collaboration.rematched.append(clock.now))
    around: Any = SimpleNamespace(told=told, swarm=collaboration, clock=clock, heard=heard, astray=None)
    marker = tmp_path / "marker"
    watch = ProgressWatchdog(
        load_run("emoji"), collaboration, heard, Orders(), marker, lambda: None, lambda: around.astray
    )  # type: ignore[arg-type]

    def look(seconds: float = 1.0) -> None:
        clock.now += seconds
        collaboration.averager.pulse[0] = clock.now
        watch._treat(diagnose(watch._inquire()))

    around.watch, around.look = watch, look
    yield around


def test_a_peer_that_is_cut_off_tries_to_come_back_and_says_when_it_goes_on(watched: Any) -> None:
    watched.swarm.round_log.phase("training", "towards step 6")
    watched.look()
    assert [type(event) for event in watched.told] == [Phase]
    watched.swarm.contacts.answer = Connectivity(C, frozenset(), A)
    watched.swarm.board.view = SwarmState.of([record("a")])
    watched.look(6.0)
    *_, trouble, phase = watched.told
    assert isinstance(trouble, Trouble) and trouble.what == "connection" and "connects to all" in trouble.remedy
    assert isinstance(phase, Phase) and (phase.phase, phase.reason) == ("waiting", trouble.words)
    assert watched.swarm.contacts.asked[-1], "over new connections"
    watched.swarm.round_log.phase("averaging", "for step 6")
    assert watched.told[-1] is phase, "what it would do is not shown while it cannot"
    watched.swarm.contacts.answer = WELL
    watched.look(11.0)
    watched.look()
    *_, shown, log = watched.told
    assert isinstance(shown, Phase) and (shown.phase, shown.reason) == ("averaging", "for step 6")
    assert isinstance(log, Log) and log.message.startswith("goes on after ")


def test_members_that_answered_are_remembered_for_the_next_start(watched: Any, tmp_path: Path) -> None:
    address = "/ip4/203.0.113.7/tcp/31337/p2p/QmSY4bsZLR2qXhvXRG9hyVZaPEzvsSMBhLPWE6ruGyb7Q8"
    watched.swarm.contacts.known = [address]
    watched.watch._ask()
    watched.swarm.contacts.known = []
    watched.watch._ask()
    assert peers_met(tmp_path) == [address], "nobody answers now, and they may later"
    (tmp_path / MET).write_text("/ip4/127.0.0.1/tc")
    assert peers_met(tmp_path) == [], "damaged"


def test_a_peer_that_others_look_for_elsewhere_begins_anew_when_they_say_so_twice(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[str]()
    monkeypatch.setattr(watched.watch, "_end", ended.append)
    watched.swarm.round_log.phase("training", "towards step 6")
    watched.astray = Astray("3 members can dial this peer at B, and others are told A")
    watched.look(room.SEEK_SECONDS + 1.0)
    watched.astray = None
    watched.look(room.DOUBT_SECONDS + 1.0)
    assert not watched.told[1:] and not ended, "once is no proof"
    watched.astray = Astray("3 members can dial this peer at B, and others are told A", "start it with B")
    for _ in range(2):
        watched.look(room.SEEK_SECONDS + 1.0)
    assert [event for event in watched.told if isinstance(event, Trouble)][-1].remedy == "it waits; start it with B"
    assert not ended, "a person said so"
    watched.astray = Astray(watched.astray.words)
    for _ in range(2):
        watched.look(room.SEEK_SECONDS + 1.0)
    assert ended == [watched.astray.words]


def test_who_is_left_by_others_that_say_goodbye_is_not_in_trouble(watched: Any) -> None:
    watched.look()
    watched.swarm.board.view = SwarmState.of([record("a")])
    watched.swarm.board.trainers = lambda: frozenset("a")
    for _ in range(20):
        watched.look()
        watched.heard(Step(6, 1.0, 1e-3, 1.0, "aa"))
    assert not [event for event in watched.told if isinstance(event, Trouble)]


@pytest.mark.parametrize("era", [0, 7])
def test_who_is_back_at_an_earlier_step_before_the_others_has_not_lost_them(watched: Any, era: int) -> None:
    watched.look()
    watched.swarm.board.view, watched.swarm.board.era = SwarmState.of([record("a", era=era)]), era
    for _ in range(60):
        watched.look()
        watched.heard(Step(6, 1.0, 1e-3, 1.0, "aa"))
    assert [event.what for event in watched.told if isinstance(event, Trouble)] == ([] if era else ["alone"])


def test_who_joins_peers_of_another_run_or_version_is_told_until_somebody_is_seen(watched: Any) -> None:
    """It trains alone for ever otherwise, and does not know. At first they may only be starting."""
    both, watched.swarm.board.view = watched.swarm.board.view, SwarmState.of([record("a")])
    alone = watched.swarm.board.view
    for view, told in ((alone, 0), (alone, 0), (alone, 1), (both, 1), (alone, 1)):
        watched.swarm.board.view = view
        watched.look(room.CALM_SECONDS + 1.0)
        watched.heard(Step(6, 1.0, 1e-3, 1.0, "aa"))
        assert [event.what for event in watched.told if isinstance(event, Trouble)].count("swarm") == told


def test_an_assistant_without_trainers_is_not_in_trouble(watched: Any) -> None:
    """Though others answer, and its last trainers went without goodbye."""
    watched.look()
    watched.swarm.about.role = "assistant"
    watched.swarm.board.view = SwarmState.of([record("a")])
    for _ in range(20):
        watched.look()
        watched.heard(Phase("waiting", "for trainers"))
    assert not [event for event in watched.told if isinstance(event, Trouble)]


def test_a_state_that_stands_still_does_so_until_something_comes(watched: Any) -> None:
    """Meanwhile this peer is shown to wait, which is not what it does."""
    watched.swarm.round_log.phase("syncing", "taking over step 6")
    watched.look()
    for _ in range(2):
        watched.look(91.0)
    assert [event.what for event in watched.told if isinstance(event, Trouble)] == ["state download"] * 2
    assert not [event for event in watched.told if isinstance(event, Log)], "it does not go on"


def test_rounds_that_fail_are_sought_anew(watched: Any) -> None:
    for _ in range(3):
        watched.heard(Round(6, "failed", "round repeated: ben did not come", [], 0.0, 1, {}))
    watched.look()
    (trouble,) = [event for event in watched.told if isinstance(event, Trouble)]
    assert trouble.what == "averaging" and "ben did not come" in trouble.words
    assert len(watched.swarm.rematched) == 1


def test_a_device_that_hangs_ends_the_process_once_in_a_while(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "END_SECONDS", 0.01)
    ended: list[int] = []
    monkeypatch.setattr(room.os, "_exit", ended.append)
    batches = watched.watch.over(iter([1, 2]))
    next(batches)
    watched.clock.now += 2.0
    next(batches)
    assert [*watched.watch._batches] == [2.0]
    watched.watch._orders.leave.set()
    watched.watch._end("a person was faster")
    assert not ended
    watched.watch._orders.leave.clear()
    watched.look(301.0)
    assert ended == [WorkerBroken.exit_code]
    with pytest.raises(WorkerBroken, match="no micro-batch has ended for 5 min"):
        watched.watch.check()
    watched.look(301.0)
    assert len(ended) == 1, "not again so soon"
    assert "it waits" in [event for event in watched.told if isinstance(event, Trouble)][-1].remedy


def test_a_data_stream_that_stalls_is_told_as_such(watched: Any) -> None:
    waiting, go = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        waiting.set()
        go.wait()
        yield 1

    thread = threading.Thread(target=lambda: next(watched.watch.over(slow())), daemon=True)
    thread.start()
    waiting.wait()
    watched.look(121.0)
    go.set()
    thread.join()
    assert [event.what for event in watched.told if isinstance(event, Trouble)] == ["data stream"]


def test_a_silent_dht_process_on_a_busy_machine_is_asked_again_before_it_counts_as_dead() -> None:
    for unanswered in range(1, DEAD_AFTER):
        facts = PeerFacts(contact=Connectivity(C, unanswered=unanswered))
        assert facts.suspicious and diagnose(facts) is None
