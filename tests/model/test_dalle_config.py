"""Sizes, sharing, initial weights and the cost of a step."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import pytest
import torch

from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import load_run

SMALL = DalleConfig(16, 7, 2, 8, 20, 6, 4, 24)


def changed(**values: object) -> DalleConfig:
    return dataclasses.replace(SMALL, **values)


def test_from_run_reads_every_part() -> None:
    run = load_run("dalle")
    config = DalleConfig.from_run(run)
    assert config == DalleConfig(1024, 64, 16, 64, 32100, 256, 32, 8192)
    other = run.replaced(
        {
            "model.reversible": False,
            "model.rotary": False,
            "model.shift_tokens": False,
            "model.ff_mult": 2,
            "model.shared_layer_groups": 6,
            "model.attention_types": ["axial_col", "conv_like"],
            "model.last_attention": "axial_row",
            "model.conv_kernel": 3,
            "model.tied_embeddings": False,
            "model.loss_image_weight": 1.0,
        }
    )
    assert DalleConfig.from_run(other) == DalleConfig(
        1024, 64, 16, 64, 32100, 256, 32, 8192, reversible=False, rotary=False, shift_tokens=False, ff_mult=2,
        shared_layer_groups=6, attention_types=("axial_col", "conv_like"), last_attention="axial_row",
        conv_kernel=3, tied_embeddings=False, loss_image_weight=1.0,
    )  # fmt: skip


def test_parameter_counts_of_the_papers_variants() -> None:
    paper = DalleConfig.from_run(load_run("dalle"))

    def count(**values: object) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in Dalle(dataclasses.replace(paper, **values)).parameters())

    assert count() == 125_894_244
    assert count(tied_embeddings=False) == 167_415_396
    assert count(shared_layer_groups=64) == 1_116_354_148
    assert count(shared_layer_groups=64, tied_embeddings=False) == 1_157_875_300


def test_sharing_follows_the_cycle() -> None:
    assert [SMALL.weight_set(i) for i in range(7)] == [0, 1, 2, 3, 0, 1, 4]
    assert [SMALL.attention_kind(i) for i in range(7)] == [
        "axial_row", "axial_col", "axial_row", "axial_row", "axial_row", "axial_col", "conv_like",
    ]  # fmt: skip
    assert changed(depth=3).weight_sets == 3
    assert changed(depth=1).weight_sets == 1


def digest(dalle: Dalle) -> str:
    sha = hashlib.sha256()
    for name, parameter in dalle.named_parameters():
        sha.update(name.encode() + parameter.detach().numpy().tobytes())
    return sha.hexdigest()


def test_initial_weights_are_the_same_bytes_everywhere() -> None:
    """All members of a run start from these; a change here splits every swarm."""
    dalle = Dalle(SMALL)
    assert digest(dalle) == "3f308ec169bf754624aa0340faa6ca2e866f866fa5c7cb09e6a984a2090521ed"
    dalle.initialise(7)
    assert digest(dalle) == "9ecae69d9ce210a836f674bbbd530a23948c8f1662473aca573b9346e751cde5"
    dalle.initialise(0)
    assert digest(dalle) == "3f308ec169bf754624aa0340faa6ca2e866f866fa5c7cb09e6a984a2090521ed"


def test_initial_weights_ignore_torch_threads_and_seeds() -> None:
    torch.manual_seed(1)
    first = digest(Dalle(SMALL))
    torch.manual_seed(2)
    assert digest(Dalle(SMALL)) == first


def test_initial_distributions() -> None:
    config = DalleConfig(64, 26, 2, 16, 100, 8, 4, 200)
    dalle = Dalle(config)
    parameters = dict(dalle.named_parameters())

    def uniform(name: str, fan_in: int) -> None:
        values, bound = parameters[name], 1 / math.sqrt(fan_in)
        assert values.abs().max() <= bound
        assert values.abs().max() > 0.9 * bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)

    uniform("attention.0.qkv", 64)
    uniform("attention.4.out.weight", 32)
    uniform("attention.4.out.bias", 32)
    uniform("feed_forward.1.expand.weight", 64)
    uniform("feed_forward.1.expand.bias", 64)
    uniform("feed_forward.1.contract.weight", 256)
    uniform("feed_forward.1.contract.bias", 256)
    uniform("logits.weight", 64)
    uniform("logits.bias", 64)
    assert (parameters["norm.weight"] == 1).all()
    assert (parameters["layers.3.attention.norm.bias"] == 0).all()
    for layer, scale in ((0, 0.1), (17, 0.1), (18, 1e-5), (23, 1e-5), (24, 1e-6), (25, 1e-6)):
        for branch in ("attention", "feed_forward"):
            assert (parameters[f"layers.{layer}.{branch}.scale"] == scale).all()


@torch.no_grad()
def test_loss_at_the_start_is_that_of_a_guess() -> None:
    config = DalleConfig(64, 4, 2, 32, 1000, 16, 8, 256)
    dalle = Dalle(config)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, 1000, (4, 16), generator=generator)
    image = torch.randint(0, 256, (4, 64), generator=generator)
    losses = dalle.loss(text, image)
    # Logits of unit-variance rows and uniform weights have variance 1/3, which costs half of that in nats.
    guess = (math.log(config.text_ids) + 7 * math.log(256)) / 8 + 1 / 6
    assert losses.total.item() == pytest.approx(guess, abs=0.2)


def test_flops_of_the_papers_model() -> None:
    """Projections and the two blocks of logits, and a few per cent for attention over allowed pairs."""
    paper = DalleConfig.from_run(load_run("dalle"))
    linear = 64 * 1280 * 16_777_216
    logits = 1024 * (256 * 32356 + 1024 * 8192)
    assert paper.flops_per_sample() == pytest.approx(6 * (linear + logits), rel=0.04)
    assert paper.flops_per_sample() > 6 * (linear + logits)


@pytest.mark.parametrize("kind", ["axial_row", "axial_col", "conv_like"])
def test_flops_count_the_pairs_that_are_allowed(kind: str) -> None:
    config = changed(attention_types=(kind,), last_attention=kind)
    pattern = Dalle(config).attention_branches[kind].pattern
    pairs = int(pattern.mask(config.sequence_length).sum())
    per_set = 3 * 16 * 16 + 16 * 16 + 128 * 16 + 16 * 64
    forward = 7 * (22 * per_set + 2 * pairs * 16) + 16 * (6 * 26 + 16 * 24)
    assert config.flops_per_sample() == 6 * forward
