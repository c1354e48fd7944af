"""A CLIP model with random weights, so small that a test can make and run it, saved as published ones are."""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import CLIPModel, CLIPTokenizer

SIDE = 32


def small_clip() -> tuple[CLIPModel, CLIPTokenizer]:
    """A model for pictures of SIDE x SIDE pixels, and a tokenizer whose tokens are letters."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer  # seconds, in each of pytest's processes

    ends = ["<|startoftext|>", "<|endoftext|>"]
    tokens = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase), *ends]
    vocab = {token: number for number, token in enumerate(tokens)}
    start, end = (vocab[token] for token in ends)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **size, "vocab_size": len(vocab), "max_position_embeddings": 16,
            "bos_token_id": start, "eos_token_id": end, "pad_token_id": end,
        },
        vision_config={**size, "image_size": SIDE, "patch_size": 8},
        projection_dim=16,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CLIPModel(config).eval()
        for parameter in model.parameters():  # the library's own start is so small that all pictures look alike
            torch.nn.init.normal_(parameter.data, std=0.3)
    return model, CLIPTokenizer(vocab=vocab, merges=[])


def save_clip(folder: Path) -> Path:
    """Write it as safetensors."""
    model, tokenizer = small_clip()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
