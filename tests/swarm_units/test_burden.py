"""Who is left out for it holds the others up, and who is not though it is slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tt_cli.swarm.burden import FIRST_STEPS, MOST_STEPS, OFTEN, Burdens, beyond_most, charged, read_waits, waits_to_tell

HONEST = {name: 80 for name in "abcdefg"}


def left_out(
    burdens: Burdens,
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
    found = left_out(Burdens(2.0), 5, {"slow": 30.0}, HONEST | {"slow": 80}, whole=40.0, idle=35.0)
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
    assert not left_out(Burdens(2.0), 20, {"slow": late}, HONEST | {"slow": samples}, whole, idle), why


def test_one_slow_step_is_forgiven() -> None:
    burdens, samples = Burdens(2.0), HONEST | {"x": 80}
    for epoch in range(1, 20):
        burdens.round_ended({"x": 30.0} if epoch == 10 else {})
        assert not burdens.stepped(epoch, 40.0 if epoch == 10 else 10.0, 10.0, samples)


@pytest.mark.parametrize("place", range(3))
def test_nor_is_one_failed_round_held_against_anybody_among_quick_steps(place: int) -> None:
    """A first round that broke off after five seconds, and two of a second each: three steps of 3 s on average."""
    burdens = Burdens(0.5)
    for epoch, late in enumerate([0.0] * place + [5.0] + [0.0] * (2 - place), 1):
        burdens.round_ended({"a": late})
        assert not burdens.stepped(epoch, 1.0 + late, 1.0 + late, HONEST)


def test_who_makes_rounds_fail_is_charged_with_all_of_their_time() -> None:
    burdens, found = Burdens(2.0), {}
    for epoch in range(1, OFTEN + 1):
        burdens.round_ended({}, spoilers={"x"}, seconds=20.0)
        burdens.round_ended({})  # the repeated one, without it
        found = burdens.stepped(epoch, 30.0, 30.0, HONEST)
    assert found["x"].share == 0.0 and found["x"].cost == 20.0


def test_each_time_again_it_is_left_out_for_twice_as_long() -> None:
    burdens, samples, epoch, lengths = Burdens(2.0), HONEST | {"x": 80}, 0, []
    while len(lengths) < 9:
        epoch += 1
        burdens.round_ended({"x": 30.0})
        if "x" in (found := burdens.stepped(epoch, 40.0, 40.0, samples)):
            lengths.append(found["x"].steps)
            epoch += found["x"].steps
    assert lengths == [10, 20, 40, 80, 160, 320, 640, MOST_STEPS, MOST_STEPS]


def test_who_came_back_and_is_no_burden_any_more_begins_anew() -> None:
    burdens, samples = Burdens(2.0), HONEST | {"x": 80}
    assert left_out(burdens, OFTEN, {"x": 30.0}, samples, 40.0, 40.0)
    back = OFTEN + FIRST_STEPS
    assert not left_out(burdens, FIRST_STEPS + 1, {}, samples, 10.0, 10.0, start=back)
    again = left_out(burdens, 5, {"x": 100.0}, samples, 110.0, 110.0, start=back + FIRST_STEPS + 1)
    assert again["x"][1] == FIRST_STEPS


def test_how_late_is_measured_against_half_of_the_others() -> None:
    assert beyond_most({"a": 1.0, "b": 2.0, "c": 3.0, "d": 30.0}) == {"c": 1.0, "d": 28.0}
    assert beyond_most({"a": 1.0}) == {} == beyond_most({})
    assert beyond_most(dict.fromkeys("abc", 7.0)) == {}


def test_who_was_held_up_by_another_shares_its_time_with_it() -> None:
    """Whoever of the two lies: each is charged with half, and no third one."""
    assert charged({}, {"victim": 12.0}, {"victim": {"attacker": 12.0}}) == {"victim": 6.0, "attacker": 6.0}
    assert charged({"a": 12.0}, {"b": 11.0}, {"b": {"a": 12.0}}) == {"a": 12.0, "b": 11.0}, "all waited for a"
    assert charged({"a": 8.0}, {"b": 11.0}, {"b": {"a": 12.0}}) == {"a": 8.0, "b": 9.0}
    assert charged({}, {"slow": 12.0}, {"slow": {"slow": 12.0}, "other": {"slow": 5.0}}) == {"slow": 12.0}
    assert charged({"a": 1.0}, {"a": 4.0, "b": 2.0}, {}) == {"a": 4.0, "b": 2.0}


def test_another_victim_in_each_round_leaves_the_attacker_out_and_nobody_else() -> None:
    burdens, samples = Burdens(2.0), HONEST | {"x": 80}
    for epoch in range(1, OFTEN + 1):
        victim = "abcdefg"[epoch]
        burdens.round_ended(charged({}, {victim: 30.0}, {victim: {"x": 30.0}}))
        found = burdens.stepped(epoch, 40.0, 40.0, samples)
    assert set(found) == {"x"}


nonsense = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
)


@given(nonsense)
def test_what_others_say_of_their_waits_is_checked(said: object) -> None:
    waits = read_waits(said)
    assert all(seconds >= 0 and seconds < 1e400 for seconds in waits.values())
    found = charged({}, {"b": 5.0}, {"b": said})
    assert 0 < sum(found.values()) <= 5.0 + 1e-9


def test_what_is_told_of_waits_is_read_again() -> None:
    waits = {"a": 0.2, "b": 3.0, "c": 9.04, "d": 5.0, "e": 4.0}
    told = waits_to_tell(waits)
    assert list(read_waits(told).items()) == [("c", 9.0), ("d", 5.0), ("e", 4.0)]
