"""Steps that were missed while a state was taken over: averages that are kept, and steps made from them."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peer.states import gradients, small_run, trained
from swarm.made import NO_PROOFS, SteppedClock, record

from tt_cli.run import RunConfig, folders, load_run
from tt_cli.supervisor.events import Event, Synchronised
from tt_cli.swarm import step_replay as room
from tt_cli.swarm.allreduce import average_buffer as stores
from tt_cli.swarm.allreduce.average_buffer import AverageBuffer, KeptAverages
from tt_cli.swarm.allreduce.round_plan import RoundPlan
from tt_cli.swarm.catch_up import CatchUp
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer, Partition
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.shared_state import LockedState, state_key
from tt_cli.swarm.state.bridge import Chunks, NoState, ReceivedState, StateBridge, StateBuffer
from tt_cli.swarm.step_replay import StepReplay

CODEC = codec_of(load_run("emoji"))


class Others:
    """The rest of the swarm, stepping on demand; and this peer's averager, which fetches their averages.

    lost: steps whose average nobody gives. wrong: steps for which they give another one. run: other than the usual.
    """

    def __init__(self, lost: Sequence[int] = (), wrong: Sequence[int] = (), run: RunConfig | None = None):
        self._trained, self.lost, self.wrong, self.run = trained(run=run), lost, wrong, run
        self.state = LockedState(self._trained)
        self.layout = Partition(self._trained.shapes(), 4096, CODEC.block)
        self.store = AverageBuffer(self.layout, CODEC)
        self._averages: dict[str, bytes] = {}
        self._news = threading.Condition()
        self._seen = (0, "")
        self.asked: list[str] = []
        self.plans: list[RoundPlan | None] = []
        self.clock, self.traffic, self.peer_id, self.audits = Clock(), [0, 0], "me", NO_PROOFS

    def step(self) -> None:
        """Make one, and wait until this peer has looked."""
        self.make_step()
        self.wait_until_seen()

    def make_step(self) -> None:
        epoch, before = self.state.epoch, state_key(self.state.epoch, self.state.digest)
        average = GradientBuffer(self.layout, CODEC)
        for name, gradient in gradients(self._trained, epoch).items():
            average.encode(name, gradient)
        given = GradientBuffer(self.layout, CODEC)
        given.load(average.dump())
        if epoch in self.wrong:
            given.encode(name, -gradient)
        if epoch not in self.lost:
            self._averages[before] = given.dump()  # before anybody sees the step
        self.state.step(DecodedGradients(average))

    def wait_until_seen(self) -> None:
        here = self.state.position
        with self._news:
            assert self._news.wait_for(lambda: self._seen == here, 30.0)

    def view(self) -> SwarmState:
        with self._news:
            self._seen = self.state.position
            self._news.notify_all()
            return SwarmState.of([record("a", epoch=self._seen[0], digest=self._seen[1])])

    def fetch_average(self, donors: list[str], key: str, timeout: float, plan: RoundPlan | None = None) -> str | None:
        self.asked.append(key)
        self.plans.append(plan)
        if donors != ["a"] or key not in self._averages:
            return None
        self.store.buffer.load(self._averages[key])
        return donors[0]

    def drop_fetch(self) -> None: ...

    def take_state(self, *asked: object, **more: object) -> Any:
        raise NoState("none of 0 peers can hand over a state", asked=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.01)


def replayed(others: Others, before: int, after: int) -> tuple[LockedState, int]:
    """A state is taken after `before` steps of those that this peer sees; `after` more are made before it arrives."""
    averager: Any = others

    def fetch(view: SwarmState, state: tuple[int, str], timeout: float) -> str:
        return averager.fetch_average(view.donors(), state_key(*state), timeout) or ""

    with StepReplay(others.run or small_run(), averager, others.view, fetch) as missed:
        others.wait_until_seen()
        for _ in range(before):
            others.step()
        mine = LockedState(trained(run=others.run))
        for _ in range(before):
            average = GradientBuffer(others.layout, CODEC)
            for name, gradient in gradients(others._trained, mine.epoch).items():
                average.encode(name, gradient)
            mine.step(DecodedGradients(average))
        for _ in range(after):
            others.step()
        return mine, missed.replay(mine)


@pytest.mark.parametrize("there", [{}, {"client_mode": True}, {"epoch": 2}, {"epoch": 0}, {"role": "aux"}], ids=str)
def test_a_step_that_a_few_made_is_made_with_the_average_that_others_voted_for(there: dict[str, Any]) -> None:
    others, mine, said = Others(), LockedState(trained(run=small_run())), list[Event]()
    averager: Any = others
    plan = RoundPlan(state_key(*mine.position))
    others.make_step()
    view = SwarmState((record("a", **{"epoch": 1, "digest": others.state.digest, **there}),), 0, mine.digest)
    assert CatchUp(small_run(), averager, mine, said.append).follow(view, plan) == (not there)
    assert (others.asked, others.plans) == (([], []) if there else ([state_key(0, view.digest)], [plan]))
    assert (mine.position == others.state.position) == (not there)


STEPPING_LOCALLY = small_run(optimizer={"name": "local", "sparse": 0})


@pytest.mark.parametrize("run", [None, STEPPING_LOCALLY], ids=["gradients", "local steps"])
@pytest.mark.parametrize(("before", "after"), [(0, 1), (0, 4), (2, 3), (3, 0)])
def test_steps_made_meanwhile_are_made_here_too(before: int, after: int, run: RunConfig | None) -> None:
    others = Others(run=run)
    mine, made = replayed(others, before, after)
    assert made == after
    assert mine.position == others.state.position


@pytest.mark.parametrize(("behind", "lost", "asked"), [(1, [], 1), (2, [], 2), (2, [1], 1), (2, [2], 2), (3, [], 0)])
def test_who_is_a_step_or_two_behind_makes_them_with_what_members_keep(
    behind: int, lost: list[int], asked: int
) -> None:
    others, mine, said = Others(lost), LockedState(trained(run=small_run())), list[Event]()
    averager: Any = others
    others.make_step()
    averager.fetch_average(["a"], state_key(*mine.position), 1.0)
    mine.step(DecodedGradients(others.store.buffer))
    del others.asked[:]
    for _ in range(behind):
        others.make_step()
    arrived = CatchUp(small_run(), averager, mine, said.append, look=others.view).catch_up(
        others.view(), lambda *words: None
    )
    assert (arrived, len(others.asked)) == (behind <= 2 and not lost, asked)
    assert (mine.position == others.state.position) == arrived
    assert any(isinstance(event, Synchronised) for event in said) == arrived


def test_a_step_whose_average_is_gone_ends_it() -> None:
    others = Others(lost=[2])
    mine, made = replayed(others, 0, 4)
    assert (made, mine.epoch) == (2, 2)


def test_no_more_averages_than_have_room_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_KEPT", 2)
    assert replayed(Others(), 0, 3)[1] == 2


class Leaping(Others):
    """Two steps between one look and the next."""

    def step(self) -> None:
        with self._news:
            self.make_step()
            self.make_step()
        self.wait_until_seen()


def test_a_step_that_was_not_seen_makes_nobody_a_liar() -> None:
    assert replayed(Leaping(), 0, 1)[1] == 0


def test_an_average_that_leads_elsewhere_ends_it() -> None:
    with pytest.raises(NoState, match="a sent an average that does not lead to the others' step 2") as error:
        replayed(Others(wrong=[1]), 0, 3)
    assert error.value.refused == {"a"}


class WithLiar(Others):
    """Three who vote and hand over their state, after which they make a step; an assistant gives other averages.

    signers: who precommitted those; of three nobody may lie.
    """

    signers = "c"

    def view(self) -> SwarmState:
        voters = [one.changed(peer_id=name, vote=True) for one in super().view().records for name in "abc"]
        return SwarmState.of([*voters, voters[0].changed(peer_id="liar", role="assistant", vote=False)])

    def fetch_average(self, donors: list[str], key: str, timeout: float, plan: RoundPlan | None = None) -> str | None:
        assert plan is not None
        for donor in donors:
            self.asked.append(donor)
            with suppress(ValueError):
                plan.check_votes(self.signers if donor == "liar" else "abc")
                self.store.buffer.load(self._averages[key])
                if donor == "liar":
                    name, shape = next(iter(self._trained.shapes().items()))
                    self.store.buffer.encode(name, torch.ones(shape))
                return donor
        return None

    def take_state(self, *asked: object, **more: object) -> Any:
        self._seen = (0, "")  # by whoever replays steps, and not as the state was asked for
        self.wait_until_seen()
        buffer = StateBuffer.new()
        with self.state.use() as state:
            tree = state.write_into(buffer.write)
        self.step()
        return ReceivedState(tree, Chunks(tree, range(len(tree)), buffer), ("a",))


def beside_a_liar() -> tuple[WithLiar, LockedState, CatchUp]:
    others, mine = WithLiar(), LockedState(trained(run=small_run()))
    averager: Any = others
    return others, mine, CatchUp(small_run(), averager, mine, lambda event: None, look=others.view)


def test_who_gives_a_false_average_is_not_asked_again() -> None:
    others, mine, taking = beside_a_liar()
    assert not taking.take_state() and others.asked == ["liar"], "the step made meanwhile"
    assert taking.take_state() and mine.position == others.state.position
    others.make_step()
    assert taking.make_steps(others.view()) and mine.position == others.state.position
    assert others.asked[1:] == ["c", "a"], "in turns"


def test_nor_is_who_gives_it_to_one_that_is_a_step_behind() -> None:
    others, mine, taking = beside_a_liar()
    others.make_step()
    assert not taking.make_steps(others.view()) and taking.take_state(), "it has to take the state"
    others.make_step()
    assert taking.make_steps(others.view()) and mine.position == others.state.position
    assert others.asked.count("liar") == 1 and "liar" in taking.false_among(others.view())


def test_an_average_that_no_voter_precommitted_changes_nothing() -> None:
    others, mine, taking = beside_a_liar()
    others.signers = "x"
    assert taking.take_state() and mine.position == others.state.position, "with the step made meanwhile"
    others.make_step()
    assert taking.make_steps(others.view()) and mine.position == others.state.position
    assert others.asked == ["liar", "b", "liar", "c"], "the next one is asked at once"


class Dribbling(WithLiar):
    """The assistant sends what members stepped with, part by part, until the time is over."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = self._now = SteppedClock()

    def fetch_average(self, donors: list[str], key: str, timeout: float, plan: RoundPlan | None = None) -> str | None:
        if donors[0] == "liar":
            self.asked.append("liar")
            self._now.now += timeout
            return None
        return super().fetch_average(donors, key, timeout, plan)


def test_who_gives_an_average_too_slowly_is_asked_last_from_then_on() -> None:
    others, mine = Dribbling(), LockedState(trained(run=small_run()))
    averager: Any = others
    taking = CatchUp(small_run(), averager, mine, lambda event: None, look=others.view)
    others.make_step()
    assert not taking.make_steps(others.view()) and others.asked == ["liar"]
    for _ in range(4):
        assert taking.make_steps(others.view()) and mine.position == others.state.position
        others.make_step()
    assert others.asked.count("liar") == 1 and "liar" not in taking.false_among(others.view())


class Held(StateBridge):
    """A state that is on its way for `seconds`, and gives way to the parts of an average; nothing else comes."""

    def __init__(self, clock: SteppedClock, seconds: float):
        self.clock, self._clock, self._until = clock, clock, clock.now + seconds
        self.traffic, self._progress = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        self.parts = 1

    def is_alive(self) -> bool:
        return True

    def result(self, timeout: float) -> str:
        self._clock.now += timeout
        self.traffic[1] += self.parts
        if self._clock.now < self._until:
            raise concurrent.futures.TimeoutError
        return "it came"


def test_a_state_is_not_given_up_while_an_average_comes_to_which_it_gives_way() -> None:
    held: Any = Held(SteppedClock(), 300.0)
    assert held._await(held, 180.0, None) == "it came"
    held = Held(SteppedClock(), 300.0)
    held.parts = 0
    with pytest.raises(NoState, match="nothing came for 180 s"):
        held._await(held, 180.0, None)


def test_a_full_disk_keeps_none_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None: ...

        def seek(self, place: int) -> None: ...

        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.tempfile, "TemporaryFile", lambda dir: Full())
    others = Others()
    mine, made = replayed(others, 0, 2)
    assert (made, mine.epoch) == (0, 0)


def test_a_folder_that_cannot_be_written_to_keeps_none_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TT_HOME", str(tmp_path / "file"))  # of whoever is root, too
    mine, made = replayed(Others(), 0, 2)
    assert (made, mine.epoch) == (0, 0)


class Watched(Others):
    """As others; of the run's folder it notes what this process has open when the next average is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open = set[str]()

    def fetch_average(self, *asked: Any, **more: Any) -> str | None:
        for opened in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                self.open.add(os.readlink(opened))
        return super().fetch_average(*asked, **more)


def test_they_are_kept_beside_the_backups_and_gone_with_the_process() -> None:
    others, folder = Watched(), folders.run_folder(small_run())
    assert replayed(others, 0, 2)[1] == 2
    assert len([opened for opened in others.open if opened.startswith(str(folder))]) == 1
    assert not os.listdir(folder)


def test_averages_are_kept_while_somebody_asks_for_them() -> None:
    now = [1000.0]
    store = Others().store
    kept = KeptAverages(store, lambda: now[0])

    def round_of(number: int) -> None:
        store.open((1, 1))
        for index, part in enumerate(store.parts):
            width = part.stop - part.start
            read = store.buffer.read(part.start, part.start + width)
            store.put(index, bytes([number]) * len(read), store.hashes)
        kept.committed(f"{number}_aa")

    round_of(1)
    round_of(2)
    assert kept.find("1_aa") is None  # nobody had asked
    second = kept.find("2_aa")
    assert second is not None and second.get(0)[0] == 2 and len(second.parts) == len(store.parts)
    round_of(3)
    round_of(4)
    assert [kept.find(f"{number}_aa") is not None for number in (2, 3, 4)] == [False, True, True]
    now[0] += stores.WANTED_SECONDS + 1
    round_of(5)
    store.open((1, 1))
    assert [kept.find(f"{number}_aa") for number in (3, 4, 5)] == [None, None, None]
