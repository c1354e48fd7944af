"""The codec of gradients: large tensors in 8 bits, small ones in fp16.

As in the paper (section 3.1, "communication"), tensors of 2^16 elements and more go in 8 bits and the rest in 16. The
8 bits are our `linear8`, or the paper's `blockwise8` (one scale per block of 4096; Dettmers et al., 2022).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    SizeAdaptiveCompression,
    deserialize_torch_tensor,
)
from hivemind.proto import runtime_pb2

from tt_cli.errors import TTError
from tt_cli.run import RunConfig
from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.compression import linear8, linear8_kernels
from tt_cli.swarm.compression.linear8 import add_decoded, decode, decode_into, encode, encoded_bytes

SELF_TEST_ERROR = 0.05
NAME, TAG = "LINEAR_8BIT", 64  # of linear8: far from hivemind's own numbers, which count up from 0
# of blockwise8: elements that share one scale; values that 8 bits tell apart; bytes before the scales
BLOCK, CODEBOOK, HEAD = 4096, 256, 16


class MalformedPart(ValueError):
    """A part of a tensor that another peer sent is not what it should be."""


class Linear8(CompressionBase):
    """linear8 as one of hivemind's codecs, once it was told of it: see `hivemind_patches.add_codec`."""

    compression_type = TAG

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """A message of the same shape. Raises ValueError for what is not fp32, not on the CPU, or not finite."""
        return runtime_pb2.Tensor(
            compression=TAG,
            buffer=encode(tensor),
            size=tensor.shape,
            dtype="float32",
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """The tensor, finite. Raises ValueError for a malformed message, before memory is allocated."""
        if serialized_tensor.compression != TAG or serialized_tensor.dtype != "float32":
            raise ValueError(f"codec {serialized_tensor.compression} of {serialized_tensor.dtype[:20]!r}")
        shape = tuple(serialized_tensor.size)
        return decode(serialized_tensor.buffer, math.prod(shape)).view(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes of a coded element over those of a plain one, without scales: hivemind's parts stay whole blocks."""
        return 1 / info.descriptor.dtype.itemsize


class GradientCodec(SizeAdaptiveCompression):
    """hivemind's choice by size; refuses what is not finite, which blockwise8 would turn into a finite lie.

    As hivemind's codecs it codes whole tensors. For rounds it codes parts of large and of small tensors: `large` says
    which, and it takes no other form for either.
    """

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """Encode a tensor as hivemind does. Raises ValueError for values that are not finite."""
        codec = self.choose_compression(info)
        if not isinstance(codec, Linear8) and not is_finite(tensor):  # linear8 looks for itself
            raise ValueError("values that are not finite")
        return codec.compress(tensor, info, allow_inplace)

    def encode_part(self, tensor: torch.Tensor, large: bool) -> runtime_pb2.Tensor:
        """A message with `tensor` (elements,). Raises ValueError for values that are not finite."""
        codec = self._of(large)
        if not isinstance(codec, Linear8) and not is_finite(tensor):
            raise ValueError("values that are not finite")
        return codec.compress(tensor, CompressionInfo.from_tensor(tensor))

    def message(self, encoded: bytes, elements: int, large: bool) -> runtime_pb2.Tensor:
        """The message that `encode_part` returns, from its bytes."""
        tag = self._of(large).compression_type
        return runtime_pb2.Tensor(buffer=encoded, size=[elements], dtype="float32", compression=tag)

    @property
    def block(self) -> int:
        """Elements of a large tensor that share a scale."""
        return linear8_kernels.BLOCK if self._of(True).compression_type == TAG else BLOCK

    @property
    def scale_bytes(self) -> int:
        """Size of each scale."""
        return 2 if self._of(True).compression_type == TAG else 4

    def take_apart(self, encoded: bytes, elements: int) -> tuple[memoryview, memoryview]:
        """Scales and codes of an encoded part of large tensors."""
        view, scales = memoryview(encoded), -(-elements // self.block) * self.scale_bytes
        begin = 0 if self.scale_bytes == 2 else HEAD
        return view[begin : begin + scales], view[len(view) - elements :]

    def put_together(self, scales: memoryview, codes: memoryview) -> bytes:
        """The encoded part that has these scales and codes."""
        if self.scale_bytes == 2:
            return b"".join((scales, codes))
        return b"".join((_head(len(scales) // 4), scales, codebook(), codes))

    def most_norm(self, encoded: bytes, elements: int, large: bool) -> float:
        """A bound of a checked part's norm: that of its blocks' largest magnitudes. A few times the norm."""
        if not large:
            return float(np.linalg.norm(np.frombuffer(encoded, "<f2").astype(np.float64)))
        scales, _ = self.take_apart(encoded, elements)
        if self.scale_bytes == 2:
            largest = 127.0 * (np.frombuffer(scales, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            largest = np.abs(np.frombuffer(scales, "<f4"))
        return float(np.linalg.norm(largest.astype(np.float64)) * self.block**0.5)

    def cut(self, encoded: bytes, elements: int, large: bool, start: int, stop: int) -> bytes:
        """Elements `start` to `stop` of an encoded part of so many; `start` begins a block where tensors are large."""
        if not large:
            return encoded[2 * start : 2 * stop]
        scales, codes = self.take_apart(encoded, elements)
        first, last = start // self.block * self.scale_bytes, -(-stop // self.block) * self.scale_bytes
        return self.put_together(scales[first:last], codes[start:stop])

    def read_part(self, message: runtime_pb2.Tensor, elements: int, large: bool) -> bytes:
        """The bytes of a part that another peer sent. What they decode to is finite.

        Raises MalformedPart for anything that `encode_part` cannot have made. Sizes are checked before a byte is
        decoded: blockwise8's decoder is native code that reads as far beyond the received bytes as they say.
        """
        if tuple(message.size) != (elements,):
            raise MalformedPart(f"a part of shape {tuple(message.size)[:4]} instead of {(elements,)}")
        if message.dtype != "float32":
            raise MalformedPart(f"a part of type {message.dtype[:20]!r} instead of float32")
        if message.compression != self._of(large).compression_type:
            raise MalformedPart(f"a part in codec {message.compression}, which this run does not use here")
        self.check_part(message.buffer, elements, large)
        return message.buffer

    def check_part(self, buffer: bytes, elements: int, large: bool) -> None:
        """Raise MalformedPart unless these bytes decode to so many finite numbers."""
        tag = self._of(large).compression_type
        if len(buffer) != _encoded_bytes(tag, elements):
            raise MalformedPart(f"a part of {len(buffer)} bytes for {elements} elements")
        if tag == TAG:
            try:
                linear8.check(buffer, elements)
            except ValueError as error:
                raise MalformedPart(str(error)) from error
        elif tag == runtime_pb2.FLOAT16:
            if bool((np.frombuffer(buffer, "<u2") & 0x7C00 == 0x7C00).any()):  # the exponent of NaN and infinity
                raise MalformedPart("values that are not finite")
        else:
            blocks = -(-elements // BLOCK)
            if buffer[:HEAD] != _head(blocks):
                raise MalformedPart("a part with another count of scales or values than its size needs")
            if buffer[HEAD + 4 * blocks : HEAD + 4 * blocks + len(codebook())] != codebook():
                raise MalformedPart("a part with values of its own")
            if not is_finite(self._extract(buffer, elements, large)):
                raise MalformedPart("values that are not finite")

    def decode_into(self, buffer: bytes, large: bool, out: torch.Tensor) -> None:
        """Fill `out` (elements,) fp32 from the bytes of a checked part."""
        if self._of(large).compression_type == TAG:
            decode_into(buffer, out)
        else:
            out.copy_(self._extract(buffer, out.numel(), large))

    def add(self, buffer: bytes, large: bool, accumulator: torch.Tensor, weight: float) -> None:
        """accumulator (elements,) fp32 += weight times a checked part; products and sums are rounded one by one."""
        if self._of(large).compression_type == TAG:
            add_decoded(buffer, accumulator, weight)
        else:
            accumulator.add_(self._extract(buffer, accumulator.numel(), large).mul_(weight))

    def _of(self, large: bool) -> CompressionBase:
        return self.greater_equal if large else self.less

    def _extract(self, buffer: bytes, elements: int, large: bool) -> torch.Tensor:
        try:
            return deserialize_torch_tensor(self.message(buffer, elements, large))
        except Exception as error:  # numpy, torch and bitsandbytes raise many types for broken bytes
            raise MalformedPart(f"a part that cannot be decoded ({error})") from error


def codec_of(run: RunConfig) -> GradientCodec:
    """The run's codec: its 8 bits for tensors of `large_tensor` elements and more, fp16 below.

    hivemind knows the codec in this process and those forked from it afterwards.
    """
    hivemind_patches.add_codec(NAME, Linear8())
    large = {"linear8": Linear8, "blockwise8": BlockwiseQuantization}[run.swarm.compression]
    return GradientCodec(run.swarm.large_tensor, less=Float16Compression(), greater_equal=large())


def is_finite(tensor: torch.Tensor) -> bool:
    """True if all elements of a CPU tensor are finite; numpy takes a twentieth of the time of torch here."""
    return bool(np.isfinite(tensor.detach().numpy()).all())


def self_test(codec: CompressionBase) -> None:
    """Send one tensor there and back. Raises TTError where the installed packages break the codec.

    With numpy 2.4 hivemind's 8-bit codecs raise inside the averager, where the round still looks like a success.
    """
    tensor = torch.linspace(-1.0, 1.0, 2**16, dtype=torch.float32).mul_(1e-3)
    info = CompressionInfo.from_tensor(tensor, key="self-test")
    try:
        again = deserialize_torch_tensor(codec.compress(tensor, info))
        error = float((again - tensor).norm() / tensor.norm())
    except Exception as problem:  # whatever the codec's dependencies raise, the peer must not start
        raise TTError(
            f"the gradient codec does not work here ({problem}): reinstall tt with its pinned versions"
        ) from problem
    if not error < SELF_TEST_ERROR:
        raise TTError(f"the gradient codec loses {error:.1%} here: reinstall tt with its pinned versions")


@functools.cache
def codebook() -> bytes:
    """The values that blockwise8's codes stand for, as they travel."""
    tensor = torch.zeros(1)
    encoded = BlockwiseQuantization().compress(tensor, CompressionInfo.from_tensor(tensor)).buffer
    return bytes(encoded[HEAD + 4 : HEAD + 4 + 4 * CODEBOOK])


def _head(blocks: int) -> bytes:
    return blocks.to_bytes(8, "little") + CODEBOOK.to_bytes(8, "little")


def _encoded_bytes(tag: int, elements: int) -> int:
    """blockwise8: int64 counts of scales and of values, the scales (fp32), the values (fp32), one byte each."""
    if tag == TAG:
        return encoded_bytes(elements)
    if tag == runtime_pb2.FLOAT16:
        return 2 * elements
    return HEAD + 4 * (-(-elements // BLOCK) + CODEBOOK) + elements
