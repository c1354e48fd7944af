"""Files of weights, written so that a crash or full disk loses nothing; checkpoints in a folder by their step."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tt_cli.atomic_write import atomic_file, remove_abandoned
from tt_cli.checkpoint.hash_tree import DTYPES, tensor_digest
from tt_cli.checkpoint.training_state import (
    PARAMETERS,
    CheckpointError,
    CorruptCheckpoint,
    TrainingState,
    check_finite,
    checked_state,
    checked_step,
    serialised,
)
from tt_cli.errors import TTError, disk_remedy, os_errors
from tt_cli.run import RunConfig
from tt_cli.run.checkpoint_names import name_of, outdated, read_head, step_in

_CHUNK = 1 << 24
_ASIDE = ("corrupt", "before-order-*", "of-*")  # endings of what was set aside

OnProgress = Callable[[int, int], object]


def save(
    folder: Path, state: TrainingState, keep: int = 3, *, spread: bool = False, spare: Collection[int] = ()
) -> Path:
    """Write `state` into `folder`, remove all but the `keep` newest checkpoints, return the new file's path.

    Of those set aside for one reason as many stay. spread: keep older ones too, see `outdated`. spare: steps whose
    checkpoints stay. The file appears only when all of it is on the disk. Raises CheckpointError when it cannot be
    written; checkpoints already there are then untouched.
    """
    path = folder / name_of(state.step)
    pieces = serialised(state)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for temporary in folder.glob(".step-*.tmp"):
            remove_abandoned(temporary)
        with atomic_file(path) as file:
            file.writelines(pieces)
    except OSError as error:
        size = sum(len(piece) for piece in pieces) / 1e6
        space = "free some space or set TT_HOME to a larger disk"
        advice = disk_remedy(error, "set TT_HOME to a folder that you can write to", space)
        raise CheckpointError(
            f"cannot save a checkpoint of {size:.1f} MB in {folder}: {error.strerror or error}; "
            f"earlier checkpoints are untouched; {advice}"
        ) from error
    there = {step_of(old): old for old in checkpoints_in(folder)}
    for step in outdated(list(there), keep, spread) - {state.step, *spare}:
        there[step].unlink(missing_ok=True)
    for ending in _ASIDE:
        with suppress(OSError):
            for old in sorted(folder.glob(f"step-*.safetensors.{ending}"), key=os.path.getmtime)[:-keep]:
                old.unlink()
    return path


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint's file gives."""
    return int(path.stem.removeprefix("step-"))


def write(path: Path, pieces: Sequence[bytes | memoryview], on_progress: OnProgress = lambda done, total: None) -> None:
    """Write `pieces`, one after the other, as the file `path`, which may replace one; all of it or nothing.

    `on_progress` gets the bytes written and to write, now and then. Raises CheckpointError.
    """
    done, total = 0, sum(map(len, pieces))
    with refusals(path), atomic_file(path) as file:
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK):
                done += file.write(memoryview(piece)[start : start + _CHUNK])
                on_progress(done, total)


def refusals(path: Path) -> AbstractContextManager[None]:
    """Turns an OSError in writing `path` into a CheckpointError."""
    otherwise = "name a file in a folder that you can write to"
    return os_errors(f"cannot write {path}", lambda error: disk_remedy(error, otherwise), CheckpointError)


def load(path: Path) -> TrainingState:
    """Read and check one checkpoint. Raises CheckpointError."""
    tensors, metadata = _read(path)
    return checked_state(tensors, metadata, str(path))


def load_model(path: Path) -> tuple[RunConfig, dict[str, Tensor]]:
    """Read the run and the parameters of a checkpoint, not the optimizer. Raises CheckpointError."""
    tensors, metadata = _read(path, prefix=PARAMETERS)
    checked_step(metadata, str(path))
    parameters = {name.removeprefix(PARAMETERS): tensor for name, tensor in tensors.items()}
    known = {tensor.dtype for tensor in parameters.values()} <= DTYPES.keys()
    if not known or tensor_digest(parameters) != metadata["parameters_digest"]:
        raise CorruptCheckpoint(f"{path} is damaged: its digest does not match its content")
    check_finite(parameters, str(path))
    return RunConfig.from_toml(metadata["run"], f"{path}, the run file inside"), parameters


def newest(
    folder: Path,
    identity: str | None = None,
    on_message: Callable[[str], None] = lambda message: None,
    *,
    to_train: bool = False,
) -> tuple[Path, TrainingState] | None:
    """Return the newest usable checkpoint of `folder` with its path, or None.

    A corrupt one is renamed *.corrupt, said through `on_message`, and the one before it is tried. Passed over: those
    of another run than `identity` or of a later version of tt, and `to_train`, weights without an optimizer's state.
    """
    for path in checkpoints_in(folder):
        try:
            state = load(path)
        except CheckpointError as error:
            aside = ""
            if isinstance(error, CorruptCheckpoint):
                with suppress(OSError):
                    aside = f" set aside as {path.rename(f'{path}.corrupt').name},"
            on_message(f"{error};{aside} using the one before it")
        else:
            if identity is not None and state.identity != identity:
                on_message(f"{path} belongs to the run {state.identity}, not {identity}; passed over")
            elif to_train and not state.optimizer:
                on_message(f"{path} holds weights to draw with, not the optimizer's state to train on; passed over")
            else:
                return path, state
    return None


def find(folder: Path, identity: str, step: int, digest: str) -> tuple[Path, TrainingState] | None:
    """The checkpoint of exactly this state, with its path; None where it is not there or cannot be used."""
    path = folder / name_of(step)
    try:
        head = read_head(path)
        fits = (head.identity, head.digest, head.trains) == (identity, digest, True)
        return (path, load(path)) if fits else None
    except TTError:
        return None


def set_aside_after(folder: Path, step: int, ending: str) -> list[Path]:
    """Rename the checkpoints of later steps, so that none of them counts as the newest. Returns their new paths."""
    aside = []
    for path in checkpoints_in(folder):
        if step_of(path) > step:
            aside.append(path.with_name(f"{path.name}.{ending}"))
            with refusals(aside[-1]):
                os.replace(path, aside[-1])
    return aside


def set_aside_other(path: Path, digest: str) -> Path | None:
    """Rename a checkpoint that is of another state, so that it is not overwritten. Returns its new path."""
    try:
        other = read_head(path).digest
    except TTError:  # none there, or a damaged one
        return None
    if other == digest:
        return None
    with refusals(aside := path.with_name(f"{path.name}.of-{other[:8]}")):
        return path.rename(aside)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of `folder`, newest first. Raises CheckpointError where it cannot be read."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {folder}: {error.strerror or error}") from error
    steps = [(step, folder / name) for name in names if (step := step_in(name)) is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def _read(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            # Cloned out of the memory map: the file may be replaced or removed while the tensors live on.
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - no dict
            tensors = {name: file.get_tensor(name).clone() for name in names}
            return tensors, file.metadata() or {}
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CorruptCheckpoint(f"{path} is damaged: {error}") from error
