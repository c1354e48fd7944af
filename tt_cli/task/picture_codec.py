"""The VQGAN that the run file names, and pictures as bytes from its codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from tt_cli.checkpoint.published_weights import read_published
from tt_cli.checkpoint.training_state import CheckpointError
from tt_cli.data import builtin
from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import download
from tt_cli.model.vqgan import PUBLISHED, Vqgan, VqganConfig
from tt_cli.run import DalleRun, RunConfig

BUILTIN_WEIGHTS = "vqgan.safetensors"
BUILTIN_CONFIG = "vqgan.json"


def load_vqgan(run: RunConfig) -> Vqgan:
    """The run's VQGAN on the CPU, in eval mode; it has its encoder if the weights have one.

    From the Hub come the published f8 architecture's weights, as safetensors or as a Lightning checkpoint. Raises
    UsageError if the weights are of another size than the run file says, TTError if they cannot be read.
    """
    part = DalleRun.of(run).vqgan
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
    try:
        tensors = read_published(weights)
    except CheckpointError as error:
        raise TTError(f"the VQGAN weights: {error}") from error
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
        return TypeAdapter(VqganConfig).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise TTError(f"the VQGAN's sizes in {path} cannot be read ({error}); install tt again") from error
