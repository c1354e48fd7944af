"""How gradients travel: large tensors in 8 bits, small ones in fp16.

As in the paper (section 3.1, "communication"), tensors of 2^16 elements and more go in 8 bits and the rest in 16. The
8 bits are our `linear8`, or the paper's `blockwise8` (one scale per block of 4096; Dettmers et al., 2022).
"""

from __future__ import annotations

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
from tt_cli.swarm import registry
from tt_cli.swarm.linear8 import encoded_bytes

SELF_TEST_ERROR = 0.05
BLOCK, CODEBOOK = 4096, 256  # of blockwise8: elements that share one scale; values that 8 bits tell apart


class MalformedPart(ValueError):
    """A part of a tensor that another peer sent is not what it should be."""


class GradientCodec(SizeAdaptiveCompression):
    """hivemind's choice by size; refuses what is not finite, which blockwise8 would turn into a finite lie."""

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        """As hivemind's. Raises ValueError for values that are not finite."""
        codec = self.choose_compression(info)
        if not isinstance(codec, registry.Linear8) and not is_finite(tensor):  # linear8 looks for itself
            raise ValueError("values that are not finite")
        return codec.compress(tensor, info, allow_inplace)


def codec_of(run: RunConfig) -> CompressionBase:
    """The run's codec: its 8 bits for tensors of `large_tensor` elements and more, fp16 below.

    hivemind knows the codec in this process and those forked from it afterwards.
    """
    registry.register()
    large = {"linear8": registry.Linear8, "blockwise8": BlockwiseQuantization}[run.swarm.compression]
    return GradientCodec(run.swarm.large_tensor, less=Float16Compression(), greater_equal=large())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements of a CPU tensor are finite; numpy takes a twentieth of the time of torch here."""
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


def decode_part(message: runtime_pb2.Tensor, shape: torch.Size) -> torch.Tensor:
    """One received part as a finite fp32 tensor of `shape`. Raises MalformedPart for anything else.

    Only the forms that `codec_of` sends are taken, and their sizes are checked before a byte is decoded:
    the 8-bit decoder is native code that would read as far beyond the received bytes as the message says.
    """
    if tuple(message.size) != tuple(shape):
        raise MalformedPart(f"a part of shape {tuple(message.size)} instead of {tuple(shape)}")
    if message.dtype != "float32":
        raise MalformedPart(f"a part of type {message.dtype[:20]!r} instead of float32")
    _check_layout(message, shape.numel())
    try:
        tensor = deserialize_torch_tensor(message)
    except Exception as error:  # numpy, torch and bitsandbytes raise many types for broken bytes
        raise MalformedPart(f"a part that cannot be decoded ({error})") from error
    if tensor.shape != shape or tensor.dtype != torch.float32:
        raise MalformedPart(f"a part that decodes to {tensor.dtype} {tuple(tensor.shape)}")
    if message.compression != registry.TAG and not is_finite(tensor):  # linear8 decodes to nothing else
        raise MalformedPart("values that are not finite")
    return tensor.detach()


def _check_layout(message: runtime_pb2.Tensor, elements: int) -> None:
    """Raise MalformedPart unless the buffer is as long as `elements` need, and as its own head says.

    blockwise8: int64 count of scales, int64 count of values, the scales (fp32), the values (fp32), one byte each.
    """
    buffer, blocks = message.buffer, -(-elements // BLOCK)
    if message.compression == registry.TAG:
        expected = encoded_bytes(elements)
    elif message.compression == runtime_pb2.FLOAT16:
        expected = 2 * elements
    elif message.compression == runtime_pb2.BLOCKWISE_8BIT:
        expected = 16 + 4 * (blocks + CODEBOOK) + elements
        if buffer[:16] != blocks.to_bytes(8, "little") + CODEBOOK.to_bytes(8, "little"):
            raise MalformedPart("a part with another count of scales or values than its size needs")
    else:
        raise MalformedPart(f"a part in codec {message.compression}, which this run does not use")
    if len(buffer) != expected:
        raise MalformedPart(f"a part of {len(buffer)} bytes for {elements} elements")
