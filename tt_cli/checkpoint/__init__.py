"""Weights at rest: the state of training as one safetensors file with the run file inside."""

from tt_cli.checkpoint.files import load, load_model, newest, save, write
from tt_cli.checkpoint.published import is_checkpoint, read_published, write_published
from tt_cli.checkpoint.state import (
    CheckpointError,
    CorruptCheckpoint,
    TrainingState,
    pack,
    received_state,
    serialised,
    unpack,
)
from tt_cli.checkpoint.tree import CHUNK, StateTree, bytes_of

__all__ = [
    "CHUNK",
    "CheckpointError",
    "CorruptCheckpoint",
    "StateTree",
    "TrainingState",
    "bytes_of",
    "is_checkpoint",
    "load",
    "load_model",
    "newest",
    "pack",
    "read_published",
    "received_state",
    "save",
    "serialised",
    "unpack",
    "write",
    "write_published",
]
