"""What a member says about itself that is not so, and a state that it hands out and nobody should take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tt_cli.checkpoint.hash_tree import StateTree
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import SharedState

EPOCHS_AHEAD = 5

Lie = Callable[[PeerRecord, int], dict[str, Any]]
"""(its honest record, how many it published before) → the fields that it changes."""


def endless_speed(record: PeerRecord, published: int) -> dict[str, Any]:
    """Infinity, and every other time the largest number that a record can carry."""
    return {"samples_per_second": math.inf if published % 2 else 1e12}


RECORDS: dict[str, Lie] = {
    "epoch 10^9": lambda record, published: {"epoch": 10**9},
    "samples 10^12": lambda record, published: {"samples": 10**12, "total_samples": 10**12},
    "speed inf": endless_speed,
    "weight never published": lambda record, published: {"samples": 0, "samples_per_second": 0.0},
}


def false_bytes(shared: SharedState, buffer: StateBuffer) -> StateTree:
    """The manifest of the state that all hold, and zeros for its bytes."""
    tree: StateTree = shared.tree
    buffer.write(0, bytes(tree.nbytes))
    return tree


def false_state(shared: Any, buffer: StateBuffer) -> StateTree:
    """A state that fits its manifest, some steps ahead of the others': theirs with all parameters zero."""
    state = shared.snapshot()
    state.step += EPOCHS_AHEAD
    for tensor in state.parameters.values():
        tensor.copy_(torch.zeros_like(tensor))
    tree = state.tree()
    state.write_into(tree, buffer.write)
    return tree
