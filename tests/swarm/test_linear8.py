"""linear8: what it loses, and what it refuses, with compiled kernels and without."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionInfo,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tt_cli.kernel_choice import Implementation
from tt_cli.swarm.compression import linear8
from tt_cli.swarm.compression.linear8 import (
    BLOCK,
    LARGEST,
    SMALLEST,
    PortableLinear8,
    add_decoded,
    check,
    decode_into,
    encode,
)
from tt_cli.swarm.compression.linear8_numba import NumbaLinear8

pytestmark = pytest.mark.slow

LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7, 2**19, 2**19 + 1, 2**20 + 300]


@pytest.fixture(params=["portable", "compiled"], autouse=True, scope="module")
def each_implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests with both."""
    kernels = NumbaLinear8() if request.param == "compiled" else PortableLinear8()
    chosen = Implementation(kernels, request.param, "a test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear8, "implementation", lambda: chosen)
        yield


def drawn(kind: str, elements: int, seed: int = 0) -> Tensor:
    """Elements as gradients have them: normal, of rows whose scales span four decades, or with heavy tails."""
    random = np.random.default_rng(seed)
    if kind == "t3":
        values = random.standard_t(3, elements)
    else:
        values = random.standard_normal(elements)
    if kind == "rows":
        values *= np.repeat(10.0 ** random.uniform(-4, 0, -(-elements // 1024)), 1024)[:elements]
    return torch.from_numpy((values * 1e-3).astype(np.float32))


def decode(buffer: bytes, elements: int) -> Tensor:
    tensor = torch.empty(elements)
    decode_into(buffer, tensor)
    return tensor


def lost(tensor: Tensor, again: Tensor) -> float:
    return float((again - tensor).norm() / tensor.norm())


def plainly(tensor: Tensor) -> bytes:
    """The form in docs/protocol.md, block by block and in float64 wherever rounding is not part of it."""
    scales, coded = [], []
    for start in range(0, tensor.numel(), BLOCK):
        block = tensor.numpy()[start : start + BLOCK]
        largest = max(np.abs(block).max(), SMALLEST)
        bits = int((largest / np.float32(127)).view(np.uint32))
        upper = -(-bits // 2**16)
        scale = np.array([upper << 16], np.uint32).view(np.float32)[0]
        factor = np.float32(1) / scale
        scales.append(upper.to_bytes(2, "little"))
        coded += [round(float(value * factor)) for value in block]
    return b"".join(scales) + np.array(coded, np.int8).tobytes()


# --- what it loses ---


@pytest.mark.parametrize(("kind", "bound"), [("normal", 0.01), ("rows", 0.01), ("t3", 0.02)])
def test_what_it_loses_is_bounded_and_less_than_hiveminds_own(kind: str, bound: float) -> None:
    tensor = drawn(kind, 2**19)
    error = lost(tensor, decode(encode(tensor), tensor.numel()))
    assert error < bound
    for other in (BlockwiseQuantization(), Uniform8BitQuantization()):
        message = other.compress(tensor, CompressionInfo.from_tensor(tensor, key=0))
        assert error < lost(tensor, deserialize_torch_tensor(message))


@settings(max_examples=60)
@given(values=st.lists(st.floats(-float(LARGEST), float(LARGEST), width=32), max_size=40), repeats=st.integers(1, 20))
@example(values=[float(LARGEST), -float(LARGEST)], repeats=200)
@example(values=[float(SMALLEST), 0.0, 1e-45], repeats=100)
@example(values=[1e-45, -1e-45], repeats=200)
@example(values=[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], repeats=50)
def test_its_bytes_are_those_of_the_written_form(values: list[float], repeats: int) -> None:
    tensor = torch.tensor(values * repeats, dtype=torch.float32)
    buffer = encode(tensor)
    assert buffer == plainly(tensor)
    again = decode(buffer, tensor.numel())
    assert bool(torch.isfinite(again).all())
    for block, decoded in zip(tensor.split(BLOCK), again.split(BLOCK), strict=True):
        largest = max(float(block.abs().max()), float(SMALLEST)) if block.numel() else 0.0
        assert float((decoded.double() - block.double()).abs().max() if block.numel() else 0) <= largest / 127 * 0.51


def test_views_are_encoded_as_what_they_show() -> None:
    tensor = drawn("rows", 6000).reshape(60, 100)
    for view in (tensor, tensor.t(), tensor[3]):
        assert encode(view) == encode(view.contiguous().view(-1))


# --- without a tensor in between ---


@pytest.mark.parametrize("elements", LENGTHS)
def test_a_reducer_needs_no_tensor_in_between(elements: int) -> None:
    """Into memory that is at hand, and into a weighted sum: each element by three fp32 operations."""
    first, second = (drawn("rows", elements, seed) for seed in (1, 2))
    received = memoryview(encode(first))
    again = torch.full((elements, 1), float("nan"))
    check(received, elements)
    decode_into(received, again)
    assert torch.equal(again.view(-1), decode(encode(first), elements))
    total = torch.zeros(elements, 1)
    expected = np.zeros(elements, np.float32)
    for tensor, weight in ((first, 3.0), (second, 0.1), (second, 0.0)):
        add_decoded(encode(tensor), total, weight)
        expected += decode(encode(tensor), elements).numpy() * np.float32(weight)
    assert total.view(-1).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e39])
def test_what_is_refused_changes_no_sum(weight: float) -> None:
    buffer = encode(drawn("normal", 1030))
    total = torch.ones(1030)
    with pytest.raises(ValueError, match="a weight of"):
        add_decoded(buffer, total, weight)
    for wrong in (buffer[:-1], buffer + b"0", b"\xff\xff" + buffer[2:]):
        with pytest.raises(ValueError, match="bytes instead of|scales"):
            add_decoded(wrong, total, 1.0)
        with pytest.raises(ValueError, match="bytes instead of|scales"):
            decode_into(wrong, total)
    assert torch.equal(total, torch.ones(1030))


def test_memory_of_another_kind_is_refused() -> None:
    tensor = drawn("normal", 600)
    buffer = encode(tensor)
    for out in (torch.zeros(1200)[::2], torch.zeros(600, dtype=torch.float64), torch.zeros(600, device="meta")):
        with pytest.raises(ValueError, match="instead of"):
            decode_into(buffer, out)
        with pytest.raises(ValueError, match="instead of"):
            add_decoded(buffer, out, 1.0)


def test_the_bytes_of_a_known_tensor() -> None:
    """A run's peers may have unlike versions of tt: another form of these bytes needs another name in the run file."""
    tensor = torch.from_numpy(np.sin(np.arange(1000, dtype=np.float64) ** 2).astype(np.float32).round(3))
    assert hashlib.sha256(encode(tensor)).hexdigest()[:16] == "7cf4e4da0ef0ce92"


# --- what it refuses ---


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -3e38])
@pytest.mark.parametrize("place", [0, 255, 256, 1023, 1024, 1029])
def test_what_is_not_finite_is_refused(value: float, place: int) -> None:
    tensor = drawn("normal", 1030)
    tensor[place] = value
    with pytest.raises(ValueError, match="not finite"):
        encode(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="instead of float32"):
        encode(torch.zeros(8, dtype=dtype))


@pytest.mark.parametrize("upper", [0x7F80, 0x7FC0, 0xFF80, 0x8000, 0xBF80, 0x7F7F, 0x0000, 0x0080])
@pytest.mark.parametrize("block", [0, 4])
def test_scales_that_no_encoder_writes(upper: int, block: int) -> None:
    """Infinity, NaN, their negatives, -0, -1, one that overflows, zero, and one that some CPUs flush to it."""
    buffer = encode(drawn("normal", 1030))
    buffer = buffer[: 2 * block] + upper.to_bytes(2, "little") + buffer[2 * block + 2 :]
    with pytest.raises(ValueError, match="scales"):
        decode(buffer, 1030)
    with pytest.raises(ValueError, match="scales"):
        check(buffer, 1030)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), elements=st.integers(0, 600))
def test_bytes_of_any_kind_are_decoded_whole_or_refused(data: st.DataObject, elements: int) -> None:
    right = elements + 2 * -(-elements // BLOCK)
    length = data.draw(st.just(right) | st.integers(0, 700))
    buffer = data.draw(st.binary(min_size=length, max_size=length))
    try:
        tensor = decode(buffer, elements)
    except ValueError as error:
        assert length != right or "scales" in str(error)
    else:
        assert length == right and tensor.shape == (elements,) and bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("elements", [2**32 - 1, 2**256, 1029, 1031])
def test_a_size_that_the_bytes_do_not_bear_out_is_refused(elements: int) -> None:
    with pytest.raises(ValueError, match="bytes instead of"):
        check(encode(drawn("normal", 1030)), elements)
