"""The codec of gradients: large tensors in 8 bits, or the largest elements alone; small ones in fp16.

As in the paper (section 3.1, "communication"), tensors of 2^16 elements and more go in 8 bits and the rest in 16. The
8 bits are our `linear8`, or the paper's `blockwise8` (one scale per block of 4096; Dettmers et al., 2022). Local steps
may send sparse messages (`sparse.py`), of which the averages have a form of their own.

A part is a head, a scale for each block of elements, a table of values, and codes of the elements. A class for each
codec says how many bytes these have; it encodes a tensor (elements,), fp32 on the CPU, with finite values or
ValueError, decodes checked parts, and adds them up with a weight, products and sums rounded one by one.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

import numpy as np
import torch
from hivemind.compression import BlockwiseQuantization, CompressionBase, CompressionInfo, Float16Compression
from hivemind.proto import runtime_pb2

from tt_cli.errors import TTError
from tt_cli.run import RunConfig
from tt_cli.swarm.compression import linear8, sparse, sparse_average


class MalformedPart(ValueError):
    """A part of a tensor that another peer sent is not what it should be."""


class Codec(ABC):
    """The form of a part. tag: its number in the messages that carry parts. block: elements that share a scale.

    scale_bytes: of a block. code_bytes: of an element. most_error: of the self-test's tensor, over its norm.
    """

    tag: int
    block: int
    scale_bytes: int
    code_bytes = 1
    table = b""
    most_error = 0.05

    def head(self, blocks: int) -> bytes:
        return b""

    @abstractmethod
    def encode(self, tensor: torch.Tensor) -> bytes:
        """The bytes of fp32 values on the CPU. Raises ValueError where they are not finite, or too large."""

    @abstractmethod
    def check(self, buffer: bytes, elements: int) -> object:
        """Raise ValueError unless these bytes, which have the right length, decode to so many finite numbers."""

    @abstractmethod
    def decode_into(self, buffer: bytes, out: torch.Tensor) -> None:
        """Fill `out` (elements,), contiguous fp32 on the CPU, from checked bytes."""

    @abstractmethod
    def largest(self, scales: memoryview, codes: memoryview, /) -> np.ndarray:
        """A bound of the root mean square of each block: its largest magnitude, or less."""

    def add_decoded(self, buffer: bytes, accumulator: torch.Tensor, weight: float) -> None:
        """accumulator += decoded * weight; each product and sum is rounded by itself."""
        self.decode_into(buffer, decoded := torch.empty_like(accumulator))
        accumulator.add_(decoded.mul_(weight))

    def room(self, elements: int) -> int:
        """Bytes that the codes of so many elements have, at most."""
        return elements * self.code_bytes

    def codes(self, scales: memoryview, elements: int) -> int:
        """Bytes of the codes in a part with these scales."""
        return self.room(elements)

    def spread_out(self, scales: memoryview, codes: memoryview, /) -> memoryview | bytes:
        """The codes as they rest: each block at its place, with the room that it has at most."""
        return codes

    def drawn_together(self, scales: memoryview, codes: memoryview, /) -> memoryview | bytes:
        """The codes as they travel, from how they rest."""
        return codes


class Float16(Codec):
    """hivemind's fp16: codes alone."""

    tag, block, scale_bytes, code_bytes = runtime_pb2.FLOAT16, 1, 0, 2
    stock: CompressionBase = Float16Compression()

    def encode(self, tensor: torch.Tensor) -> bytes:
        if not _is_finite(tensor):
            raise ValueError("values that are not finite")
        return bytes(self.stock.compress(tensor, CompressionInfo.from_tensor(tensor)).buffer)

    def check(self, buffer: bytes, elements: int) -> None:
        if bool((np.frombuffer(buffer, "<u2") & 0x7C00 == 0x7C00).any()):  # the exponent of NaN and infinity
            raise ValueError("values that are not finite")

    def decode(self, buffer: bytes, elements: int) -> torch.Tensor:
        message = runtime_pb2.Tensor(buffer=buffer, size=[elements], dtype="float32", compression=self.tag)
        try:
            return self.stock.extract(message)
        except Exception as error:  # numpy, torch and bitsandbytes raise many types for broken bytes
            raise ValueError(f"a part that cannot be decoded ({error})") from error

    def decode_into(self, buffer: bytes, out: torch.Tensor) -> None:
        out.copy_(self.decode(buffer, out.numel()))

    def largest(self, scales: memoryview, codes: memoryview) -> np.ndarray:
        return np.frombuffer(codes, "<f2")


class Blockwise8(Float16):
    """hivemind's 8 bits, with counts of scales and values, int64, before them."""

    tag, block, scale_bytes, code_bytes = runtime_pb2.BLOCKWISE_8BIT, 4096, 4, 1
    stock = BlockwiseQuantization()

    @functools.cached_property
    def table(self) -> bytes:  # type: ignore[override]
        """The values that codes stand for, fp32: those with which one zero is encoded."""
        return self.encode(torch.zeros(1))[16 + self.scale_bytes : -1]

    def head(self, blocks: int) -> bytes:
        return blocks.to_bytes(8, "little") + (256).to_bytes(8, "little")

    def check(self, buffer: bytes, elements: int) -> None:
        head = self.head(-(-elements // self.block))
        if not buffer.startswith(head):
            raise ValueError("a part with another count of scales or values than its size needs")
        if buffer[-elements - len(self.table) : -elements] != self.table:
            raise ValueError("a part with values of its own")
        if not _is_finite(self.decode(buffer, elements)):
            raise ValueError("values that are not finite")

    def largest(self, scales: memoryview, codes: memoryview) -> np.ndarray:
        return np.abs(np.frombuffer(scales, "<f4"))


class Linear8(Codec):
    """The 8 bits of `linear8.py`; its number is far from hivemind's own, which count up from 0."""

    tag, block, scale_bytes = 64, linear8.BLOCK, 2
    encode, check = staticmethod(linear8.encode), staticmethod(linear8.check)
    decode_into, add_decoded = staticmethod(linear8.decode_into), staticmethod(linear8.add_decoded)

    def largest(self, scales: memoryview, codes: memoryview) -> np.ndarray:
        return 127.0 * linear8.widened(np.frombuffer(scales, "<u2"))


class SparseMessage(Codec):
    """The largest `kept` of each chunk of elements, as `sparse.py` has them."""

    tag, block, scale_bytes, most_error = 65, sparse.CHUNK, 2, 1.0

    def __init__(self, kept: int):
        self.kept = kept

    def room(self, elements: int) -> int:
        return sparse.chunks_in(elements) * sparse.code_bytes(self.kept)

    def encode(self, tensor: torch.Tensor) -> bytes:
        return sparse.encode(tensor, self.kept)

    def check(self, buffer: bytes, elements: int) -> None:
        sparse.check(buffer, self.kept)

    def decode_into(self, buffer: bytes, out: torch.Tensor) -> None:
        sparse.decode_into(buffer, out, self.kept)

    def add_decoded(self, buffer: bytes, accumulator: torch.Tensor, weight: float) -> None:
        sparse.add_decoded(buffer, accumulator, self.kept, weight)

    def largest(self, scales: memoryview, codes: memoryview) -> np.ndarray:
        return 2.0 * linear8.widened(np.frombuffer(scales, "<u2"))


class SparseAverage(Codec):
    """The average of sparse messages, as `sparse_average.py` has it."""

    tag, block, scale_bytes, most_error = 66, sparse.CHUNK, sparse_average.HEAD_BYTES, 0.3
    encode, decode_into = staticmethod(sparse_average.encode), staticmethod(sparse_average.decode_into)
    check = staticmethod(sparse_average.check)
    spread_out = staticmethod(sparse_average.spread_out)
    drawn_together = staticmethod(sparse_average.drawn_together)
    largest = staticmethod(sparse_average.root_mean_squares)

    def room(self, elements: int) -> int:
        return sparse.chunks_in(elements) * sparse_average.MOST_CODES

    def codes(self, scales: memoryview, elements: int) -> int:
        return sparse_average.code_bytes(scales)


class GradientCodec:
    """The codecs of one run: `large` for parts of large tensors, fp16 for the others. block: that of `large`.

    averages: the codecs of averages, where these are others.
    """

    def __init__(self, large: Codec, averages: GradientCodec | None = None):
        self.large, self._small = large, Float16()
        self.block, self.averages = large.block, averages or self

    def of(self, large: bool) -> Codec:
        """The one that is for such tensors: a part comes in no other form."""
        return self.large if large else self._small

    def message(self, encoded: bytes, elements: int, large: bool) -> runtime_pb2.Tensor:
        return runtime_pb2.Tensor(buffer=encoded, size=[elements], dtype="float32", compression=self.of(large).tag)

    def take_apart(self, encoded: bytes, elements: int, large: bool) -> tuple[memoryview, memoryview]:
        """Scales and codes of a part."""
        codec, view, blocks = self.of(large), memoryview(encoded), -(-elements // self.of(large).block)
        begin = len(codec.head(blocks))
        end = begin + blocks * codec.scale_bytes
        return view[begin:end], view[end + len(codec.table) :]

    def put_together(self, scales: memoryview, codes: memoryview | bytes, large: bool) -> bytes:
        codec = self.of(large)
        return b"".join((codec.head(len(scales) // max(1, codec.scale_bytes)), scales, codec.table, codes))

    def most_norm(self, encoded: bytes, elements: int, large: bool) -> float:
        """A bound of a checked part's norm: that of its blocks' largest magnitudes. A few times the norm."""
        codec = self.of(large)
        largest = codec.largest(*self.take_apart(encoded, elements, large))
        return float(np.linalg.norm(largest.astype(np.float64)) * codec.block**0.5)

    def cut(self, encoded: bytes, elements: int, large: bool, start: int, stop: int) -> bytes:
        """Elements `start` to `stop` of an encoded part of so many; `start` begins a block where tensors are large."""
        codec, (scales, codes) = self.of(large), self.take_apart(encoded, elements, large)
        first, last = start // codec.block * codec.scale_bytes, -(-stop // codec.block) * codec.scale_bytes
        return self.put_together(scales[first:last], codes[codec.room(start) : codec.room(stop)], large)

    def read_part(self, message: runtime_pb2.Tensor, elements: int, large: bool) -> bytes:
        """The bytes of a part that another peer sent. What they decode to is finite.

        Raises MalformedPart for anything that `encode` cannot have made. Sizes are checked before a byte is
        decoded: blockwise8's decoder is native code that reads as far beyond the received bytes as they say.
        """
        if tuple(message.size) != (elements,):
            raise MalformedPart(f"a part of shape {tuple(message.size)[:4]} instead of {(elements,)}")
        if message.dtype != "float32":
            raise MalformedPart(f"a part of type {message.dtype[:20]!r} instead of float32")
        if message.compression != self.of(large).tag:
            raise MalformedPart(f"a part in codec {message.compression}, which this run does not use here")
        self.check_part(message.buffer, elements, large)
        return message.buffer

    def check_part(self, buffer: bytes, elements: int, large: bool) -> None:
        """Raise MalformedPart unless these bytes decode to so many finite numbers."""
        codec, blocks = self.of(large), -(-elements // self.of(large).block)
        before = len(codec.head(blocks)) + blocks * codec.scale_bytes + len(codec.table)
        scales, codes = self.take_apart(buffer, elements, large)
        if len(buffer) < before or len(codes) != codec.codes(scales, elements):
            raise MalformedPart(f"a part of {len(buffer)} bytes for {elements} elements")
        try:
            codec.check(buffer, elements)
        except ValueError as error:
            raise MalformedPart(str(error)) from error


def codec_of(run: RunConfig) -> GradientCodec:
    """The codec that all members of a run use."""
    if run.sparse:
        return GradientCodec(SparseMessage(run.sparse), GradientCodec(SparseAverage()))
    return GradientCodec(Linear8() if run.swarm.compression == "linear8" else Blockwise8())


def _is_finite(tensor: torch.Tensor) -> bool:
    """True if all elements of a CPU tensor are finite; numpy takes a twentieth of the time of torch here."""
    return bool(np.isfinite(tensor.detach().numpy()).all())


def self_test(codec: GradientCodec) -> None:
    """Encode and decode tensors. Raises TTError where the installed packages break the codec.

    With numpy 2.4 hivemind's 8-bit codecs raise inside the averager, where the round still looks like a success.
    """
    tensor = torch.linspace(-1.0, 1.0, 2**16, dtype=torch.float32).mul_(1e-3)
    decoded = torch.empty_like(tensor)
    for each in dict.fromkeys((codec.large, codec.averages.large, codec.of(False))):
        try:
            each.decode_into(each.encode(tensor), decoded)
            error = float((decoded - tensor).norm() / tensor.norm())
        except Exception as problem:  # whatever the codec's dependencies raise, the peer must not start
            raise TTError(
                f"the gradient codec does not work here ({problem}): reinstall tt with its pinned versions"
            ) from problem
        if not error < each.most_error:
            raise TTError(f"the gradient codec loses {error:.1%} here: reinstall tt with its pinned versions")
