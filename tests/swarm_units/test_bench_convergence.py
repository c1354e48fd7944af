"""The arithmetic of scripts/bench_convergence.py: what a swarm averages, and how steps are counted."""

from __future__ import annotations

import pytest
import torch

from scripts.bench_convergence import plain_average, smoothed, steps_to, swarm_average
from tt_cli.run import load_run
from tt_cli.swarm.codec import codec_of
from tt_cli.swarm.layout import Layout


def test_the_average_of_a_swarm_is_that_by_samples_but_for_the_codec() -> None:
    shapes = {"large": torch.Size([300, 257]), "small": torch.Size([100]), "other": torch.Size([70_001])}
    layout = Layout(shapes, large_tensor=2**16)
    generator = torch.Generator().manual_seed(0)
    flats = [torch.zeros(layout.size) for _ in range(4)]
    for flat in flats:
        for view in layout.views(flat):
            view.normal_(generator=generator)
    sizes = [28, 20, 12, 4]
    codec = codec_of(load_run("emoji-demo"))
    exact = plain_average(flats, sizes)
    average = swarm_average(codec, layout, flats, sizes, order=[2, 0, 3, 1])
    assert torch.allclose(exact, sum(f.double() * n for f, n in zip(flats, sizes, strict=True)).float() / 64, atol=1e-6)
    assert 1e-3 < float((average - exact).norm() / exact.norm()) < 0.02
    # a peer's own share is added as it is, the others' as they decode it: another order of reducers, other bytes
    assert not torch.equal(average, swarm_average(codec, layout, flats, sizes, order=[0, 1, 2, 3]))


def test_steps_are_counted_between_steps() -> None:
    falling = [float(10 - step) for step in range(11)]
    assert smoothed(falling)[:3] == [10.0, 9.5, 9.0] and smoothed(falling)[10] == 2.0
    assert steps_to(falling, 4.0) == pytest.approx(8.0)
    assert steps_to(falling, 3.25) == pytest.approx(8.75)
    assert steps_to(falling, 1.9) is None
