"""A crowd of newcomers over limited lines: what its members send, how long it takes, and that rounds go on."""

from __future__ import annotations

import pytest
from simulation.crowd import Setting, Taken, taken

TAKERS, CHUNKS = 8, 48


@pytest.fixture(scope="module")
def crowds() -> dict[bool, Taken]:
    """By whether takers hand on what they have."""
    return {hand_on: taken(Setting(TAKERS, CHUNKS, hand_on)) for hand_on in (True, False)}


def test_members_send_the_state_a_few_times_however_many_take_it(crowds: dict[bool, Taken]) -> None:
    assert crowds[True].copies < 0.4 * TAKERS
    assert crowds[False].copies > 0.99 * TAKERS
    assert max(crowds[True].seconds) < 0.7 * max(crowds[False].seconds)


def test_rounds_come_first_on_the_members_lines(crowds: dict[bool, Taken]) -> None:
    usual = taken(Setting(0, CHUNKS))
    for crowd in crowds.values():
        assert crowd.round_seconds < 1.4 * usual.round_seconds, "a round of six seconds, with chunks on their way"
        assert crowd.step_seconds < 1.25 * usual.step_seconds
