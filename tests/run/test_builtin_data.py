"""The built-in emoji runs fit the data, the tokenizer and the VQGAN that ship with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tt_cli
from tt_cli.run import load_run

SHIPPED = Path(tt_cli.__file__).parent / "data" / "builtin" / "emoji"


@pytest.mark.parametrize("name", ["emoji", "emoji-demo"])
def test_the_tokenizer_has_the_run_files_vocabulary(name: str) -> None:
    vocabulary = json.loads((SHIPPED / "tokenizer.json").read_text())["model"]["vocab"]
    run = load_run(name)
    assert run.tokenizer.vocab_size == max(vocabulary.values()) + 1
    assert run.tokenizer.pad_id in vocabulary.values()


@pytest.mark.parametrize("name", ["emoji", "emoji-demo"])
def test_the_vqgan_has_the_run_files_codebook_and_grid(name: str) -> None:
    vqgan = json.loads((SHIPPED / "vqgan.json").read_text())
    run = load_run(name)
    assert run.vqgan.codebook_size == vqgan["codebook_size"]
    assert run.vqgan.pixels == vqgan["resolution"]
    assert run.vqgan.grid == vqgan["resolution"] // 2 ** (len(vqgan["channel_multipliers"]) - 1)
