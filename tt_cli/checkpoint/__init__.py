"""Weights at rest: the state of training as one safetensors file with the run file inside."""

from tt_cli.checkpoint.files import load, load_model, newest, save
from tt_cli.checkpoint.state import CheckpointError, CorruptCheckpoint, TrainingState, pack, unpack

__all__ = [
    "CheckpointError",
    "CorruptCheckpoint",
    "TrainingState",
    "load",
    "load_model",
    "newest",
    "pack",
    "save",
    "unpack",
]
