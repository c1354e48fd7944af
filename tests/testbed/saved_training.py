"""A training at rest: the model as transformers reads it, the optimizer's state, the place in the stream.

Safetensors and JSON. Each save is a folder of its own, step-000200, and goes when the next one is complete.
Used by scripts/finetune_gpt2.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from testbed.offloaded import Offloaded
from testbed.text_stream import Stream, readable
from tt_cli.errors import TTError, UsageError

TOKENIZER, OPTIMIZER, RECORD = "tokenizer.json", "optimizer.safetensors", "training.json"


def last_saved(folder: Path | None) -> Path | None:
    """The newest complete one in a folder, which is made. Raises TTError."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TTError(f"cannot save in {folder}: {error.strerror}") from error
    return max((record.parent for record in folder.glob(f"step-*/{RECORD}")), default=None)


def save(
    folder: Path, step: int, settings: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer, stream: Stream,
) -> Path:  # fmt: skip
    """Write it, and return where. settings: what it must go on with. Raises TTError."""
    last, into = last_saved(folder), folder / f"step-{step:06}"
    try:
        into.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(into)
        tokenizer.save(str(into / TOKENIZER))
        save_file(state_tensors(model, optimizer), into / OPTIMIZER)
        record = {"step": step, "settings": settings, "stream": stream.state()}
        (into / RECORD).write_text(json.dumps(record))  # as the last: now it is complete
        if last and last != into:
            shutil.rmtree(last)
    except OSError as error:
        raise TTError(f"cannot save to {into}: {error.strerror or error}") from error
    return into


def record_of(saved: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The step and the place in the stream. Raises UsageError where the settings are others."""
    with readable(str(saved)):
        record: dict[str, Any] = json.loads((saved / RECORD).read_text())
        was = record["settings"]
        other = [f"{key} {was[key]}" for key in settings if was[key] != settings[key]]
    if other:
        raise UsageError(f"{saved} was trained with {', '.join(other)}: go on with that, or --save elsewhere")
    return record


def put_back(
    saved: Path, record: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, stream: Stream
) -> None:
    """Give a fresh optimizer and a fresh stream what was saved. Raises UsageError."""
    with readable(str(saved)):
        tensors = load_file(saved / OPTIMIZER)
        for name, weight, state in _slots(model, optimizer):
            own = {key.rpartition("/")[2]: value for key, value in tensors.items() if key.startswith(f"{name}/")}
            if (master := own.pop("master", None)) is not None:
                weight.data.copy_(master)
            for key, value in own.items():
                if value.ndim:
                    state[key] = value.to(weight.device)
                else:  # how many steps: torch counts with a tensor in the host's memory, bitsandbytes with an int
                    state[key] = value if value.is_floating_point() else int(value)
            if state["step"] and state.get("state1", weight).dtype == torch.uint8:
                tables = _inner(optimizer).name2qmap
                for key, table in (("qmap1", "dynamic"), ("qmap2", "udynamic")):
                    state[key] = tables[table] = tables[table].to(weight.device)
        stream.go_on(record["stream"])


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that the optimizer knows beside the model's weights, by the names of these."""
    found = {}
    for name, weight, state in _slots(model, optimizer):
        for key, value in state.items():
            if not key.startswith("qmap"):  # bitsandbytes' tables of codes, the same for all
                found[f"{name}/{key}"] = torch.as_tensor(value).cpu().contiguous()
        if isinstance(optimizer, Offloaded):
            found[f"{name}/master"] = weight.detach()
    return found


def _slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    weights = optimizer.masters if isinstance(optimizer, Offloaded) else model.parameters()
    for (name, _), weight in zip(model.named_parameters(), weights, strict=True):
        yield name, weight, _inner(optimizer).state[weight]


def _inner(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.inner if isinstance(optimizer, Offloaded) else optimizer
