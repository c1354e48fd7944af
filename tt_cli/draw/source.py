"""What to draw with: the checkpoint, the run inside it, and why this one was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tt_cli.checkpoint import load, newest
from tt_cli.data import load_tokenizer, load_vqgan
from tt_cli.errors import TTError, UsageError
from tt_cli.model import Dalle, DalleConfig
from tt_cli.run import RunConfig, folders

if TYPE_CHECKING:
    from tt_cli.checkpoint import TrainingState
    from tt_cli.data import Tokenizer
    from tt_cli.model import Vqgan


@dataclass(frozen=True)
class Source:
    """A checkpoint to draw with."""

    run: RunConfig
    step: int
    path: Path
    reason: str
    parameters: dict[str, Tensor]


def find_checkpoint(
    run: RunConfig | None, place: Path | None, on_message: Callable[[str], None] = lambda message: None
) -> Source:
    """The checkpoint at `place` (a file, a folder of checkpoints, a run's folder), else the newest of `run`.

    If both are given, the checkpoint must be one of that run. Raises UsageError for what is not there,
    CheckpointError for what cannot be used; `on_message` is told of damaged files that were passed over.
    """
    if place is None:
        if run is None:
            raise ValueError("neither a run nor a place is given")
        folder = folders.checkpoints(run)
        found = newest(folder, run.identity, on_message)
        if found is None:
            name = run.run.name
            raise TTError(
                f"there is no checkpoint of run {run.identity} on this machine: train one with `tt demo` or "
                f"`tt join {name}`, or name a file or folder with --checkpoint"
            )
        return _source(*found, f"the newest of this run in {folder}")
    if not place.exists():
        raise UsageError(f"--checkpoint {place}: no such file or folder")
    if place.is_file():
        return _of_run(run, _source(place, load(place), "named by --checkpoint"))
    folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    found = newest(folder, None if run is None else run.identity, on_message)
    if found is None:
        raise UsageError(f"--checkpoint {place}: no usable checkpoint (step-*.safetensors) in {folder}")
    return _source(*found, f"the newest in {folder}")


def load_models(source: Source, device: str = "auto") -> tuple[Dalle, Vqgan, Tokenizer]:
    """The decoder with the checkpoint's parameters, and the VQGAN and the tokenizer of its run.

    `device` is "cpu", "cuda" or "auto" (a GPU where there is one). Raises UsageError when there is no GPU
    and TTError for parameters that do not fit.
    """
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
    where = torch.device("cuda" if gpu and device != "cpu" else "cpu")
    model = Dalle(DalleConfig.from_run(source.run))
    load_parameters(model, source.parameters, str(source.path))
    return model.to(where).eval(), load_vqgan(source.run).to(where), load_tokenizer(source.run)


def load_parameters(model: Dalle, parameters: Mapping[str, Tensor], origin: str) -> None:
    """Copy a checkpoint's parameters into `model`; TTError, and no change, if they do not fit."""
    own = dict(model.named_parameters())
    unlike = sorted(
        name for name in own.keys() | parameters.keys()
        if name not in own or name not in parameters or own[name].shape != parameters[name].shape
    )  # fmt: skip
    if unlike:
        raise TTError(
            f"{origin} does not fit the run file inside it: {len(unlike)} tensors differ, such as "
            f"{unlike[0]}; it was written by another version of tt, or changed"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(parameters[name])


def _source(path: Path, state: TrainingState, reason: str) -> Source:
    run = RunConfig.from_toml(state.run_toml, f"{path}, the run file inside")
    return Source(run, state.step, path, reason, state.parameters)


def _of_run(run: RunConfig | None, source: Source) -> Source:
    if run is not None and run.identity != source.run.identity:
        unlike = run.differences(source.run)
        more = f" and {len(unlike) - 3} more" if len(unlike) > 3 else ""
        raise UsageError(
            f"{source.path} belongs to another run, {source.run.identity}: {'; '.join(unlike[:3])}{more}; "
            "leave out --run to use it"
        )
    return source
