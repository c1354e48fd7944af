"""A language model as others publish it on the Hub, with some thousand weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tt_cli.data import builtin

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
