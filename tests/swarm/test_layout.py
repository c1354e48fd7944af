"""The cut of the gradients: every element in exactly one part, whole blocks, equal shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.settings import normal

from tt_cli.run import load_run
from tt_cli.swarm.compression.accumulator import Accumulator
from tt_cli.swarm.compression.codec import GradientCodec, codec_of
from tt_cli.swarm.compression.gradient_buffer import (
    MAX_REDUCERS,
    PART_ELEMENTS,
    DecodedGradients,
    GradientBuffer,
    Partition,
)

LARGE, BLOCK = 1000, 256
LOSS = torch.tensor(2.5)
SIZES = st.lists(st.integers(1, 3 * PART_ELEMENTS), min_size=1, max_size=6)


def layout(sizes: list[int]) -> Partition:
    return Partition({f"t{index}": torch.Size([size]) for index, size in enumerate(sizes)}, LARGE, BLOCK)


@given(SIZES, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_parts_follow_each_other_over_the_whole_buffer(sizes: list[int], reducers: int) -> None:
    made = layout(sizes)
    position, reducer = 0, 0
    for part in made.parts((1,) * reducers):
        assert part.start == position and 0 < part.elements <= PART_ELEMENTS + BLOCK
        assert part.large == (part.stop <= made.boundary)
        assert part.reducer >= reducer
        if part.large:
            assert part.start % BLOCK == 0
        position, reducer = part.stop, part.reducer
    assert position == made.size


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_tensors_do_not_overlap_and_large_ones_share_no_block(sizes: list[int]) -> None:
    made = layout(sizes)
    places = sorted((made.starts[name], shape.numel()) for name, shape in made.shapes.items())
    for (start, size), (following, _) in zip(places, [*places[1:], (made.size, 0)], strict=True):
        assert start + size <= following < start + size + BLOCK
        assert (size < LARGE) == (start >= made.boundary)
        assert size < LARGE or start % BLOCK == 0


def sparse_codec() -> GradientCodec:
    return codec_of(load_run("emoji").replaced({"optimizer": {"name": "local", "sparse": 64}}))


@pytest.mark.parametrize("codec", [sparse_codec(), sparse_codec().averages], ids=["message", "average"])
def test_a_buffer_gives_back_sparse_parts_whatever_length_they_have(codec: GradientCodec) -> None:
    shapes = {"a": torch.Size([3, 5001]), "s": torch.Size([70]), "b": torch.Size([2**18 + 5])}
    made = Partition(shapes, 5000, codec.block)
    buffer = GradientBuffer(made, codec)
    for seed in (0, 1):  # the second lies where the first did
        whole = normal(seed, made.size)
        for part in made.parts((3, 2, 1)):
            assert not part.large or part.start % 4096 == part.stop % 4096 == 0
            values = whole[part.start : part.stop]
            sparser = values * (values.abs() > seed + torch.arange(part.elements) / part.elements)
            encoded = codec.of(part.large).encode(sparser)
            codec.check_part(encoded, part.elements, part.large)
            buffer.write(part.start, part.stop, encoded)
            assert buffer.read(part.start, part.stop) == encoded
            codec.of(part.large).decode_into(encoded, values)
        again = GradientBuffer(made, codec)
        again.load(buffer.dump())
        for name, tensor in DecodedGradients(again).items():
            start = made.starts[name]
            assert torch.equal(tensor.view(-1), whole[start : start + tensor.numel()])


@pytest.mark.parametrize("compression", ["linear8", "blockwise8"])
def test_a_buffer_gives_back_what_was_encoded_whole_and_in_slices(compression: str) -> None:
    codec = codec_of(load_run("emoji").replaced({"swarm.compression": compression}))
    shapes = {"a": torch.Size([3, 5001]), "s": torch.Size([70]), "b": torch.Size([2**18 + 5]), "t": torch.Size([9, 9])}
    made = Partition(shapes, 5000, codec.block)
    buffer, again = GradientBuffer(made, codec), GradientBuffer(made, codec)
    gradients = {name: normal(index, *shape) for index, (name, shape) in enumerate(shapes.items())}
    for name, gradient in gradients.items():
        buffer.encode(name, gradient * 3, 3.0)
    for part in made.parts((1,) * 3):
        encoded = buffer.read(part.start, part.stop)
        message = codec.message(encoded, part.elements, part.large)
        again.write(part.start, part.stop, codec.read_part(message, part.elements, part.large))
        assert again.read(part.start, part.stop) == encoded
    decoded = DecodedGradients(again)
    assert list(decoded) == list(shapes)
    for name, gradient in gradients.items():
        found, whole = decoded[name], torch.empty(gradient.numel())
        codec.of(name in "ab").decode_into(codec.of(name in "ab").encode(gradient.view(-1)), whole)
        assert found.shape == gradient.shape
        assert float((found - gradient).norm() / gradient.norm()) < 0.02
        if gradient.numel() < 2**18:
            assert float((found.view(-1) - whole).abs().max()) < 1e-5


@given(SIZES, st.lists(st.integers(0, 2**20), min_size=1, max_size=8).filter(any))
@settings(max_examples=60, deadline=None)
def test_each_reducer_has_its_share_and_none_has_none(sizes: list[int], shares: list[int]) -> None:
    made, sent = layout(sizes), [0] * len(shares)
    position = 0
    for part in made.parts(shares):
        assert part.start == position
        position = part.stop
        sent[part.reducer] += part.elements * (1 if part.large else 2)
    assert position == made.size
    for share, count in zip(shares, sent, strict=True):
        assert (count == 0) if share == 0 else abs(count - sum(sent) * share / sum(shares)) <= 2 * BLOCK


def test_shares_are_equal_to_within_a_block() -> None:
    made = layout([32_000_000, 500, 700])
    shares = [0] * 4
    for part in made.parts((1,) * 4):
        shares[part.reducer] += part.elements * (1 if part.large else 2)
    assert max(shares) - min(shares) <= 2 * BLOCK


def test_more_reducers_than_blocks() -> None:
    made = layout([1000])
    parts = made.parts((1,) * 8)
    assert sum(part.elements for part in parts) == made.size
    assert len(parts) <= 4


@pytest.mark.parametrize("shares", [(), (0, 0), (3, -1), (1,) * (MAX_REDUCERS + 1)])
def test_a_group_needs_a_reducer_and_has_no_thousands(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="reducers|shares"):
        layout([1000]).parts(shares)


def test_a_gradient_counts_once_whether_it_is_given_back_dropped_or_not_finite() -> None:
    local, sums = GradientBuffer(layout([LARGE, 3]), codec_of(load_run("emoji"))), Accumulator(["t0", "t1"])

    def add(value: float, samples: int) -> bool:
        return sums.add({"t0": torch.full((LARGE,), value), "t1": torch.full((3,), value)}, samples, LOSS, {})

    def mean() -> float:
        sums.hold(local)
        assert sums.held.mean_loss() == 2.5 and sums.new.samples == 0
        (first, *others) = {round(float(value), 1) for tensor in DecodedGradients(local).values() for value in tensor}
        assert not others
        return first

    assert add(1.0, 4) and mean() == 1.0
    assert add(4.0, 2)  # while the first round runs, which the others make without this peer
    sums.give_back(local)
    assert sums.samples == 6 and mean() == 2.0
    sums.release()
    assert add(5.0, 1)
    sums.forget()
    assert not sums.samples and add(3.0, 1) and mean() == 3.0
    sums.release()
    assert add(1.0, 1) and not add(torch.nan, 1)
    sums._sums["t0"][7] = torch.inf  # memory that was damaged
    with pytest.raises(ValueError, match="finite"):
        sums.hold(local)
    assert not sums.samples and not DecodedGradients(local)["t0"].any()
    assert add(3.0, 1) and mean() == 3.0
