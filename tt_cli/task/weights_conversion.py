"""Conversion of weights: published ones into a checkpoint of tt and back, without running what is in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tt_cli.checkpoint.checkpoint_files import load_model, write
from tt_cli.checkpoint.published_weights import is_checkpoint, read_published, write_published
from tt_cli.checkpoint.training_state import TrainingState, serialised
from tt_cli.errors import TTError, UsageError, first_line, os_errors
from tt_cli.model import vqgan
from tt_cli.model.published_names import from_published, to_published
from tt_cli.run import load_run
from tt_cli.task.causal_lm_task import CausalLmTask
from tt_cli.task.dalle_task import DalleTask
from tt_cli.terminal.progress import progress

DEFAULT_RUN = "dalle"

Say = Callable[[str], None]


def to_checkpoint(file: Path, out: Path, run: str | None, step: int | None, say: Say) -> dict[str, Any]:
    """Write the published weights of a decoder as a checkpoint of its run, those of a VQGAN without its training's.

    A checkpoint made so holds no optimizer state. Returns facts about what was written. Raises UsageError and TTError.
    """
    if is_checkpoint(file):
        raise UsageError(f"{file} is a checkpoint of tt already; for the published names add --to published")
    say(f"Reading {file}")
    state = read_published(file)
    if {"decoder.conv_in.weight", "quantize.embed.weight"} <= state.keys():
        if run is not None or step is not None:
            raise UsageError(f"{file} holds a VQGAN, which is of no run; leave out --run and --step")
        return _keep_vqgan(state, out, say)
    config, step = load_run(run or DEFAULT_RUN), step or 0
    say(f"Checking {len(state)} tensors against the model of run {config.identity}")
    weights = from_published(DalleTask(config).unfilled_model("meta"), state)
    parameters = {name: tensor.to(torch.float32).contiguous() for name, tensor in weights.items()}
    pieces = serialised(TrainingState(step, parameters, {}, config.to_toml(), config.identity))
    with _writing(sum(len(piece) for piece in pieces), say) as on_progress:
        write(out, pieces, on_progress)
    return {"kind": "checkpoint", "run": config.identity, "step": step, **_counted(parameters)}


def to_published_names(file: Path, out: Path, say: Say) -> dict[str, Any]:
    """Write a checkpoint's weights under the published names. Returns facts about them. Raises UsageError, TTError."""
    if not is_checkpoint(file):
        raise UsageError(f"{file} is no checkpoint of tt; --to published reads what tt wrote")
    say(f"Reading {file}")
    config, parameters = load_model(file)
    task = DalleTask(config)
    task.check_fit(parameters, str(file))
    state = to_published(task.unfilled_model("meta").config, parameters)
    with _writing(sum(tensor.nbytes for tensor in parameters.values()), say) as on_progress:
        write_published(out, state, on_progress)
    return {"kind": "published", "run": config.identity, **_counted(parameters), "names": len(state)}


def to_pretrained(file: Path, out: Path, say: Say) -> dict[str, Any]:
    """Write a language model's checkpoint as a folder that transformers' `from_pretrained` reads, with its tokenizer.

    Of a run that trains adapters it has these alone, as peft reads them.

    Returns facts about it. Raises UsageError for a checkpoint of another kind of run, TTError.
    """
    say(f"Reading {file}")
    config, parameters = load_model(file)
    task = CausalLmTask(config)
    model: Any = task.filled_model(parameters, str(file))
    from transformers import PreTrainedTokenizerFast  # which the model has found to be installed

    say(f"Writing {sum(tensor.nbytes for tensor in parameters.values()) / 1e6:.1f} MB")
    whole = task.run.lora is None
    backend, end = task.tokenizer.backend, task.run.tokenizer.document_end
    if task.run.pretrained is None:  # else its own ends, of answers too; a configuration's default is of no tokenizer
        model.config.eos_token_id = model.generation_config.eos_token_id = task.tokenizer.end
    with os_errors(f"cannot write {out}"), TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        folder = Path(beside, out.name)  # which takes its place whole
        try:
            model.save_pretrained(folder, **({} if whole else {"save_embedding_layers": False}))
            PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token=end).save_pretrained(folder)
        except Exception as error:  # of a full disk each library has an error of its own
            raise TTError(f"cannot write {out}: {first_line(error)}") from error
        (folder / "README.md").unlink(missing_ok=True)  # peft's form for a card, not filled in
        for path in folder.iterdir():
            path.chmod(0o644)  # the library writes weights for the owner alone
        folder.rename(out)
    return {"kind": "model" if whole else "adapters", "run": config.identity, **_counted(parameters)}


def _keep_vqgan(state: dict[str, Tensor], out: Path, say: Say) -> dict[str, Any]:
    """Write published weights of a VQGAN without what only its training needed."""
    say(f"Checking {len(state)} tensors against the published VQGAN")
    with torch.device("meta"):
        model = vqgan.Vqgan(vqgan.PUBLISHED, with_encoder="encoder.conv_in.weight" in state)
    tensors = {name: tensor.contiguous() for name, tensor in model.checked(state).items()}
    with _writing(sum(tensor.nbytes for tensor in tensors.values()), say) as on_progress:
        write_published(out, tensors, on_progress)
    return {"kind": "vqgan", **_counted(tensors)}


def _counted(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {"tensors": len(tensors), "elements": sum(tensor.numel() for tensor in tensors.values())}


def _writing(total: int, say: Say) -> AbstractContextManager[Callable[[int, int], None]]:
    """Show progress; gives a function to call with the bytes written and to write."""
    say(f"Writing {total / 1e6:.1f} MB")
    return progress("Writing", "bytes", lines=False)
