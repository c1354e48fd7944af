"""A language model as others publish it on the Hub, with some thousand weights, and runs that go on from it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from testbed.tiny_words import tiny_words
from tt_cli.checkpoint.hash_tree import tensor_digest
from tt_cli.data import builtin
from tt_cli.run import CausalLmRun

BASE = "acme/base"


def published_model(folder: Path, **changes: object) -> dict[str, bytes]:
    """The files of a small Llama's repository: weights in bfloat16, configuration, tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 256, "head_dim": 16}
    config = AutoConfig.for_model("llama", **sizes, bos_token_id=None, eos_token_id=0, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder, **changes)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"tokenizer.json": builtin.checked_file("austen", "tokenizer.json").read_bytes()}


def tuned_run(folder: Path, *, lora: int = 0, **changes: object) -> CausalLmRun:
    """A run that goes on from the weights in a folder, as BASE. lora: the rank of adapters; 0: none."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    digest = tensor_digest({name: parameter.detach() for name, parameter in model.named_parameters()})
    parts: dict[str, object] = {"pretrained": {"name": BASE, "digest": digest}}
    parts |= {"lora": {"rank": lora}} if lora else {}
    return tiny_words(rms_norm_eps=1e-6).replaced({"run.name": "tuned", **parts, **changes})
