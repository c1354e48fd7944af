"""From codes to pictures: the VQGAN that the run file names, and pictures as bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tt_cli.data import builtin
from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import download
from tt_cli.model.vqgan import PUBLISHED, Vqgan, VqganConfig
from tt_cli.run import RunConfig

BUILTIN_WEIGHTS = "vqgan.safetensors"
BUILTIN_CONFIG = "vqgan.json"
# PyTorch Lightning of 2021 files what this callback remembers under its class, in the published VQGAN's file too.
LIGHTNING_CALLBACK = "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"


def load_vqgan(run: RunConfig) -> Vqgan:
    """The run's VQGAN on the CPU, in eval mode; it has its encoder if the weights have one.

    From the Hub come the published f8 architecture's weights, as safetensors or as a Lightning checkpoint. Raises
    UsageError if the weights are of another size than the run file says, TTError if they cannot be read.
    """
    part = run.vqgan
    if part.source == "builtin":
        weights = builtin.checked_file(part.name, BUILTIN_WEIGHTS)
        config = _read_config(builtin.checked_file(part.name, BUILTIN_CONFIG))
    else:
        weights = download(part.name, part.filename or "", part.revision)
        config = dataclasses.replace(
            PUBLISHED,
            resolution=part.grid * PUBLISHED.factor,
            attn_resolutions=(part.grid,),
            codebook_size=part.codebook_size,
        )
    for key, mine, theirs in (
        ("codebook_size", part.codebook_size, config.codebook_size),
        ("grid", part.grid, config.grid),
        ("pixels", part.pixels, config.resolution),
    ):
        if mine != theirs:
            raise UsageError(f"vqgan.{key} is {mine} in the run file, but the VQGAN {part.name} has {theirs}")
    tensors = _read_tensors(weights)
    with torch.device("meta"):
        vqgan = Vqgan(config, with_encoder="encoder.conv_in.weight" in tensors)
    vqgan.to_empty(device="cpu")
    vqgan.load_published(tensors)
    return vqgan.eval().requires_grad_(False)


def decode_pictures(vqgan: Vqgan, codes: np.ndarray | torch.Tensor, batch: int = 64) -> np.ndarray:
    """Codes (b, n) → pictures (b, H, W, 3) uint8, at most `batch` at a time (the VQGAN takes large ones in turns)."""
    device = next(vqgan.parameters()).device
    parts = []
    known = codes if isinstance(codes, torch.Tensor) else torch.from_numpy(codes.astype(np.int64))
    for chunk in known.split(batch):
        pictures = vqgan.decode(chunk.to(device))
        parts.append((pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy())
    if not parts:
        side = vqgan.config.resolution
        return np.zeros((0, side, side, 3), dtype=np.uint8)
    return np.concatenate(parts)


def _read_config(path: Path) -> VqganConfig:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sizes: dict[str, Any] = {name: tuple(size) if isinstance(size, list) else size for name, size in fields.items()}
        return VqganConfig(**sizes)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise TTError(f"the VQGAN's sizes in {path} cannot be read ({error}); install tt again") from error


class _Callback:
    """Stands for that class where the file names it; it takes anything and keeps nothing."""

    def __init__(self, *given: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a safetensors file or of a Lightning checkpoint's `state_dict`, as float32."""
    import pickle  # for the name of an error: torch.load raises it for a file that holds more than tensors
    import zipfile

    import safetensors
    import safetensors.torch

    try:
        if path.suffix == ".safetensors":
            tensors: Any = safetensors.torch.load_file(path)
        else:
            mmap = zipfile.is_zipfile(path)  # then what is left out is not read
            with torch.serialization.safe_globals([(_Callback, LIGHTNING_CALLBACK)]):
                checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            tensors = checkpoint["state_dict"]
        return {name: tensor.float() for name, tensor in tensors.items() if not name.startswith("loss.")}
    except pickle.UnpicklingError as error:
        raise TTError(
            f"the VQGAN weights {path} hold more than tensors and are not opened, for such a file can run code; "
            "convert them to safetensors"
        ) from error
    except (OSError, EOFError, RuntimeError, KeyError, AttributeError, TypeError, safetensors.SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise TTError(f"the VQGAN weights {path} cannot be read ({reason}); fetch them again") from error
