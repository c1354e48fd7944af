"""TrainingState: all that members of a run hold in common, its digest, and its form as bytes.

Notable:
- the digest covers every bit; it is the root of a hash tree, which tells which chunks of two states differ;
- what comes in, from a file or a peer, is checked before it is returned: format, digest, finite numbers;
- no tensor is copied more than once on its way in or out. The library's own writer copies twice, so this
  room writes the (simple) safetensors format itself; reading goes through the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tt_cli.checkpoint.hash_tree import DTYPES, StateTree, bytes_of
from tt_cli.errors import TTError
from tt_cli.run.checkpoint_names import FORMAT, metadata_digest

PARAMETERS, OPTIMIZER = "parameters.", "optimizer."  # how tensor names start in a file
_METADATA = {"format", "step", "identity", "digest", "parameters_digest", "run", "metadata_digest"}


class CheckpointError(TTError):
    """A checkpoint cannot be written or used."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint's content is not what was written: torn, damaged, forged or not finite."""


@dataclass
class TrainingState:
    """The state after `step` global steps. parameters, optimizer: name -> tensor (8-bit moments are uint8).

    Tensors on a GPU are copied to the CPU when written; those that come from `load` are on the CPU and contiguous.
    """

    step: int
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    run_toml: str
    identity: str

    def tree(self) -> StateTree:
        """Hash all of it: over run identity, step and every tensor's name, shape, dtype and bytes, by chunks.

        The order of the dicts and the tensors' strides do not matter, nor does the text of the run file.
        """
        return StateTree.of(self.identity, self.step, self.parameters, self.optimizer)

    def digest(self) -> str:
        """The root of the tree, 64 hex digits."""
        return self.tree().digest

    def write_into(self, tree: StateTree, write: Callable[[int, memoryview], object]) -> None:
        """Copy all tensors with `write(offset, bytes)`, each to its place in `tree`, which is that of this state."""
        groups = {"parameters": self.parameters, "optimizer": self.optimizer}
        for group, spec, offset in tree.places():
            write(offset, bytes_of(groups[group][spec.name]))


def received_state(tree: StateTree, data: memoryview, run_toml: str, *, parameters_only: bool = False) -> TrainingState:
    """The state whose chunks, all verified, lie in `data` at the tree's places. Its tensors share the memory of `data`.

    run_toml: the receiver's own. parameters_only: there are only those. Raises CorruptCheckpoint for one that holds
    NaN or infinity: who signs it is wrong.
    """
    groups: dict[str, dict[str, Tensor]] = {"parameters": {}, "optimizer": {}}
    for group, spec, offset in tree.places():
        if not parameters_only or group == "parameters":
            groups[group][spec.name] = spec.view(data, offset)
    for tensors in groups.values():
        check_finite(tensors, "the received state")
    return TrainingState(tree.step, groups["parameters"], groups["optimizer"], run_toml, tree.identity)


def serialised(state: TrainingState) -> list[bytes | memoryview]:
    """The pieces of the safetensors file of `state`. Those of tensors on the CPU are views: write them at once."""
    named = {PARAMETERS + name: tensor for name, tensor in state.parameters.items()}
    named |= {OPTIMIZER + name: tensor for name, tensor in state.optimizer.items()}
    tree = state.tree()
    metadata = {"format": FORMAT, "step": str(state.step), "identity": state.identity, "run": state.run_toml}
    metadata |= {"digest": tree.digest, "parameters_digest": tree.parameters_digest}
    return file_pieces(named, {**metadata, "metadata_digest": metadata_digest(metadata)})


def file_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """The pieces of the safetensors file of `tensors`, no two of which share memory."""
    named = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # wide first: all aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in named:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(bytes_of(tensor) for _, tensor in named)]


def checked_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], origin: str) -> TrainingState:
    """Check a file's whole content and return the state in it. Raises CheckpointError, naming `origin`."""
    step = checked_step(metadata, origin)
    groups: dict[str, dict[str, Tensor]] = {PARAMETERS: {}, OPTIMIZER: {}}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in groups if name.startswith(prefix)), None)
        if prefix is None or tensor.dtype not in DTYPES:
            raise CorruptCheckpoint(f"{origin} is no checkpoint of tt: unexpected tensor '{name[:80]}'")
        groups[prefix][name.removeprefix(prefix)] = tensor
    state = TrainingState(step, groups[PARAMETERS], groups[OPTIMIZER], metadata["run"], metadata["identity"])
    if state.digest() != metadata["digest"]:
        raise CorruptCheckpoint(f"{origin} is damaged: its digest does not match its content")
    check_finite(tensors, origin)
    return state


def checked_step(metadata: Mapping[str, str], origin: str) -> int:
    """Check the metadata's form and return the step. Raises CheckpointError."""
    format = metadata.get("format", "")
    if format != FORMAT and re.fullmatch(r"tt-\d{1,6}", format):
        later = int(format.removeprefix("tt-")) > int(FORMAT.removeprefix("tt-"))
        advice = "update tt" if later else "it was written by an earlier version, use that one"
        raise CheckpointError(f"{origin} has format {format}; this version of tt reads {FORMAT}: {advice}")
    if format != FORMAT or metadata.keys() != _METADATA:
        raise CorruptCheckpoint(f"{origin} is no checkpoint of tt: its header does not say so")
    if metadata["metadata_digest"] != metadata_digest(metadata):
        raise CorruptCheckpoint(f"{origin} is damaged: its header's digest does not match")
    if not re.fullmatch(r"[0-9]{1,15}", metadata["step"]):
        raise CorruptCheckpoint(f"{origin} is damaged: step '{metadata['step'][:40]}' is no number")
    return int(metadata["step"])


def check_finite(tensors: Mapping[str, Tensor], origin: str) -> None:
    """Raise CorruptCheckpoint when a floating-point tensor holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor)  # passes NaN on, needs no memory
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise CorruptCheckpoint(f"{origin} is unusable: '{name[:80]}' holds NaN or infinity")
