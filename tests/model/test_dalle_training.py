"""The reversible trunk, gradient accumulation and lower precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tt_cli.model import Dalle, DalleConfig
from tt_cli.model.losses import Targets, split_cross_entropy
from tt_cli.model.reversible import Branch, reversible_trunk

SMALL = DalleConfig(32, 6, 2, 16, 20, 6, 4, 24)


def batch(config: DalleConfig, b: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, config.text_vocab, (b, config.text_length), generator=generator)
    return text, torch.randint(0, config.image_vocab, (b, config.image_positions), generator=generator)


def gradients(dalle: Dalle) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in dalle.named_parameters()}
    assert all(g is not None for g in found.values())
    return {name: g.clone() for name, g in found.items() if g is not None}


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Norm of the difference of all tensors over the norm of ``b``."""
    difference = sum((a[name].double() - b[name].double()).square().sum() for name in b)
    return float((difference / sum(x.double().square().sum() for x in b.values())).sqrt())


def test_gradcheck_of_the_recomputing_backward() -> None:
    """Three pairs of branches, of which the first and last share a weight."""

    def branch(x: Tensor, weights: list[Tensor]) -> Tensor:
        return torch.tanh(x @ weights[0]) * weights[1]

    tensors = [torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    tensors.append(torch.randn(3, dtype=torch.float64, requires_grad=True))
    branches = [Branch(branch, (i, 3)) for i in (0, 1, 2, 1, 0, 2)]
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        return reversible_trunk(x, branches, tensors, recompute=True)

    assert torch.autograd.gradcheck(run, (x, *tensors))
    stored = reversible_trunk(x, branches, tensors, recompute=False)
    assert torch.equal(run(x, *tensors), stored)


def test_gradcheck_of_the_loss() -> None:
    z, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 3), (11, 3), (11,))
    )
    labels = torch.tensor([[0, 3, 4, 10, 7], [1, 1, 5, 9, 9]])

    def run(z: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return split_cross_entropy(z, weight, bias, Targets(labels, 2, 4), torch.float64)

    assert torch.autograd.gradcheck(run, (z, weight, bias))


def test_recomputing_keeps_memory_independent_of_depth() -> None:
    """What is kept for the backward pass is the weights and two streams, however many layers there are."""

    def kept(depth: int, backward: str) -> int:
        config = DalleConfig(32, depth, 2, 16, 20, 6, 4, 24, reversible_backward=backward)
        dalle = Dalle(config)
        sizes: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            if tensor.dim() >= 3:
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            dalle.trunk(torch.randn(8, config.sequence_length, 32, requires_grad=True))
        return sum(sizes)

    assert kept(5, "recompute") == kept(50, "recompute") > 0
    assert kept(10, "store") > 15 * kept(10, "recompute")


@pytest.mark.parametrize("backward", ["recompute", "store"])
def test_accumulated_gradients_are_those_of_the_whole_batch(backward: str) -> None:
    config = DalleConfig(32, 6, 2, 16, 20, 6, 4, 24, reversible_backward=backward)
    dalle = Dalle(config).double()
    text, image = batch(config, 6)
    dalle.loss(text, image).total.backward()
    whole = gradients(dalle)
    dalle.zero_grad()
    for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
        (dalle.loss(text[part], image[part]).total / 3).backward()
    torch.testing.assert_close(gradients(dalle), whole)


def test_frozen_parameters_get_no_gradient() -> None:
    dalle = Dalle(SMALL)
    for name, parameter in dalle.named_parameters():
        parameter.requires_grad_(name.startswith("attention.1"))
    dalle.loss(*batch(SMALL, 2)).total.backward()
    with_gradient = {name for name, p in dalle.named_parameters() if p.grad is not None}
    assert with_gradient == {"attention.1.qkv", "attention.1.out.weight", "attention.1.out.bias"}


def test_parameters_changed_before_backward_are_noticed() -> None:
    """The recomputation would use other weights than the forward pass did."""
    dalle = Dalle(SMALL)
    total = dalle.loss(*batch(SMALL, 2)).total
    with torch.no_grad():
        dalle.attention[0].qkv.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reversible", [True, False])
def test_autocast(dtype: torch.dtype, reversible: bool) -> None:
    """Only matrix products lose precision; rebuilt activations cost no more than stored ones."""
    text, image = batch(SMALL, 8)
    errors = {}
    for backward in ("recompute", "store"):
        dalle = Dalle(DalleConfig(32, 6, 2, 16, 20, 6, 4, 24, reversible=reversible, reversible_backward=backward))
        exact = copy.deepcopy(dalle).double()
        exact.loss(text, image).total.backward()
        with torch.autocast("cpu", dtype=dtype):
            losses = dalle.loss(text, image)
        losses.total.backward()
        assert losses.total.dtype == torch.float32
        found = gradients(dalle)
        assert all(g.dtype == torch.float32 for g in found.values())
        assert losses.total.item() == pytest.approx(exact.loss(text, image).total.item(), abs=2e-3)
        errors[backward] = relative_difference(found, gradients(exact))
    assert errors["store"] < (2e-2 if dtype == torch.bfloat16 else 4e-3)
    assert errors["recompute"] < 1.1 * errors["store"] + 1e-5


@pytest.mark.parametrize("forward_inside", [True, False])
def test_autocast_around_backward_changes_nothing(forward_inside: bool) -> None:
    """The recomputed branches take the forward pass's precision."""
    dalle = Dalle(SMALL)
    found = []
    for backward_inside in (True, False):
        dalle.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_inside):
            total = dalle.loss(*batch(SMALL, 2)).total
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward_inside):
            total.backward()
        found.append(gradients(dalle))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_no_gradients_are_made_when_none_are_wanted() -> None:
    dalle = Dalle(SMALL)
    with torch.no_grad():
        without = dalle.loss(*batch(SMALL, 2))
    assert not without.total.requires_grad
    torch.testing.assert_close(without.total, dalle.loss(*batch(SMALL, 2)).total.detach())


def test_a_few_steps_learn_a_picture() -> None:
    dalle = Dalle(SMALL)
    text, image = batch(SMALL, 2)
    optimizer = torch.optim.Adam(dalle.parameters(), lr=1e-2)
    first = dalle.loss(text, image).total.item()
    for _ in range(40):
        optimizer.zero_grad()
        total = dalle.loss(text, image).total
        total.backward()
        optimizer.step()
    assert total.item() < 0.1 * first
    assert torch.equal(dalle.generate(text, top_k=1), image)


def test_wrong_shapes_are_refused() -> None:
    dalle = Dalle(SMALL)
    text, image = batch(SMALL, 2)
    with pytest.raises(ValueError, match=r"text has shape \(2, 5\), expected \(b, 6\)"):
        dalle(text[:, :5])
    with pytest.raises(ValueError, match=r"image has shape \(2, 17\), expected \(2, 0..16\)"):
        dalle(text, torch.zeros(2, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match="image has 15 codes, a picture has 16"):
        dalle.loss(text, image[:, :15])
