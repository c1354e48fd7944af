"""A crowd of newcomers over limited lines: what its members send, how long it takes, and that rounds go on."""

from __future__ import annotations

import asyncio

import pytest
from simulation.crowd import Setting, Taken, taken
from simulation.virtual import in_virtual_time

from tt_cli.swarm.network.bandwidth import LEAST_REST, OVERHEAD, REST_SECONDS, BandwidthLimiter

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
        assert crowd.step_seconds < 1.4 * usual.step_seconds
    assert crowds[True].step_seconds < 1.25 * usual.step_seconds


def test_a_chunk_waits_for_the_rest_of_the_line_or_the_end_of_the_round_but_not_for_long() -> None:
    async def hand_over() -> None:
        clock, began = asyncio.get_running_loop().time, asyncio.get_running_loop().time()
        line, second = BandwidthLimiter(clock=clock), int(LEAST_REST / 8 / OVERHEAD)
        assert await line.give_way(2**30) and clock() == began, "no round has the line"
        line.begin(slow=False)
        for sent in (1, 2):
            assert await line.give_way(second)
            assert clock() - began == pytest.approx(sent, rel=0.1)
        waiting = asyncio.create_task(line.give_way(int(2 * REST_SECONDS) * second))
        await asyncio.sleep(0.1)
        assert not await line.give_way(second), "others take longer than anybody would wait"
        line.end()
        assert await waiting and clock() - began < 3.0, "the round is over"

    in_virtual_time(hand_over())
