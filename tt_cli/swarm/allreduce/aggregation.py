"""One part of the average from the members' parts: what a reducer does, and what an audit repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tt_cli.swarm.allreduce.centered_clip import FEWEST, ReceivedPart, centered_clip, weighted_mean
from tt_cli.swarm.compression.codec import GradientCodec

Aggregation = Literal["centered_clip", "mean"]
LARGEST = 1e18  # magnitude: beyond it no gradient is meant, and below it no weighted sum overflows


@dataclass(frozen=True)
class AveragedPart:
    """encoded: as it travels. clipped: senders that were moved towards the others. huge: senders left out for values
    beyond LARGEST."""

    encoded: bytes
    clipped: frozenset[str] = frozenset()
    huge: list[str] = field(default_factory=list)


def average_part(
    codec: GradientCodec, aggregation: Aggregation, contributions: Sequence[ReceivedPart], elements: int, large: bool
) -> AveragedPart:
    """Equal contributions, in the order of the senders' peer ids, give equal bytes on every machine.

    Zeros when nobody has samples. CenteredClip begins at three members; below, nobody knows which one is wrong.
    """
    taking = [each for each in contributions if each.weight > 0.0]
    average, clipped = _average(codec, aggregation, taking, elements, large)
    huge: list[str] = []
    if not average.abs().max() <= LARGEST:
        huge = [each.sender for each in taking if _magnitude(codec, each, elements, large) > LARGEST]
        taking = [each for each in taking if each.sender not in huge]
        average, clipped = _average(codec, aggregation, taking, elements, large)
    return AveragedPart(codec.encode_part(average, large).buffer, clipped, huge)


def _average(
    codec: GradientCodec, aggregation: Aggregation, taking: Sequence[ReceivedPart], elements: int, large: bool
) -> tuple[torch.Tensor, frozenset[str]]:
    if aggregation == "mean" or len(taking) < FEWEST:
        return weighted_mean(codec, taking, elements, large), frozenset()
    average, factors = centered_clip(codec, taking, elements, large)
    return average, frozenset(factors)


def _magnitude(codec: GradientCodec, contribution: ReceivedPart, elements: int, large: bool) -> float:
    decoded = torch.empty(elements)
    codec.decode_into(contribution.encoded, large, decoded)
    return float(decoded.abs().max())
