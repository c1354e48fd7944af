"""How gradients travel, and what is refused before it is decoded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hivemind.compression import CompressionInfo, NoCompression, deserialize_torch_tensor
from hivemind.proto import runtime_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.settings import normal
from torch import Tensor

from tt_cli.errors import TTError
from tt_cli.run import load_run
from tt_cli.swarm.compression.codec import GradientCodec, Linear8, MalformedPart, codec_of, self_test

LARGE, SMALL = 2**16, 5000


@pytest.fixture(scope="module", params=["linear8", "blockwise8"])
def codec(request: pytest.FixtureRequest) -> GradientCodec:
    return codec_of(load_run("emoji").replaced({"swarm.compression": request.param}))


@pytest.fixture(scope="module")
def stock() -> GradientCodec:
    return codec_of(load_run("emoji").replaced({"swarm.compression": "blockwise8"}))


def encode(codec: GradientCodec, tensor: Tensor) -> runtime_pb2.Tensor:
    """As a sender sends a part: of a large tensor from LARGE elements on."""
    elements = tensor.numel()
    return codec.message(codec.of(elements >= LARGE).encode(tensor), elements, elements >= LARGE)


def decode(codec: GradientCodec, message: runtime_pb2.Tensor, elements: int) -> Tensor:
    """As a reducer reads a part: of a large tensor from LARGE elements on."""
    encoded = codec.read_part(message, elements, elements >= LARGE)
    codec.check_part(encoded, elements, elements >= LARGE)
    tensor = torch.empty(elements)
    codec.of(elements >= LARGE).decode_into(encoded, tensor)
    return tensor


@pytest.fixture(scope="module")
def large(stock: GradientCodec) -> runtime_pb2.Tensor:
    return encode(stock, normal(1, LARGE))


@pytest.fixture(scope="module")
def small(stock: GradientCodec) -> runtime_pb2.Tensor:
    return encode(stock, normal(2, SMALL))


def changed(message: runtime_pb2.Tensor, **fields: object) -> runtime_pb2.Tensor:
    again = runtime_pb2.Tensor()
    again.CopyFrom(message)
    size = fields.pop("size", None)
    if size is not None:
        del again.size[:]
        again.size.extend(size)  # type: ignore[arg-type]
    for name, value in fields.items():
        setattr(again, name, value)
    return again


def test_the_installed_packages_pass_the_self_test(codec: GradientCodec) -> None:
    self_test(codec)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda tensor: tensor * 1.1, "loses 10.0%"),
        (lambda tensor: tensor * float("nan"), "loses nan"),
        (lambda tensor: tensor.reshape(2, -1, 3), "does not work here"),
    ],
)
def test_the_self_test_finds_a_codec_that_is_off(
    broken: Callable[[Tensor], Tensor], words: str, codec: GradientCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode_into = codec.large.decode_into

    def decode_off(buffer: bytes, out: Tensor) -> None:
        decode_into(buffer, out)
        out.copy_(broken(out))

    monkeypatch.setattr(codec.large, "decode_into", decode_off)
    with pytest.raises(TTError, match=words) as caught:
        self_test(codec)
    assert "\n" not in str(caught.value) and "reinstall" in str(caught.value)


@pytest.mark.parametrize("elements", [1, 255, 4096, 65535, 65536, 65537, 100_000])
def test_a_part_arrives_nearly_as_it_was(elements: int, codec: GradientCodec) -> None:
    tensor = normal(3, elements, scale=1e-3)
    message = encode(codec, tensor)
    again = decode(codec, message, elements)
    assert again.dtype == torch.float32 and not again.requires_grad
    large = elements >= 65536
    assert float((again - tensor).norm() / tensor.norm()) < (0.02 if large else 1e-3)
    assert len(message.buffer) < elements * (1.05 if large else 2) + 1


def test_a_run_takes_linear8_unless_its_file_says_otherwise() -> None:
    run, tensor = load_run("emoji"), normal(1, LARGE)
    assert encode(codec_of(run), tensor).compression == Linear8.tag
    stock = run.replaced({"swarm.compression": "blockwise8"})
    assert encode(codec_of(stock), tensor).compression == runtime_pb2.BLOCKWISE_8BIT
    assert encode(codec_of(stock), tensor[:5000]).compression == runtime_pb2.FLOAT16
    assert run.identity != stock.identity  # peers with unlike codecs never meet


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("elements", "place"), [(2**16, 0), (2**16 + 3, -1), (5000, 2500), (1, 0)])
def test_what_is_not_finite_is_never_encoded(value: float, elements: int, place: int, codec: GradientCodec) -> None:
    tensor = normal(1, elements)
    tensor[place] = value
    with pytest.raises(ValueError, match="not finite"):
        encode(codec, tensor)


def test_parts_add_up_as_products_and_sums_that_are_rounded_one_by_one(codec: GradientCodec) -> None:
    for large, elements in ((True, 5000), (False, 700)):
        tensor, total = normal(4, elements), normal(5, elements)
        encoded = codec.of(large).encode(tensor)
        decoded = torch.empty(elements)
        codec.of(large).decode_into(encoded, decoded)
        expected = total + decoded * 7.0
        codec.of(large).add_decoded(encoded, total, 7.0)
        assert torch.equal(total, expected)


def test_large_and_small_parts_are_not_taken_for_each_other(codec: GradientCodec) -> None:
    for large in (True, False):
        message = codec.message(codec.of(large).encode(normal(1, 512)), 512, large)
        with pytest.raises(MalformedPart, match="does not use here"):
            codec.read_part(message, 512, not large)


@pytest.mark.parametrize(
    "fields",
    [
        {"size": [4999]},
        {"size": [5000, 1]},
        {"size": []},
        {"size": [2**31 - 1]},
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
        {"dtype": "__class__"},
        {"dtype": ""},
        {"compression": runtime_pb2.NONE},
        {"compression": runtime_pb2.UNIFORM_8BIT},
        {"compression": runtime_pb2.QUANTILE_8BIT},
        {"compression": runtime_pb2.MEANSTD_16BIT},
        {"compression": 77},
        {"buffer": b""},
        {"buffer": bytes(9999)},
        {"buffer": bytes(10001)},
        {"buffer": bytes(10**7)},
        {"buffer": b"\x00\x7c" * 5000},  # infinity
        {"buffer": b"\x00\x00" * 4999 + b"\x00\x7e"},  # one NaN
    ],
    ids=lambda fields: str(fields)[:24],
)
def test_a_16_bit_part_that_is_not_as_it_should_be(
    fields: dict[str, object], small: runtime_pb2.Tensor, stock: GradientCodec
) -> None:
    with pytest.raises(MalformedPart):
        decode(stock, changed(small, **fields), SMALL)


def int64(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


@pytest.mark.parametrize(
    ("blocks", "values"), [(0, 256), (16, 0), (-1, 256), (16, -1), (15, 260), (17, 252), (2**62, 256), (0, 0)]
)
def test_an_8_bit_part_cannot_make_the_decoder_read_beyond_it(
    blocks: int, values: int, large: runtime_pb2.Tensor, stock: GradientCodec
) -> None:
    """The native decoder checks no bounds: with fewer scales or values than it reads, it would read our memory."""
    head = int64(blocks) + int64(values)
    rests = (large.buffer[16:],)
    for rest in rests:
        with pytest.raises(MalformedPart, match="count of scales"):
            decode(stock, changed(large, buffer=head + rest), LARGE)


@pytest.mark.parametrize("length", [0, 8, 15, 16, 17, 1000, 2**16, -1])
def test_a_torn_8_bit_part(length: int, large: runtime_pb2.Tensor, stock: GradientCodec) -> None:
    with pytest.raises(MalformedPart):
        decode(stock, changed(large, buffer=large.buffer[:length]), LARGE)


def test_scales_that_are_not_finite(large: runtime_pb2.Tensor, stock: GradientCodec) -> None:
    for scale in (float("nan"), float("inf")):
        poisoned = large.buffer[:16] + torch.tensor([scale]).numpy().tobytes() + large.buffer[20:]
        with pytest.raises(MalformedPart, match="finite"):
            decode(stock, changed(large, buffer=poisoned), LARGE)


def test_hivemind_refuses_linear8() -> None:
    """A peer of another kind does not misread the part: hivemind has no codec for the number."""
    with pytest.raises(ValueError, match="no name defined for value 64"):
        deserialize_torch_tensor(encode(codec_of(load_run("emoji")), normal(1, LARGE)))


def test_a_plain_tensor_is_not_what_the_run_sends(stock: GradientCodec) -> None:
    tensor = normal(1, 8)
    plain = NoCompression().compress(tensor, CompressionInfo.from_tensor(tensor, key=0))
    with pytest.raises(MalformedPart, match="codec 0"):
        decode(stock, plain, 8)


messages = st.builds(
    runtime_pb2.Tensor,
    buffer=st.one_of(st.binary(max_size=64), st.binary(min_size=16, max_size=16)),
    size=st.lists(st.integers(0, 2**31 - 1), max_size=3) | st.just([8]),
    dtype=st.sampled_from(["float32", "float32", "float16", "uint8", "int64", "object", "x"]),
    compression=st.integers(0, 7),
    requires_grad=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(message=messages)
def test_random_messages_raise_nothing_else(message: runtime_pb2.Tensor, codec: GradientCodec) -> None:
    for large in (True, False):
        try:
            encoded = codec.read_part(message, 8, large)
        except MalformedPart:
            continue
        tensor = torch.empty(8)
        codec.of(large).decode_into(encoded, tensor)
        assert bool(torch.isfinite(tensor).all())


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_damaged_parts_raise_nothing_else(
    data: st.DataObject, large: runtime_pb2.Tensor, small: runtime_pb2.Tensor, stock: GradientCodec
) -> None:
    message, elements = data.draw(st.sampled_from([(large, LARGE), (small, SMALL)]))
    start = data.draw(st.integers(0, 1200) | st.integers(0, len(message.buffer)))
    damage = data.draw(st.binary(min_size=1, max_size=12))
    buffer = message.buffer[:start] + damage + message.buffer[start + len(damage) :]
    try:
        tensor = decode(stock, changed(message, buffer=buffer), elements)
    except MalformedPart:
        return
    assert bool(torch.isfinite(tensor).all())
