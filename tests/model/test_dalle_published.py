"""The published checkpoint's names, at full size on the meta device and with real weights at tiny size."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from model import published_fixture as fixture
from model.published_fixture import export_published
from torch import Tensor

from tt_cli.errors import UsageError
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.published_names import from_published, load_published, published_names
from tt_cli.run import load_run

# Keys and shapes of dalle-pytorch 1.6.6 with the paper's settings, reversible and sequential; `optimize_for_inference`
# changes none of them.
LATER_KEYS = Path(__file__).parent / "data" / "dalle_later_keys.json.gz"

LAYER = "model.transformer.layers.blocks.3"
QKV = f"{LAYER}.f.net.fn.fn.fn.to_qkv.weight"


def paper_model(reversible: bool = True) -> Dalle:
    with torch.device("meta"):
        return Dalle(DalleConfig.from_run(load_run("dalle").replaced({"model.reversible": reversible})))


def tiny_shape() -> Dalle:
    """The fixture's model without values."""
    with torch.device("meta"):
        return Dalle(fixture.config())


def test_the_papers_model_has_the_published_tensors() -> None:
    dalle = paper_model()
    parameters = list(dalle.named_parameters())
    assert len(parameters) == 423
    assert sum(p.numel() for _, p in parameters) == 125_894_244
    biases = [p for name, p in parameters if "bias" in name]
    assert (len(biases), sum(p.numel() for p in biases)) == (145, 223_844)
    large = [p for _, p in parameters if p.numel() > 65536]
    assert (len(large), sum(p.numel() for p in large)) == (21, 125_407_232)

    exported = export_published(dalle)
    assert len(exported) == 841
    assert {key: list(tensor.shape) for key, tensor in exported.items()} == fixture.published_keys()
    load_published(dalle, exported)


def full_size_keys(reversible: bool, later: bool) -> dict[str, list[int]]:
    """Key -> shape at the paper's size, without prefix, from lists that the packages themselves gave."""
    if later:
        known = json.loads(gzip.decompress(LATER_KEYS.read_bytes()))
        return known["reversible" if reversible else "sequential"]
    rename = str if reversible else fixture.sequential_name
    return {rename(key).removeprefix("model."): shape for key, shape in fixture.published_keys().items()}


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("reversible", [False, True])
def test_every_naming_at_full_size(reversible: bool, later: bool, prefix: str) -> None:
    dalle, keys = paper_model(reversible), full_size_keys(reversible, later)
    assert len(keys) == 841
    names = published_names(dalle.config, later=later)
    assert keys.keys() == {"transformer.pos_emb", *(alias for aliases in names.values() for alias in aliases)}

    state = {prefix + key: torch.empty(shape, device="meta") for key, shape in keys.items()}
    found = from_published(dalle, state)
    shapes = {name: parameter.shape for name, parameter in dalle.named_parameters()}
    assert {name: tensor.shape for name, tensor in found.items()} == shapes
    assert len(found) == 423

    key = f"{prefix}{names['feed_forward.4.contract.weight'][0]}"  # of the last layer
    with pytest.raises(UsageError, match=f"1 missing .{key.removeprefix('model.')}.; use the run file"):
        from_published(dalle, {name: tensor for name, tensor in state.items() if name != key})
    with pytest.raises(UsageError, match=f"{key.removeprefix('model.')} has shape"):
        from_published(dalle, state | {key: torch.empty(1024, 4095, device="meta")})
    with pytest.raises(UsageError, match="another function"):
        from_published(paper_model(not reversible), state)


def test_round_trip() -> None:
    dalle = fixture.model()
    exported = export_published(dalle)
    published = fixture.state()
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[key], published[key]) for key in published)
    other = Dalle(fixture.config())
    load_published(other, exported)
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
    load_published(dalle, state)
    expected = fixture.model()
    assert all(torch.equal(a, b) for a, b in zip(dalle.parameters(), expected.parameters(), strict=True))


def refused(state: dict[str, Tensor], message: str) -> None:
    """The state is refused with a line that matches, and the model stays as it was."""
    dalle = Dalle(fixture.config())
    before = [p.clone() for p in dalle.parameters()]
    with pytest.raises(UsageError, match=message) as caught:
        load_published(dalle, state)
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
    refused(
        fixture.state(reversible=False),
        "do not fit the reversible model .*; they are a sequential model's, another function; use the run file",
    )


def test_wrong_shapes_values_and_types_are_refused() -> None:
    refused(
        fixture.state() | {QKV: torch.zeros(3, 5)}, r"to_qkv.weight has shape \(3, 5\), the model needs \(192, 64\)"
    )
    bad = fixture.state()[f"{LAYER}.g.net.scale"].clone()
    bad[0, 0, 7] = torch.nan
    refused(fixture.state() | {f"{LAYER}.g.net.scale": bad}, r"3.g.net.scale holds values that are not finite")
    refused(fixture.state() | {QKV: torch.zeros(192, 64, dtype=torch.int64)}, "to_qkv.weight is torch.int64")


def test_a_value_that_is_not_finite_is_found_in_every_tensor_and_alias() -> None:
    dalle, state = tiny_shape(), fixture.state()
    assert len(state) == 113
    for index, (key, tensor) in enumerate(state.items()):
        bad = tensor.clone()
        bad.view(-1)[(7 * index) % bad.numel()] = (torch.nan, torch.inf, -torch.inf)[index % 3]
        with pytest.raises(UsageError, match=f"{key.removeprefix('model.')} holds values that are not finite"):
            from_published(dalle, state | {key: bad})
    key = "model.to_logits.0.weight"
    with pytest.raises(UsageError, match="to_logits.0.weight holds values that are not finite"):
        from_published(dalle, state | {key: state[key].double() * 1e300})  # finite there, but not in float32


def test_half_precision_is_read() -> None:
    halves = {key: tensor if key.endswith("pos_emb") else tensor.bfloat16() for key, tensor in fixture.state().items()}
    dalle = Dalle(fixture.config())
    load_published(dalle, halves)
    assert {parameter.dtype for parameter in dalle.parameters()} == {torch.float32}
    assert torch.equal(dalle.logits.bias, fixture.state()["model.to_logits.1.bias"].bfloat16().float())


def test_the_public_packages_vqgan_beside_the_decoder_is_left_out() -> None:
    dalle = Dalle(fixture.config())
    load_published(dalle, fixture.state() | {"model.vae.model.encoder.conv_in.weight": torch.zeros(3)})
    load_published(
        dalle,
        {key.removeprefix("model."): value for key, value in fixture.state().items()} | {"vae.codebook": torch.ones(2)},
    )
    assert torch.equal(dalle.logits.bias, fixture.state()["model.to_logits.1.bias"])


def test_a_name_with_and_without_prefix_is_refused() -> None:
    refused(fixture.state() | {"to_logits.0.weight": torch.ones(64)}, "to_logits.0.weight stands there twice")


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
        export_published(Dalle(fixture.config(**{feature: False})))
