"""`tt calc`: what it prints, its JSON, wrong input, and that it costs no import of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tt_cli.cli.main import main
from tt_cli.run import load_run

WITHOUT_TORCH = """
import contextlib, io, sys
from tt_cli.cli.main import main
for words in ("gpt2-large --gpu 8GB --8bit --offload", "dalle --gpu t4 --compare", "--list"):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["calc", *words.split()]) == 0
print(sorted({"torch", "hivemind", "datasets", "numpy", "transformers"} & set(sys.modules)))
"""


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["calc", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_torch_is_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_json_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "gpt2-large", "--gpu", "24GB", "--8bit", "--checkpointing")
    assert found["parameters"] == 774_030_080 and found["fits"] is True
    assert found["gpu_bytes"] == sum(c["bytes"] for c in found["components"] if c["place"] == "device")
    assert found["host_bytes"] == sum(c["bytes"] for c in found["components"] if c["place"] == "host")
    assert found["settings"]["micro_batch"] == found["largest_micro_batch"] > 1
    assert found["settings"]["state_bits"] == 8 and found["settings"]["layers"] == "checkpointed"
    assert found["network"]["seconds"] > 0 and found["compute"]["flops"] > 1e15
    assert found["smallest_change"] is None and "compared" not in found


def test_what_does_not_fit_is_told_a_change_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "gpt2-large", "--gpu", "12GB")
    assert found["fits"] is False and found["largest_micro_batch"] == 0
    fixed = answer(capsys, "gpt2-large", "--gpu", "12GB", *" ".join(found["smallest_change"]).split())
    assert fixed["fits"] is True


def test_a_run_file_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[2] / "configs" / "dalle.toml"
    assert answer(capsys, str(file), "--gpu", "16GB") == answer(capsys, "dalle", "--gpu", "16GB")


def test_a_run_with_local_steps_shares_parameters_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "local.toml"
    file.write_text(load_run("dalle").replaced({"optimizer": {"name": "local", "sparse": 0}}).to_toml())
    local, plain = (answer(capsys, run, "--gpu", "16GB") for run in (str(file), "dalle"))
    sizes = [{part["what"]: part["bytes"] for part in each["components"]} for each in (local, plain)]
    assert sizes[0]["shared state"] == 4 * local["parameters"] < sizes[1]["shared state"]
    assert "inner moments" in sizes[0] and "local steps" in local["reasons"]["optimizer"]
    assert local["reasons"]["inner steps"].startswith("16 of 16 examples by each of 16 peers for a global step")
    assert local["network"]["bytes_per_hour"] > local["network"]["bytes_each_way"]
    sparse = tmp_path / "sparse.toml"
    sparse.write_text(load_run("dalle").replaced({"optimizer": {"name": "local", "sparse": 64}}).to_toml())
    less = answer(capsys, str(sparse), "--gpu", "16GB")
    assert 0.1 < less["network"]["bytes_each_way"] / local["network"]["bytes_each_way"] < 0.25
    assert less["settings"]["compression"] == "64 of 4,096"
    assert main(["calc", str(file), "--bits", "8"]) == 2
    assert "leave the optimizer out" in capsys.readouterr().err


def test_people_see_a_table_with_bars_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calc", "gpt2", "--gpu", "t4", "--compare"]) == 0
    text = capsys.readouterr().out
    for words in ("124,439,808 parameters", "optimizer state", "█", "✓ it fits", "largest micro-batch that fits",
                  "precision: mixed", "technique", "gradient checkpointing", "Mbit/s", "FLOP"):  # fmt: skip
        assert words in text
    assert main(["calc", "gpt2", "--gpu", "2GB"]) == 0
    assert "✗ it does not fit" in capsys.readouterr().out


def test_the_list_names_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calc", "--list"]) == 0
    assert "774,030,080 parameters" in capsys.readouterr().out
    assert main(["calc", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpt2"] == 124_439_808


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which model?"),
        (["gpt2-lrage"], "did you mean 'gpt2-large'?"),
        (["emojy"], "did you mean 'emoji'?"),
        (["gpt2", "--gpu", "8XB"], "no amount of memory"),
        (["gpt2", "--gpu", "8"], "(without a unit it is bytes): write it like 8GB"),
        (["gpt2", "--gpu", "rtx309"], "did you mean 'rtx3090'?"),
        (["gpt2", "--gpu", "8GB", "--cpu", "4GB"], "--gpu and --cpu"),
        (["gpt2", "--micro-batch", "0"], "--micro-batch 0"),
        (["gpt2", "--micro-batch", "x"], "--micro-batch: x: should be a valid integer"),
        (["gpt2", "--line", "0"], "--line 0"),
        (["gpt2", "--line", "nan"], "--line nan"),
        (["gpt2", "--peers", "0"], "--peers 0"),
        (["gpt2", "--bits", "4"], "--bits: '4' is not one of '32', '16', '8'"),
        (["gpt2", "--alone", "--compression", "fp16"], "--alone"),
        (["gpt2", "--sequence", "4096"], "1024 positions"),
        (["t5-base", "--attention", "fused"], "--attention eager"),
        (["gpt2", "--optimizer", "adafactor", "--8bit"], "no 8-bit state"),
        (["dalle", "--checkpointing"], "--checkpointing: no peer of a run"),
        (["nowhere.toml"], "cannot read the run file"),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["calc", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
