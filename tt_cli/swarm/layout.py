"""All gradients in one flat buffer, and how a group of peers cuts it into parts.

Every member computes the same cut from the run's shapes and the group alone, so nothing of it travels.

- Large tensors come first, each from a multiple of 256 elements on: no block of the 8-bit codec spans two tensors.
- Small ones follow without gaps. They travel in 16 bits, a few hundred of them in one part.
- Reducers get equal shares of the encoded bytes, to within a block; a share is cut into parts of nearly equal size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 256  # elements: a block of linear8
PART_ELEMENTS = 2**18  # at most, in one message


@dataclass(frozen=True)
class Part:
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


class Layout:
    """Where each tensor lies. shapes: name → shape. large_tensor: elements from which a tensor counts as large.

    size: elements of the buffer. boundary: where the small tensors begin.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], large_tensor: int):
        self.shapes = dict(shapes)
        self._starts: dict[str, int] = {}
        position = 0
        for name, shape in shapes.items():
            if shape.numel() >= large_tensor:
                self._starts[name] = position
                position = _aligned(position + shape.numel())
        self.boundary = position
        for name, shape in shapes.items():
            if name not in self._starts:
                self._starts[name] = position
                position += shape.numel()
        self.size = position

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor, in the order of `shapes`, as a view of `flat` (size,)."""
        return [
            flat[start : start + shape.numel()].view(shape)
            for shape, start in zip(self.shapes.values(), map(self._starts.__getitem__, self.shapes), strict=True)
        ]

    def parts(self, reducers: int) -> list[Part]:
        """The cut for a group with so many reducers (1 or more), in the order of the buffer."""
        if reducers < 1:
            raise ValueError("a group without a reducer")
        total = self.boundary + 2 * (self.size - self.boundary)  # bytes, but for the scales
        bounds = [self._position(total * index // reducers) for index in range(reducers)] + [self.size]
        parts = []
        for reducer, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            for first, last in _cut(min(start, self.boundary), min(stop, self.boundary)):
                parts.append(Part(first, last, True, reducer))
            for first, last in _cut(max(start, self.boundary), max(stop, self.boundary)):
                parts.append(Part(first, last, False, reducer))
        return parts

    def _position(self, encoded: int) -> int:
        """The element before which about so many bytes lie."""
        if encoded <= self.boundary:
            return min(_aligned(encoded), self.boundary)
        return self.boundary + (encoded - self.boundary) // 2


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Pieces of nearly equal size, whole blocks but for the last."""
    if stop <= start:
        return
    count = -(-(stop - start) // PART_ELEMENTS)
    bounds = [start + _aligned((stop - start) * index // count) for index in range(count)] + [stop]
    yield from zip(bounds, bounds[1:], strict=False)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin when they follow each other; one more entry than pieces."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found
