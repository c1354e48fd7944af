"""All gradients in one flat buffer, and how a group of peers cuts it into parts.

Every member computes the same cut from the run's shapes and the group alone, so nothing of it travels.

- Large tensors come first, each from the beginning of a block on: no block of the 8-bit codec spans two tensors.
- Small ones follow without gaps. They travel in 16 bits, a few hundred of them in one part.
- Reducers get equal shares of the encoded bytes, to within a block; a share is cut into parts of nearly equal size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

PART_ELEMENTS = 2**18  # in one message, and up to a block more
MAX_REDUCERS = 256


@dataclass(frozen=True)
class TensorPart:
    """Elements `start` to `stop` of the flat buffer, which `reducer` (its index among the reducers) averages.

    large: in the run's 8 bits, else in fp16.
    """

    start: int
    stop: int
    large: bool
    reducer: int

    @property
    def elements(self) -> int:
        """How many."""
        return self.stop - self.start


class Partition:
    """Where each tensor lies. shapes: name → shape. large_tensor: elements from which a tensor counts as large.

    block: elements that share a scale in the run's 8 bits. size: elements of the buffer. boundary: where the small
    tensors begin.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], large_tensor: int, block: int):
        self.shapes, self.block = dict(shapes), block
        self._starts: dict[str, int] = {}
        position = 0
        for name, shape in shapes.items():
            if shape.numel() >= large_tensor:
                self._starts[name] = position
                position = self._aligned(position + shape.numel())
        self.boundary = position
        for name, shape in shapes.items():
            if name not in self._starts:
                self._starts[name] = position
                position += shape.numel()
        self.size = position

    def start(self, name: str) -> int:
        """The first element of a tensor."""
        return self._starts[name]

    def parts(self, reducers: int) -> tuple[TensorPart, ...]:
        """The cut for a group with so many reducers, in the order of the buffer. Raises ValueError for none or many."""
        if not 1 <= reducers <= MAX_REDUCERS:
            raise ValueError(f"a group with {reducers} reducers: from 1 to {MAX_REDUCERS} there may be")
        total = self.boundary + 2 * (self.size - self.boundary)  # bytes, but for the scales
        bounds = [self._position(total * index // reducers) for index in range(reducers)] + [self.size]
        parts = []
        for reducer, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            for first, last in self._cut(min(start, self.boundary), min(stop, self.boundary)):
                parts.append(TensorPart(first, last, True, reducer))
            for first, last in self._cut(max(start, self.boundary), max(stop, self.boundary)):
                parts.append(TensorPart(first, last, False, reducer))
        return tuple(parts)

    def _position(self, encoded: int) -> int:
        """The element before which about so many bytes lie."""
        if encoded <= self.boundary:
            return min(self._aligned(encoded), self.boundary)
        return self.boundary + (encoded - self.boundary) // 2

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Pieces of nearly equal size, whole blocks but for the last."""
        if stop <= start:
            return
        count = -(-(stop - start) // PART_ELEMENTS)
        bounds = [start + self._aligned((stop - start) * index // count) for index in range(count)] + [stop]
        for first, last in zip(bounds, bounds[1:], strict=False):
            if last > first:
                yield first, last

    def _aligned(self, elements: int) -> int:
        return -(-elements // self.block) * self.block
