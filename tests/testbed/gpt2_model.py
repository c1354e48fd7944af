"""A GPT-2 of transformers: from the Hub, a folder, or a tiny one made here; and the calculator's word for it.

Used by scripts/finetune_gpt2.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from testbed.text_stream import readable
from tt_cli.data import builtin
from tt_cli.errors import UsageError
from tt_cli.hub.hub_files import download
from tt_cli.memory.architectures import ARCHITECTURES, Architecture

TINY = "a tiny GPT-2"
# without dropout, which would take fused attention away on a CPU; its ids are those of the built-in tokenizer
_SHAPE = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 1024, "resid_pdrop": 0.0}
_SHAPE |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}


def configuration(name: str, device: torch.device) -> Any:
    """Of transformers. name: TINY, a folder, or OWNER/NAME on the Hub. Raises TTError."""
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    if name == TINY:
        config = hf.GPT2Config(**_SHAPE)
    else:
        folder = _files(name, "config.json")
        with readable(f"the model {name}"):
            config = hf.AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type != "gpt2":
            raise UsageError(f"the model {name} is a {config.model_type}: only a GPT-2 will do")
    eager = device.type == "cpu" and config.attn_pdrop  # there torch has no fused attention with dropout
    config._attn_implementation = "eager" if eager else "sdpa"
    return config


def architecture(config: Any, name: str, sequence: int) -> Architecture:
    """What the calculator is asked about."""
    dim, heads = config.n_embd, config.n_head
    return replace(
        ARCHITECTURES["gpt2"], title=name, layers=config.n_layer, dim=dim, heads=heads, dim_head=dim // heads,
        hidden=config.n_inner or 4 * dim, vocab=config.vocab_size, positions=config.n_positions, sequence=sequence,
        dropout=config.resid_pdrop,
    )  # fmt: skip


def weights(config: Any, name: str, saved: Path | None, dtype: torch.dtype) -> tuple[Any, Path]:
    """The model in the host's memory, and the file of its tokenizer; as it was saved, else as published or drawn.

    Raises TTError.
    """
    import transformers as hf

    if name == TINY:
        folder = saved or builtin.checked_file("emoji", "tokenizer.json").parent
    else:
        folder = saved or _files(name, "tokenizer.json", "model.safetensors")
    with readable(f"the model in {folder}"):
        if name == TINY and not saved:
            return hf.GPT2LMHeadModel(config).to(dtype), folder / "tokenizer.json"
        model = hf.GPT2LMHeadModel.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True)
        return model, folder / "tokenizer.json"


def _files(name: str, *files: str) -> Path:
    """The folder where they are, fetched if they are on the Hub. Raises TTError."""
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    return [download(name, file) for file in files][-1].parent
