"""Causal language models: one text for one model, equal first weights everywhere, losses as of plain ones."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tt_cli.errors import UsageError
from tt_cli.model.causal_lm import canonical, causal_lm, next_token_loss

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64},
    "llama": {"model_type": "llama", **LLAMA},
    "qwen2": {"model_type": "qwen2", **LLAMA, "tie_word_embeddings": True},
}
DIGESTS = {
    "gpt2": "06bd658bf20f5055",
    "llama": "968ebc3754f4d7d6",
    "qwen2": "9e36f3950bc06701",
}  # of seed 7, on any machine


def digest(model: nn.Module) -> str:
    parts = (part for name, p in model.named_parameters() for part in (name.encode(), p.detach().numpy().tobytes()))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_decides_the_first_weights_to_the_byte(name: str) -> None:
    text = canonical(MODELS[name])
    torch.manual_seed(1)
    one = causal_lm(text, seed=7)
    torch.manual_seed(2)
    assert digest(one) == digest(causal_lm(text, seed=7)) == DIGESTS[name]
    assert digest(one) != digest(causal_lm(text, seed=8))


@pytest.mark.parametrize("name", MODELS)
def test_they_vary_as_transformers_own_do(name: str) -> None:
    config = {key: value for key, value in MODELS[name].items() if key != "model_type"}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config))
    theirs = dict(plain.named_parameters())
    ours = dict(causal_lm(canonical(MODELS[name]), seed=0).named_parameters())
    assert list(ours) == list(theirs)
    for each, parameter in ours.items():
        torch.testing.assert_close(parameter.std(), theirs[each].std(), rtol=0.15, atol=1e-7, msg=each)
        torch.testing.assert_close(parameter.mean(), theirs[each].mean(), rtol=0, atol=4e-3, msg=each)


def test_a_layers_weights_do_not_depend_on_what_is_beside_it() -> None:
    deeper = causal_lm(canonical(MODELS["llama"] | {"num_hidden_layers": 3}), seed=0)
    parameters = dict(deeper.named_parameters())
    for name, own in causal_lm(canonical(MODELS["llama"]), seed=0).named_parameters():
        assert torch.equal(own, parameters[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_plain_transformers(name: str) -> None:
    model = causal_lm(canonical(MODELS[name]), seed=0).eval()
    config = {key: value for key, value in MODELS[name].items() if key != "model_type"}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config), attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(0))
    loss, expected = next_token_loss(model, ids), plain(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    theirs = dict(plain.named_parameters())
    for each, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[each].grad, rtol=1e-3, atol=1e-6, msg=each)


def test_attention_is_that_of_torch() -> None:
    model: Any = causal_lm(canonical(MODELS["gpt2"]), seed=0)
    assert model.config._attn_implementation == "sdpa"


def test_on_meta_there_are_names_and_shapes_alone() -> None:
    text = canonical(MODELS["qwen2"])
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in causal_lm(text, seed=None).named_parameters()}
    assert shapes == {name: p.shape for name, p in causal_lm(text, seed=0).named_parameters()}
    assert "lm_head.weight" not in shapes  # tied


@pytest.mark.parametrize("name", MODELS)
def test_one_model_is_one_text(name: str) -> None:
    text = canonical(MODELS[name])
    assert canonical(json.loads(text)) == text == canonical(dict(reversed(MODELS[name].items())))
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    published = AutoConfig.for_model(**json.loads(text)).to_dict()  # as in a config.json
    assert published["transformers_version"] and canonical(published) == text
    assert canonical(MODELS[name] | {"vocab_size": 65}) != text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "nothing"}, 'model_type = "nothing": Unrecognized model identifier: nothing'),
        ({}, "model_type = null: "),
        ({**MODELS["llama"], "hidden_size": "wide"}, "hidden_size' expected int, got str"),
        ({**MODELS["llama"], "auto_map": {"AutoModel": "evil.Model"}}, "auto_map: a configuration that is trained"),
        ({**MODELS["llama"], "rms_norm_eps": float("nan")}, "cannot be written as JSON"),
    ],
)
def test_what_is_no_configuration_is_one_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        canonical(fields)
    assert "\n" not in str(caught.value)


def test_a_model_that_predicts_no_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="no causal language model of vit: "):
        causal_lm(canonical({"model_type": "vit"}), seed=0)


def says(logits: torch.Tensor) -> nn.Module:
    """A model that has one answer."""
    return cast(nn.Module, lambda **given: SimpleNamespace(logits=logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 8, 50])
def test_the_loss_and_its_gradient_are_torchs(dtype: torch.dtype, length: int) -> None:
    ids = torch.randint(0, 40, (3, length + 1), generator=torch.Generator().manual_seed(0))
    drawn = torch.randn(3, length, 40, generator=torch.Generator().manual_seed(1)) * 5
    found = []
    for ours in (True, False):
        logits = drawn.to(dtype).requires_grad_()
        if ours:
            loss = next_token_loss(says(logits), ids)
        else:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        (3 * loss).backward()
        assert logits.grad is not None and loss.dtype == torch.float32
        found.append((loss.detach(), logits.grad))
    (loss, gradient), (same, theirs) = found
    torch.testing.assert_close(loss, same, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, theirs, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-9)
    with torch.no_grad():
        assert not next_token_loss(says(drawn), ids).requires_grad


def test_in_fp16_the_gradients_of_unlikely_tokens_are_there() -> None:
    """Of a scaled loss: each would be less than three times the smallest number without."""
    logits = torch.zeros(1, 1000, 6000, dtype=torch.float16, requires_grad=True)
    (2.0**16 * next_token_loss(says(logits), torch.zeros(1, 1001, dtype=torch.int64))).backward()
    assert logits.grad is not None
    torch.testing.assert_close(float(logits.grad[0, 0, 1]), 2.0**16 / 1000 / 6000, rtol=1e-3, atol=0)
