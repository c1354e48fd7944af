"""Checkpoints in a folder: written whole or not at all, the newest usable one found again."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from testbed.full_disk import full_after

from tt_cli.checkpoint.checkpoint_files import (
    find,
    load,
    load_model,
    newest,
    save,
    set_aside_after,
    set_aside_other,
)
from tt_cli.checkpoint.training_state import CheckpointError, CorruptCheckpoint, TrainingState
from tt_cli.errors import TTError
from tt_cli.run import load_run
from tt_cli.run.checkpoint_names import read_head

RUN = load_run("emoji")


def state_at(step: int, identity: str = RUN.identity, elements: int = 1000) -> TrainingState:
    parameters = {"weight": torch.full((elements,), float(step)), "bias": torch.zeros(3, dtype=torch.float16)}
    optimizer = {"weight.moment": torch.full((elements,), step % 256, dtype=torch.uint8)}
    return TrainingState(step, parameters, optimizer, RUN.to_toml(), identity)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(path: Path, needle: bytes) -> None:
    """Change one byte in the first place where `needle` stands."""
    data = bytearray(path.read_bytes())
    data[data.index(needle)] ^= 1
    path.write_bytes(data)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    state = state_at(123)
    path = save(tmp_path / "new" / "folder", state)
    assert path == tmp_path / "new" / "folder" / "step-00000123.safetensors"
    again = load(path)
    assert again.digest() == state.digest()
    assert (again.run_toml, again.identity, again.step) == (state.run_toml, state.identity, 123)
    assert names(path.parent) == ["step-00000123.safetensors"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 100, 20, 99_999_999, 100_000_000):
        save(tmp_path, state_at(step), keep=3, spare=[5] if step == 99_999_999 else ())
        assert (tmp_path / "step-00000005.safetensors").exists() == (step < 100_000_000)
    assert names(tmp_path) == ["step-00000100.safetensors", "step-100000000.safetensors", "step-99999999.safetensors"]
    found = newest(tmp_path)
    assert found is not None
    assert found[1].step == 100_000_000


def test_a_step_lower_than_all_is_written_and_stays(tmp_path: Path) -> None:
    for step in (10, 11, 12):
        save(tmp_path, state_at(step), keep=2)
    path = save(tmp_path, state_at(3), keep=2)
    assert load(path).step == 3


def test_the_same_step_again_replaces_the_file(tmp_path: Path) -> None:
    save(tmp_path, state_at(4))
    other = state_at(4)
    other.parameters["weight"] += 1
    assert load(save(tmp_path, other)).digest() == other.digest()
    assert len(names(tmp_path)) == 1


def test_a_loaded_state_outlives_its_file(tmp_path: Path) -> None:
    path = save(tmp_path, state_at(4, elements=100_000))
    state = load(path)
    path.write_bytes(b"")
    assert state.digest() == state_at(4, elements=100_000).digest()


def test_newest_of_nothing_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    (tmp_path / "step-1.safetensors").write_text("not our name")
    assert newest(tmp_path) is None


def test_a_corrupt_checkpoint_is_set_aside_and_the_one_before_used(tmp_path: Path) -> None:
    save(tmp_path, state_at(1))
    damage(save(tmp_path, state_at(2)), torch.full((8,), 2.0).numpy().tobytes())
    with save(tmp_path, state_at(3)).open("r+b") as file:
        file.truncate(1000)
    (tmp_path / "step-00000004.safetensors").write_bytes(b"")
    said: list[str] = []
    found = newest(tmp_path, on_message=said.append)
    assert found is not None
    assert (found[0].name, found[1].step) == ("step-00000001.safetensors", 1)
    assert names(tmp_path) == [
        "step-00000001.safetensors",
        "step-00000002.safetensors.corrupt",
        "step-00000003.safetensors.corrupt",
        "step-00000004.safetensors.corrupt",
    ]
    assert len(said) == 3
    assert all("step-0000000" in line and "\n" not in line for line in said)
    assert said[2].endswith("set aside as step-00000002.safetensors.corrupt, using the one before it")
    said.clear()
    assert newest(tmp_path, on_message=said.append) is not None
    assert said == []


def test_other_runs_and_later_formats_are_passed_over_untouched(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save(tmp_path, state_at(1))
    save(tmp_path, state_at(2, identity="other-12345678"))
    save_file({"parameters.a": torch.ones(1)}, tmp_path / "step-00000003.safetensors", {"format": "tt-9"})
    before = names(tmp_path)
    said: list[str] = []
    found = newest(tmp_path, RUN.identity, said.append)
    assert found is not None
    assert found[1].step == 1
    assert names(tmp_path) == before
    assert "has format tt-9" in said[0]
    assert said[1].endswith(f"belongs to the run other-12345678, not {RUN.identity}; passed over")


def test_a_model_is_read_without_its_optimizer(tmp_path: Path) -> None:
    path = save(tmp_path, state_at(9))
    run, parameters = load_model(path)
    assert run == RUN
    assert parameters.keys() == {"weight", "bias"}
    assert torch.equal(parameters["weight"], torch.full((1000,), 9.0))

    damage(path, bytes([9]) * 100)  # in the optimizer
    load_model(path)
    with pytest.raises(CorruptCheckpoint, match="digest does not match"):
        load(path)
    damage(path, torch.full((8,), 9.0).numpy().tobytes())  # in the parameters
    with pytest.raises(CorruptCheckpoint, match="digest does not match"):
        load_model(path)
    path.write_bytes(path.read_bytes().replace(b'"F16"', b'"U16"'))  # numbers that no checkpoint of tt has
    with pytest.raises(CorruptCheckpoint, match="digest does not match"):
        load_model(path)
    spoiled = state_at(10)
    spoiled.parameters["bias"][1] = torch.nan
    with pytest.raises(CorruptCheckpoint, match="'bias' holds NaN"):
        load_model(save(tmp_path, spoiled))


def test_a_missing_file_is_not_called_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint \S+: No such file") as error:
        load(tmp_path / "step-00000001.safetensors")
    assert not isinstance(error.value, CorruptCheckpoint)


# --- disks that are full or read-only, and processes that die ---


def test_a_file_too_large_for_the_disk_leaves_everything_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, state_at(1))
    with pytest.raises(CheckpointError) as error, full_after(100_000):
        save(tmp_path, state_at(2, elements=1_000_000))
    assert str(error.value) == (
        f"cannot save a checkpoint of 5.0 MB in {tmp_path}: File too large; earlier checkpoints are "
        "untouched; raise the limit on file sizes (ulimit -f)"
    )
    assert names(tmp_path) == ["step-00000001.safetensors"]
    found = newest(tmp_path)
    assert found is not None
    assert found[1].digest() == state_at(1).digest()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_no_space_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    save(tmp_path, state_at(1))

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError) as error:
        save(tmp_path, state_at(1))
    said = str(error.value)
    assert f"{os.strerror(number)}; earlier checkpoints are untouched; " in said
    assert said.endswith(
        "free some space or set TT_HOME to a larger disk"
        if number == errno.ENOSPC
        else "set TT_HOME to a folder that you can write to"
    )
    assert names(tmp_path) == ["step-00000001.safetensors"]


def test_what_a_dead_writer_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    abandoned = tmp_path / ".step-00000007.safetensors.99999.tmp"
    abandoned.write_bytes(b"half")
    busy = tmp_path / ".step-00000008.safetensors.99998.tmp"
    with busy.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        save(tmp_path, state_at(1))
        assert names(tmp_path) == [busy.name, "step-00000001.safetensors"]
    save(tmp_path, state_at(2))
    assert names(tmp_path) == ["step-00000001.safetensors", "step-00000002.safetensors"]


WRITE_FOR_EVER = """
import sys, torch
from pathlib import Path
from tt_cli.checkpoint.checkpoint_files import save
from tt_cli.checkpoint.training_state import TrainingState
for step in range(10**6):
    parameters = {"weight": torch.full((1_000_000,), float(step))}
    save(Path(sys.argv[1]), TrainingState(step, parameters, {}, "", "run-0"))
    print(step, flush=True)
"""


def size_of(path: Path) -> int:
    """0 for a file that has just been renamed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_kill_9_while_writing_loses_nothing(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) == 4:
            break
    # The next file is being written: wait until some of it is there.
    while not any(path.name.endswith(".tmp") and size_of(path) for path in tmp_path.iterdir()):
        assert writer.poll() is None
    os.kill(writer.pid, signal.SIGKILL)
    seen = 4 + len(writer.stdout.read().splitlines())
    writer.wait()
    said: list[str] = []
    found = newest(tmp_path, "run-0", said.append)
    assert found is not None
    assert found[1].step in (seen, seen + 1)
    assert said == []
    save(tmp_path, state_at(found[1].step + 1))
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


def test_the_checkpoint_of_one_state_is_found_and_no_other(tmp_path: Path) -> None:
    state = state_at(7)
    path = save(tmp_path, state)
    found = find(tmp_path, RUN.identity, 7, state.digest())
    assert found is not None and found[0] == path and found[1].digest() == state.digest()
    assert find(tmp_path, RUN.identity, 8, state.digest()) is None
    assert find(tmp_path, RUN.identity, 7, state_at(8).digest()) is None
    assert find(tmp_path, "another-00000000", 7, state.digest()) is None
    assert set_aside_other(path, state.digest()) is None and path.exists()
    aside = set_aside_other(save(tmp_path, state_at(8)), state.digest())
    assert aside is not None and names(tmp_path) == [path.name, aside.name]
    damage(path, b"weight")
    assert find(tmp_path, RUN.identity, 7, state.digest()) is None
    drawing = TrainingState(9, state.parameters, {}, state.run_toml, state.identity)
    save(tmp_path, drawing)
    assert find(tmp_path, RUN.identity, 9, drawing.digest()) is None, "nobody trains on it"


def test_a_damaged_head_is_not_believed(tmp_path: Path) -> None:
    path = save(tmp_path, state_at(7))
    assert read_head(path).step == 7
    damage(path, b"emoji")  # in its metadata
    with pytest.raises(TTError, match="is damaged"):
        read_head(path)


def test_later_checkpoints_are_set_aside(tmp_path: Path) -> None:
    for step in (5, 6, 7):
        save(tmp_path, state_at(step))
    aside = set_aside_after(tmp_path, 5, "before-order-3")
    assert sorted(path.name for path in aside) == [
        "step-00000006.safetensors.before-order-3",
        "step-00000007.safetensors.before-order-3",
    ]
    found = newest(tmp_path)
    assert found is not None and found[1].step == 5
    assert set_aside_after(tmp_path, 5, "before-order-3") == []
    assert load(aside[0]).step in (6, 7)


def test_of_what_was_set_aside_the_newest_stay(tmp_path: Path) -> None:
    """Over months, a disk with errors filled with them."""
    for number, kind in enumerate(3 * ["corrupt", "before-order-3", "of-0123abcd", "bak"]):
        file = tmp_path / f"step-{100 - number:08d}.safetensors.{kind}"
        file.touch()
        os.utime(file, (number, number))
    path = save(tmp_path, state_at(200), keep=1)
    assert [name for name in names(tmp_path) if name != path.name] == [
        "step-00000089.safetensors.bak",
        "step-00000090.safetensors.of-0123abcd",
        "step-00000091.safetensors.before-order-3",
        "step-00000092.safetensors.corrupt",
        "step-00000093.safetensors.bak",
        "step-00000097.safetensors.bak",
    ], "a person's own copies are theirs"


def test_older_checkpoints_are_kept_ever_fewer_the_older_they_are(tmp_path: Path) -> None:
    for step in range(0, 400, 4):
        save(tmp_path, state_at(step, elements=1), keep=2, spread=True)
        kept = sorted(int(name[5:13]) for name in names(tmp_path))
        behind = [step - one for one in kept]
        assert kept[0] == 0 and len(kept) <= 2 + step.bit_length()
        assert all(older <= 4 * newer for older, newer in zip(behind[:-2], behind[1:-1], strict=True)), behind
    assert 6 <= len(kept) <= 10
