"""The built-in emoji runs fit the data, the tokenizer and the VQGAN that ship with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tt_cli
from tt_cli.run import load_run

SHIPPED = Path(tt_cli.__file__).parent / "data" / "builtin" / "emoji"


@pytest.mark.parametrize("name", ["emoji", "emoji-demo"])
def test_tokenizer_and_vqgan_have_what_the_run_file_says(name: str) -> None:
    vocabulary = json.loads((SHIPPED / "tokenizer.json").read_text())["model"]["vocab"]
    vqgan, run = json.loads((SHIPPED / "vqgan.json").read_text()), load_run(name)
    assert run.tokenizer.vocab_size == max(vocabulary.values()) + 1
    assert run.tokenizer.pad_id in vocabulary.values()
    assert (run.vqgan.codebook_size, run.vqgan.pixels) == (vqgan["codebook_size"], vqgan["resolution"])
    assert run.vqgan.grid == vqgan["resolution"] // 2 ** (len(vqgan["channel_multipliers"]) - 1)
