"""Checkpoints as files, for those who do not compute with them: their names, which are kept, what their heads say."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tt_cli.errors import TTError

FORMAT = "tt-2"
BUILT_IN = "built-in"  # in place of a checkpoint's place: the weights that come with tt
_NAME = re.compile(r"step-(\d{8,15})\.safetensors")


@dataclass(frozen=True)
class Head:
    """The facts in a checkpoint's metadata. digest: of the whole state. trains: the optimizer's state is in it."""

    step: int
    identity: str
    digest: str
    trains: bool


def name_of(step: int) -> str:
    """The file of the checkpoint of a step."""
    return f"step-{step:08d}.safetensors"


def step_in(name: str) -> int | None:
    """The step of a checkpoint's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def outdated(newest_first: Sequence[int], keep: int, spread: bool) -> set[int]:
    """The steps whose checkpoints go when `keep` are kept.

    spread: older ones stay too, ever fewer the older they are, to which a run can go back: of those that lie 2^k to
    2^(k+1) steps behind the newest, the oldest.
    """
    older = newest_first[keep:]
    if not (spread and older):
        return set(older)
    oldest = {(newest_first[0] - step).bit_length(): step for step in older}
    return {step for step in older if step not in oldest.values()}


def read_head(path: Path) -> Head:
    """Check a checkpoint's head and that no bytes are missing; the tensors' bytes are not looked at. Raises TTError."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            trains = any(name.startswith("optimizer.") for name in file.keys())  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as error:
        raise TTError(f"cannot read the checkpoint {path}: {error}") from error
    if metadata.get("format") != FORMAT or metadata.get("metadata_digest") != metadata_digest(metadata):
        raise TTError(f"{path} is damaged, or no checkpoint of this version of tt")
    return Head(int(metadata["step"]), metadata["identity"], metadata["digest"], trains)


def metadata_digest(metadata: Mapping[str, str]) -> str:
    """Of all fields but itself, 64 hex digits."""
    fields = sorted((key, value) for key, value in metadata.items() if key != "metadata_digest")
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
