"""Batches of pictures drawn side by side: as many as fit into a share of the memory that is free."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tt_cli.memory import shown
from tt_cli.model.allocator import free_memory

# Shares of the free memory that drawing takes by itself. A GPU's allocator needs some room for pieces that do not
# fit each other; a computer's memory is wanted by its other programs too.
GPU_SHARE = 0.85
HOST_SHARE = 0.5
# More rows than this are hardly faster, and the first picture would come late.
MOST_ROWS = 256


@dataclass(frozen=True)
class BatchLimit:
    """The most bytes that drawing may take, and why."""

    nbytes: int
    reason: str
    asked: bool  # by whoever draws, so it is kept to even where not one picture fits


def memory_limit(device: torch.device, memory: int | None) -> BatchLimit:
    """``memory`` bytes, or a share of what is free on the device."""
    if memory is not None:
        return BatchLimit(memory, "as asked", asked=True)
    free, share = free_memory(device), GPU_SHARE if device.type == "cuda" else HOST_SHARE
    where = "in memory" if device.type == "cpu" else f"on {device}"
    return BatchLimit(int(free * share), f"{share:.0%} of the {shown(free)} free {where}", asked=False)


@dataclass(frozen=True)
class PromptSlice:
    """The pictures ``first`` … ``first + count - 1`` of the prompt at ``place``."""

    place: int
    first: int
    count: int


def next_batch(waiting: deque[PromptSlice], fits: Callable[[int, int], bool]) -> list[PromptSlice]:
    """Take the next parts to draw together, all with equal counts: whole prompts, or even pieces of one.

    ``fits(prompts, samples)`` tells whether so many prompts with so many pictures each fit. One picture is taken even
    where it says no.
    """
    part = waiting.popleft()
    if fits(1, part.count):
        parts = [part]
        while waiting and waiting[0].count == part.count and fits(len(parts) + 1, part.count):
            parts.append(waiting.popleft())
        return parts
    most = 1 + bisect_left(range(2, part.count), True, key=lambda samples: not fits(1, samples))
    pieces = -(-part.count // most)
    count = -(-part.count // pieces)
    if part.count > count:
        waiting.appendleft(PromptSlice(part.place, part.first + count, part.count - count))
    return [PromptSlice(part.place, part.first, count)]
