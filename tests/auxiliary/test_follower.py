"""How an auxiliary peer follows the run: by averages or by states, whichever is fewer bytes; and what it believes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peer.states import gradients, small_run
from swarm.made import NO_PROOFS, SteppedClock, record

from tt_cli.auxiliary import state_follower as room
from tt_cli.auxiliary.lease import Lease
from tt_cli.auxiliary.member import AuxiliaryMember
from tt_cli.auxiliary.state_follower import StateFollower
from tt_cli.auxiliary.state_keeper import StateKeeper
from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.identity.passes import Notice, RollBack
from tt_cli.peer.trained_state import TrainedState
from tt_cli.supervisor.events import Event, Log, Saved, Synchronised, Trouble
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm.allreduce.average_buffer import KEPT_AVERAGES, AverageBuffer
from tt_cli.swarm.allreduce.messages import RoundRules
from tt_cli.swarm.allreduce.round_plan import RoundPlan
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients
from tt_cli.swarm.membership.orders import OrganiserOrders
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.shared_state import state_key
from tt_cli.swarm.state.bridge import Chunks, NoState, ReceivedState, StateBuffer
from tt_cli.task import task_of

RUN = small_run(**{"model.dim": 32, "model.depth": 2, "model.heads": 2, "model.dim_head": 16})


class Swarm:
    """Members who step on demand and keep the averages of their last steps; and the aux peer's averager.

    bytes_a_second: of each. silent: they give no averages. wrong: they give others than those with which they stepped.
    nobody: they give no states, which takes them so many seconds.
    """

    peer_id, audits = "me", NO_PROOFS

    def __init__(self) -> None:
        self._theirs, self.clock = TrainedState(RUN, task_of(RUN).new_model(), None), SteppedClock()
        rules = RoundRules.of(RUN, self._theirs.shapes())
        self.store, self._average = (AverageBuffer(rules.layout, rules.codec) for _ in range(2))
        self.traffic = torch.zeros(2, dtype=torch.int64)
        self._kept: dict[str, bytes] = {}
        self.bytes_a_second = math.inf
        self.asked: list[str] = []
        self.silent = self.wrong = False
        self.nobody: float | None = None

    @property
    def digest(self) -> str:
        return self._theirs.digest

    def view(self) -> SwarmState:
        return SwarmState.of([record(name, epoch=self._theirs.epoch, digest=self.digest) for name in ("anna", "ben")])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            before = state_key(self._theirs.epoch, self.digest)
            for name, gradient in gradients(self._theirs, self._theirs.epoch).items():
                self._average.buffer.encode(name, gradient)
            self._kept[before] = self._average.buffer.dump()
            self._theirs.step(DecodedGradients(self._average.buffer))

    def fetch_average(self, donors: list[str], key: str, timeout: float, plan: RoundPlan) -> str | None:
        if self.silent or key not in list(self._kept)[-KEPT_AVERAGES:]:
            return None
        self.asked.append(donors[0])
        self.store.buffer.load(self._kept[key])
        if self.wrong:
            name, shape = next(iter(self._theirs.shapes().items()))
            self.store.buffer.encode(name, torch.ones(shape))
        self._take(self.store.buffer.nbytes)
        return donors[0]

    def _take(self, count: int) -> None:
        self.traffic[1] += count
        self.clock.now += count / self.bytes_a_second

    def drop_fetch(self) -> None: ...

    def take_state(self, own: Any, timeout: float, *_: object, at_once: int, **more: object) -> ReceivedState:
        assert at_once == 1, "every donor makes a copy of its state"
        if self.nobody is not None:
            self.clock.now += self.nobody
            raise NoState("none of 0 peers can hand over a state", asked=False)
        buffer = StateBuffer.new()
        tree = self._theirs.write_into(buffer.write)
        chunks = Chunks(tree, tree.differing(own), buffer)
        received = sum(map(len, chunks.values()))
        self._take(received)
        return ReceivedState(tree, chunks, ("anna",), received=received)


@dataclass
class Aux:
    """An auxiliary peer over that swarm. averages: whether it may follow by them."""

    swarm: Swarm = field(default_factory=Swarm)
    averages: bool = True
    told: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        averager: Any = self.swarm
        self.keeper = StateKeeper(RUN, self.told.append)
        self.swarm.silent = not self.averages
        self.follower = StateFollower(RUN, self.keeper, averager, self.swarm.view, self.told.append)

    def look(self, seconds: float = 1.0) -> None:
        """As the coordinator does."""
        self.swarm.clock.now += seconds
        if self.follower.wants(view := self.swarm.view()):
            self.follower.follow(view)

    @property
    def lines(self) -> list[str]:
        return [event.message for event in self.told if isinstance(event, Log)]

    @property
    def current(self) -> bool:
        return self.keeper.position == (self.swarm.view().epoch, self.swarm.digest)

    @property
    def period(self) -> float:
        return max(room.MIN_SECONDS, self.keeper.trained.tree.nbytes / room.BYTES_A_SECOND)


@pytest.fixture
def aux() -> Aux:
    """It holds the state of step 3."""
    aux = Aux()
    aux.swarm.step(3)
    aux.look()
    assert aux.current
    return aux


def test_it_wants_what_is_new_and_not_what_is_older(aux: Aux) -> None:
    aux.swarm.clock.now += aux.period
    wants = aux.follower.wants
    assert not wants(SwarmState.of([]))
    assert not wants(SwarmState.of([record(epoch=3, digest=aux.keeper.position[1])]))
    assert not wants(SwarmState.of([record(epoch=2, digest="aa")]))
    assert wants(two_voters(3)) and wants(SwarmState.of([record(epoch=9)]))


def two_voters(epoch: int, digest: str = "aa", **more: object) -> SwarmState:
    return SwarmState.of([record(name, epoch=epoch, digest=digest, vote=True, **more) for name in "ab"])


def test_what_one_voter_alone_names_is_followed_as_far_as_the_run_can_have_come(aux: Aux) -> None:
    """And no further, whatever it claims: nobody is there to outvote it."""
    level, wants = SwarmState.of([record(epoch=3, digest=aux.keeper.position[1])]), aux.follower.wants

    def alone(steps: int) -> SwarmState:
        return SwarmState.of([record(epoch=3 + steps, vote=True)])

    for view in (level, SwarmState.of([])):  # all are asleep, and nobody steps
        aux.swarm.clock.now += 1000 * room.STEP_SECONDS
        assert not wants(view)
    few, week = int(room.MIN_SECONDS / room.STEP_SECONDS), 100_000
    assert wants(alone(few)) and not aux.lines
    assert not wants(alone(few + 1)) and not wants(alone(RUN.schedule.total_steps - 3))
    (line,) = aux.lines
    assert line == f"one trainer alone says that the run is at step {few + 4}, and 0 s ago it was at step 3: not taken"
    assert wants(two_voters(RUN.schedule.total_steps)) and wants(two_voters(3))
    assert not wants(SwarmState.of([record(epoch=3, digest="bb", vote=True)])), "another state of the same step"
    aux.swarm.clock.now += week * room.STEP_SECONDS
    assert wants(alone(week)), "it was cut off from who trained all the time, or there was time enough"


def test_two_peers_of_one_user_are_one_voter(aux: Aux) -> None:
    aux.swarm.clock.now += aux.period
    assert not aux.follower.wants(two_voters(3, user="Anna", pass_text="pass"))
    assert aux.follower.wants(two_voters(3, pass_text="pass"))


def test_who_was_down_follows_who_trained_alone_meanwhile(aux: Aux) -> None:
    """The time since its checkpoint was written counts, until it has seen where those who train are."""
    averager: Any = aux.swarm
    keeper = StateKeeper(RUN, aux.told.append)
    assert keeper.position == aux.keeper.position
    aux.swarm.clock.now = keeper.saved_at + 600 * room.STEP_SECONDS
    follower = StateFollower(RUN, keeper, averager, aux.swarm.view, aux.told.append)
    late = SwarmState.of([record(epoch=500, vote=True)])
    assert not follower.wants(SwarmState.of([record("me", role="aux", epoch=3, digest=keeper.position[1])]))
    assert follower.wants(late)
    assert not follower.wants(SwarmState.of([record(epoch=3, digest=keeper.position[1], vote=True)]))
    assert not follower.wants(late)


def test_what_it_did_not_ask_for_is_not_taken(aux: Aux) -> None:
    """The donor has gone on to what one voter alone names, and nobody believes."""
    held = aux.keeper.position
    aux.swarm.silent = True
    aux.swarm.step(2 * int(room.MIN_SECONDS / room.STEP_SECONDS))
    aux.swarm.clock.now += aux.period
    aux.follower.wants(SwarmState.of([record(epoch=3, digest=held[1])]))
    asked = SwarmState.of([record(epoch=4, vote=True)])
    assert aux.follower.wants(asked)
    aux.follower.follow(asked)
    assert aux.keeper.position == held and "not taken" in aux.lines[-1]


def test_an_average_that_leads_nowhere_does_not_open_the_way_to_any_step(aux: Aux) -> None:
    aux.swarm.wrong = True
    aux.swarm.step()
    aux.look()
    assert aux.keeper.position == (0, "")
    aux.swarm.clock.now += aux.period
    for epoch in (2, 3, RUN.schedule.total_steps):
        assert not aux.follower.wants(SwarmState.of([record(epoch=epoch, vote=True)]))
    aux.look()
    assert aux.current


def test_each_step_is_made_with_its_average_and_checkpoints_are_those_of_the_swarm(aux: Aux) -> None:
    started, average = int(aux.swarm.traffic[1]), aux.swarm.store.buffer.nbytes
    for _ in range(4):
        aux.swarm.step()
        aux.look(0.3 * aux.period)
        assert aux.current
    assert aux.swarm.traffic[1] - started == 4 * average
    assert [type(event) for event in aux.told if not isinstance(event, Log)] == [
        Synchronised, Saved, Synchronised, Synchronised, Synchronised, Synchronised, Saved,
    ]  # fmt: skip
    saved = [load(event.path) for event in aux.told if isinstance(event, Saved)]  # type: ignore[arg-type]
    assert saved[-1].digest() == aux.swarm.digest
    state, four = (
        f"a state ({aux.keeper.trained.tree.nbytes / 1e3:.0f} kB)",
        f"the averages of 4 steps ({4 * average / 1e3:.0f} kB)",
    )
    assert aux.lines == [f"takes {four} in place of {state}, while members keep them"]


def test_of_two_steps_that_it_sees_at_once_both_averages_are_there_still(aux: Aux) -> None:
    aux.swarm.step(2)
    aux.look()
    assert aux.current and len(aux.swarm.asked) == 2
    aux.swarm.step(3)
    aux.look()
    assert not aux.current, "the first of three is kept no longer: a state, when the next checkpoint is due"
    aux.look(aux.period)
    assert aux.current and len(aux.swarm.asked) == 2


def bytes_taken(aux: Aux, steps: int, seconds: float) -> int:
    """What it takes while the swarm makes so many steps, one every so many seconds."""
    before = int(aux.swarm.traffic[1])
    for _ in range(steps):
        aux.swarm.step()
        aux.look(seconds)
    return int(aux.swarm.traffic[1]) - before


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("steps_a_state", [2, 8])
def test_it_takes_what_is_fewer_bytes(aux: Aux, steps_a_state: int, slow: bool) -> None:
    """Whatever the steps between two checkpoints: never more than by states alone, once it knows them."""
    states = Aux(averages=False)
    period = 2 * aux.period if slow else aux.period
    for one in (aux, states):
        one.swarm.bytes_a_second = one.keeper.trained.tree.nbytes / (0.1 * period) if slow else math.inf
        bytes_taken(one, 2 * steps_a_state + 1, period / steps_a_state)
    taken, by_states = (bytes_taken(one, 16, period / steps_a_state) for one in (aux, states))
    average, state = aux.swarm.store.buffer.nbytes, aux.keeper.trained.tree.nbytes
    assert taken == (16 * average if steps_a_state * average < state else by_states)
    assert state <= by_states >= taken


def test_averages_that_have_cost_as_much_as_a_state_are_followed_by_one(aux: Aux) -> None:
    average = aux.swarm.store.buffer.nbytes
    taken = bytes_taken(aux, 20, aux.period / 20.5)
    assert aux.keeper.trained.tree.nbytes - average <= taken < aux.keeper.trained.tree.nbytes
    assert not aux.current and not aux.lines
    aux.swarm.step()
    aux.look(aux.period)
    assert aux.current and aux.lines == [
        f"takes a state ({aux.keeper.trained.tree.nbytes / 1e3:.0f} kB) in place of the averages of 21 steps "
        f"({21 * average / 1e6:.1f} MB)"
    ]


def test_members_are_asked_in_turns_and_an_assistant_before_all(aux: Aux, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        aux.swarm.step()
        aux.look(0.1)
    assert sorted(aux.swarm.asked) == ["anna", "anna", "ben", "ben"]
    usual = aux.swarm.view
    state = {"epoch": aux.keeper.epoch + 1}

    def with_assistant() -> SwarmState:
        others = [record(name, digest=aux.swarm.digest, **state, role=name) for name in ("assistant", "aux")]
        return SwarmState.of([*others, *usual().records])

    monkeypatch.setattr(aux.swarm, "view", with_assistant)
    aux.swarm.step()
    aux.look(0.1)
    assert aux.swarm.asked[4:] == ["assistant"] and aux.current


def test_an_average_that_leads_elsewhere_is_not_held_and_a_state_is_taken_when_one_is_due(aux: Aux) -> None:
    aux.swarm.wrong = True
    aux.swarm.step()
    aux.look()
    assert (aux.keeper.position, aux.keeper.hand_over()) == ((0, ""), None)
    assert "sent an average that does not lead to the others' state" in aux.lines[-1]
    aux.swarm.step()
    aux.look()
    assert len(aux.swarm.asked) == 1 and aux.keeper.epoch == 0, "it is not led on from there"
    aux.look(aux.period)
    assert aux.current


def test_a_lost_average_waits_for_the_next_state(aux: Aux) -> None:
    held, aux.swarm.silent = aux.keeper.position, True
    aux.swarm.step()
    aux.look()
    assert aux.keeper.position == held and aux.keeper.hand_over() is not None
    aux.swarm.silent = False
    aux.swarm.step()
    aux.look(aux.period)
    assert aux.current
    aux.swarm.step()
    aux.look()
    assert aux.current, "and from there by averages again"


def test_nobodys_answer_changes_nothing_and_is_told(aux: Aux) -> None:
    held, aux.swarm.nobody, aux.swarm.silent = aux.keeper.position, 0.0, True
    aux.swarm.step()
    aux.look(aux.period)
    assert aux.keeper.position == held
    (trouble,) = [event for event in aux.told if isinstance(event, Trouble)]
    assert trouble.words == "could not take over the others' state: none of 0 peers can hand over a state"
    told = len(aux.told)
    aux.look(0.5 * room.MIN_SECONDS)
    assert len(aux.told) == told, "not asked again so soon"


def test_after_minutes_in_which_no_state_came_it_asks_as_soon_as_after_one_that_came(aux: Aux) -> None:
    aux.swarm.nobody, aux.swarm.silent = 180.0, True
    aux.swarm.step()
    aux.look(aux.period)
    aux.swarm.nobody = None
    aux.look(aux.period)
    assert aux.current


def test_one_that_came_slowly_makes_no_checkpoint_rarer_and_two_do() -> None:
    aux = Aux(averages=False)
    aux.swarm.step()
    aux.look()
    current = []
    for slow in (False, True, False, False, True, True, False):
        aux.swarm.step()
        aux.swarm.bytes_a_second = aux.keeper.trained.tree.nbytes / aux.period if slow else math.inf
        aux.look(aux.period)
        current.append(aux.current)
    assert current == [True] * 6 + [False]


def test_the_last_state_is_taken_and_written_at_once(aux: Aux) -> None:
    assert not aux.follower.wants(two_voters(6)) and aux.follower.wants(two_voters(RUN.schedule.total_steps))


def test_what_breaks_the_state_ends_the_process(aux: Aux, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = WorkerBroken("the memory was damaged")

    def step(gradients: object) -> None:
        raise broken

    monkeypatch.setattr(aux.keeper.state, "step", step)
    aux.swarm.step()
    aux.look()
    assert aux.follower.broken is broken


def test_who_begins_anew_with_a_state_of_before_an_order_holds_none_of_the_era(aux: Aux, tmp_path: Path) -> None:
    """Its newest checkpoint is of before the order's state, which it did not have."""
    order = RollBack(5, "55", "", order=7)
    told: Any = SimpleNamespace(notice=lambda: Notice(RUN.identity, 1, 0.0, frozenset(), frozenset(), "", order))
    published: list[PeerRecord] = []
    board: Any = SimpleNamespace(view=SwarmState.of([]), expect=int, start=int, publish=published.append)
    averager: Any = aux.swarm
    for held in ((3, aux.keeper.position[1]), (0, "")):
        orders = OrganiserOrders(told, tmp_path / "aux.era", leave=aux.keeper.go_back)
        orders.done(order)
        aux.keeper.accept() if held[0] else aux.keeper.go_back(order)
        assert aux.keeper.position == held
        member = AuxiliaryMember(RUN, aux.keeper, averager, board, orders, Lease("me", (), 30.0), "", aux.told.append)
        went_back = len(aux.lines)
        member.look()
        assert (published[-1].epoch, published[-1].digest, published[-1].era, averager.era) == (0, "", 7, 7)
        assert len(aux.lines) - went_back == bool(held[0])
