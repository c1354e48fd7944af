"""The arithmetic of scripts/bench convergence: what a swarm averages, and how steps are counted."""

from __future__ import annotations

import pytest
import torch

from scripts.benchmarks.convergence import smoothed, steps_to, swarm_average
from tt_cli.run import load_run
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer, Partition


def test_the_average_of_a_swarm_is_that_by_samples_but_for_the_codec() -> None:
    shapes = {"large": torch.Size([300, 257]), "small": torch.Size([100]), "other": torch.Size([70_001])}
    codec, sizes = codec_of(load_run("emoji-demo")), [28, 20, 12, 4]
    layout = Partition(shapes, 2**16, codec.block)
    generator = torch.Generator().manual_seed(0)
    exact = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    buffers = [GradientBuffer(layout, codec) for _ in sizes]
    for buffer, size in zip(buffers, sizes, strict=True):
        for name, shape in shapes.items():
            gradient = torch.randn(shape, generator=generator)
            exact[name] += gradient.double() * (size / sum(sizes))
            buffer.encode(name, gradient * size, size)
    average = swarm_average(buffers, sizes, order=[2, 0, 3, 1], aggregation="mean")
    for name, mean in DecodedGradients(average).items():
        error = float((mean - exact[name]).norm() / exact[name].norm())
        assert (1e-5 if name == "small" else 1e-3) < error < (1e-3 if name == "small" else 0.02), name
    again = swarm_average(buffers, sizes, order=[2, 0, 3, 1], aggregation="mean")
    for start, stop in ((0, layout.boundary), (layout.boundary, layout.size)):
        assert average.read(start, stop) == again.read(start, stop)


def test_steps_are_counted_between_steps() -> None:
    falling = [float(10 - step) for step in range(11)]
    assert smoothed(falling)[:3] == [10.0, 9.5, 9.0] and smoothed(falling)[10] == 2.0
    assert steps_to(falling, 4.0) == pytest.approx(8.0)
    assert steps_to(falling, 3.25) == pytest.approx(8.75)
    assert steps_to(falling, 1.9) is None
