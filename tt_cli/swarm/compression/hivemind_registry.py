"""hivemind's registry of codecs, with linear8 in it.

hivemind looks the codec of a message up by the *name* of its number. The enumeration is compiled into hivemind and
cannot be extended, but proto3 carries numbers that it has no name for: a name and an entry under it are all it takes.
"""

from __future__ import annotations

import math

import torch
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper  # type: ignore[import-untyped]
from hivemind.compression import CompressionBase, CompressionInfo, serialization
from hivemind.proto import runtime_pb2

from tt_cli.swarm.compression.linear8 import decode, encode

NAME, TAG = "LINEAR_8BIT", 64  # far from hivemind's own numbers, which count up from 0


class Linear8(CompressionBase):
    """linear8 as hivemind calls its codecs, once it was told of it."""

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


class _Tags(EnumTypeWrapper):
    """hivemind's compression types, and ours."""

    def Name(self, number: int) -> str:
        return NAME if number == TAG else super().Name(number)

    def Value(self, name: str) -> int:
        return TAG if name == NAME else super().Value(name)

    def keys(self) -> list[str]:
        return [*super().keys(), NAME]

    def values(self) -> list[int]:
        return [*super().values(), TAG]

    def items(self) -> list[tuple[str, int]]:
        return [*super().items(), (NAME, TAG)]


def register() -> None:
    """Let hivemind encode and decode linear8 too, here and in forked processes. Its own codecs stay as they are."""
    if not isinstance(runtime_pb2.CompressionType, _Tags):
        runtime_pb2.CompressionType = _Tags(runtime_pb2.CompressionType.DESCRIPTOR)
    serialization._BASE_COMPRESSION_TYPES.setdefault(NAME, Linear8())
