"""Built-in weights: what the swarm of a built-in run learned, beside the data that it learned from.

Notable:
- they draw for every run with the model, tokenizer, VQGAN and data of the run they come from, whatever its schedule;
- tensors of at least 4,096 elements are stored in 8 bits, as gradients travel (`swarm/compression/linear8.py`); the
  others, norms and scales, in fp32.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from tt_cli.checkpoint.training_state import TrainingState, file_pieces
from tt_cli.data import builtin
from tt_cli.errors import UsageError
from tt_cli.optim.outer_step import shared_optimizer
from tt_cli.run import RunConfig
from tt_cli.swarm.compression import linear8
from tt_cli.task import task_of

FILE = "weights.safetensors"
SMALLEST = 4096  # elements of a tensor in 8 bits
GO_ON = 0.75
"""Share of the schedule after which training goes on: with a quarter of the rate, it learns more than it forgets."""
_LIKE = ("model", "tokenizer", "vqgan", "data")  # parts of a run file that its weights depend on


def pack(state: TrainingState) -> list[bytes | memoryview]:
    """The pieces of the file for the parameters of `state`, see `training_state.file_pieces`."""
    tensors = {}
    for name, tensor in state.parameters.items():
        coded = tensor.numel() >= SMALLEST
        tensors[name] = torch.frombuffer(bytearray(linear8.encode(tensor)), dtype=torch.uint8) if coded else tensor
    return file_pieces(tensors, {"step": str(state.step), "run": state.run_toml})


def unpack(path: Path, run: RunConfig) -> TrainingState | None:
    """The state in a file that `pack` wrote, without an optimizer's; None where it is of another model or other data.

    The step is that of the run it comes from, all else of `run`.
    """
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        theirs = RunConfig.from_toml(about["run"], f"{path}, the run file inside")
        if any(getattr(run, part, None) != getattr(theirs, part, None) for part in _LIKE):
            return None
        parameters = {}
        for name, shape in task_of(run).shapes().items():
            stored = file.get_tensor(name)
            parameters[name] = torch.empty(shape) if stored.dtype == torch.uint8 else stored.clone()
            if stored.dtype == torch.uint8:
                linear8.decode_into(stored.numpy().data, parameters[name])
    return TrainingState(int(about["step"]), parameters, {}, run.to_toml(), run.identity)


def built_in(run: RunConfig) -> TrainingState | None:
    """The weights to draw with that come with tt; None where there are none for such a run. Raises TTError."""
    named = run.data.source == "builtin" and builtin.has(run.data.name, FILE)
    return unpack(builtin.checked_file(run.data.name, FILE), run) if named else None


def start_from_built_in(run: RunConfig) -> TrainingState:
    """The state with which training goes on from the built-in weights: at GO_ON of the schedule, with new moments.

    Equal bytes for all who start so. Raises UsageError where no weights are built in for such a run, TTError.
    """
    if (state := built_in(run)) is None:
        raise UsageError(f"no weights are built in for run {run.run.name}: start it from its seed")
    state.step = round(GO_ON * run.schedule.total_steps)
    state.optimizer = shared_optimizer(state.parameters, run.optimizer).state_dict()
    return state
