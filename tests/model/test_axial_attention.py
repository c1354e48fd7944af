"""Axial attention in joined calls of fused kernels, with the CPU's kernel, against the structured way."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from testbed.spawned import spawned
from torch import Tensor
from torch._inductor import config as inductor

from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.layers import attention, axial_attention, fused
from tt_cli.model.layers.blocks import AttentionBranch
from tt_cli.model.layers.rotary import rotary_factors, rotary_table
from tt_cli.model.layers.token_shift import shifted, sources, unshifted

# 12 x 12 codes after 7 positions of text: more than attention.DENSE_POSITIONS, and the text does not fill its line
CONFIG = DalleConfig(32, 5, 2, 16, 20, 6, 12, 24)
CPU = torch.device("cpu")


def gradients(config: DalleConfig, *, on_lines: bool) -> dict[str, Tensor]:
    """Of all parameters, and the losses."""
    dalle = Dalle(config)
    for kind, branch in dalle.attention_branches.items():
        if on_lines and kind != "conv_like":
            dalle.attention_branches[kind] = AttentionBranch(config, branch.pattern, lambda *given: True)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, 20, (3, config.text_length), generator=generator)
    image = torch.randint(0, 24, (3, config.image_positions), generator=generator)
    losses = dalle.loss(text, image)
    losses.total.backward()
    found = {name: p.grad for name, p in dalle.named_parameters() if p.grad is not None}
    return {**found, "text": losses.text.detach(), "image": losses.image.detach()}


@pytest.mark.parametrize("kind", ["axial_row", "axial_col"])
@pytest.mark.parametrize("rotary", [True, False])
def test_loss_and_gradients_are_those_of_the_structured_way(kind: str, rotary: bool) -> None:
    assert CONFIG.sequence_length > attention.DENSE_POSITIONS
    config = dataclasses.replace(CONFIG, attention_types=(kind,), rotary=rotary)
    found, expected = (gradients(config, on_lines=on_lines) for on_lines in (True, False))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda words, n=name: f"{n}: {words}")


def compiled_gradients() -> tuple[dict[str, Tensor], set[str], str]:
    """By the CPU's compiler; for a process of its own, which compiles anew.

    One number at a time, as a GPU's threads have it: loops over vectors take the compiler half as long again.
    """
    fused.fusion.devices.add("cpu")
    with inductor.patch({"cpp.vec_isa_ok": False}):
        return gradients(CONFIG, on_lines=True), fused.fusion.compiled, fused.fusion.failure


@pytest.mark.debian
def test_compiled_kernels_give_the_same_gradients() -> None:
    with spawned({}) as call:
        found, compiled, failure = call(compiled_gradients).result()
    assert not failure
    axial = {"to_lines", "_joined", "spread", "from_lines"}
    others = {"geglu", "_geglu_gradient", "_normed", "_incoming"}
    assert compiled == axial | others | {"_add_", "_add_norm_gradients_", "_add_output_gradients"}
    for name, tensor in gradients(CONFIG, on_lines=True).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


def test_it_serves_the_axial_layers_of_a_gpu_alone() -> None:
    gpu, half, served = torch.device("cuda"), torch.bfloat16, axial_attention.is_served
    assert served("axial_row", 32, 64, gpu, half) and served("axial_col", 32, 64, gpu, torch.float32)
    assert not served("axial_row", 32, 64, CPU, half) and not served("axial_row", 32, 64, gpu, torch.float64)
    assert not served("axial_row", 32, 20, gpu, half) and not served("axial_row", 16, 64, gpu, half)
    assert not served("conv_like", 32, 64, gpu, half)


def test_real_factors_turn_as_complex_numbers_do() -> None:
    table, (cos, sin) = (make(CONFIG, CPU, torch.float32) for make in (rotary_table, rotary_factors))
    x = torch.randn(len(table), 16)
    turned = torch.view_as_real(torch.view_as_complex(x.unflatten(1, (-1, 2))) * table).flatten(1)
    torch.testing.assert_close(x * cos + x.unflatten(1, (-1, 2)).flip(2).flatten(1) * sin, turned)


@pytest.mark.parametrize("n", [5, 7, 8, 20, 23])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_token_shift_by_index_is_the_one_by_slices(n: int, sign: int) -> None:
    """Seven positions of text before rows of four codes; whole and unfinished rows."""
    x = torch.randn(2, n, 8)
    index = sources(n, 7, 4, sign, CPU)[None, :, :, None]
    taken = x.unflatten(2, (4, 2)).gather(1, index.clamp_min(0).expand(2, -1, -1, 2))
    expected = (shifted if sign > 0 else unshifted)(x, 7, 4, x.dtype)
    torch.testing.assert_close(torch.where(index < 0, 0, taken).flatten(2), expected, rtol=0, atol=0)
