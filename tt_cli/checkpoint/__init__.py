"""Weights at rest: the state of training as one safetensors file with the run file inside."""

from tt_cli.checkpoint.checkpoint_files import (
    checkpoints_in,
    find,
    load,
    load_model,
    newest,
    save,
    set_aside_after,
    step_of,
    write,
)
from tt_cli.checkpoint.hash_tree import CHUNK, StateTree, bytes_of
from tt_cli.checkpoint.published_weights import is_checkpoint, read_published, write_published
from tt_cli.checkpoint.training_state import (
    CheckpointError,
    CorruptCheckpoint,
    TrainingState,
    received_state,
    serialised,
)

__all__ = [
    "CHUNK",
    "CheckpointError",
    "CorruptCheckpoint",
    "StateTree",
    "TrainingState",
    "bytes_of",
    "checkpoints_in",
    "find",
    "is_checkpoint",
    "load",
    "load_model",
    "newest",
    "read_published",
    "received_state",
    "save",
    "serialised",
    "set_aside_after",
    "step_of",
    "write",
    "write_published",
]
