"""All gradients in one flat buffer: how a group of peers cuts it into parts, and where it rests between two processes.

- Large tensors come first, each from the beginning of a block on: no block of the 8-bit codec spans two tensors.
- Small ones follow without gaps. They travel in 16 bits, a few hundred of them in one part.
- Reducers get their shares of the encoded bytes, to within a block; a share is cut into parts of nearly equal size.
- At rest the elements are encoded: the bytes that travel are slices of the buffer.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from tt_cli.swarm.compression.codec import GradientCodec
from tt_cli.swarm.shared_memory import shared_bytes

PART_ELEMENTS = 2**18  # in one message, and up to a block more
MAX_REDUCERS, MAX_MEMBERS = 64, 1024  # of a group; listening members beyond that reduce nothing
PIECE = 2**20  # elements that are encoded or decoded at a time
NOBODY = -1


@dataclass(frozen=True)
class TensorPart:
    """Elements `start` to `stop` of the flat buffer, which `reducer` (its index among the reducers) averages.

    reducer: NOBODY where they are not repeated with others. large: in the run's 8 bits, else in fp16.
    """

    start: int
    stop: int
    large: bool
    reducer: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


class Partition:
    """The place of each tensor in the buffer. shapes: name → shape. large_tensor: elements from which one is large.

    block: elements that share a scale in the run's 8 bits. size: elements of the buffer. boundary: where the small
    tensors begin. starts: the first element of each tensor.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], large_tensor: int, block: int):
        self.shapes, self.block = dict(shapes), block
        self.starts: dict[str, int] = {}
        position = 0
        for name, shape in shapes.items():
            if shape.numel() >= large_tensor:
                self.starts[name] = position
                position = self._aligned(position + shape.numel())
        self.boundary = position
        for name, shape in shapes.items():
            if name not in self.starts:
                self.starts[name] = position
                position += shape.numel()
        self.size = position

    def parts(self, shares: Sequence[int]) -> tuple[TensorPart, ...]:
        """The cut for reducers with these shares, each of their sum, in the order of the buffer.

        Raises ValueError for none or many, and where nobody has a share.
        """
        if not 1 <= len(shares) <= MAX_REDUCERS:
            raise ValueError(f"a group with {len(shares)} reducers: from 1 to {MAX_REDUCERS} there may be")
        if min(shares) < 0 or not (whole := sum(shares)):
            raise ValueError("shares of nothing")
        total = self.boundary + 2 * (self.size - self.boundary)  # bytes, but for the scales
        ends = (end if end < whole else None for end in accumulate(shares))
        bounds = [0, *(self.size if end is None else self._position(total * end // whole) for end in ends)]
        return tuple(
            TensorPart(first, last, large, reducer)
            for reducer, share in enumerate(pairwise(bounds))
            for large, side in ((True, min), (False, max))
            for first, last in self._cut(*(side(bound, self.boundary) for bound in share))
        )

    def repeated(self, shares: Sequence[int], lost: Collection[int]) -> tuple[TensorPart, ...]:
        """The same cut, with the parts of `lost` reducers for their backups, and all others for NOBODY.

        The backups of a reducer are the next ones in order that have parts of their own and are not lost: its first
        part goes to the first of them, its second to the next, and so on in turns. Raises as `parts`.
        """
        parts, place = self.parts(shares), Counter[int]()
        backups, again = sorted({part.reducer for part in parts}.difference(lost)), list[TensorPart]()
        for part in parts:
            backup = NOBODY
            if part.reducer in lost and backups:
                backup = backups[(bisect(backups, part.reducer) + place[part.reducer]) % len(backups)]
                place[part.reducer] += 1
            again.append(replace(part, reducer=backup))
        return tuple(again)

    def _position(self, encoded: int) -> int:
        """The element before which about so many bytes lie."""
        if encoded <= self.boundary:
            return min(self._aligned(encoded), self.boundary)
        return self.boundary + (encoded - self.boundary) // 2

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Pieces of nearly equal size, whole blocks but for the last; none of nothing."""
        count = -(-(stop - start) // PART_ELEMENTS)
        bounds = [start + self._aligned((stop - start) * index // count) for index in range(count)] + [stop]
        yield from ((first, last) for first, last in pairwise(bounds) if last > first)

    def _aligned(self, elements: int) -> int:
        return -(-elements // self.block) * self.block


class GradientBuffer:
    """Every element of a layout, in a codec: scales and codes of large tensors, fp16 for small ones."""

    def __init__(self, layout: Partition, codec: GradientCodec):
        self.layout, self.codec = layout, codec
        scales = layout.boundary // codec.block * codec.large.scale_bytes
        self.nbytes = scales + codec.large.room(layout.boundary) + 2 * (layout.size - layout.boundary)
        self._memory = shared_bytes(self.nbytes)
        self._scales, self._codes = self._memory[:scales], self._memory[scales:]

    def dump(self) -> bytes:
        return bytes(self._memory)

    def load(self, dumped: bytes) -> None:
        """Become what was dumped from a buffer of the same layout and codec."""
        self._memory[:] = dumped

    def write(self, start: int, stop: int, encoded: bytes) -> None:
        """Keep the checked bytes of elements `start` to `stop`. `start` begins a block where tensors are large."""
        large = stop <= self.layout.boundary
        scales, codes = self.codec.take_apart(encoded, stop - start, large)
        first = start // self.codec.block * self.codec.large.scale_bytes
        self._scales[first : first + len(scales)] = scales
        self._codes[self._code(start) : self._code(stop)] = self.codec.of(large).spread_out(scales, codes)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of elements `start` to `stop`, as they travel; the same as written where that was one piece."""
        large = stop <= self.layout.boundary
        codec = self.codec.of(large)
        first, last = (-(-element // self.codec.block) * codec.scale_bytes for element in (start, stop))
        scales = self._scales[first:last]
        codes = codec.drawn_together(scales, self._codes[self._code(start) : self._code(stop)])
        return self.codec.put_together(scales, codes, large)

    def _code(self, element: int) -> int:
        """The place of its code: those of small tensors have two bytes."""
        boundary = self.layout.boundary
        return self.codec.large.room(min(element, boundary)) + 2 * max(0, element - boundary)

    def encode(self, name: str, values: torch.Tensor, divisor: float = 1.0) -> None:
        """Write one tensor, divided by `divisor`; fp32 on any device. Raises ValueError where it is not finite."""
        for start, stop, piece in self._pieces(name, values.detach().reshape(-1)):
            mean = piece.to("cpu", torch.float32, copy=True).div_(divisor)
            self.write(start, stop, self.codec.of(stop <= self.layout.boundary).encode(mean))

    def encode_way(self, name: str, begun: torch.Tensor, own: torch.Tensor, left: torch.Tensor | None = None) -> None:
        """Write how much less a tensor is than when it was `begun`, fp32; `own`, as it is now, on any device.

        left: what earlier messages left out, of any float type; it comes on top, and what this one leaves out takes
        its place. Raises ValueError where it is not finite.
        """
        before, rest = begun.reshape(-1).split(PIECE), None if left is None else left.view(-1).split(PIECE)
        for number, (start, stop, piece) in enumerate(self._pieces(name, own.detach().reshape(-1))):
            way = before[number] - piece.to("cpu", torch.float32)
            if rest is not None:
                way.add_(rest[number])
            codec = self.codec.of(stop <= self.layout.boundary)
            self.write(start, stop, encoded := codec.encode(way))
            if rest is not None:
                codec.decode_into(encoded, sent := torch.empty_like(way))
                rest[number].copy_(way.sub_(sent))

    def decode(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (elements,), contiguous fp32 on the CPU, with one tensor."""
        for start, stop, piece in self._pieces(name, out):
            self.codec.of(stop <= self.layout.boundary).decode_into(self.read(start, stop), piece)

    def _pieces(self, name: str, flat: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Where each PIECE of a tensor lies in the buffer, and its elements."""
        start = self.layout.starts[name]
        for piece in flat.split(PIECE):
            yield start, start + len(piece), piece
            start += len(piece)


class DecodedGradients(Mapping[str, torch.Tensor]):
    """A buffer's tensors as fp32, decoded when they are asked for.

    One tensor at a time: the next one is decoded into the same memory, whatever was made of the one before.
    """

    def __init__(self, buffer: GradientBuffer):
        self._buffer = buffer
        shapes = buffer.layout.shapes.values()
        self._memory = torch.empty(max((shape.numel() for shape in shapes), default=0))

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._buffer.layout.shapes[name]
        flat = self._memory[: shape.numel()]
        self._buffer.decode(name, flat)
        return flat.view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffer.layout.shapes)

    def __len__(self) -> int:
        return len(self._buffer.layout.shapes)
