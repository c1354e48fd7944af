"""`tt convert`: published weights to a checkpoint and back, and one line for what cannot be converted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from data.test_pictures import TINY
from model import published_fixture as fixture
from torch import Tensor

from tt_cli.checkpoint.checkpoint_files import load, load_model, save
from tt_cli.checkpoint.published_weights import read_published
from tt_cli.cli.main import main
from tt_cli.model import vqgan
from tt_cli.run import RunConfig, load_run

pytestmark = pytest.mark.slow


def tiny_run(reversible: bool = True) -> RunConfig:
    """The paper's run at the size of the fixture."""
    c = fixture.config()
    sizes = {f"model.{name}": getattr(c, name) for name in ("dim", "depth", "heads", "dim_head", "text_length")}
    codes = {"vqgan.codebook_size": c.image_vocab, "vqgan.grid": c.image_size, "vqgan.pixels": 8 * c.image_size}
    more = {"run.name": "tiny", "tokenizer.vocab_size": c.text_vocab, "model.reversible": reversible}
    return load_run("dalle").replaced(sizes | codes | more)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the published weights dalle.pt and their run file tiny.toml."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": fixture.state(), "step": 5, "optimizer": {"m": torch.ones(3)}}, "dalle.pt")
    Path("tiny.toml").write_text(tiny_run().to_toml())
    return tmp_path


def convert(*arguments: str) -> int:
    return main(["convert", *arguments])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_with_the_run_inside(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("dalle.pt", "step-00000031.safetensors", "--run", "tiny.toml", "--step", "31") == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"Wrote a checkpoint of {sum(p.numel() for p in fixture.model().parameters()):,} para")
    assert "tt infer" in said.out
    assert "Checking 113 tensors against the model of run tiny-" in said.err
    state = load(folder / "step-00000031.safetensors")
    assert (state.step, state.identity, state.optimizer) == (31, tiny_run().identity, {})
    run, parameters = load_model(folder / "step-00000031.safetensors")
    assert run == tiny_run()
    assert_same(parameters, {name: tensor.detach() for name, tensor in fixture.model().named_parameters()})


@pytest.mark.parametrize("out", ["again.pt", "again.safetensors"])
def test_there_and_back(folder: Path, out: str) -> None:
    assert convert("dalle.pt", "mine.safetensors", "--run", "tiny.toml") == 0
    assert convert("mine.safetensors", out, "--to", "published") == 0
    again = read_published(folder / out)
    assert_same(again, fixture.state())
    assert len({tensor.data_ptr() for tensor in again.values()}) == len(list(fixture.model().parameters())) + 1
    assert (folder / out).stat().st_size < 1.05 * (folder / "mine.safetensors").stat().st_size
    assert convert(out, "mine2.safetensors", "--run", "tiny.toml") == 0
    assert load(folder / "mine2.safetensors").digest() == load(folder / "mine.safetensors").digest()


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("dalle.pt", "mine.safetensors", "--run", "tiny.toml", "--json") == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert said.err == ""
    assert facts == {
        "kind": "checkpoint",
        "from": "dalle.pt",
        "to": "mine.safetensors",
        "run": tiny_run().identity,
        "step": 0,
        "tensors": len(list(fixture.model().parameters())),
        "elements": sum(parameter.numel() for parameter in fixture.model().parameters()),
        "bytes": Path("mine.safetensors").stat().st_size,
    }


def test_a_vqgan_loses_its_losses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vqgan, "PUBLISHED", TINY)
    weights = vqgan.Vqgan(TINY).state_dict()
    torch.save({"state_dict": {**weights, "loss.logvar": torch.zeros(1)}, "epoch": 2}, "last.ckpt")
    assert convert("last.ckpt", "vqgan.safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "vqgan"
    assert_same(safetensors.torch.load_file("vqgan.safetensors"), dict(weights))
    weights["decoder.conv_out.bias"][1] = torch.nan
    torch.save(weights, "bad.pt")
    refused(capsys, 1, "decoder.conv_out.bias holds values that are not finite", "bad.pt", "out.safetensors")
    refused(capsys, 2, "holds a VQGAN, which is of no run", "last.ckpt", "out.safetensors", "--step", "3")


# --- what cannot be converted ---


def refused(capsys: pytest.CaptureFixture[str], code: int, message: str, *arguments: str) -> None:
    """One line on stderr and the exit code; nothing is written."""
    before = {path.name: path.stat().st_mtime_ns for path in Path().iterdir()}
    assert convert(*arguments, "--json") == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tt: ") and said.err.count("\n") == 1, said.err
    assert message in said.err
    assert {path.name: path.stat().st_mtime_ns for path in Path().iterdir()} == before


class Payload:
    """What a malicious file would run when it is opened."""

    def __reduce__(self):
        return os.mkdir, ("witness",)


def test_code_in_a_file_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": fixture.state(), "hook": Payload()}, "evil.pt")
    message = "evil.pt holds more than tensors (posix.mkdir) and is not opened, for such a file can run code"
    refused(capsys, 1, message, "evil.pt", "out.safetensors", "--run", "tiny.toml")
    assert not Path("witness").exists()
    torch.load("evil.pt", weights_only=False)
    assert Path("witness").exists(), "it is code that would have run"


WISHES = [
    ("none.pt out.safetensors", "cannot read none.pt: no such file"),
    (". out.safetensors", "cannot read .: a folder; name a file in it"),
    ("dalle.pt out.pt", "out.pt: must end in .safetensors"),
    ("mine.safetensors out.onnx --to published", "out.onnx: must end in .safetensors or .pt or .pth or .bin"),
    ("dalle.pt away/out.safetensors", "there is no folder away; make it first"),
    ("dalle.pt folder.safetensors", "folder.safetensors is a folder; name a file in it"),
    ("dalle.pt mine.safetensors", "mine.safetensors exists; name another file, or overwrite it with --force"),
    ("mine.safetensors mine.safetensors --force", "is what is to be read; name another file"),
    ("mine.safetensors out.safetensors", "is a checkpoint of tt already; for the published names add --to publish"),
    ("dalle.pt out.pt --to published", "dalle.pt is no checkpoint of tt"),
    ("mine.safetensors out.pt --to published --step 3", "leave out --run and --step"),
    ("dalle.pt out.safetensors --step -1", "--step -1: must be 0 or more"),
    ("dalle.pt out.safetensors --run emoji", "weights do not fit the reversible model of depth 6"),
    ("dalle.pt out.safetensors --run nosuch", "no run is called 'nosuch'"),
    ("dalle.pt out.safetensors --to elsewhere", "--to: 'elsewhere' is not one of"),
]


def test_impossible_wishes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("dalle.pt", "mine.safetensors", "--run", "tiny.toml", "--json") == 0
    Path("folder.safetensors").mkdir()
    capsys.readouterr()
    for arguments, message in WISHES:
        refused(capsys, 2, message, *arguments.split())


KEY = "model.transformer.layers.blocks.4.g.net.fn.fn.fn.net.3.weight"


def test_weights_that_do_not_fit_leave_what_was_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is refused, model/test_dalle_published.py knows."""
    state = fixture.state()
    del state[KEY]
    torch.save(state, "bad.pt")
    Path("out.safetensors").write_text("before")
    message = "1 missing (transformer.layers.blocks.4.g.net.fn.fn.fn.net.3.weight)"
    refused(capsys, 2, message, "bad.pt", "out.safetensors", "--run", "tiny.toml", "--force")
    assert convert("dalle.pt", "out.safetensors", "--run", "tiny.toml", "--force") == 0
    assert load(folder / "out.safetensors").step == 0


def test_a_checkpoint_of_another_shape_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert("dalle.pt", "mine.safetensors", "--run", "tiny.toml", "--json")
    state = load(folder / "mine.safetensors")
    state.parameters["norm.bias"] = torch.ones(3)
    path = save(folder, state)
    capsys.readouterr()
    refused(capsys, 1, "does not fit the run file inside it", path.name, "out.pt", "--to", "published")
