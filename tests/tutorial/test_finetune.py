"""The tutorial's script at its tiny size, and the figures of the tutorial's page.

All tests but one call its main(): a process would import torch and transformers again.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hub_standin import HubStandin
from testbed.memory_step import optimizer_of
from testbed.offloaded import Offloaded
from testbed.saved_training import OPTIMIZER, put_back, save, state_tensors
from testbed.spawned import python

from scripts import finetune_gpt2
from tt_cli.cli.calc import question
from tt_cli.cli.main import COMMANDS, loaded
from tt_cli.memory import shown
from tt_cli.memory.report import report

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "finetune_gpt2.py"
PAGE = ROOT / "docs" / "tutorials" / "memory.md"
FEW = ("--tiny", "--steps", "2", "--batch", "4", "--sequence", "64")
STEP = {"event", "step", "loss", "tokens_per_s", "memory_bytes", "peak_bytes", "calculator_bytes"}
START = {"event", "settings", "device", "parameters", "micro_batch", "reason", "calculator_bytes", "components"}
END = {"event", "seconds", "first_loss", "last_loss", "peak_bytes", "calculator_bytes", "error", "saved"}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Call main() with these arguments: exit code, standard output and standard error."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        code = finetune_gpt2.main()
        return code, *capfd.readouterr()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield call
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_tiny_run_learns_within_the_memory_that_was_counted(run: Run) -> None:
    code, out, err = run("--tiny", "--8bit", "--checkpointing", "--json", "--steps", "20")
    assert code == 0, err
    start, *steps, end = events(out)
    assert (set(start), set(steps[0]), set(end)) == (START, STEP, END)
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert end["first_loss"] > 6  # of 1,024 ids: 6.93 before anything is learned
    assert end["last_loss"] < end["first_loss"] - 1
    assert steps[0]["peak_bytes"] is None  # measured in the second step alone, when the optimizer's state is there
    assert start["calculator_bytes"] == end["calculator_bytes"] == steps[-1]["calculator_bytes"]
    assert abs(end["error"]) < 0.1 and end["peak_bytes"] > steps[-1]["memory_bytes"] > 4 * 2 * start["parameters"]


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--precision", "mixed"),
        ("--precision", "pure16", "--8bit"),
        ("--precision", "mixed", "--checkpointing", "--micro-batch", "3"),
    ],
    ids=" ".join,
)
def test_what_is_measured_is_what_the_calculator_says(run: Run, flags: tuple[str, ...]) -> None:
    code, out, _ = run("--tiny", "--steps", "2", "--json", *flags)
    assert code == 0
    assert abs(events(out)[-1]["error"]) < 0.1


def test_steps_are_the_same_in_micro_batches(run: Run) -> None:
    losses = [
        [event["loss"] for event in events(run(*FEW, "--json", "--micro-batch", size)[1])[1:-1]] for size in "431"
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_the_micro_batch_is_the_largest_that_fits_and_says_why(run: Run) -> None:
    code, out, _ = run("--tiny", "--steps", "1", "--batch", "40", "--memory", "700MB")
    reason = re.search(r"micro-batch (\d+): \d+ MiB of 601 MiB on cpu, the largest that fits\n", out)
    assert code == 0 and reason is not None
    assert 1 < int(reason[1]) < 40
    assert "on cpu, a whole step at once" in run(*FEW)[1]


@pytest.mark.parametrize("bits", ["--8bit", None])
def test_a_training_goes_on_where_it_was_saved(run: Run, tmp_path: Path, bits: str | None) -> None:
    def trained(folder: str, steps: int) -> str:
        flags = [bits] if bits else []
        code, out, err = run(*FEW, *flags, "--steps", str(steps), "--save", tmp_path / folder)
        assert code == 0, err
        return out

    trained("whole", 4)
    trained("parts", 2)
    assert "step 3/4" in (out := trained("parts", 4)) and "step 2/4" not in out
    whole, parts = (
        [hashlib.sha256((tmp_path / folder / "step-000004" / name).read_bytes()).hexdigest() for name in (
            "model.safetensors", OPTIMIZER)]
        for folder in ("whole", "parts")
    )  # fmt: skip
    assert whole == parts
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["step-000004"]
    for change, words in ((("--seed", "7"), "was trained with seed 0"), ((), "has 4 steps already")):
        code, _, err = run(*FEW, *([bits] if bits else []), "--steps", "4", "--save", tmp_path / "parts", *change)
        assert code == 2 and words in err


@pytest.mark.parametrize("bits", [32, 8])
def test_an_offloaded_optimizer_does_what_one_beside_the_model_does(bits: int, tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8))

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(3):
            model(torch.randn(4, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    made = partial(optimizer_of, "adam", bits, rate=1e-2)
    plain, moved = model(), model()
    beside, away = made(plain.parameters()), Offloaded(moved.parameters(), made)
    steps(plain, beside, 1)
    steps(moved, away, 1)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))

    # 16-bit weights are copies of float32 ones, which come back with the state
    half = model().bfloat16()
    away = Offloaded(half.parameters(), made)
    for master, own in zip(away.masters, half.parameters(), strict=True):
        own.grad = torch.full_like(own, 1.0)
        assert master.dtype == torch.float32 and torch.equal(master, own.float())
    away.step()
    assert all(torch.equal(m.bfloat16(), own) for m, own in zip(away.masters, half.parameters(), strict=True))
    kept = {name: value.clone() for name, value in state_tensors(half, away).items()}
    assert any(not torch.equal(value, value.bfloat16().float()) for name, value in kept.items() if "master" in name)

    parts: Any = SimpleNamespace(state=dict, go_on=lambda state: None, save=lambda path: None)
    half.save_pretrained = lambda folder: None  # type: ignore[assignment]
    saved = save(tmp_path, 1, {}, half, away, parts, parts)
    again = Offloaded(model().bfloat16().parameters(), made)
    put_back(saved, {"stream": {}}, half, again, parts)
    restored = state_tensors(half, again)
    assert set(restored) == set(kept) and all(torch.equal(restored[name], kept[name]) for name in kept)


def test_a_model_and_c4_come_from_the_hub_as_they_are_needed(hub: HubStandin, run: Run, tmp_path: Path) -> None:
    assert run(*FEW, "--save", tmp_path / "made")[0] == 0
    files = {file.name: file.read_bytes() for file in (tmp_path / "made" / "step-000002").iterdir()}
    hub.put("model", "acme/small", files)
    names = "configs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/c4-train.*.json.gz\n"
    texts = [{"text": f"{number} apples are red. " * 20, "timestamp": "", "url": ""} for number in range(50)]
    shard = gzip.compress("\n".join(map(json.dumps, texts)).encode())
    hub.put("dataset", "allenai/c4", {"README.md": f"---\n{names}---\n", "en/c4-train.00000-of-00001.json.gz": shard})
    small = ("--device", "cpu", "--sequence", "64", "--batch", "4", "--steps", "2", "--json", "--model", "acme/small")
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = python(code, *small, env=hub.environment(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert events(done.stdout)[1]["loss"] < 10


LINES = {"empty": "", "no JSON": "{", "no text": '{"a": 1}', "a number": '{"text": 1}'}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "torch sees no GPU: --tiny trains a small model here"),
        (("--device", "cpu"), 1, "the Hugging Face Hub cannot be reached"),
        (("--device", "cpu", "--model", "BERT"), 2, "is a bert: only a GPT-2 will do"),
        (("--device", "cpu", "--model", "EMPTY"), 2, "cannot read the model"),
        (("--tiny", "--model", "gpt2"), 2, "leave --model out"),
        (("--tiny", "--offload"), 2, "--offload moves the optimizer from a GPU"),
        (("--tiny", "--sequence", "500"), 2, "--sequence 500 is too long"),
        (("--tiny", "--batch", "0"), 2, "--batch 0: must be 1 to"),
        (("--tiny", "--learning-rate", "nan"), 2, "--learning-rate nan: must be"),
        (("--tiny", "--memory", "much"), 2, "'much' is no amount of memory"),
        (("--tiny", "--memory", "10MB"), 2, "only a smaller model or a shorter --sequence would"),
        (("--tiny", "--memory", "700MB", "--micro-batch", "99"), 2, "add --micro-batch 1"),
        (("--tiny", "--save", "/proc/none"), 1, "cannot save in /proc/none"),
        (("--tiny", "--data", "missing.jsonl"), 2, "cannot read missing.jsonl: no such file"),
        *(((*FEW, "--data", name), 2, "cannot read") for name in (*LINES, "no text at all.jsonl.gz")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_done_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # some of it is refused without a GPU alone
    for name, line in LINES.items():
        Path(name).write_text(line)
    Path("no text at all.jsonl.gz").write_bytes(bytes(range(256)))
    Path("BERT").mkdir()
    Path("BERT/config.json").write_text('{"model_type": "bert"}')
    Path("EMPTY").mkdir()
    found, _, err = run(*arguments)
    assert (found, err.count("\n")) == (code, 1), err
    assert err.startswith("finetune_gpt2: ") and words in err


def test_transformers_is_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run("--tiny")
    assert (code, err) == (2, "finetune_gpt2: transformers is not installed: pip install 'tt-cli[clip]'\n")


def test_the_table_of_the_tutorial_is_what_the_calculator_says() -> None:
    command = loaded(next(command for command in COMMANDS if command.name == "calc"))
    rows = re.findall(r"^\| `(--[^`]+)` \| (.+? GiB) \| (.+? GiB) \| (\w+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) >= 6
    for flags, gpu, ram, largest in rows:
        words = ["gpt2-large", "--gpu", "8GB", "--alone", "--micro-batch", "1", *flags.split()]
        found = report(question(command.make_context("calc", words).params))
        sizes = [shown(found.answer.total(place)) for place in ("device", "host")]
        assert [*sizes, str(found.largest or "none")] == [gpu, ram, largest], flags
