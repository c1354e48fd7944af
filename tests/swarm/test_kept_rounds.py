"""Which of a peer's rounds a member speaks of, a little early or late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from tt_cli.identity.rate_limit import Crowded
from tt_cli.swarm.allreduce.messages import GROUP_BYTES
from tt_cli.swarm.allreduce.rendezvous import KEPT_GROUPS
from tt_cli.swarm.rounds import SETTLING, KeptRounds

PATIENCE = 60.0
CALLER = PeerID.from_base58("QmSoLV4Bbm51jM9C4gDYZQ9Cy3U6aXMJDAbzgu2fzaDs64")


def group(number: int) -> bytes:
    return bytes([number]) * GROUP_BYTES


def round_in(number: int, state_key: str = "0_00") -> Any:
    """A round with two phases, the second of which members name by one byte more."""
    phases = [SimpleNamespace(left=False), SimpleNamespace(left=False)]

    async def phase(group_id: bytes) -> Any:
        return phases[len(group_id) > GROUP_BYTES]

    name = SimpleNamespace(state_key=state_key)
    return SimpleNamespace(allreduce=SimpleNamespace(group_id=group(number), name=name), phase=phase, phases=phases)


async def waiting(rounds: KeptRounds, number: int) -> asyncio.Task[Any]:
    """A member that speaks of a round which has not begun."""
    task = asyncio.create_task(rounds.find(group(number)))
    for _ in range(10):  # until it waits for what comes
        await asyncio.sleep(0)
    return task


def test_a_member_that_is_early_waits_while_a_group_is_sought() -> None:
    async def check() -> None:
        rounds, began = KeptRounds(PATIENCE), round_in(1)
        assert await rounds.find(group(1)) is None, "no group is sought"
        rounds.seek()
        early = await waiting(rounds, 1)
        assert not early.done()
        await rounds.begin(began)
        assert await early is began.phases[0]
        assert await rounds.find(group(1) + b"r") is began.phases[1]

    asyncio.run(check())


def test_nobody_waits_for_a_group_that_was_given_up_or_was_not_found() -> None:
    """Of one that was given up they are told so while the next one is sought."""

    async def check() -> None:
        rounds = KeptRounds(PATIENCE)
        rounds.seek()
        rounds.seek()
        early = [await waiting(rounds, number) for number in (1, 2)]
        await rounds.sought({group(1)}, {group(1)})
        assert await early[0] is None
        assert not early[1].done()
        await rounds.sought({group(1)}, set())
        assert await early[1] is None

    asyncio.run(check())


def test_who_is_early_is_answered_after_a_while_at_the_latest() -> None:
    async def check() -> None:
        rounds = KeptRounds(0.01)
        rounds.seek()
        assert await rounds.find(group(1)) is None

    asyncio.run(check())


def test_the_newest_rounds_are_kept_and_those_from_a_state_can_be_left() -> None:
    async def check() -> None:
        rounds, made = KeptRounds(PATIENCE), [round_in(number, f"{number}_00") for number in range(KEPT_GROUPS + 1)]
        for one in made:
            await rounds.begin(one)
        assert list(rounds.values()) == made[1:]
        rounds.leave(made[1].allreduce.name.state_key)
        assert [[phase.left for phase in one.phases] for one in made[:3]] == [[False] * 2, [True] * 2, [False] * 2]

    asyncio.run(check())


def test_one_member_has_few_questions_at_a_time() -> None:
    async def check() -> None:
        rounds = KeptRounds(PATIENCE)
        with pytest.raises(ValueError, match="no such round here"):
            async with rounds.asked(group(1), CALLER):
                pass
        await rounds.begin(round_in(1))
        asked = [rounds.asked(group(1), CALLER) for _ in range(SETTLING + 1)]
        for question in asked[:-1]:
            assert await question.__aenter__() is rounds[group(1)].phases[0]
        with pytest.raises(Crowded):
            await asked[-1].__aenter__()

    asyncio.run(check())
