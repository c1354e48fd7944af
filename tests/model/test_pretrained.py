"""Weights that others trained, and adapters on them: equal everywhere, and as transformers and peft have them."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from model.test_causal_lm import MODELS, digest
from safetensors.torch import load_file, save_file
from testbed.pretrained import published_model
from torch import nn
from transformers import AutoModelForCausalLM

from tt_cli.errors import TTError, UsageError
from tt_cli.model.causal_lm import adapted, canonical, causal_lm, next_token_loss, pretrained
from tt_cli.run.text_parts import LoraPart, PretrainedPart
from tt_cli.task.task import narrow, trained

SOURCE = PretrainedPart(name="acme/base", revision="abc", digest="0" * 64)
IDS = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(0))


def with_adapters(name: str, seed: int | None = 7, rank: int = 4) -> nn.Module:
    return adapted(causal_lm(canonical(MODELS[name]), seed and 0), LoraPart(rank=rank), SOURCE, seed)


@pytest.mark.parametrize("settings", [{}, {"max_shard_size": "20KB"}])
def test_weights_are_those_of_the_repository_in_full_precision(tmp_path: Path, settings: dict[str, str]) -> None:
    config = canonical(json.loads(published_model(tmp_path, **settings)["config.json"]))
    assert len(list(tmp_path.glob("*.safetensors"))) == (3 if settings else 1)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    for other in tmp_path.glob("*config.json"):
        other.unlink()  # a peer fetches weights alone
    model = pretrained(config, tmp_path, "x")
    assert model.training and plain.dtype == torch.bfloat16
    for (name, ours), (same, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (name, ours.dtype) == (same, torch.float32) and torch.equal(ours, theirs.float()), name


def test_wrong_weights_are_one_line(tmp_path: Path) -> None:
    config = canonical(json.loads(published_model(tmp_path)["config.json"]))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, tmp_path / "less")
    (tmp_path / "less").replace(tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="^x has no weights for 1 tensors of model.config, such as model.norm.weight$"):
        pretrained(config, tmp_path, "x")
    wide = canonical(json.loads(config) | {"hidden_size": 64})
    for content in (None, b"\x80\x02evil"):
        if content is not None:
            (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(TTError, match="^x: its weights cannot be read: ") as caught:
            pretrained(wide, tmp_path, "x")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_adapters_begin_as_the_model_does_and_alone_are_trained(name: str) -> None:
    model, plain = with_adapters(name).eval(), causal_lm(canonical(MODELS[name]), 0).eval()
    loss = next_token_loss(model, IDS)
    torch.testing.assert_close(loss, next_token_loss(plain, IDS))
    loss.backward()
    with_gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradients == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(with_gradients) == 2 * 2 * (4 if name == "gpt2" else 7)  # of two layers


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_stay_take_half_the_room_with_the_same_gradients(name: str) -> None:
    gradients, held = [], []
    for dtype in (None, torch.bfloat16):
        model = with_adapters(name)
        narrow(model, dtype)
        held.append(sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad))
        torch.manual_seed(0)  # for dropout
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(model, IDS)
        loss.backward()
        gradients.append([parameter.grad for parameter in trained(model).values()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert held[1] < 0.8 * held[0]  # embeddings and norms are whole


def test_their_first_weights_follow_from_the_seed_and_vary_as_pefts() -> None:
    one = with_adapters("llama")
    assert digest(one) == digest(with_adapters("llama")) != digest(with_adapters("llama", seed=8))
    plain = peft.get_peft_model(
        causal_lm(canonical(MODELS["llama"]), 0), peft.LoraConfig(r=64, target_modules="all-linear")
    )
    theirs = dict(plain.named_parameters())
    for name, ours in with_adapters("llama", rank=64).named_parameters():
        if ".lora_A." in name:
            torch.testing.assert_close(ours.std(), theirs[name].std(), rtol=0.05, atol=0)
        assert ".lora_B." not in name or not ours.any()


def test_on_meta_they_have_the_same_names_and_shapes() -> None:
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in with_adapters("gpt2", None).named_parameters()}
    assert shapes == {name: p.shape for name, p in with_adapters("gpt2").named_parameters()}
