"""Files of published weights: every form that they come in is read, nothing in them is run, aliases stay aliases."""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
import types
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from testbed.full_disk import full_after
from torch import Tensor, nn

from tt_cli.checkpoint.checkpoint_files import newest, save
from tt_cli.checkpoint.published_weights import is_checkpoint, read_published, write_published
from tt_cli.checkpoint.training_state import CheckpointError, TrainingState
from tt_cli.errors import UsageError
from tt_cli.run import load_run

RUN = load_run("emoji")
WEIGHT = torch.arange(6.0).reshape(2, 3)


def aliased() -> dict[str, Tensor]:
    """Two names of one tensor, another view of it, and one of another type."""
    return {"a": WEIGHT, "b": WEIGHT, "flat": WEIGHT.view(-1), "half": torch.ones(3, dtype=torch.bfloat16)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_published(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("wrapped", [(), ("state_dict",), ("model",), ("weights",), ("model", "state_dict")])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_is_found_where_training_scripts_put_it(tmp_path: Path, wrapped: tuple, zipped: bool) -> None:
    content = OrderedDict(aliased())
    for key in reversed(wrapped):
        content = {key: content, "step": 7, "settings": {"lr": 0.1, "names": ["x"]}, "optimizer": {"m": torch.ones(9)}}
    path = tmp_path / "weights.bin"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    found = read_published(path)
    assert_same(found, aliased())
    assert found["a"].data_ptr() == found["b"].data_ptr() == found["flat"].data_ptr()


def test_parameters_come_as_plain_tensors(tmp_path: Path) -> None:
    torch.save({"a": nn.Parameter(WEIGHT), "position_ids": torch.arange(3)}, tmp_path / "weights.pt")
    found = read_published(tmp_path / "weights.pt")
    assert [type(tensor) for tensor in found.values()] == [Tensor, Tensor]
    assert not found["a"].requires_grad


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_written_and_read_aliases_are_stored_once(tmp_path: Path, name: str) -> None:
    state = {f"layers.{layer}.weight": torch.ones(1000, 1) for layer in range(1)}
    state |= {f"layers.{layer}.weight": state["layers.0.weight"] for layer in range(1, 50)}
    state |= {"other": torch.ones(1000, 1), "empty": torch.ones(0), "nothing": torch.ones(0)}
    told: list[tuple[int, int]] = []
    write_published(tmp_path / name, state, lambda done, total: told.append((done, total)))
    found = read_published(tmp_path / name)
    assert_same(found, state)
    assert len({found[f"layers.{layer}.weight"].data_ptr() for layer in range(50)}) == 1
    assert found["other"].data_ptr() != found["layers.0.weight"].data_ptr()
    size = (tmp_path / name).stat().st_size
    assert size < 20_000
    if name.endswith(".safetensors"):
        assert told[-1] == (size, size)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_module_with_shared_tensors_loads_what_was_written(tmp_path: Path) -> None:
    """By safetensors' own rule for aliases, so that others can use the file."""
    theirs, mine = (nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]) for _ in range(2))
    for module in (theirs, mine):
        module[1].weight = module[0].weight
    write_published(tmp_path / "weights.safetensors", theirs.state_dict())
    safetensors.torch.load_model(mine, tmp_path / "weights.safetensors")
    assert_same(dict(mine.state_dict()), dict(theirs.state_dict()))


def test_the_librarys_own_files_are_read(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": WEIGHT}, tmp_path / "w", metadata={"format": "pt", "origin": "elsewhere"})
    assert_same(read_published(tmp_path / "w"), {"a": WEIGHT})
    module = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    module[1].weight = module[0].weight
    safetensors.torch.save_model(module, str(tmp_path / "m.safetensors"))
    assert_same(read_published(tmp_path / "m.safetensors"), dict(module.state_dict()))


# --- what is refused ---


class Payload:
    """What a malicious file would run when it is opened."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_code_in_a_file_is_not_run(tmp_path: Path, zipped: bool, name: str) -> None:
    witness = tmp_path / "witness"
    content = {"state_dict": {"a": WEIGHT}, "callbacks": Payload(witness)}
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=zipped)
    refused(tmp_path / name, r"holds more than tensors \(posix.mkdir\) and is not opened, for such a file can run code")
    (tmp_path / name).write_bytes(pickle.dumps(Payload(witness), protocol=2))
    refused(tmp_path / name, "is not opened")
    assert not witness.exists()
    pickle.loads(pickle.dumps(Payload(witness)))
    assert witness.exists(), "it is code that would have run"


def test_the_class_that_lightning_files_name_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch Lightning of 2021 kept what a callback remembers under the callback's class."""
    name = "pytorch_lightning.callbacks.model_checkpoint"
    callback = type("ModelCheckpoint", (), {"__module__": name})
    for module in ("pytorch_lightning", "pytorch_lightning.callbacks", name):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    sys.modules[name].ModelCheckpoint = callback
    content = {"epoch": 3, "state_dict": aliased(), "callbacks": {callback: {"best": torch.tensor(1.0)}}}
    torch.save(content, tmp_path / "last.ckpt")
    content["callbacks"] = {"made": callback()}
    torch.save(content, tmp_path / "made.ckpt")
    monkeypatch.delattr(sys.modules[name], "ModelCheckpoint")
    assert_same(read_published(tmp_path / "last.ckpt"), aliased())
    assert_same(read_published(tmp_path / "made.ckpt"), aliased())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds no weights: no named tensors, alone or as state_dict, model, weights"),
        ([WEIGHT], "holds no weights"),
        ({"ema": {"a": WEIGHT}}, "holds no weights"),
        ({"model": {"model": {"model": {"model": {"a": WEIGHT}}}}}, "holds no weights"),
        ({"model": {"a": WEIGHT}, "weights": {"a": WEIGHT}}, "holds weights as model and as weights"),
        ({"a": WEIGHT, "step": 3}, "among its tensors is 'step', a int; have its maker save the state dict alone"),
        ({"a": WEIGHT, 3: WEIGHT}, "among its tensors is '3'"),
        ({"a": torch.empty(3, device="meta")}, "a holds no plain numbers"),
        ({"a": torch.eye(3).to_sparse()}, "a holds no plain numbers"),
        ({"a": torch.ones(3, dtype=torch.complex64)}, "a is torch.complex64; weights are float64, float32"),
        ({"a": torch.ones(3).to(torch.float8_e5m2)}, "a is torch.float8_e5m2; weights are"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_name(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "weights.pt")
    refused(tmp_path / "weights.pt", message)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 99, b"PK\x03\x04" + b"\0" * 99, pickle.dumps([1], protocol=5), b"\x10" + b"\0" * 7 + b"{}", b"[1]"],
)
def test_other_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights.pt").write_bytes(content)
    refused(tmp_path / "weights.pt", "fetch it again|holds no weights|as tensors alone")
    assert not is_checkpoint(tmp_path / "weights.pt")


def test_a_damaged_file_is_read_or_refused_but_never_crashes(tmp_path: Path) -> None:
    chance = random.Random(0)
    for zipped in (True, False):
        written = io.BytesIO()
        torch.save({"model": aliased()}, written, _use_new_zipfile_serialization=zipped)
        outcomes = set()
        for index in range(300):
            data = bytearray(written.getvalue())
            data[chance.randrange(len(data))] = chance.randrange(256)
            path = tmp_path / f"{zipped}{index}.pt"  # a new file each time: the last may still be mapped
            path.write_bytes(data[: chance.choice([None, chance.randrange(len(data))])])
            try:
                read_published(path)
                outcomes.add("read")
            except CheckpointError as error:
                assert "\n" not in str(error)
                outcomes.add("refused")
        assert outcomes == {"read", "refused"}


def test_what_is_not_there_and_what_is_a_checkpoint_already(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the weights .*none.pt: No such file"):
        read_published(tmp_path / "none.pt")
    with pytest.raises(UsageError, match="Is a directory"):
        read_published(tmp_path)
    path = save(tmp_path, TrainingState(3, {"a": WEIGHT}, {}, RUN.to_toml(), RUN.identity))
    assert is_checkpoint(path)
    with pytest.raises(UsageError, match="is a checkpoint of tt already"):
        read_published(path)


# --- what is written ---


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"before")
    with pytest.raises(CheckpointError, match=rf"cannot write \S+{name}: ") as caught, full_after(100_000):
        write_published(tmp_path / name, {"a": torch.ones(1_000_000)})
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"before"


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory; name a file in a folder that you can"):
        write_published(tmp_path / "none" / "weights.pt", {"a": WEIGHT})


def test_weights_alone_are_nothing_to_train_on(tmp_path: Path) -> None:
    moments = {"m/a": torch.zeros(6)}
    save(tmp_path, TrainingState(3, {"a": WEIGHT}, moments, RUN.to_toml(), RUN.identity))
    alone = save(tmp_path, TrainingState(9, {"a": WEIGHT}, {}, RUN.to_toml(), RUN.identity))
    said: list[str] = []
    found = newest(tmp_path, RUN.identity, said.append, to_train=True)
    assert found is not None
    assert found[1].step == 3
    assert said == [f"{alone} holds weights to draw with, not the optimizer's state to train on; passed over"]
    drawn = newest(tmp_path, RUN.identity)
    assert drawn is not None
    assert drawn[1].step == 9
