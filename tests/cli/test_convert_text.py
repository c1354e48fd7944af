"""`tt convert` of a language model's checkpoint: what plain transformers loads computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from testbed.full_disk import full_after
from testbed.spawned import python
from testbed.tiny_words import tiny_words

from tt_cli.checkpoint.checkpoint_files import save
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.cli.main import main
from tt_cli.task import task_of
from tt_cli.task.causal_lm_task import CausalLmTask

PLAIN = """\
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = AutoTokenizer.from_pretrained("model")("It is a truth universally acknowledged", return_tensors="pt").input_ids
model = AutoModelForCausalLM.from_pretrained("model")
logits = model(ids).logits.detach()
assert model.generation_config.eos_token_id == model.config.eos_token_id == 0, "or it never stops"
save_file({"ids": ids, "logits": logits}, "plain.safetensors")
assert not any(name.startswith("tt_cli") for name in sys.modules)
"""
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 64}


def checkpoint(folder: Path, run: str) -> tuple[CausalLmTask, Path]:
    config = {} if run == "llama" else GPT2 | {f"{place}_pdrop": 0.0 for place in ("resid", "embd", "attn")}
    tiny = tiny_words(**config, eos_token_id=2)
    task = CausalLmTask(tiny)
    parameters = {name: tensor.detach() for name, tensor in task.new_model().named_parameters()}
    return task, save(folder, TrainingState(7, parameters, {}, tiny.to_toml(), tiny.identity), keep=10)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_plain_transformers_loads_it_with_equal_logits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task, file = checkpoint(tmp_path / "own", kind)
    assert main(["convert", str(file), "model", "--to", "published"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Wrote a model of ") and 'AutoModelForCausalLM.from_pretrained("model")' in printed
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in Path("model").iterdir()}

    python(PLAIN).check_returncode()
    theirs = load_file("plain.safetensors")
    own = task.tokenizer.document("It is a truth universally acknowledged")[:-1]
    assert theirs["ids"][0].tolist() == own.tolist()
    parameters = {name: tensor.detach() for name, tensor in task.new_model().named_parameters()}
    with torch.no_grad():
        logits = task.filled_model(parameters, "x").eval()(input_ids=torch.from_numpy(own)[None]).logits
    torch.testing.assert_close(logits, theirs["logits"], rtol=0, atol=1e-5)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library that writes the weights raises no OSError."""
    _, file = checkpoint(tmp_path / "own", "llama")
    with full_after(20_000):
        assert main(["convert", str(file), str(tmp_path / "model"), "--to", "published"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"tt: cannot write {tmp_path / 'model'}: ") and "File too large" in error
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_wrong_places_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, file = checkpoint(tmp_path / "own", "llama")
    for out, words in (
        (tmp_path, "is a folder; name a new one"),
        (tmp_path / "none" / "model", "there is no folder"),
        (tmp_path / "x.pt", "run tiny-words is of kind causal_lm, and this is for runs of kind dalle"),
    ):
        assert main(["convert", str(file), str(out), "--to", "published"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("tt: ") and words in error
    assert task_of(tiny_words()).run.kind == "causal_lm"
