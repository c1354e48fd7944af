"""The account of a training step against what torch allocates in one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from testbed.memory_step import allocated

from tt_cli.memory.activations import _padded_length, activations
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers.reversible import Half, Trunk
from tt_cli.run import load_run

EMOJI = DalleConfig.from_run(load_run("emoji"))
# Attention by structure, as at the paper's size, but small.
LONG = replace(EMOJI, dim=64, heads=4, dim_head=16, depth=5, text_length=48, image_size=16)
MIB = 2**20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products on several threads take long where other processes are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def taken(model: Dalle, b: int, dtype: torch.dtype | None) -> int:
    """Bytes at the worst moment of a step, beside parameters and their gradients."""
    config = model.config
    text = torch.ones(b, config.text_length, dtype=torch.long)
    image = torch.zeros(b, config.image_positions, dtype=torch.long)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
            losses = model.loss(text, image)
        losses.total.backward()

    step()  # tables and masks stay
    for parameter in model.parameters():
        parameter.grad = None
    return allocated(step) - sum(4 * parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "b", "dtype", "budget"),
    [
        (EMOJI, 1, None, 10**12),
        (EMOJI, 8, None, 10**12),
        (EMOJI, 8, None, 0),
        (EMOJI, 8, None, 8 * MIB),
        (EMOJI, 8, torch.bfloat16, 10**12),
        (LONG, 2, None, 10**12),
        (LONG, 2, None, 0),
        (LONG, 2, torch.bfloat16, 4 * MIB),
        (replace(LONG, text_vocab=16000), 2, torch.bfloat16, 0),
    ],
)
def test_a_step_takes_what_the_account_says(
    config: DalleConfig, b: int, dtype: torch.dtype | None, budget: int
) -> None:
    model = Dalle(config)
    model.activation_budget = budget
    itemsize = 4 if dtype is None else dtype.itemsize
    said, seen = activations(config, b, itemsize, budget, "cpu"), taken(model, b, dtype)
    assert said.total == pytest.approx(seen, rel=0.05, abs=0.75 * MIB)
    assert said.kept <= budget


def test_without_a_reversible_trunk_it_is_an_estimate() -> None:
    model = Dalle(replace(EMOJI, reversible=False))
    assert activations(model.config, 8, 4, 0, "cpu").total == pytest.approx(taken(model, 8, None), rel=0.15)


@pytest.mark.parametrize("config", [EMOJI, LONG, replace(LONG, conv_kernel=3, tied_embeddings=False, depth=2)])
def test_the_shape_without_torch_is_the_model_s(config: DalleConfig) -> None:
    with torch.device("meta"):
        model = Dalle(config)
    assert sorted(config.tensor_sizes) == sorted(parameter.numel() for parameter in model.parameters())
    pattern = model.attention_branches[config.last_attention].pattern
    assert _padded_length(config) == pattern.padded_length(config.sequence_length)
    parts = (model.attention, model.feed_forward)
    shared = sum(parameter.numel() for part in parts for parameter in part.parameters())
    assert config.weight_sets * sum(config.set_sizes) == shared
    used = [tensor for i in range(config.depth) for branch in model.layer_weights(i) for tensor in branch]
    distinct = {id(tensor): tensor for tensor in used}
    again = sum(tensor.numel() for tensor in used) - sum(tensor.numel() for tensor in distinct.values())
    assert config.effective_parameters == sum(config.tensor_sizes) + again


@pytest.mark.parametrize("budget", [0, 10**5, 3 * 10**6, 10**7, 10**10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_the_trunk_plans(budget: int, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = Dalle(LONG)
    branches = [model.attention_branches[LONG.attention_kind(i)] for i in range(LONG.depth)]
    layers = [[Half(branch, [], []), Half(model.feed_forward_branch, [], [])] for branch in branches]
    x = torch.empty(2, LONG.sequence_length, LONG.dim, device="meta")
    each = [(0, x.nbytes, 2 * x.nbytes + sum(half.branch.kept_bytes(x, dtype) for half in halves)) for halves in layers]
    plan = Trunk(layers, x, dtype, budget).plan
    kept = sum(sizes[level] for sizes, level in zip(each, plan, strict=True))
    assert activations(LONG, 2, dtype.itemsize, budget, "cpu").kept == kept


def test_more_examples_and_larger_budgets_take_more() -> None:
    totals = [activations(LONG, b, 4, 10**9, "cuda").total for b in (1, 2, 4, 8, 16)]
    assert totals == sorted(totals) and len(set(totals)) == 5
    kept = [activations(LONG, 8, 4, budget, "cpu").kept for budget in (0, 10**7, 10**8, 10**10)]
    assert kept == sorted(kept) and kept[0] == 0 and kept[1] <= 10**7
