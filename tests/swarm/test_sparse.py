"""Sparse messages and their averages: what they keep, that all machines write the same, and what is refused."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peer.states import small_run
from torch import Tensor

from tt_cli.swarm.compression import sparse, sparse_average
from tt_cli.swarm.compression.codec import Codec, GradientCodec, MalformedPart, codec_of, self_test
from tt_cli.swarm.compression.linear8 import LARGEST
from tt_cli.swarm.compression.sparse import CHUNK

KEPT = 64
CODEC = codec_of(small_run(optimizer={"name": "local", "sparse": KEPT}))
KINDS = pytest.mark.parametrize("codec", [CODEC, CODEC.averages], ids=["message", "average"])


def drawn(elements: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, elements).astype(np.float32)) * 1e-3


def decoded(codec: Codec, encoded: bytes, elements: int) -> Tensor:
    out = torch.full((elements,), 7.0)
    codec.decode_into(encoded, out)
    return out


def averaged(members: int, elements: int) -> Tensor:
    """The mean of the messages of so many."""
    total = torch.zeros(elements)
    for member in range(members):
        CODEC.large.add_decoded(CODEC.large.encode(drawn(elements, member)), total, 1.0)
    return total / members


def test_a_message_has_the_largest_of_each_chunk_in_114_bytes() -> None:
    values = drawn(3 * CHUNK)
    encoded = CODEC.large.encode(values)
    assert len(encoded) == 3 * 114
    found = decoded(CODEC.large, encoded, 3 * CHUNK)
    for chunk, own in zip(found.view(3, -1), values.view(3, -1), strict=True):
        largest = own.abs().topk(KEPT).indices
        assert sorted(largest.tolist()) == chunk.nonzero().view(-1).tolist()
        assert torch.equal(chunk[largest].sign(), own[largest].sign())
        assert len({*chunk.abs().tolist()}) == 3, "nothing, a scale and two of them"
        kept = own * (chunk != 0)
        best = float(chunk @ kept) / float(chunk @ chunk)
        assert best == pytest.approx(1.0, abs=0.005), "no other scale is nearer"


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    values = torch.ones(CHUNK) * torch.tensor([1.0, -1.0]).repeat(CHUNK // 2)
    values[5] = 3.0
    found = decoded(CODEC.large, CODEC.large.encode(values), CHUNK)
    assert found.nonzero().view(-1).tolist() == list(range(KEPT)) and found[5] == 2 * found[4] > 0


@KINDS
@pytest.mark.parametrize("elements", [100, CHUNK - 1, CHUNK + 1, 70 * CHUNK + 9])
def test_a_tensor_may_end_within_a_chunk(codec: GradientCodec, elements: int) -> None:
    values = drawn(elements)
    encoded = codec.large.encode(values)
    codec.check_part(encoded, -(-elements // CHUNK) * CHUNK, True)
    found = decoded(codec.large, encoded, elements)
    assert 0.0 < float((found - values).norm() / values.norm()) < 0.9
    total = torch.ones(elements)
    codec.large.add_decoded(encoded, total, 3.0)
    assert torch.equal(total, 1 + found * 3)
    assert codec.most_norm(encoded, elements, True) >= float(found.norm())


@KINDS
def test_zeros_stay_zeros_and_what_is_too_small_becomes_so(codec: GradientCodec) -> None:
    for values in (torch.zeros(CHUNK), torch.full((CHUNK,), -1e-40), torch.full((CHUNK,), 1e-31)):
        encoded = codec.large.encode(values)
        codec.check_part(encoded, CHUNK, True)
        assert not decoded(codec.large, encoded, CHUNK).any()


@KINDS
def test_what_is_not_finite_has_no_code(codec: GradientCodec) -> None:
    for value in (float("nan"), float("inf"), -float("inf"), 1e38):
        values = drawn(2 * CHUNK)
        values[-1] = value
        with pytest.raises(ValueError, match="not finite"):
            codec.large.encode(values)
    values[-1] = float(LARGEST)
    assert decoded(codec.large, codec.large.encode(values), 2 * CHUNK).isfinite().all()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_places_are_those_of_a_stable_sort(data: st.DataObject) -> None:
    kept, kind = data.draw(st.integers(1, 256)) * 4, data.draw(st.sampled_from(["t3", "unlike", "zeros", "equal"]))
    draws = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    values = draws.standard_t(3, (3, CHUNK)) * 10.0 ** data.draw(st.integers(-45, 36))
    if kind == "unlike":
        values *= np.exp(draws.normal(0, 5, values.shape))
    elif kind == "zeros":
        values *= draws.random(values.shape) < 0.01
    elif kind == "equal":
        values = draws.integers(-3, 4, values.shape) * np.abs(values[:, :1])
    chunks = values.clip(-3e37, 3e37).astype(np.float32)
    _, places, _ = sparse._read(sparse.encode(torch.from_numpy(chunks), kept), kept)
    largest = np.argsort(-np.abs(chunks), axis=1, kind="stable")[:, :kept]
    assert np.array_equal(places, np.sort(largest, axis=1))


@pytest.mark.parametrize(("members", "most"), [(1, 0.134), (2, 0.142), (4, 0.157), (32, 0.4), (300, 0.6256)])
def test_an_average_takes_what_its_members_sent_and_never_more_than_its_bound(members: int, most: float) -> None:
    mean = averaged(members, 4 * CHUNK)
    encoded = CODEC.averages.large.encode(mean)
    assert len(encoded) <= most * mean.numel() and most <= 0.63
    CODEC.averages.check_part(encoded, mean.numel(), True)
    found = decoded(CODEC.averages.large, encoded, mean.numel())
    assert float((found - mean).norm() / mean.norm()) < 0.2
    assert float(found @ mean) / float(mean @ mean) == pytest.approx(1.0, abs=0.06)
    assert CODEC.averages.most_norm(encoded, mean.numel(), True) >= float(found.norm())


def test_equal_values_give_these_bytes_on_every_machine() -> None:
    """The digests were written down on one CPU."""
    values = drawn(5 * CHUNK, 3)
    values[CHUNK : 2 * CHUNK] *= 1e-20
    values[2 * CHUNK : 3 * CHUNK] = values[0]
    values[3 * CHUNK] = 1.0
    digests = [hashlib.sha256(codec.large.encode(values)).hexdigest()[:16] for codec in (CODEC, CODEC.averages)]
    assert digests == ["62bb0586a059d302", "1584a40146ef4c8e"]


def test_the_self_test_looks_at_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    self_test(CODEC)
    looked_at = []
    for each in (CODEC.large, CODEC.averages.large):
        monkeypatch.setattr(each, "encode", lambda values, each=each: looked_at.append(each) or type(each).encode)
    with pytest.raises(Exception, match="does not work here"):
        self_test(CODEC)
    assert looked_at == [CODEC.large]


def message_with(places: list[int], scale: int = 0x3F80) -> bytes:
    """A message of one chunk that keeps eight, at these places."""
    packed = 0
    for position, place in enumerate(places):
        packed |= place << 12 * position
    return scale.to_bytes(2, "little") + packed.to_bytes(12, "little") + b"\x00\x00"


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (message_with([0, 1, 2, 3, 4, 5, 7, 6]), "places that do not rise"),
        (message_with([0, 1, 2, 3, 4, 5, 6, 6]), "places that do not rise"),
        (message_with([*range(8)], 0x7F80), "scales that are not finite"),
        (message_with([*range(8)], 0xBF80), "scales that are not finite"),
        (message_with([*range(8)], 0x0001), "scales that are not finite"),
        (message_with([*range(8)])[:-1], "a part of 15 bytes"),
        (message_with([*range(8)]) + b"\0", "a part of 17 bytes"),
        (b"", "a part of 0 bytes"),
    ],
)
def test_a_message_that_nobody_encodes_is_refused(encoded: bytes, words: str) -> None:
    codec = codec_of(small_run(optimizer={"name": "local", "sparse": 8}))
    codec.check_part(message_with([0, 5, 6, 7, 100, 4000, 4094, 4095]), CHUNK, True)
    with pytest.raises(MalformedPart, match=words):
        codec.check_part(encoded, CHUNK, True)


def average_with(scale: int, places: list[int], codes: bytes) -> bytes:
    there = np.zeros(CHUNK, bool)
    there[places] = True
    return scale.to_bytes(2, "little") + np.packbits(there, bitorder="little").tobytes() + codes


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (average_with(0x3F80, [3, 4, 5], b"\x12"), "bytes"),
        (average_with(0x3F80, [3, 4, 5], b"\x12\x03\x00"), "bytes"),
        (average_with(0x3F80, [3, 4, 5], b"\x12\x13"), "more values than bits say"),
        (average_with(0x3F80, [], b""), "a scale without values"),
        (average_with(0, [3], b"\x01"), "values without a scale"),
        (average_with(0x8000, [], b""), "values without a scale"),
        (average_with(0x7F80, [3], b"\x01"), "scales that are not finite"),
        (average_with(0x3F80, [*range(CHUNK)], b""), "bytes"),
        (b"\x3f\x80", "bytes"),
    ],
)
def test_an_average_that_nobody_encodes_is_refused(encoded: bytes, words: str) -> None:
    CODEC.averages.check_part(average_with(0x3F80, [3, 4, 4095], b"\x12\x03"), CHUNK, True)
    with pytest.raises(MalformedPart, match=words):
        CODEC.averages.check_part(encoded, CHUNK, True)


@KINDS
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_changed_bytes_are_refused_or_finite(codec: GradientCodec, data: st.DataObject) -> None:
    encoded = bytearray(codec.large.encode(drawn(2 * CHUNK)))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.check_part(bytes(encoded), 2 * CHUNK, True)
    except MalformedPart:
        return
    assert decoded(codec.large, bytes(encoded), 2 * CHUNK).isfinite().all()


def test_bits_and_places_are_the_documented_ones() -> None:
    """Codes 0 to 3 of a message: one scale, minus one, two, minus two."""
    encoded = bytearray(message_with([1, 2, 3, 4, 5, 6, 7, 4095]))
    encoded[-2:] = b"\xe4\x00"
    out = torch.empty(CHUNK)
    sparse.decode_into(bytes(encoded), out, 8)
    assert out[[1, 2, 3, 4, 5, 4095, 0]].tolist() == [1.0, -1.0, 2.0, -2.0, 1.0, 1.0, 0.0]
    sparse_average.decode_into(average_with(0x3F80, [3, 4, 4095], b"\x67\x0f"), out)
    assert out[[3, 4, 4095, 0]].tolist() == [1.0, float(sparse_average.FINE[6]), -1.0, 0.0]
