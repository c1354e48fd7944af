"""A tiny decoder computed in float64 by the code that the paper's checkpoint was trained with.

data/dalle_tiny.safetensors and .json hold weights under published names, logits, losses, gradients (tensors
of more than 512 elements as every ``grad_stride``-th element, and the norm and maximum of each), greedy codes,
masks, and the logits of a later dalle-pytorch whose conv_like window is another one.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.model.published_names import load_published, to_published

_DATA = Path(__file__).parent / "data"


def export_published(dalle: Dalle) -> dict[str, Tensor]:
    """The weights under the paper's names with the prefix "model."; aliases share their storage."""
    return to_published(dalle.config, {name: tensor.detach() for name, tensor in dalle.named_parameters()})


@cache
def tensors() -> dict[str, Tensor]:
    """All tensors of the fixture."""
    return load_file(_DATA / "dalle_tiny.safetensors")


@cache
def facts() -> dict[str, Any]:
    """The scalars of the fixture."""
    return json.loads((_DATA / "dalle_tiny.json").read_text())


@cache
def published_keys() -> dict[str, list[int]]:
    """Key -> shape of the published checkpoint of the paper's run."""
    return json.loads(gzip.decompress((_DATA / "dalle_published_keys.json.gz").read_bytes()))


def sequential_name(name: str) -> str:
    """The sequential trunk's name of a tensor that is named as in the reversible one."""
    if ".blocks." not in name:
        return name
    head, _, tail = name.partition(".blocks.")
    layer, branch, rest = tail.split(".", 2)
    return f"{head}.layers.{layer}.{'fg'.index(branch)}.{rest.removeprefix('net.')}"


def state(reversible: bool = True) -> dict[str, Tensor]:
    """The state dict as it was published, aliases included."""
    rename = str if reversible else sequential_name
    aliases = facts()["aliases"]
    return {f"model.{rename(key)}": tensors()[f"weights.{source}"] for key, source in aliases.items()}


def config(**changes: Any) -> DalleConfig:
    """The fixture's configuration."""
    c = facts()["config"]
    values = {
        "dim": c["dim"],
        "depth": c["depth"],
        "heads": c["heads"],
        "dim_head": c["dim_head"],
        "text_vocab": c["text_vocab"],
        "text_length": c["text_len"],
        "image_size": c["fmap"],
        "image_vocab": c["image_vocab"],
        "loss_image_weight": c["loss_img_weight"],
    }
    return DalleConfig(**(values | changes))


def model(**changes: Any) -> Dalle:
    """A model of the fixture's configuration with the fixture's weights."""
    dalle = Dalle(config(**changes))
    load_published(dalle, state(dalle.config.reversible))
    return dalle


def text() -> Tensor:
    """(2, 16) int64; the first caption is padded with id 0, the second with id 1."""
    return tensors()["text"]


def image() -> Tensor:
    """(2, 64) int64."""
    return tensors()["image"].long()
