"""Weights as others publish them: files read as named tensors, nothing in them ever run, and written so.

Notable:
- what a file is, is told by its first bytes, not by its name;
- a pickled file goes through torch's weights-only reader, which builds tensors and plain containers and
  refuses everything else before it is called;
- tensors are views of the file where its format allows: 0.5 GB of weights cost no memory until they are used;
- a safetensors file holds no aliases: a tensor with several names stands under the first, and the metadata say
  `other name = first name`, as safetensors' own `save_model` does it; they come back as aliases.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tt_cli.atomic_write import atomic_file
from tt_cli.checkpoint.checkpoint_files import OnProgress, refusals, write
from tt_cli.checkpoint.training_state import CheckpointError, file_pieces
from tt_cli.errors import UsageError, os_errors

WRAPPERS = ("state_dict", "model", "weights")  # keys under which training scripts put the tensors
_ZIP, _PICKLES = b"PK\x03\x04", (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# PyTorch Lightning of 2021 files what its callbacks remember under their class, which the VQGAN's file names too.
_CALLBACK = "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_published(path: Path) -> dict[str, Tensor]:
    """The named tensors (CPU) of a .pt, .pth, .ckpt, .bin or .safetensors file, names as they stand in it.

    A state dict may stand alone or below WRAPPERS, up to three deep; what stands beside it is left out. Aliases share
    their storage. The tensors may be views of the file: copy what has to outlive it. Raises UsageError for a file that
    is not there or is a checkpoint of tt, CheckpointError for one that holds anything but plain tensors.
    """
    with os_errors(f"cannot read the weights {path}", kind=UsageError), path.open("rb") as file:
        start = file.read(9)
    if start.startswith((_ZIP, *_PICKLES)):
        tensors = _state_dict(_unpickled(path, mmap=start.startswith(_ZIP)), path)
    elif start[8:] == b"{":
        tensors = _safetensors(path)
    else:
        raise CheckpointError(f"{path} is neither a torch nor a safetensors file; fetch it again")
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            message = "holds no plain numbers; have its maker save it as a dense tensor"
            raise CheckpointError(f"{path}: {name[:80]} {message}")
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype not in _DTYPES:
            message = "weights are float64, float32, float16 or bfloat16"
            raise CheckpointError(f"{path}: {name[:80]} is {tensor.dtype}; {message}")
    return tensors


def write_published(
    path: Path, state: Mapping[str, Tensor], on_progress: OnProgress = lambda done, total: None
) -> None:
    """Write named tensors (CPU) to `path`: safetensors if it is called so, else a state dict for `torch.load`.

    Aliases are stored once. See `write`; torch writes its own format at once, of which `on_progress` is not told.
    """
    if path.suffix == ".safetensors":
        write(path, _as_safetensors(state), on_progress)
        return
    with refusals(path), atomic_file(path) as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's writer says so when the disk is full
            raise CheckpointError(f"cannot write {path}: {_line(error)}; is the disk full?") from error


def _as_safetensors(state: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in first:
            metadata[name] = first[place]
        else:
            first[place], tensors[name] = name, tensor
    return file_pieces(tensors, metadata)


def is_checkpoint(path: Path) -> bool:
    """True if the file says that it is a checkpoint of tt (of any version); False if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return bool(re.fullmatch(r"tt-\d{1,6}", (file.metadata() or {}).get("format", "")))
    except (OSError, SafetensorError):
        return False


def _safetensors(path: Path) -> dict[str, Tensor]:
    if is_checkpoint(path):
        raise UsageError(f"{path} is a checkpoint of tt already; its run file is inside, so leave out --run")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
            aliases = file.metadata() or {}
        aliased = {name: tensors[first] for name, first in aliases.items() if first in tensors and name not in tensors}
        return tensors | aliased
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {_line(error)}; fetch it again") from error


def _unpickled(path: Path, mmap: bool) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([(_ReadProgress, _CALLBACK)]):
            warnings.simplefilter("ignore")  # about what it may refuse: it says so itself when it does
            if mmap and path.suffix != ".safetensors":
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            with path.open("rb") as file:  # torch would believe a name rather than the content
                return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(
                f"{path} holds more than tensors ({named[1][:80]}) and is not opened, for such a file can run code; "
                "get it as safetensors, or have its maker save the state dict alone"
            ) from error
        raise CheckpointError(f"{path} cannot be read as tensors alone ({_line(error)}); fetch it again") from error
    except Exception as error:  # bytes from anyone: the reader raises whatever they lead it to
        raise CheckpointError(f"{path} cannot be read ({_line(error)}); fetch it again") from error


class _ReadProgress:
    """Stands for the class of a training callback where a file names it; it takes anything and keeps nothing."""

    def __init__(self, *given: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(len(WRAPPERS) + 1):
        if not isinstance(content, Mapping):
            break
        if any(isinstance(value, Tensor) for value in content.values()):
            for name, value in content.items():
                if not isinstance(name, str) or not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"{path}: among its tensors is {str(name)[:80]!r}, a {type(value).__name__}; "
                        "have its maker save the state dict alone"
                    )
            return {name: value.detach() for name, value in content.items()}
        inside = [key for key in WRAPPERS if isinstance(content.get(key), Mapping)]
        if len(inside) > 1:
            raise CheckpointError(f"{path} holds weights as {' and as '.join(inside)}; keep the one that is wanted")
        if not inside:
            break
        content = content[inside[0]]
    raise CheckpointError(f"{path} holds no weights: no named tensors, alone or as {', '.join(WRAPPERS)}")


def _line(error: Exception) -> str:
    """The first line of an error of torch's that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Weights only load failed", "In PyTorch 2.6"))]
    return (telling or lines or [type(error).__name__])[0][:120].rstrip(".")
