"""Gradients at rest between the processes of a peer: encoded, a byte for each element instead of four.

Both the gradient on its way into a round and the average that comes out of it lie in such a buffer. The bytes that
travel are slices of it; the optimizer reads one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tt_cli.swarm.compression.codec import GradientCodec
from tt_cli.swarm.compression.partition import Partition
from tt_cli.swarm.shared_memory import shared_bytes

PIECE = 2**20  # elements that are encoded or decoded at a time


class GradientBuffer:
    """Every element of a layout, in the run's codec: scales and codes of large tensors, fp16 for small ones."""

    def __init__(self, layout: Partition, codec: GradientCodec):
        self.layout, self.codec = layout, codec
        scales = layout.boundary // codec.block * codec.scale_bytes
        self.nbytes = scales + layout.boundary + 2 * (layout.size - layout.boundary)
        self._memory = memory = shared_bytes(self.nbytes)
        self._scales, self._codes = memory[:scales], memory[scales : scales + layout.boundary]
        self._small = memory[scales + layout.boundary :]

    def dump(self) -> bytes:
        """A copy of all of it."""
        return bytes(self._memory)

    def load(self, dumped: bytes) -> None:
        """Become what was dumped from a buffer of the same layout and codec."""
        self._memory[:] = dumped

    def write(self, start: int, stop: int, encoded: bytes) -> None:
        """Keep the checked bytes of elements `start` to `stop`. `start` begins a block where tensors are large."""
        if stop <= self.layout.boundary:
            scales, codes = self.codec.take_apart(encoded, stop - start)
            first = start // self.codec.block * self.codec.scale_bytes
            self._scales[first : first + len(scales)] = scales
            self._codes[start:stop] = codes
        else:
            self._small[2 * (start - self.layout.boundary) : 2 * (stop - self.layout.boundary)] = encoded

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of elements `start` to `stop`, as they travel; the same as written where that was one piece."""
        if stop <= self.layout.boundary:
            size = self.codec.scale_bytes
            first, last = start // self.codec.block * size, -(-stop // self.codec.block) * size
            return self.codec.put_together(self._scales[first:last], self._codes[start:stop])
        return bytes(self._small[2 * (start - self.layout.boundary) : 2 * (stop - self.layout.boundary)])

    def encode(self, name: str, values: torch.Tensor, divisor: float = 1.0) -> None:
        """Write one tensor, divided by `divisor`; fp32 on any device. Raises ValueError where it is not finite."""
        flat = values.detach().reshape(-1)
        for start, stop in self._pieces(name):
            first = start - self.layout.start(name)
            piece = flat[first : first + stop - start].to("cpu", torch.float32, copy=True)
            encoded = self.codec.encode_part(piece.div_(divisor), stop <= self.layout.boundary)
            self.write(start, stop, encoded.buffer)

    def decode(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (elements,), contiguous fp32 on the CPU, with one tensor."""
        for start, stop in self._pieces(name):
            first = start - self.layout.start(name)
            piece = out[first : first + stop - start]
            self.codec.decode_into(self.read(start, stop), stop <= self.layout.boundary, piece)

    def _pieces(self, name: str) -> Iterator[tuple[int, int]]:
        start, stop = self.layout.start(name), self.layout.start(name) + self.layout.shapes[name].numel()
        for first in range(start, stop, PIECE):
            yield first, min(stop, first + PIECE)


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
