"""Who is left out for it holds the others up, and who is not though it is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tt_cli.swarm.allreduce.lateness import beyond_most, read_waits, waits_to_report
from tt_cli.swarm.participants.stragglers import FIRST_STEPS, MOST_STEPS, OFTEN, StragglerDetector

HONEST = {name: 80 for name in "abcdefg"}


def left_out(
    burdens: StragglerDetector,
    steps: int,
    late: dict[str, float],
    samples: dict[str, int],
    whole: float,
    idle: float,
    start: int = 1,
) -> dict[str, tuple[int, int]]:
    """Member → step at which it was left out first, and for how many."""
    found: dict[str, tuple[int, int]] = {}
    for epoch in range(start, start + steps):
        burdens.round_ended(late)
        for one, burden in burdens.stepped(epoch, whole, idle, samples).items():
            found.setdefault(one, (epoch, burden.steps))
    return found


def test_who_costs_more_than_it_gives_is_left_out_after_a_few_steps() -> None:
    found = left_out(StragglerDetector(2.0), 5, {"slow": 30.0}, HONEST | {"slow": 80}, whole=40.0, idle=35.0)
    assert found == {"slow": (OFTEN, FIRST_STEPS)}


@pytest.mark.parametrize(
    ("late", "samples", "whole", "idle", "why"),
    [
        (30.0, 80, 300.0, 300.0, "an eighth of the samples is worth more than a tenth of the time"),
        (18.0, 560, 40.0, 35.0, "it gives half of the samples"),
        (30.0, 80, 40.0, 0.0, "the devices computed meanwhile"),
        (1.5, 80, 3.0, 3.0, "nobody is blamed for so little"),
    ],
)
def test_who_gives_more_than_it_costs_stays(late: float, samples: int, whole: float, idle: float, why: str) -> None:
    assert not left_out(StragglerDetector(2.0), 20, {"slow": late}, HONEST | {"slow": samples}, whole, idle), why


def test_one_slow_step_is_forgiven() -> None:
    burdens, samples = StragglerDetector(2.0), HONEST | {"x": 80}
    for epoch in range(1, 20):
        burdens.round_ended({"x": 30.0} if epoch == 10 else {})
        assert not burdens.stepped(epoch, 40.0 if epoch == 10 else 10.0, 10.0, samples)


@pytest.mark.parametrize("place", range(3))
def test_nor_is_one_failed_round_held_against_anybody_among_quick_steps(place: int) -> None:
    """A first round that broke off after five seconds, and two of a second each: three steps of 3 s on average."""
    burdens = StragglerDetector(0.5)
    for epoch, late in enumerate([0.0] * place + [5.0] + [0.0] * (2 - place), 1):
        burdens.round_ended({"a": late})
        assert not burdens.stepped(epoch, 1.0 + late, 1.0 + late, HONEST)


def test_who_makes_rounds_fail_is_charged_with_all_of_their_time() -> None:
    burdens, found = StragglerDetector(2.0), {}
    for epoch in range(1, OFTEN + 1):
        burdens.round_ended({}, spoilers={"x"}, seconds=20.0)
        burdens.round_ended({})  # the repeated one, without it
        found = burdens.stepped(epoch, 30.0, 30.0, HONEST)
    assert found["x"].share == 0.0 and found["x"].cost == 20.0


def test_each_time_again_it_is_left_out_for_twice_as_long() -> None:
    burdens, samples, epoch, lengths = StragglerDetector(2.0), HONEST | {"x": 80}, 0, []
    while len(lengths) < 9:
        epoch += 1
        burdens.round_ended({"x": 30.0})
        if "x" in (found := burdens.stepped(epoch, 40.0, 40.0, samples)):
            lengths.append(found["x"].steps)
            epoch += found["x"].steps
    assert lengths == [10, 20, 40, 80, 160, 320, 640, MOST_STEPS, MOST_STEPS]


def test_who_came_back_and_is_no_burden_any_more_begins_anew() -> None:
    burdens, samples = StragglerDetector(2.0), HONEST | {"x": 80}
    assert left_out(burdens, OFTEN, {"x": 30.0}, samples, 40.0, 40.0)
    back = OFTEN + FIRST_STEPS
    assert not left_out(burdens, FIRST_STEPS + 1, {}, samples, 10.0, 10.0, start=back)
    again = left_out(burdens, 5, {"x": 100.0}, samples, 110.0, 110.0, start=back + FIRST_STEPS + 1)
    assert again["x"][1] == FIRST_STEPS


def test_how_late_is_measured_against_half_of_the_others() -> None:
    assert beyond_most({"a": 1.0, "b": 2.0, "c": 3.0, "d": 30.0}) == {"c": 1.0, "d": 28.0}
    assert beyond_most({"a": 1.0}) == {} == beyond_most({})
    assert beyond_most(dict.fromkeys("abc", 7.0)) == {}


def test_who_is_named_for_weeks_is_left_out_no_longer_for_it_unless_it_was_out_meanwhile() -> None:
    """While most do not say so yet, it stays, and is named again at every step."""
    burdens, samples, lengths = StragglerDetector(2.0), HONEST | {"x": 80}, []
    for epoch in range(1, 9):
        burdens.round_ended({"x": 30.0})
        lengths += [burden.steps for burden in burdens.stepped(epoch, 40.0, 40.0, samples).values()]
    assert lengths == [FIRST_STEPS] * 6


Round = tuple[dict[str, float], dict[str, dict[str, float]]]  # who was late, and for whom it waited as it says


def steps_out(steps: int, held_up: Callable[[set[str]], Round]) -> Counter[str]:
    """Of all steps, for how many each was left out. held_up: what happens in a round of these members."""
    burdens, out, counts = StragglerDetector(2.0), dict[str, int](), Counter[str]()
    for epoch in range(1, steps + 1):
        present = {one for one in HONEST if out.get(one, 0) < epoch}
        counts.update(HONEST.keys() - present)
        late, told = held_up(present)
        burdens.round_ended(late, told)
        took = 40.0 if late else 10.0
        found = burdens.stepped(epoch, took, took, {one: 80 for one in present})
        assert found.keys() <= present
        out |= {one: epoch + burden.steps for one, burden in found.items()}
    return counts


def late_for(late: str, waited_for: str) -> Round:
    return {late: 30.0}, {late: {waited_for: 30.0}}


def test_who_is_slow_with_one_alone_is_left_out_and_that_one_is_not() -> None:
    counts = steps_out(OFTEN + FIRST_STEPS, lambda there: late_for("a", "x") if {"a", "x"} <= there else ({}, {}))
    assert not counts  # there is no x
    counts = steps_out(OFTEN + FIRST_STEPS, lambda there: late_for("a", "b") if {"a", "b"} <= there else ({}, {}))
    assert counts == {"b": FIRST_STEPS}


def test_who_is_slow_with_another_one_once_that_is_left_out_pays_for_most_of_it() -> None:
    def held_up(there: set[str]) -> Round:
        return late_for(min(there - {"g"}), "g") if "g" in there else ({}, {})

    counts = steps_out(300, held_up)
    assert counts["g"] > 250 and set(counts) <= {"g", "a"} and counts["a"] <= FIRST_STEPS


def test_who_is_slow_and_blames_another_one_each_time_costs_one_member_a_few_steps() -> None:
    blamed: list[str] = []

    def held_up(there: set[str]) -> Round:
        if "g" not in there:
            return {}, {}
        if not blamed or blamed[-1] not in there:
            blamed.append(min(there - {"g"} - set(blamed), default="a"))
        return late_for("g", blamed[-1])

    counts = steps_out(300, held_up)
    assert counts["g"] > 250 and sum(counts.values()) - counts["g"] <= FIRST_STEPS


def test_two_that_are_slow_with_each_other_alone_take_turns() -> None:
    both = 0

    def held_up(there: set[str]) -> Round:
        nonlocal both
        both += not {"a", "b"} & there
        return late_for("a", "b") if {"a", "b"} <= there else ({}, {})

    counts = steps_out(400, held_up)
    assert set(counts) == {"a", "b"} and both == 0
    assert 1 / 3 < counts["a"] / counts["b"] < 3


def test_who_lie_about_one_together_have_nobody_else_left_out() -> None:
    def held_up(there: set[str]) -> Round:
        liars = {"f", "g"} & there
        if not liars or "a" not in there:
            return {}, {}
        return dict.fromkeys(liars, 30.0), {one: {"a": 30.0} for one in liars}

    assert set(steps_out(400, held_up)) <= {"a", "f", "g"}


def test_another_victim_in_each_round_leaves_the_attacker_out_and_nobody_else() -> None:
    turn = 0

    def held_up(there: set[str]) -> Round:
        nonlocal turn
        turn += 1
        victims = sorted(there - {"g"})
        return late_for(victims[turn % len(victims)], "g") if "g" in there else ({}, {})

    assert set(steps_out(60, held_up)) == {"g"}


def test_what_all_saw_explains_first() -> None:
    """Who is late because of one that is late for everybody is charged with the rest alone."""
    burdens = StragglerDetector(2.0)
    for epoch in range(1, OFTEN + 1):
        burdens.round_ended({"a": 30.0, "b": 29.0}, {"b": {"a": 30.0}})
        found = burdens.stepped(epoch, 80.0, 80.0, HONEST)
    assert {one: burden.cost for one, burden in found.items()} == {"a": 30.0, "b": 29.0}


nonsense = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
)


@given(nonsense)
def test_what_others_say_of_their_waits_is_checked(said: object) -> None:
    waits = read_waits(said)
    assert all(seconds >= 0 and seconds < 1e400 for seconds in waits.values())
    burdens = StragglerDetector(2.0)
    burdens.round_ended({"b": 5.0}, {"b": waits})
    assert sum(burdens._now.values()) == pytest.approx(5.0)


def test_what_is_told_of_waits_is_read_again() -> None:
    waits = {"a": 0.2, "b": 3.0, "c": 9.04, "d": 5.0, "e": 4.0}
    told = waits_to_report(waits)
    assert list(read_waits(told).items()) == [("c", 9.0), ("d", 5.0), ("e", 4.0)]
