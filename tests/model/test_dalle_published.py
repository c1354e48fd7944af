"""The published checkpoint's names, at full size on the meta device and with real weights at tiny size."""

from __future__ import annotations

import pytest
import torch
from model import published_fixture as fixture
from torch import Tensor

from tt_cli.errors import UsageError
from tt_cli.model import Dalle, DalleConfig
from tt_cli.run import load_run

LAYER = "model.transformer.layers.blocks.3"
QKV = f"{LAYER}.f.net.fn.fn.fn.to_qkv.weight"


def paper_model() -> Dalle:
    with torch.device("meta"):
        return Dalle(DalleConfig.from_run(load_run("dalle")))


def test_the_papers_model_has_the_published_tensors() -> None:
    dalle = paper_model()
    parameters = list(dalle.named_parameters())
    assert len(parameters) == 423
    assert sum(p.numel() for _, p in parameters) == 125_894_244
    biases = [p for name, p in parameters if "bias" in name]
    assert (len(biases), sum(p.numel() for p in biases)) == (145, 223_844)
    large = [p for _, p in parameters if p.numel() > 65536]
    assert (len(large), sum(p.numel() for p in large)) == (21, 125_407_232)

    exported = dalle.export_published()
    assert len(exported) == 841
    assert {key: list(tensor.shape) for key, tensor in exported.items()} == fixture.published_keys()
    dalle.load_published(exported)


def test_round_trip() -> None:
    dalle = fixture.model()
    exported = dalle.export_published()
    published = fixture.state()
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[key], published[key]) for key in published)
    other = Dalle(fixture.config())
    other.load_published(exported)
    assert all(torch.equal(a, b) for a, b in zip(dalle.parameters(), other.parameters(), strict=True))


def later_name(key: str) -> str:
    """dalle-pytorch 1.4's name, by the renaming that the paper's authors used for their checkpoint."""
    if ".norm." not in key and ".scale" not in key:
        key = key.replace("net.fn.fn", "net.fn.fn.fn")
        key = key.replace("to_qkv", "fn.to_qkv").replace("to_out", "fn.to_out")
    return key


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("later", [False, True])
def test_other_names_of_the_same_weights(prefix: str, later: bool) -> None:
    state = {prefix + key.removeprefix("model."): tensor for key, tensor in fixture.state().items()}
    if later:
        state = {later_name(key): tensor for key, tensor in state.items()}
        assert f"{prefix}transformer.layers.blocks.0.f.net.fn.fn.fn.fn.fn.to_qkv.weight" in state
    dalle = Dalle(fixture.config())
    dalle.load_published(state)
    expected = fixture.model()
    assert all(torch.equal(a, b) for a, b in zip(dalle.parameters(), expected.parameters(), strict=True))


def refused(state: dict[str, Tensor], message: str) -> None:
    """The state is refused with a line that matches, and the model stays as it was."""
    dalle = Dalle(fixture.config())
    before = [p.clone() for p in dalle.parameters()]
    with pytest.raises(UsageError, match=message) as caught:
        dalle.load_published(state)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, dalle.parameters(), strict=True))


def test_missing_and_unexpected_names_are_refused() -> None:
    state = fixture.state()
    del state[QKV]
    refused(state, r"1 missing \(transformer.layers.blocks.3.f.net.fn.fn.fn.to_qkv.weight\)")
    refused(fixture.state() | {"model.visual.weight": torch.zeros(1)}, r"1 unexpected \(visual.weight\)")
    state = fixture.state()
    del state["model.transformer.pos_emb"]
    refused(state, r"1 missing \(transformer.pos_emb\)")
    refused({}, "113 missing .*, …")


def test_the_other_trunks_weights_are_refused() -> None:
    """Sequential and reversible trunks are different functions of tensors with the same shapes."""
    refused(fixture.state(reversible=False), "do not fit the reversible model")


def test_wrong_shapes_values_and_types_are_refused() -> None:
    refused(
        fixture.state() | {QKV: torch.zeros(3, 5)},
        r"to_qkv.weight has shape \(3, 5\), the model needs \(192, 64\)",
    )
    bad = fixture.state()[f"{LAYER}.g.net.scale"].clone()
    bad[0, 0, 7] = torch.nan
    refused(fixture.state() | {f"{LAYER}.g.net.scale": bad}, r"3.g.net.scale holds values that are not finite")
    refused(fixture.state() | {QKV: torch.zeros(192, 64, dtype=torch.int64)}, "to_qkv.weight is torch.int64")


def test_shared_tensors_that_differ_are_refused() -> None:
    qkv = "model.transformer.layers.blocks.4.f.net.fn.fn.fn.to_qkv.weight"  # layer 4 shares with layer 0
    refused(
        fixture.state() | {qkv: fixture.state()[qkv] + 1},
        "blocks.4.f.net.fn.fn.fn.to_qkv.weight and .*blocks.0.* differ",
    )
    refused(
        fixture.state() | {"model.image_emb.linear.bias": torch.zeros(180)},
        "image_emb.linear.bias and to_logits.1.bias differ",
    )


def test_other_rotary_angles_are_refused() -> None:
    angles = fixture.state()["model.transformer.pos_emb"]
    refused(fixture.state() | {"model.transformer.pos_emb": angles * 1.001}, "other rotary angles")


@pytest.mark.parametrize("feature", ["tied_embeddings", "rotary", "shift_tokens"])
def test_unpublished_variants_are_refused(feature: str) -> None:
    with pytest.raises(UsageError, match=f"{feature} is false; published names exist only"):
        Dalle(fixture.config(**{feature: False})).export_published()
