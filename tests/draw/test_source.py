"""Where checkpoints come from: published weights, and the Hub through the real client in processes of their own."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from draw.small_clip import save_clip
from draw.tiny import Tiny, inferred
from hub_standin import HubStandin
from model.published_fixture import export_published
from PIL import Image
from safetensors.torch import save_file
from testbed.spawned import spawned

from tt_cli.cli.main import main
from tt_cli.draw.weights_source import torch_device
from tt_cli.errors import UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny.new()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> Path:
    """A folder of its own, with the tiny run's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(tiny.run.to_toml())
    return tmp_path


class Harm:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("harmed",)


def infer(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["infer", "red apple", "--candidates", "1", "--seed", "3", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_published_weights_draw_what_the_checkpoint_draws(
    here: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tiny.save(here / "own", 5)
    assert infer("--checkpoint", str(own), "--out", "first", capsys=capsys)[0] == 0
    published = {name: tensor.clone() for name, tensor in export_published(tiny.decoder).items()}
    torch.save({"state_dict": published}, here / "published.pt")
    save_file(published, here / "published.safetensors")
    for number, name in enumerate(("published.pt", "published.safetensors")):
        out = f"out-{number}"
        code, said, _ = infer("--checkpoint", name, "--run", "tiny.toml", "--out", out, "--json", capsys=capsys)
        told = json.loads(said)
        assert (code, told["step"], told["run"], told["checkpoint"]) == (0, None, tiny.run.identity, name)
        with Image.open(f"{out}/red-apple-1.png") as picture, Image.open("first/red-apple-1.png") as first:
            assert picture.tobytes() == first.tobytes()
            assert "step" not in picture.text


def test_published_weights_that_cannot_be_used_are_one_line(
    here: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    published = export_published(tiny.decoder)
    torch.save(published, here / "published.pt")
    torch.save({**published, "harm": Harm()}, here / "harm.pt")
    (here / "bare.pt").write_bytes(pickle.dumps(Harm(), protocol=2))
    torch.save({name: tensor for name, tensor in published.items() if "to_logits" not in name}, here / "less.pt")
    (here / "notes.txt").write_text("no weights")
    (here / "words.pt").write_text("no weights")
    for name, more, code, words in (
        ("published.pt", (), 2, "name its run too, such as --run dalle"),
        ("published.pt", ("--run", "emoji"), 2, "weights"),
        ("harm.pt", ("--run", "tiny.toml"), 1, "holds more than tensors"),
        ("bare.pt", ("--run", "tiny.toml"), 1, "bare.pt"),
        ("less.pt", ("--run", "tiny.toml"), 2, "missing"),
        ("words.pt", ("--run", "tiny.toml"), 1, "neither a torch nor a safetensors file"),
        ("notes.txt", ("--run", "tiny.toml"), 2, "notes.txt is no checkpoint: its name ends in none of .safetensors"),
    ):
        found, _, said = infer("--checkpoint", name, *more, capsys=capsys)
        assert (found, said.count("\n")) == (code, 1), said
        assert words in said, said
    assert not (here / "harmed").exists()


def call(calls: list[list[str]], environment: dict[str, str]) -> list[tuple[int, str, str]]:
    with spawned(environment) as begin:
        answers: list[tuple[int, str, str]] = begin(inferred, calls).result()
        return answers


def files_of(folder: Path) -> dict[str, str | bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_checkpoints_and_clip_from_the_hub(here: Path, tiny: Tiny, hub: HubStandin) -> None:
    for step in (7, 12):
        path = tiny.save(here / "saved", step)
    checkpoints = files_of(here / "saved")
    torch.save({"harm": Harm()}, here / "harm.pt")
    hub.put("model", "acme/tiny", {"README.md": "tiny", **checkpoints})
    hub.put("model", "acme/nested", {f"checkpoints/{name}": data for name, data in checkpoints.items()})
    hub.put("model", "acme/other", {"harm.pt": (here / "harm.pt").read_bytes(), "step-1.safetensors": b"no"})
    hub.put("model", "acme/torn", {path.name: path.read_bytes()[:-9]})
    hub.put("model", "acme/clip", files_of(save_clip(here / "clip")))
    hub.put("model", "acme/closed", checkpoints, access="gated")
    online = hub.environment(here)
    good: list[tuple[list[str], dict[str, Any]]] = [
        (["--checkpoint", "acme/tiny"], {"step": 12}),
        (["--checkpoint", "acme/tiny/step-00000007.safetensors", "--revision", "main"], {"step": 7}),
        (["--checkpoint", "acme/nested", "--run", "tiny.toml"], {"step": 12}),
        (["--checkpoint", "acme/tiny", "--clip", "acme/clip", "--keep", "1"], {"keep": 1, "candidates": 2}),
    ]
    bad = [
        (["--checkpoint", "acme/nothing"], 2, "the Hub has no such repository"),
        (["--checkpoint", "acme/tiny", "--revision", "old"], 2, "acme/tiny at old: the repository has no such"),
        (["--checkpoint", "acme/tiny/step-9.safetensors"], 2, "step-9.safetensors: no such file in acme/tiny"),
        (["--checkpoint", "acme/other"], 2, "no checkpoint of tt (step-*.safetensors) in acme/other"),
        (["--checkpoint", "acme/closed"], 2, "ask for access on its page"),
        (["--checkpoint", "acme/tiny", "--run", "emoji"], 2, "belongs to another run"),
        (["--checkpoint", "acme/torn"], 1, "is damaged"),
        (["--checkpoint", "acme/other/harm.pt", "--run", "tiny.toml"], 1, "holds more than tensors"),
        (["--checkpoint", "acme/tiny", "--clip", "acme/none"], 2, "the Hub has no such repository"),
        (["--checkpoint", "acme/tiny", "--clip", "acme/clip@old"], 2, "the repository has no such revision"),
        (["--checkpoint", "acme/tiny", "--clip", "acme/tiny"], 2, "--clip acme/tiny: it is no CLIP model: it needs"),
    ]
    answers = call([[*arguments, "--json"] for arguments, _ in good] + [arguments for arguments, _, _ in bad], online)
    told = []
    for (code, out, err), (arguments, expected) in zip(answers, good, strict=False):
        assert code == 0, (arguments, err)
        told.append(json.loads(out))
        assert expected.items() <= told[-1].items()
    commit = told[0]["checkpoint"].rpartition(" ")[2]
    assert told[0]["checkpoint"] == f"acme/tiny/step-00000012.safetensors at {commit}"
    assert len(commit) == 40
    assert told[3]["clip"].startswith("acme/clip@") and len(told[3]["drawings"]) == 1
    for (code, _, err), (arguments, expected_code, words) in zip(answers[len(good) :], bad, strict=True):
        lines = [line for line in err.splitlines() if "taking " not in line]
        assert (code, len(lines)) == (expected_code, 1), (arguments, err)
        assert words in lines[0], (arguments, err)
    assert not (here / "harmed").exists()

    offline = {**online, "HF_ENDPOINT": "http://127.0.0.1:9"}  # a port where nobody listens
    cached, absent = call([["--checkpoint", "acme/tiny", "--json"], ["--checkpoint", "acme/more"]], offline)
    assert cached[0] == 0, cached
    assert json.loads(cached[1])["checkpoint"] == told[0]["checkpoint"]
    assert absent[0] == 1 and absent[2].count("\n") == 1
    assert "the Hugging Face Hub cannot be reached" in absent[2]


def test_one_of_several_gpus_draws(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="^--device cuda: torch finds no GPU here; use --device cpu$"):
        torch_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    broken = [torch.device("cuda", 0)]

    def try_out(device: torch.device) -> None:
        if device in broken:
            raise RuntimeError("CUDA error: no kernel image is available\nfor this")

    for device in ("auto", "cuda:1"):
        assert torch_device(device, try_out) == torch.device("cuda", 1)
    with pytest.raises(UsageError, match="^--device cuda: CUDA error: no kernel image is available: see `tt doctor`"):
        torch_device("cuda", try_out)
    broken += [torch.device("cuda", 1)]
    capsys.readouterr()
    assert torch_device("auto", try_out) == torch.device("cpu") == torch_device("cpu", try_out)
    left_out = [line.partition(" is left out: CUDA error: no ")[0] for line in capsys.readouterr().err.splitlines()]
    assert left_out == ["tt: cuda:0", "tt: cuda:1"], "who draws on the CPU is told why"
    with pytest.raises(UsageError, match="^--device cuda:2: torch finds 2 GPUs here"):
        torch_device("cuda:2")
    with pytest.raises(UsageError, match="^--device gpu: no such device: give auto, cpu, cuda or cuda:N$"):
        torch_device("gpu")
