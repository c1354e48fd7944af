"""The averager without a swarm: what a round is given, what is told of one that broke, and who may begin one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.utils import MPFuture, get_dht_time
from swarm.joins import ENTRIES, group_of, rendezvous
from swarm.made import record
from swarm.rounds import PEERS

from tt_cli.run import load_run
from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import Contribution, RoundPlan, claim_limits, leader_of
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.matchmaking import Matchmaker
from tt_cli.swarm.membership.admission import Admission


class Control:
    """hivemind's handle of a step: done with a result, or broken."""

    def __init__(self, outcome: RoundResult | Exception, began: bool = True) -> None:
        self.outcome, self.cancelled, self.triggered = outcome, False, False
        self.began_allreduce, self.weight = began, 0.0

    def result(self, timeout: float) -> RoundResult:
        assert timeout > 10.0
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def allow_allreduce(self) -> None:
        self.triggered = True

    def get_timeout(self) -> float:
        return 5.0

    def done(self) -> bool:
        return not isinstance(self.outcome, TimeoutError)

    def cancel(self) -> None:
        self.cancelled = True


def average(
    samples: int, control: Control, overtaken: Callable[[], bool] = lambda: False, **allowed: float
) -> RoundResult:
    sent: list[Any] = []
    averager: Any = SimpleNamespace(
        max_weight=384.0,
        peer_id="me",
        clock=Clock(),
        _run=SimpleNamespace(swarm=SimpleNamespace(averaging_timeout=10.0)),
        _outer_pipe=SimpleNamespace(send=sent.append),
    )
    contribution = Contribution(samples, 2.5, {"c": 5.5, **allowed})
    result = Averager.average(averager, control, contribution, overtaken)
    assert sent == [("_contribute", [contribution], {})] and control.triggered
    return result


def test_a_member_may_claim_what_it_published_and_what_it_can_have_computed_since() -> None:
    records = [
        record(peer_id="a", samples=100, samples_per_second=10.0, micro_batch=4, time=50.0),
        record(peer_id="b", samples=0, samples_per_second=10.0, time=50.0),
        record(peer_id="c", samples=100, samples_per_second=0.0, time=50.0),
    ]
    assert claim_limits(records, 52.0) == {"a": 2 * (100 + 20 + 4)}
    assert claim_limits(records, 40.0) == {"a": 2 * (100 + 4)}, "clocks differ"
    plan = RoundPlan("5_aa", frozenset("abc"), leader_of("5_aa", tuple("abc")), 3)
    assert RoundPlan.of("5_aa", records, {}) == plan, "two of the same members are equal"


@pytest.mark.parametrize(("samples", "weight"), [(0, 0.0), (96, 96.0), (384, 384.0), (620, 384.0)])
def test_no_peer_claims_a_weight_that_the_others_refuse(samples: int, weight: float) -> None:
    """Samples pile up while rounds fail: with more weight than allowed, the next rounds would fail for ever."""
    control = Control(RoundResult(complete=True))
    average(samples, control)
    assert control.weight == weight


def test_nor_more_than_what_it_told_allows() -> None:
    """Whose DHT node hung, or whose machine stood still, has told less than it has."""
    control = Control(RoundResult(complete=True))
    average(250, control, me=190.0)
    assert control.weight == 190.0


@pytest.mark.parametrize(("error", "words"), [(RuntimeError("no group"), "no group"), (TimeoutError(), "TimeoutError")])
def test_a_broken_round_is_a_result_with_its_reason(error: Exception, words: str) -> None:
    control = Control(error)
    result = average(1, control)
    assert (result.complete, result.problem) == (False, words)
    assert control.cancelled == isinstance(error, TimeoutError)


class Seeking(Control):
    """A group that nobody comes to."""

    def __init__(self) -> None:
        super().__init__(TimeoutError(), began=False)

    def result(self, timeout: float) -> RoundResult:
        assert timeout < 1.0
        raise TimeoutError


def test_a_group_for_a_step_that_the_others_have_made_is_given_up() -> None:
    control, looks = Seeking(), iter([False, False, True])
    result = average(1, control, lambda: next(looks))
    assert result.overtaken and not result.complete and not result.problem and control.cancelled


def test_samples_and_loss_of_a_round_are_those_of_whoever_said_them() -> None:
    members = {"a": {"samples": 10, "loss": 20.0}, "b": {}, "c": {"samples": 30, "loss": 30.0}}
    assert RoundResult(members=members).samples_and_loss() == (40, 1.25)
    assert RoundResult(members={"a": {}}).samples_and_loss() == (0, None)


@pytest.mark.parametrize("loss", [0.0, 1e300, -1e300])
def test_one_member_that_lies_changes_the_loss_of_a_round_little(loss: float) -> None:
    members = {
        "a": {"samples": 10, "loss": 20.0},
        "b": {"samples": 30, "loss": 30.0},
        "c": {"samples": 20, "loss": loss},
    }
    assert 0.5 <= (RoundResult(members=members).samples_and_loss()[1] or 0.0) <= 4.0


OPEN = Admission(load_run("emoji"))


def group(count: int) -> GroupInfo:
    return GroupInfo(b"group", tuple(PEERS[:count]), (b"",) * count)


@pytest.mark.parametrize(
    ("came", "expected", "enough"),
    [(1, 2, False), (2, 2, True), (2, 3, True), (2, 4, False), (3, 4, True), (3, 5, False), (4, 5, True), (4, 6, True)],
)
def test_no_two_groups_can_both_be_enough(came: int, expected: int, enough: bool) -> None:
    met = RoundPlan("0_aa", frozenset(), str(PEERS[0]), expected)
    if enough:
        met.check(group(came))
    else:
        with pytest.raises(ValueError, match=f"only {came} of {expected}"):
            met.check(group(came))


@pytest.mark.parametrize(("came", "with_steps", "takes"), [(2, 1, True), (4, 1, False), (4, 2, True), (4, 0, False)])
def test_a_newcomer_relies_on_those_in_its_group_who_have_made_steps(came: int, with_steps: int, takes: bool) -> None:
    voices = {f"phantom {number}": 1 for number in range(9)} | {str(PEERS[0]): 1}
    met = RoundPlan("0_aa", frozenset(), str(PEERS[0]), 10, voices, newcomer=True)
    if takes:
        met.check(group(came), with_steps)
    else:
        with pytest.raises(ValueError, match="only 1 of 10"):
            met.check(group(came), with_steps)
    with pytest.raises(ValueError, match="only 1 of 10"):
        replace(met, newcomer=False).check(group(came), with_steps)


@pytest.mark.parametrize(("signers", "enough"), [("ab", False), ("abc", True), ("abxyz", False), ("", False)])
def test_an_average_needs_the_vote_of_a_trainer_who_does_not_lie(signers: str, enough: bool) -> None:
    plan = RoundPlan("0_aa", swarm=7, voices=dict.fromkeys("abcdefg", 1))  # of which two may lie
    if enough:
        plan.check_votes(signers)
    else:
        with pytest.raises(ValueError, match=f"{len(signers)} votes of 7 trainers"):
            plan.check_votes(signers)


def test_a_group_with_a_spoiler_has_no_round() -> None:
    with pytest.raises(ValueError, match="who spoiled a round"):
        RoundPlan("0_aa", frozenset(), str(PEERS[0]), 2, avoided=frozenset({str(PEERS[1])})).check(group(2))


class Heard:
    """One of the futures by which the averager's process hears that a step is given up; notes what it then sees."""

    def __init__(self, seen: list[bool], control: StepControl):
        self._seen, self._control = seen, control

    def cancel(self) -> None:
        self._seen.append(self._control.cancelled())

    def set_result(self, _: None) -> None:
        self._seen.append(self._control.cancelled())

    def done(self) -> bool:
        return True


def control_heard() -> tuple[StepControl, list[bool]]:
    MPFuture()  # it starts what those derived from it use
    seen: list[bool] = []
    control = StepControl(get_dht_time(), get_dht_time() + 60.0, False, 1.0, ENTRIES[0])
    control.attach(Heard(seen, control), Heard(seen, control))
    return control, seen


def test_a_step_counts_as_given_up_before_the_averager_hears_of_it() -> None:
    """hivemind's looks once, when it hears; it went on to a round that the trainer repeats with others."""
    hivemind_patches.apply()
    control, seen = control_heard()
    assert control.cancel() and control.cancelled()
    assert seen == [True, True]


def test_a_group_of_too_few_or_given_up_as_it_formed_has_no_round() -> None:
    control, _ = control_heard()
    point = rendezvous(control)
    point.plan = RoundPlan("0_aa", frozenset(), str(PEERS[0]), 2)
    formed = group_of(0, 1)
    asyncio.run(point.update_key_on_group_assembled(formed))
    with pytest.raises(ValueError, match="only 2 of 4 trainers came"):  # as many as there are when it begins
        point.check(formed, 4, OPEN, 9.0)
    assert point.check(formed, 3, OPEN, 9.0).keys() == set(PEERS[:2])
    control.cancel()
    with pytest.raises(ValueError, match="given up"):
        point.check(formed, 3, OPEN, 9.0)


class Rounds:
    """In the averager's place: every group that is sought ends in the same way."""

    peer_id, clock = "b", Clock()

    def __init__(self, outcome: RoundResult, began: bool = True) -> None:
        self.outcome, self.began, self.sought = outcome, began, 0

    def seek(self, *_: Any) -> Control:
        self.sought += 1
        return Control(self.outcome, self.began)

    def average(self, *_: Any) -> RoundResult:
        return self.outcome


ALL = RoundPlan("5_aa", frozenset("bcd"), "b", 3)


@pytest.mark.parametrize(
    ("outcome", "began", "leader", "missed"),
    [
        (RoundResult(complete=True, members={"b": {}, "c": {}}), True, "b", {"d"}),
        (RoundResult(problem="no group"), False, "b", {"c", "d"}),
        (RoundResult(problem="no group"), False, "c", {"c"}),
        (RoundResult(problem="it broke"), True, "c", set()),
        (RoundResult(overtaken=True), False, "c", set()),
    ],
)
def test_who_did_not_come_is_told(outcome: RoundResult, began: bool, leader: str, missed: set[str]) -> None:
    rounds: Any = Rounds(outcome, began)
    plan = replace(ALL, leader=leader)
    result, absent = Matchmaker(rounds, 3.0).average(plan, 5, 1.0, lambda: False)
    assert result is outcome and absent == missed


def test_a_group_is_sought_when_it_is_time_and_once() -> None:
    rounds: Any = Rounds(TimeoutError())  # type: ignore[arg-type]
    matchmaker = Matchmaker(rounds, 3.0)
    matchmaker.prepare(ALL, 100.0)
    matchmaker.prepare(RoundPlan("5_aa", frozenset("b"), "b", 1), 0.1)
    assert rounds.sought == 0
    matchmaker.prepare(ALL, 0.5)
    matchmaker._pending[1].stage = None  # type: ignore[union-attr]
    matchmaker.prepare(ALL, 0.2)
    assert rounds.sought == 1
    matchmaker.prepare(replace(ALL, state_key="6_bb"), 0.2)
    assert rounds.sought == 2
