"""What a peer does when nobody hands a state over: the published checkpoint, and when it is believed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from peer.states import small_run, trained
from swarm.made import NO_PROOFS, SteppedClock, record

from tt_cli.errors import TTError
from tt_cli.peer.trained_state import TrainedState
from tt_cli.supervisor.events import Download, Event, Log, Synchronised
from tt_cli.swarm import catch_up as room
from tt_cli.swarm.catch_up import CatchUp, DownloadProgress
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.shared_state import LockedState
from tt_cli.swarm.state.bridge import Chunks, NoState, StateBuffer

RUN = small_run()
LIAR, OTHER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmcMb57LWXEVD1gqYBk49isPnmfGRDFvgZnTz4HnDbZuHn"


class NobodyGives:
    """An averager whose donors all fail."""

    clock: Clock = Clock()
    traffic, peer_id, audits = (0, 0), "me", NO_PROOFS

    def fetch_average(self, *asked: object) -> None:
        return None

    def drop_fetch(self) -> None: ...

    def take_state(self, *asked: object, **more: object) -> None:
        raise NoState("no peer handed over a state that can be used (a: it did not answer)")


def publisher(state: TrainedState) -> Any:
    def published() -> tuple[Any, StateBuffer, str]:
        buffer = StateBuffer.new()
        return state.write_into(buffer.write), buffer, "acme/run/step-00000003.safetensors at 123456"

    return published


def take_over(mine: TrainedState, published: Any, said: list[Event]) -> CatchUp:
    return CatchUp(RUN, NobodyGives(), LockedState(mine), said.append, published)  # type: ignore[arg-type]


def quiet(phase: str, reason: str) -> None: ...


def test_the_published_state_is_taken_when_it_is_the_one_that_members_signed() -> None:
    said: list[Event] = []
    mine, theirs = trained(seed=1), trained(steps=3)
    view = SwarmState.of([record("a", epoch=3, digest=theirs.digest)])
    assert take_over(mine, publisher(theirs), said).catch_up(view, quiet)
    assert mine.digest == theirs.digest and mine.epoch == 3
    assert [e.source for e in said if isinstance(e, Synchronised)] == ["acme/run/step-00000003.safetensors at 123456"]


def test_a_published_state_that_members_did_not_sign_is_not_taken_while_they_are_there() -> None:
    said: list[Event] = []
    mine, published, theirs = trained(seed=1), trained(steps=3), trained(steps=4)
    before = mine.digest
    taking = take_over(mine, publisher(published), said)
    assert not taking.catch_up(SwarmState.of([record("a", epoch=4, digest=theirs.digest)]), quiet)
    assert mine.digest == before
    assert any("holds step 3: not what is needed" in e.message for e in said if isinstance(e, Log))


def test_the_first_peer_begins_with_what_was_published_if_that_is_newer() -> None:
    said: list[Event] = []
    nobody, me = SwarmState.of([]), SwarmState.of([record("me", epoch=0, digest="ab" * 32)])
    for mine, view, taken in (
        (trained(seed=1), nobody, True),
        (trained(seed=1), me, True),
        (trained(seed=1, steps=4), nobody, False),
        (trained(seed=1), SwarmState.of([record("a", epoch=1, digest="cd" * 32)]), False),
    ):
        published = trained(steps=3)
        assert take_over(mine, publisher(published), said).begin(view, quiet) == taken
        assert (mine.digest == published.digest) == taken


def test_a_hub_that_fails_is_told_and_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Event] = []
    asked: list[bool] = []

    def failing() -> tuple[Any, StateBuffer, str]:
        asked.append(True)
        raise TTError("the Hugging Face Hub cannot be reached")

    taking, nobody = take_over(trained(), failing, said), SwarmState.of([])
    assert not taking.begin(nobody, quiet) and not taking.begin(nobody, quiet)
    assert len(asked) == 1
    assert [e.message for e in said if isinstance(e, Log)] == [
        "no published checkpoint was used: the Hugging Face Hub cannot be reached"
    ]
    monkeypatch.setattr(room, "HUB_SECONDS", 0.0)
    taking.begin(nobody, quiet)
    assert len(asked) == 2


def test_progress_is_told_with_the_rate_of_the_last_seconds() -> None:
    said: list[Event] = []
    now = [100.0]
    tell = DownloadProgress(said.append, threading.Event(), lambda: now[0])
    tell(0, 0, 0)
    assert not said, "nobody knows yet how much there is"
    for second in range(1, 11):
        now[0] = 100.0 + second
        tell(second * 1000 if second <= 5 else 5000 + (second - 5) * 100, 10_000, 3)
    first, last = said[0], said[-1]
    assert isinstance(first, Download) and isinstance(last, Download)
    assert (first.bytes_per_second, first.eta) == (1000.0, 9.0)
    assert (last.received, last.total, last.donors) == (5500, 10_000, 3)
    assert last.bytes_per_second == pytest.approx(100.0) and last.eta == pytest.approx(45.0)


class FalselyGiven(NobodyGives):
    """Who alone holds a state hands over another one."""

    def take_state(self, *asked: object, **more: object) -> None:
        raise NoState("no peer handed over a state that can be used (liar: its chunk is wrong)", refused=["liar"])


def test_the_state_of_who_handed_over_a_false_one_is_nobodys_goal() -> None:
    mine = CatchUp(RUN, FalselyGiven(), LockedState(trained(seed=1)), lambda event: None)  # type: ignore[arg-type]
    liar, honest = record("liar", epoch=9, digest="ee", vote=True), [record("a", epoch=0), record("b", epoch=0)]
    view = SwarmState.of([liar, *honest])
    assert mine.attainable(view) is view and view.leads(0, "00")
    assert not mine.catch_up(view, quiet)
    assert [one.peer_id for one in mine.attainable(view).records] == ["a", "b"]
    assert not mine.attainable(view).leads(0, "aa")
    for few in ([liar], [liar, honest[0]]):
        assert mine.attainable(SwarmState.of(few)).records == tuple(few), "this peer is as likely the one that is wrong"


def test_who_is_proven_guilty_has_no_voice_in_what_the_swarms_state_is() -> None:
    averager: Any = NobodyGives()
    averager.audits = SimpleNamespace(proofs=SimpleNamespace(guilty=lambda: frozenset(["liar"])))
    mine = CatchUp(RUN, averager, LockedState(trained(seed=1)), lambda event: None)
    ahead = [record(name, epoch=3, digest="cc", vote=True) for name in "ab"]
    behind = [record(name, epoch=1, digest="bb", vote=True) for name in ("c", "liar", "d")]
    view = SwarmState.of([*ahead, *behind])
    assert view.epoch == 1 and mine.attainable(view).epoch == 3


NOTHING = (0,) * 5


class Trickle(NobodyGives):
    """So many bytes come in one attempt after the other, and then no more."""

    def __init__(self, counts: Sequence[int]):
        self._counts, self.clock = iter(counts), SteppedClock()

    def take_state(self, *asked: object, **more: object) -> None:
        self.traffic = 0, self.traffic[1] + next(self._counts)
        super().take_state()


@pytest.mark.parametrize(
    ("votes", "bytes_each_time", "others", "named", "stays"),
    [
        ((), NOTHING, "abc", OTHER, False),
        ((LIAR,), NOTHING, "abc", OTHER, True),
        (("a",), NOTHING, "abc", OTHER, True),
        ((), (0, 0, 100, 0, 0), "abc", OTHER, True),
        ((), NOTHING[:2], "abc", OTHER, True),
        ((), NOTHING, "ab", OTHER, True),
        ((), NOTHING, "abc", LIAR, True),
    ],
    ids=["nobody votes", "it votes", "another votes", "something comes", "asked twice", "of three", "in the run file"],
)
def test_where_nobody_votes_a_state_that_is_given_to_nobody_is_no_goal_for_ever(
    votes: tuple[str, ...], bytes_each_time: tuple[int, ...], others: str, named: str, stays: bool
) -> None:
    averager: Any = Trickle(bytes_each_time)
    said, run = list[Event](), RUN.replaced({"peers.initial": [f"/ip4/203.0.113.7/tcp/31337/p2p/{named}"]})
    taking = CatchUp(run, averager, LockedState(trained(seed=1)), said.append)
    records = [record(LIAR, epoch=9, digest="ee"), *(record(name, epoch=0) for name in others)]
    view = SwarmState.of([one.changed(vote=one.peer_id in votes) for one in records])
    for _ in bytes_each_time[1:]:
        assert taking.attainable(view) is view, "the first time limit is not over"
        assert not taking.catch_up(view, quiet)
        averager.clock.now += room.VAIN_ROUNDS * RUN.swarm.averaging_timeout / (len(bytes_each_time) - 1)
    assert not taking.catch_up(view, quiet)
    assert (taking.attainable(view) is view) == stays
    assert any("gives it to nobody" in event.message for event in said if isinstance(event, Log)) != stays


class GivesAnOldState(NobodyGives):
    """Who was ahead has begun anew, and hands over what it has now."""

    def __init__(self, state: TrainedState):
        self.state = state

    def take_state(self, *asked: object, **more: object) -> Any:
        buffer = StateBuffer.new()
        tree = self.state.write_into(buffer.write)
        return SimpleNamespace(tree=tree, chunks=Chunks(tree, range(len(tree)), buffer))


def test_who_goes_forward_takes_no_state_that_it_has_left_behind() -> None:
    mine = trained(steps=3)
    before = mine.digest
    averager: Any = GivesAnOldState(trained(steps=2))
    taking = CatchUp(RUN, averager, LockedState(mine), lambda event: None)
    taking.ask_anew.set()
    assert not taking.catch_up(SwarmState.of([record("a", epoch=4, digest="ee", vote=True)]), quiet)
    assert (mine.epoch, mine.digest) == (3, before)
    assert not taking.ask_anew.is_set(), "it was asked anew"
