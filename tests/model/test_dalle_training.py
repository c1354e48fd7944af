"""The reversible trunk, gradient accumulation and lower precision."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tt_cli.model.dalle import Dalle, _layers
from tt_cli.model.dalle_config import ALL, NOTHING, STREAM, DalleConfig
from tt_cli.model.layers.products import sums_wide
from tt_cli.model.layers.reversible import Trunk
from tt_cli.model.losses import SplitCrossEntropy, Targets, cross_entropies

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


def kept_bytes(trunk: Trunk) -> int:
    """Size of what the trunk keeps between its passes, both ends of the streams aside."""
    tensors = [t for kept in trunk._kept for t in (kept.x1, kept.x2, *kept.f, *kept.g) if t is not None]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def trunk_of(config: DalleConfig, x: Tensor, budget: int, dtype: torch.dtype = torch.float32) -> Trunk:
    dalle = Dalle(config)
    layers = _layers(dalle, {p: torch.zeros_like(p) for p in dalle.parameters()}, dtype)
    return Trunk(layers, x, dtype, budget)


# bytes that one layer of TINY keeps for one example: x2; x1, q, k, v and the expanded rows
TINY = DalleConfig(8, 4, 1, 6, 5, 3, 2, 6, loss_image_weight=2.0)
STREAM_BYTES, ALL_BYTES = 7 * 8 * 8, 7 * 8 * (8 + 3 * 6 + 2 * 4 * 8)  # in float64


class TrunkForAutograd(torch.autograd.Function):
    """The trunk's two passes as one function of x and the weights; gradcheck differentiates it more than once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dalle: Dalle, budget: int, *weights: Tensor) -> Tensor:
        ctx.dalle, ctx.budget = dalle, budget
        ctx.save_for_backward(x)
        return TrunkForAutograd.run(dalle, x, budget)[0].forward(x)

    @staticmethod
    def run(dalle: Dalle, x: Tensor, budget: int) -> tuple[Trunk, list[Tensor]]:
        sums = {p: torch.zeros_like(p) for p in dalle.parameters()}
        layers = _layers(dalle, sums, x.dtype)
        return Trunk(layers, x, x.dtype, budget), list(sums.values())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        trunk, sums = TrunkForAutograd.run(ctx.dalle, *ctx.saved_tensors, ctx.budget)
        trunk.forward(*ctx.saved_tensors)
        return trunk.backward(grad), None, None, *sums


@pytest.mark.parametrize("budget", [0, 2 * STREAM_BYTES, 4 * STREAM_BYTES + 2 * ALL_BYTES, 1 << 30])
def test_gradcheck_of_the_recomputing_backward(budget: int) -> None:
    """Input and all weights, in float64, whatever is kept; two weight sets serve three layers, one the last."""
    dalle = Dalle(dataclasses.replace(TINY, shared_layer_groups=2, attention_types=("axial_row", "axial_col"))).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in dalle.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6)
    x = torch.randn(1, 7, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return TrunkForAutograd.apply(x, dalle, budget, *weights)

    assert torch.autograd.gradcheck(run, (x, *dalle.parameters()), fast_mode=True)
    torch.testing.assert_close(run(x), dalle.trunk(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_budget_decides_what_is_kept(dtype: torch.dtype) -> None:
    """Streams first, from the last layer on, then all that layers can use again; never more than the budget."""
    x = torch.randn(1, 7, 8)
    stream, rest = x.nbytes, x.nbytes + 7 * (3 * 6 + 2 * 4 * 8) * dtype.itemsize
    plans = {
        0: [NOTHING] * 4,
        stream - 1: [NOTHING] * 4,
        2 * stream + 1: [NOTHING, NOTHING, STREAM, STREAM],
        4 * stream + rest: [STREAM, STREAM, STREAM, ALL],
        4 * (stream + rest): [ALL] * 4,
    }
    results = []
    for budget, plan in plans.items():
        trunk = trunk_of(TINY, x, budget, dtype)
        assert trunk.plan == plan
        results.append(trunk.forward(x))
        assert kept_bytes(trunk) == stream * sum(p >= STREAM for p in plan) + rest * plan.count(ALL) <= budget
        results[-1] = torch.cat([results[-1], trunk.backward(torch.ones_like(x))])
        assert kept_bytes(trunk) == 0
        with pytest.raises(RuntimeError, match="each time"):
            trunk.backward(torch.ones_like(x))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


def test_without_a_budget_memory_does_not_grow_with_depth() -> None:
    x = torch.randn(2, 7, 8)
    for depth in (5, 50):
        trunk = trunk_of(dataclasses.replace(TINY, depth=depth), x, 0)
        trunk.forward(x)
        assert kept_bytes(trunk) == 0


def test_what_rebuilding_costs_in_bfloat16() -> None:
    """Products in bfloat16, 64 layers: rebuilding float32 streams moves the gradient by a quarter of what the products'
    own rounding does (3 % more error in all); rebuilding bfloat16 streams would move it by five times that."""
    config = DalleConfig(64, 64, 2, 32, 20, 6, 4, 24)
    dalle = Dalle(config)
    x, grad = torch.randn(2, 2, config.sequence_length, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in dalle.named_parameters():
            if name.endswith(".scale"):
                parameter.fill_(0.3)

    def gradient(products: torch.dtype, streams: torch.dtype, budget: int) -> Tensor:
        model = copy.deepcopy(dalle).to(torch.float64 if products == torch.float64 else torch.float32)
        layers = _layers(model, {p: torch.zeros_like(p) for p in model.parameters()}, products)
        trunk = Trunk(layers, x.to(streams), products, budget)
        trunk.forward(x.to(streams))
        return trunk.backward(grad.to(streams)).double()

    exact = gradient(torch.float64, torch.float64, 0)
    products, rebuilt = {}, {}
    for streams in (torch.float32, torch.bfloat16):
        kept = gradient(torch.bfloat16, streams, 1 << 40)
        products[streams] = float((kept - exact).norm() / exact.norm())
        rebuilt[streams] = float((gradient(torch.bfloat16, streams, 0) - kept).norm() / exact.norm())
    low, high = torch.bfloat16, torch.float32
    assert products[high] < 5e-3
    assert rebuilt[high] < 0.4 * products[high]
    assert rebuilt[low] > 3 * products[high]
    assert rebuilt[low] > 8 * rebuilt[high]


def test_gradcheck_of_the_loss() -> None:
    z, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 3), (11, 3), (11,))
    )
    labels = torch.tensor([[0, 3, 4, 10, 7], [1, 1, 5, 9, 9]])

    def run(z: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return SplitCrossEntropy.apply(z, weight, bias, Targets(labels, 2, 4), torch.float64)

    assert torch.autograd.gradcheck(run, (z, weight, bias))


@pytest.mark.parametrize("reversible", [True, False])
def test_accumulated_gradients_are_those_of_the_whole_batch(reversible: bool) -> None:
    dalle = Dalle(dataclasses.replace(SMALL, reversible=reversible)).double()
    text, image = batch(SMALL, 6)
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
    """Only matrix products lose precision; rebuilt activations cost no more than kept ones."""
    text, image = batch(SMALL, 8)
    errors = {}
    for budget in (0, 1 << 40):
        dalle = Dalle(dataclasses.replace(SMALL, reversible=reversible))
        dalle.activation_budget = budget
        exact = copy.deepcopy(dalle).double()
        exact.loss(text, image).total.backward()
        with torch.autocast("cpu", dtype=dtype):
            losses = dalle.loss(text, image)
        losses.total.backward()
        assert losses.total.dtype == torch.float32
        found = gradients(dalle)
        assert all(g.dtype == torch.float32 for g in found.values())
        assert losses.total.item() == pytest.approx(exact.loss(text, image).total.item(), abs=2e-3)
        errors[budget] = relative_difference(found, gradients(exact))
    assert errors[1 << 40] < (2e-2 if dtype == torch.bfloat16 else 4e-3)
    assert errors[0] < 1.1 * errors[1 << 40] + 1e-5


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


def test_wrong_shapes_are_refused() -> None:
    dalle = Dalle(SMALL)
    text, image = batch(SMALL, 2)
    with pytest.raises(ValueError, match=r"text has shape \(2, 5\), expected \(b, 6\)"):
        dalle.ids(text[:, :5], None)
    with pytest.raises(ValueError, match=r"image has shape \(2, 17\), expected \(2, 0..16\)"):
        dalle.ids(text, torch.zeros(2, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match="image has 15 codes, a picture has 16"):
        dalle.loss(text, image[:, :15])


def test_float16_needs_no_loss_scaling() -> None:
    """Behind a LayerScale of 1e-6 gradients are below float16's smallest numbers; here each is scaled on its way."""
    config = DalleConfig(32, 30, 2, 16, 20, 6, 4, 24)
    dalle = Dalle(config)
    text, image = batch(config, 2)
    exact = copy.deepcopy(dalle).double()
    (exact.loss(text, image).total * 1e-3).backward()
    with torch.autocast("cpu", dtype=torch.float16):
        total = dalle.loss(text, image).total
    (total * 1e-3).backward()
    found, expected = gradients(dalle), gradients(exact)
    last = [name for name in found if name.startswith("layers.28")]
    assert max(expected[name].abs().max() for name in last if ".norm." in name) < 1e-7
    for name in found:
        assert relative_difference({name: found[name]}, {name: expected[name]}) < 2e-2, name


def test_in_float16_a_large_batch_of_what_is_known_has_gradients() -> None:
    """Each entry is below half of float16's smallest number where it is divided by the batch's 65,536 codes."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(72, 32, generator=generator) * 2 - 1) / 32
    labels = torch.randint(8, 72, (64, 1025), generator=generator)
    labels[:, 0] = 0  # the text
    z = weight[labels] / weight[labels].square().sum(2, keepdim=True) * 10  # each label's logit is 10
    targets = Targets(labels, 1, 8)
    _, low, found = cross_entropies(z, weight, torch.zeros(72), targets, torch.float16, with_gradients=True)
    doubles = z.double(), weight.double(), torch.zeros(72, dtype=torch.float64)
    _, high, expected = cross_entropies(*doubles, targets, torch.float64, with_gradients=True)
    assert found is not None and expected is not None and expected.z[:, 1:].abs().max() < 2.0**-25
    assert low.item() == pytest.approx(high.item(), rel=1e-2)
    assert relative_difference(found._asdict(), expected._asdict()) < 1e-2
    assert relative_difference({"z": found.z[:, 1:]}, {"z": expected.z[:, 1:]}) < 1e-2


def test_a_device_is_asked_whether_it_adds_to_a_wide_sum() -> None:
    """Of those that torch has, CPUs do not; a GPU's answer differs with torch and its maker."""
    assert not sums_wide(torch.device("cpu"), torch.bfloat16, torch.float32)
