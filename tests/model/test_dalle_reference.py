"""The fast decoder against the plain one of reference.py, over random shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model import reference
from model.slow_drawing import whole_logits
from torch import Tensor

from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers import attention
from tt_cli.model.layers.attention import AttentionPattern
from tt_cli.model.layers.token_shift import ShiftTokens

KINDS = st.sampled_from(["axial_row", "axial_col", "conv_like"])


@st.composite
def configs(draw: st.DrawFn) -> DalleConfig:
    types = draw(st.lists(KINDS, min_size=1, max_size=3))
    return DalleConfig(
        dim=draw(st.sampled_from([4, 8, 12])),
        depth=draw(st.integers(1, 4)),
        heads=draw(st.integers(1, 3)),
        dim_head=draw(st.sampled_from([6, 8, 14])),
        text_vocab=draw(st.integers(2, 9)),
        text_length=draw(st.integers(1, 5)),
        image_size=draw(st.integers(1, 5)),
        image_vocab=draw(st.integers(1, 9)),
        reversible=draw(st.booleans()),
        ff_mult=draw(st.integers(1, 2)),
        rotary=draw(st.booleans()),
        shift_tokens=draw(st.booleans()),
        shared_layer_groups=len(types) * draw(st.integers(1, 2)),
        attention_types=tuple(types),
        last_attention=draw(KINDS),
        conv_kernel=draw(st.sampled_from([1, 3, 5])),
        tied_embeddings=draw(st.booleans()),
        loss_image_weight=draw(st.sampled_from([0.5, 7.0])),
    )


def randomised(config: DalleConfig, seed: int) -> Dalle:
    """A float64 model whose norms, scales and biases matter."""
    dalle = Dalle(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in dalle.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6)
    return dalle


def example(config: DalleConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Two captions, id 0 among them, and two pictures."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, config.text_vocab, (2, config.text_length), generator=generator)
    image = torch.randint(0, config.image_vocab, (2, config.image_positions), generator=generator)
    return text, image


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=configs(),
    dense=st.booleans(),
    cut=st.floats(0, 1),
    budget=st.sampled_from([0, 3000, 1 << 30]),
    seed=st.integers(0, 999),
)
def test_logits_losses_and_gradients(config: DalleConfig, dense: bool, cut: float, budget: int, seed: int) -> None:
    dalle = randomised(config, seed)
    dalle.activation_budget = budget
    text, image = example(config, seed)
    parameters = {name: p.detach().requires_grad_() for name, p in dalle.named_parameters()}
    codes = round(cut * config.image_positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "DENSE_POSITIONS", 1000 if dense else 0)
        logits = whole_logits(dalle, text, image[:, :codes])
        losses = dalle.loss(text, image)
        losses.total.backward()

    sums = [torch.zeros((), dtype=torch.float64)] * 3
    for row in range(2):
        expected = reference.logits(config, parameters, text[row].tolist(), image[row, :codes].tolist())
        possible = expected > -torch.inf
        torch.testing.assert_close(logits[row][possible], expected[possible])
        assert (logits[row][~possible] == torch.finfo(torch.float64).min).all()
        each = reference.losses(config, parameters, text[row].tolist(), image[row].tolist())
        sums = [s + x / 2 for s, x in zip(sums, each, strict=True)]
    torch.testing.assert_close(list(losses), sums)
    sums[0].backward()
    for name, parameter in dalle.named_parameters():
        expected_gradient = parameters[name].grad
        if expected_gradient is None:  # an embedding row that no id of this example uses
            expected_gradient = torch.zeros_like(parameter)
        torch.testing.assert_close(parameter.grad, expected_gradient, rtol=1e-5, atol=1e-9, msg=name)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(kind=KINDS, text=st.integers(1, 6), side=st.integers(1, 6), kernel=st.sampled_from([1, 3, 5, 7]),
       rows=st.integers(1, 6))  # fmt: skip
def test_structured_attention_equals_dense(kind: str, text: int, side: int, kernel: int, rows: int) -> None:
    pattern = AttentionPattern(kind, text, side, kernel)
    n = text + min(rows, side) * side
    generator = torch.Generator().manual_seed(n)
    inputs = torch.randn(3, 2, 3, n, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    outward = torch.randn(2, 3, n, 6, generator=generator, dtype=torch.float64)
    results = []
    for attend in (pattern.attend_dense, pattern.attend_structured):
        out = attend(*inputs.unbind())
        results.append((out.detach(), *torch.autograd.grad(out, inputs, outward)))
    torch.testing.assert_close(*results)


def test_structured_attention_forms_no_full_score_matrix() -> None:
    """No tensor kept for the structured backward pass is as large as the scores of all pairs."""
    text, side = 8, 16
    n = text + side * side
    for kind in ("axial_row", "axial_col", "conv_like"):
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        q, k, v = torch.randn(3, 1, 1, n, 8, requires_grad=True).unbind()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            AttentionPattern(kind, text, side, 5).attend(q, k, v, n)
        assert 0 < max(sizes) < n * n / 2


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 10, 14])
def test_token_shift(length: int) -> None:
    config = DalleConfig(8, 1, 1, 8, 5, 4, 3, 5)
    h = torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
    shifted = ShiftTokens.apply(h, config.text_positions, config.image_size)
    expected = torch.stack([reference.shift(config, row) for row in h])
    outward = torch.randn_like(h)
    torch.testing.assert_close(shifted, expected)
    torch.testing.assert_close(torch.autograd.grad(shifted, h, outward), torch.autograd.grad(expected, h, outward))
