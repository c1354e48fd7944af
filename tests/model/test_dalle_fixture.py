"""Parity with the code that trained the paper's checkpoint, within that code's own float32 deviation."""

from __future__ import annotations

import pytest
import torch
from model import published_fixture as fixture
from model.slow_drawing import generate, whole_logits
from torch import Tensor

from tt_cli.model.layers import attention
from tt_cli.model.layers.attention import AttentionPattern
from tt_cli.model.published_names import published_names
from tt_cli.model.sampling.code_choice import Sampling

MODES = pytest.mark.parametrize("mode", ["reversible", "sequential"])
PATHS = pytest.mark.parametrize("dense_positions", [0, 1000], ids=["structured", "dense"])


def split(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The two blocks that may be finite: text rows on text ids, image rows on codes."""
    config = fixture.config()
    rows, ids = config.text_length, config.text_ids
    return logits[:, :rows, :ids], logits[:, rows:, ids:]


@MODES
@PATHS
@torch.no_grad()
def test_logits(mode: str, dense_positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "DENSE_POSITIONS", dense_positions)
    config = fixture.config()
    logits = whole_logits(fixture.model(reversible=mode == "reversible"), fixture.text(), fixture.image())
    assert logits.shape == (2, config.sequence_length, config.vocab)
    # Each float32 run deviates from float64 on its own; the fixture's scale is one such run.
    scale = 2 * fixture.facts()[mode]["logits_maxdiff"]
    for ours, name in zip(split(logits), ("text_logits", "image_logits"), strict=True):
        assert (ours - fixture.tensors()[f"{mode}.{name}"]).abs().max() <= scale
    lowest = torch.finfo(torch.float32).min
    assert (logits[:, : config.text_length, config.text_ids :] == lowest).all()
    assert (logits[:, config.text_length :, : config.text_ids] == lowest).all()


@MODES
@PATHS
@pytest.mark.parametrize("codes", [0, 1, 8, 11, 63])
@torch.no_grad()
def test_logits_of_a_part_are_those_of_the_whole(
    mode: str, dense_positions: int, codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture's own partial logits (0 and 11 codes) equal the first rows of its whole ones exactly."""
    monkeypatch.setattr(attention, "DENSE_POSITIONS", dense_positions)
    dalle = fixture.model(reversible=mode == "reversible")
    logits = whole_logits(dalle, fixture.text(), fixture.image()[:, :codes])
    assert logits.shape[1] == fixture.config().text_positions + codes
    scale = 2 * fixture.facts()[mode]["logits_maxdiff"]
    for ours, name in zip(split(logits), ("text_logits", "image_logits"), strict=True):
        theirs = fixture.tensors()[f"{mode}.{name}"][:, : ours.shape[1]]
        assert (ours - theirs).abs().max() <= scale


@MODES
@PATHS
@pytest.mark.parametrize("budget", [0, 50_000, 1 << 30])
def test_losses_and_gradients(mode: str, dense_positions: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "DENSE_POSITIONS", dense_positions)
    facts = fixture.facts()
    dalle = fixture.model(reversible=mode == "reversible")
    dalle.activation_budget = budget
    losses = dalle.loss(fixture.text(), fixture.image())
    expected = [facts[mode][key] for key in ("loss", "loss_text", "loss_image")]
    assert [x.item() for x in losses] == pytest.approx(expected, abs=2e-6)
    losses.total.backward()

    # The recomputing backward rebuilds activations from rounded outputs; so did the reference's.
    scale = 3 * max(facts[mode]["grad_maxrel"], 1e-5)
    parameters = dict(dalle.named_parameters())
    names = published_names(dalle.config)
    assert len(names) == len(parameters) == len(facts[mode]["grad_norms"])
    for ours, aliases in names.items():
        gradient = parameters[ours].grad
        assert gradient is not None
        theirs = next(a for a in aliases if a in facts[mode]["grad_norms"])
        assert gradient.norm().item() == pytest.approx(facts[mode]["grad_norms"][theirs], rel=scale)
        step = facts["grad_stride"] if gradient.numel() > facts["grad_full_up_to"] else 1
        difference = gradient.flatten()[::step] - fixture.tensors()[f"{mode}.grads.{theirs}"]
        assert difference.abs().max() <= scale * facts[mode]["grad_max"][theirs], ours


@MODES
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_greedy_codes(mode: str, cache: bool) -> None:
    dalle = fixture.model(reversible=mode == "reversible")
    codes = generate(dalle, fixture.text(), Sampling(top_k=1), cache=cache)
    assert torch.equal(codes, fixture.tensors()[f"{mode}.greedy"].long())


@pytest.mark.parametrize("kind", ["axial_row", "axial_col", "conv_like"])
def test_masks(kind: str) -> None:
    config = fixture.config()
    pattern = AttentionPattern(kind, config.text_positions, config.image_size, config.conv_kernel)
    assert torch.equal(pattern.mask(config.sequence_length), fixture.tensors()[f"mask.{kind}"])


@torch.no_grad()
def test_negative_control() -> None:
    """A later version's conv_like window gives visibly other logits: the parity above can tell them apart."""
    _, ours = split(whole_logits(fixture.model(), fixture.text(), fixture.image()))
    assert (ours[:1] - fixture.tensors()["control.image_logits"]).abs().max() > 1
