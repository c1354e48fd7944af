"""The sums of one part: what must not enter them, and that the honest senders' average is as if it never came."""

from __future__ import annotations

import asyncio
import math

import numpy
import pytest
import torch
from torch import Tensor

from tt_cli.swarm.codec import MalformedPart
from tt_cli.swarm.runner import Reducer

SHAPES = (torch.Size([7]), torch.Size([3, 2]))
WEIGHTS = (10.0, 30.0)
HONEST = [[torch.full(shape, 1.0 + sender + part) for part, shape in enumerate(SHAPES)] for sender in range(2)]
LIAR = 2


def mean(part: int, senders: list[tuple[list[Tensor], float]]) -> numpy.ndarray:
    return numpy.average(
        [parts[part].numpy().astype("float64") for parts, _ in senders], axis=0, weights=[w for _, w in senders]
    )


async def send_all(reducer: Reducer, sender: int, parts: list[Tensor], weight: float) -> list[Tensor]:
    return [
        (await reducer.accumulate_part(sender, index, part, weight=weight)).clone() for index, part in enumerate(parts)
    ]


def test_it_is_the_mean_weighted_by_samples() -> None:
    third = ([torch.full(shape, -4.0) for shape in SHAPES], 5.0)

    async def round_of_three() -> list[list[Tensor]]:
        reducer = Reducer(SHAPES, 3, 100.0)
        senders = [*zip(HONEST, WEIGHTS, strict=True), third]
        return await asyncio.gather(*(send_all(reducer, i, *sender) for i, sender in enumerate(senders)))

    received = asyncio.run(round_of_three())
    for part in range(len(SHAPES)):
        expected = mean(part, [*zip(HONEST, WEIGHTS, strict=True), third])
        for averages in received:
            numpy.testing.assert_allclose(averages[part].numpy(), expected, rtol=1e-6)


BAD = {
    "NaN": (0, torch.full(SHAPES[0], math.nan), 1.0, "not finite"),
    "one infinity": (0, torch.tensor([0.0, 0, 0, 0, 0, 0, math.inf]), 1.0, "not finite"),
    "NaN weight": (0, torch.ones(SHAPES[0]), math.nan, "weight"),
    "infinite weight": (0, torch.ones(SHAPES[0]), math.inf, "weight"),
    "negative weight": (0, torch.ones(SHAPES[0]), -1.0, "weight"),
    "huge weight": (0, torch.ones(SHAPES[0]), 100.5, "weight"),
    "wrong shape": (0, torch.ones(8), 1.0, "shape"),
    "one number for all": (0, torch.ones(()), 1.0, "shape"),
    "transposed": (1, torch.ones(2, 3), 1.0, "shape"),
    "no such part": (2, torch.ones(SHAPES[1]), 1.0, "part 2"),
    "negative part": (-1, torch.ones(SHAPES[1]), 1.0, "part -1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_refused_leaves_the_average_of_the_others_as_it_is(kind: str) -> None:
    part_index, tensor, weight, words = BAD[kind]

    async def round_of_three() -> list[list[Tensor]]:
        reducer = Reducer(SHAPES, 3, 100.0)
        honest = [
            asyncio.ensure_future(send_all(reducer, i, parts, weight))
            for i, (parts, weight) in enumerate(zip(HONEST, WEIGHTS, strict=True))
        ]
        await asyncio.sleep(0)  # the honest ones have sent their first part and wait
        with pytest.raises(MalformedPart, match=words):
            await reducer.accumulate_part(LIAR, part_index, tensor, weight=weight)
        reducer.on_sender_failed(LIAR)  # what the runner does next
        return await asyncio.wait_for(asyncio.gather(*honest), 10)

    received = asyncio.run(round_of_three())
    for part in range(len(SHAPES)):
        for averages in received:
            expected = mean(part, list(zip(HONEST, WEIGHTS, strict=True)))
            numpy.testing.assert_allclose(averages[part].numpy(), expected, rtol=1e-6)


def test_a_weight_may_not_change_between_parts() -> None:
    async def round_of_three() -> tuple[list[list[Tensor]], list[Tensor]]:
        reducer = Reducer(SHAPES, 3, 100.0)
        honest = [
            asyncio.ensure_future(send_all(reducer, i, parts, weight))
            for i, (parts, weight) in enumerate(zip(HONEST, WEIGHTS, strict=True))
        ]
        first = await reducer.accumulate_part(LIAR, 0, torch.zeros(SHAPES[0]), weight=10.0)
        with pytest.raises(MalformedPart, match="changes"):
            await reducer.accumulate_part(LIAR, 1, torch.zeros(SHAPES[1]), weight=11.0)
        reducer.on_sender_failed(LIAR)
        return await asyncio.wait_for(asyncio.gather(*honest), 10), [first]

    received, (first,) = asyncio.run(round_of_three())
    honest = list(zip(HONEST, WEIGHTS, strict=True))
    zeros = ([torch.zeros(shape) for shape in SHAPES], 10.0)
    numpy.testing.assert_allclose(first.numpy(), mean(0, [*honest, zeros]), rtol=1e-6)  # it was honest so far
    for averages in received:
        numpy.testing.assert_allclose(averages[1].numpy(), mean(1, honest), rtol=1e-6)


def test_a_sender_without_samples_changes_nothing() -> None:
    async def round_of_two() -> list[list[Tensor]]:
        reducer = Reducer(SHAPES, 2, 100.0)
        idle = [torch.full(shape, 1e30) for shape in SHAPES]
        return await asyncio.gather(send_all(reducer, 0, HONEST[0], 10.0), send_all(reducer, 1, idle, 0.0))

    for averages in asyncio.run(round_of_two()):
        for average, own in zip(averages, HONEST[0], strict=True):
            assert torch.equal(average, own)
