"""Which trainers count as part of the swarm, when the DHT shows them and when it does not."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.made import SteppedClock, record

from tt_cli.run import load_run
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.records import publisher as room
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, clock: SteppedClock) -> PeerDirectory:
    monkeypatch.setattr(room, "RSASignatureValidator", lambda key: SimpleNamespace(local_public_key=b""))
    identity: Any = SimpleNamespace(key=None, peer_id="me")
    run = load_run("emoji").replaced({"swarm.statistics_expiration": 60.0})
    dht: Any = SimpleNamespace(membership=Admission(run))
    return PeerDirectory(run, dht, identity, clock=clock)


def see(board: PeerDirectory, *records: PeerRecord) -> None:
    board._count_trainers(room.SwarmState.of(board._remember(records)))


def test_a_trainer_counts_for_as_long_again_as_its_record(board: PeerDirectory, clock: SteppedClock) -> None:
    see(board, record("a"), record("b"), record("x", role="aux"))
    assert board.trainers() == {"a", "b"}
    clock.now += 59
    see(board, record("a", time=1059.0))
    assert board.trainers() == {"a", "b"}
    clock.now += 58  # b's record has expired, and is not forgotten
    see(board)
    assert board.trainers() == {"a", "b"}
    clock.now += 63
    see(board)
    assert board.trainers() == set()


def test_a_look_that_took_longer_than_records_last_makes_nobody_seem_gone(
    board: PeerDirectory, clock: SteppedClock
) -> None:
    """A DHT node that hangs may hold up a look, and all records that were known have expired when it ends."""
    see(board, record("a"), record("b"))
    clock.now += 61
    see(board)
    assert board.trainers() == {"a", "b"}
    clock.now += 60
    see(board)
    assert board.trainers() == set()


def test_the_last_word_of_who_is_silent_holds_nobody_back_unless_most_are(
    board: PeerDirectory, clock: SteppedClock
) -> None:
    """Those who ended or hang, each at its own step, would be the middle, and one of them decide alone."""

    def seen(*read: PeerRecord) -> tuple[int, str]:
        view = room.SwarmState.of(board._remember(read))
        return view.epoch, view.digest

    silence = room.SILENT_RENEWALS * room.RENEW_SECONDS
    seen(*(record(f"gone{epoch}", epoch=epoch, digest=f"{epoch}{epoch}", vote=True) for epoch in (3, 5)))
    clock.now += silence - 1
    alive = [record(name, epoch=8, digest="88", vote=True, time=clock.now) for name in "ab"]
    assert seen(alive[0]) == (5, "55")
    clock.now += 2
    assert seen(alive[1]) == (8, "88")
    clock.now += silence
    assert seen() == (8, "88"), "now all are silent, and nobody votes less than others"
    assert all(held.vote for held, _ in board._known.values())


def test_a_peer_claims_what_the_others_had_and_believe(board: PeerDirectory) -> None:
    assert board.told is None
    board._sent = record("me", samples=14_400)
    assert board.told == board._sent
    board._claims.most = 90.5
    board._claims.speed = 2.0
    assert board.told == record("me", samples=90, samples_per_second=2.0)


def test_who_says_goodbye_does_not_count(board: PeerDirectory) -> None:
    see(board, record("a"), record("b"))
    see(board, record("b", left=True, time=record("b").time + 1))
    assert board.trainers() == {"a"}


def test_a_goodbye_is_remembered_until_the_peer_comes_back(board: PeerDirectory, clock: SteppedClock) -> None:
    see(board, record("a"), record("b"))
    assert board.parted() == set()
    see(board, record("b", left=True, time=1001.0))
    clock.now += 1000  # the record has expired long since
    see(board, record("a", time=2000.0))
    assert board.parted() == {"b"}
    see(board, record("b", time=2001.0))
    assert board.parted() == set()


def test_ever_new_names_take_no_memory_and_push_out_nobody(
    board: PeerDirectory, clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_READ", 8)
    see(board, record("a"))
    for number in range(100):
        clock.now += 1
        see(board, record("a", time=clock.now), record(f"{number}"), record(f"{number}", left=True, time=clock.now))
        assert len(board._known) <= 8 and len(board.parted()) < 16 and "a" in board._known
    assert board.parted()


def test_who_is_on_the_way_in_does_not_count_and_who_is_late_does(board: PeerDirectory) -> None:
    see(board, record("a", epoch=5), record("late", epoch=4), record("new", epoch=0))
    assert board.trainers() == {"a", "late"}


def test_who_is_two_steps_ahead_is_not_gone_and_who_was_never_a_member_does_not_count(
    board: PeerDirectory, clock: SteppedClock
) -> None:
    """The records of the dead hold the middle back: a peer that missed two steps would think that it is alone."""
    dead = [record(name, vote=True) for name in "bcde"]
    see(board, record("a", vote=True), record("client", vote=True, client_mode=True), *dead)
    clock.now += 40
    ahead = {"epoch": 7, "digest": "cc", "vote": True, "time": clock.now}
    see(board, record("a", **ahead), record("x", **ahead), record("client", **ahead, client_mode=True))
    assert board.trainers() == {"a", *"bcde"}
    clock.now += 81
    see(board, record("a", **{**ahead, "epoch": 8, "time": clock.now}))
    assert board.trainers() == {"a"}, "the view goes on when the others' records have expired"


def test_who_seems_two_steps_behind_counts_until_it_has_said_so_or_is_silent_for_long(
    board: PeerDirectory, clock: SteppedClock
) -> None:
    """Its word is older than the others' steps: it may have made them, too."""
    see(board, *(record(name, vote=True) for name in (*"abcd", "late", "behind", "dead")))
    clock.now += 5
    ahead = [record(name, epoch=7, digest="cc", vote=True, time=clock.now) for name in "abcd"]
    both = [record(name, vote=True) for name in ("behind", "dead")]
    see(board, *ahead, record("late", vote=True), *both, record("new", time=clock.now))
    assert board.trainers() == {*"abcd", "late", "behind", "dead"}, "and nobody else who is behind"
    clock.now += 1
    see(board, *ahead, record("late", epoch=7, digest="cc", time=clock.now), record("behind", time=clock.now), both[1])
    assert board.trainers() == {*"abcd", "late", "dead"}
    clock.now += room.SILENT_RENEWALS * board._renewal
    see(board, *ahead)
    assert board.trainers() == {*"abcd", "late"}


def test_members_of_a_round_count_though_nobody_sees_their_records(board: PeerDirectory, clock: SteppedClock) -> None:
    board.met(["c", "d"])
    see(board, record("a"))
    assert board.trainers() == {"a", "c", "d"}
    clock.now += 61
    see(board)
    assert not board.trainers() & {"c", "d"}


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(-500, 500)), min_size=1, max_size=12), st.integers(1, 4000))
def test_what_is_untold_delays_no_step(members: list[tuple[int, int]], target: int) -> None:
    """(expected, more) of each: while nobody has to tell, what seems to be missing is so but for a third in truth."""
    missing, more = target - sum(expected for expected, _ in members), sum(more for _, more in members)
    silent = not any(room.too_unlike(abs(more), missing, len(members)) for _, more in members)
    if missing > 0 and silent:
        assert 3 * abs(more) < missing
    assert missing > 0 or silent, "what is told beyond the target begins nothing"


@pytest.fixture
def member(board: PeerDirectory, clock: SteppedClock) -> PeerDirectory:
    """One of two, which told 10 samples each five seconds ago; a step is a minute off."""
    board._run = board._run.replaced({"swarm.target_batch_size": 60})
    board._record = board._published = record("me", round="none")
    board._kept = True
    board.view = room.SwarmState.of([record("me"), record("a")])
    board._published_at = clock.now - 5.0
    board.expect(60.0)
    return board


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"samples": 16, "loss": 3.0, "total_samples": 200, "bytes_sent": 5, "samples_per_second": 2.4}, False),
        ({"samples": 25}, True),  # a third of its share of the 30 that are missing beyond the 20 that are expected
        ({"samples": 15}, True),
        ({"samples": 0}, True),
        ({"samples_per_second": 2.6}, True),
        ({"round": "dropped"}, True),
        ({"slow": ["a"]}, True),
        ({"lease": 5.0}, True),
        ({"vote": True}, True),
    ],
    ids=str,
)
def test_what_others_need_is_told_soon_and_the_rest_with_the_next_renewal(
    member: PeerDirectory, clock: SteppedClock, changes: dict[str, Any], needed: bool
) -> None:
    member._record = record("me", **{"round": "none", **changes})
    assert member._is_due() == needed
    clock.now += room.RENEW_SECONDS
    assert member._is_due()


def test_when_a_step_is_near_all_samples_are_told(member: PeerDirectory) -> None:
    member._record = record("me", round="none", samples=19)
    assert not member._is_due()
    member.expect(2.0)
    assert member._is_due()


def test_samples_that_were_not_told_are_expected_by_speed_until_the_next_renewal(
    member: PeerDirectory, clock: SteppedClock
) -> None:
    see(member, record("a"), record("b", samples_per_second=0.5), record("c", epoch=4))
    member.view = room.SwarmState.of(
        [record("me"), record("a"), record("b", samples_per_second=0.5), record("c", epoch=4)]
    )
    assert member.untold() == 0.0
    clock.now += 4.0
    assert member.untold() == 10.0
    see(member, record("a", time=1001.0))
    assert member.untold() == 2.0
    clock.now += 1000.0
    assert member.untold() == 2 * room.RENEW_SECONDS + 7, "in whole samples, or micro-batches"
    slow = record(samples_per_second=3.0, micro_batch=64)
    assert [slow.untold(seconds) for seconds in (-1.0, 21.0, 64 / 3, 1000.0)] == [0.0] * 4
    assert record(samples_per_second=9.0, micro_batch=64).untold(15.0) == 128.0


def test_looks_are_rarer_in_a_long_round_and_the_next_one_comes_when_it_ends(
    member: PeerDirectory, clock: SteppedClock
) -> None:
    member.expect(0.5)
    assert member._pause() == room.QUICK_SECONDS
    clock.now += room.LONG_ROUND_SECONDS + 1
    member.read_at = clock.now - 1
    assert not member._is_time()
    member.expect(0.5)
    assert member._is_time()


def test_a_new_state_and_the_last_samples_of_a_step_are_told_at_once(member: PeerDirectory) -> None:
    member._published_at = member._clock.monotonic()
    for changes, at_once in (({"samples": 49}, False), ({"samples": 50}, True), ({"epoch": 6}, True)):
        member._urgent = False
        member.publish(record("me", **changes))
        assert member._is_due() == at_once


def test_samples_beyond_the_target_are_not_told(member: PeerDirectory) -> None:
    member.view = room.SwarmState.of([record("me"), record("a", samples=50)])
    member._record = record("me", round="none", samples=40)
    assert not member._is_due()


class Asked:
    """A DHT without records. latest: of each look, whether all nodes were asked. stored: epochs of records.

    hangs: no answer. held: answers come once it is set. keeps: whether a record that is sent is kept.
    """

    def __init__(self, membership: Admission, hangs: bool = False, keeps: bool = True):
        self.membership, self.latest, self.stored = membership, list[bool](), queue.SimpleQueue[int]()
        self.times = list[tuple[float, float]]()  # of the records that were stored, and their ends
        self._hangs, self._keeps, self.held = hangs, keeps, threading.Event()
        self.held.set()

    def get(self, key: str, latest: bool, return_future: bool) -> Any:
        self.latest.append(latest)
        return SimpleNamespace(result=self._result)

    def _result(self, timeout: float) -> None:
        self.held.wait()
        if self._hangs:
            raise TimeoutError

    def store(self, *args: Any, value: dict[str, Any], expiration_time: float, **more: Any) -> Any:
        self.stored.put(value["epoch"])
        self.times.append((value["time"], expiration_time))
        return SimpleNamespace(result=lambda timeout: self._keeps)

    def is_alive(self) -> bool:
        return False


def test_a_fresh_view_asks_all_and_publishes_nothing(board: PeerDirectory) -> None:
    dht: Any = Asked(Admission(board._run))
    identity: Any = SimpleNamespace(key=None, peer_id="me")
    asking = PeerDirectory(board._run, dht, identity)
    asking.publish(record("me"))
    asking.start()
    for _ in range(3):
        asking.fresh_view()
    asking.stop()
    assert dht.latest.count(True) == 3 and dht.stored.qsize() == 1 and asking.told is not None
    asking.renew()
    assert asking._is_due()


def test_a_look_that_takes_long_does_not_hold_up_the_record_of_a_step(board: PeerDirectory) -> None:
    dht: Any = Asked(Admission(board._run))
    dht.held.clear()
    identity: Any = SimpleNamespace(key=None, peer_id="me")
    asking = PeerDirectory(board._run, dht, identity)
    asking.publish(record("me"))
    asking.start()
    assert dht.stored.get(timeout=60) == 5
    asking.publish(record("me", epoch=6))
    assert dht.stored.get(timeout=60) == 6
    dht.held.set()
    asking.stop()


def test_what_no_node_kept_is_told_again_soon(board: PeerDirectory, clock: SteppedClock) -> None:
    board._dht = Asked(Admission(board._run), keeps=False)  # type: ignore[assignment]
    board._record, board._published_at = record("me", epoch=6), clock.now
    board._store(board._record)
    assert board.told is None and not board._is_due()
    clock.now += 1.0
    assert board._is_due()
    board.view, board._published_at, board._urgent = room.SwarmState.of([record("a", epoch=6)]), clock.now, False
    board.publish(record("me", epoch=6, samples=board._run.swarm.target_batch_size))
    assert board._is_due()
    board._store(board._record)
    board._urgent = False
    board.publish(record("me", epoch=6, samples=board._run.swarm.target_batch_size + 1))
    assert not board._is_due(), "it is told at the pace of looks, not with each micro-batch"


def test_what_a_peer_says_after_its_clock_was_set_back_is_newer(board: PeerDirectory, clock: SteppedClock) -> None:
    board._dht = asked = Asked(Admission(board._run))  # type: ignore[assignment]

    def said() -> list[tuple[float, float]]:
        board._store(record("me"))
        return asked.times[-2:]

    assert said() == [(1000.0, 1060.0)]
    for back in (0.5, 40.0, 80.0):
        clock.now = 1000.0 - back
        (before, _), (after, until) = said()
        assert before + 0.001 < after < 1001.0 and until == after + 60.0
    clock.now = 10_000.0
    assert said()[-1] == (10_000.0, 10_060.0)
    clock.now = 1003.0
    assert said()[-1] == (1003.0, 1063.0), "nobody else had that"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_look_that_nobody_answered_shows_nobody(board: PeerDirectory, hangs: bool) -> None:
    dht: Any = Asked(Admission(board._run), hangs)
    told, identity = list[BaseException](), SimpleNamespace(key=None, peer_id="me")
    asking = PeerDirectory(board._run, dht, identity, told.append)  # type: ignore[arg-type]
    asking.start()
    asking.fresh_view()
    asking.stop()
    assert asking.blind == hangs == bool(told)
