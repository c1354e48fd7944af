"""scripts/bench workless: who counts as named, when, and as falsely named."""

from __future__ import annotations

from scripts.benchmarks.clipping import SIZES
from scripts.benchmarks.workless import COPY, MAJORITY, NOISE, WORKLESS, ZEROS, named

HONEST = [str(member) for member in range(len(SIZES)) if member not in WORKLESS]


def test_a_member_is_named_when_most_of_the_honest_say_so() -> None:
    said = {str(member): dict[str, tuple[int, str]]() for member in range(len(SIZES))}
    for place, reducer in enumerate(HONEST[:MAJORITY]):
        said[reducer] = {str(ZEROS): (5 + place, "zeros"), str(COPY): (3, "a copy"), str(NOISE): (6, "noise")}
    said[str(NOISE)] = {HONEST[0]: (1, "it lies")}
    found = named(said, attacked=True)
    assert (found["false"], found["named_rounds"]) == (0, 5 + MAJORITY - 1)
    assert found["named_by"] == dict.fromkeys(map(str, WORKLESS), MAJORITY)
    del said[HONEST[0]][str(COPY)]
    said[HONEST[1]][HONEST[2]] = (9, "noise")
    found = named(said, attacked=True)
    assert (found["false"], found["named_rounds"]) == (1, None), "three of seven are not most of them"


def test_where_nobody_attacks_every_name_is_false() -> None:
    said = {"0": {"1": (7, "noise"), "2": (8, "noise")}, "3": {"1": (9, "noise")}}
    assert named(said, attacked=False) == {"false": 2}
