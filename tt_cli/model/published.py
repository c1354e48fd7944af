"""The published checkpoint's names (training code of the paper, and what later dalle-pytorch made of them).

A shared tensor stands under every layer that uses it, and the tied matrix under the embeddings too.
Reversible and sequential trunks have different names because they are different functions; weights do not
carry over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tt_cli.errors import UsageError

if TYPE_CHECKING:
    from tt_cli.model.config import DalleConfig
    from tt_cli.model.dalle import Dalle

_PREFIX = "model."
_ANGLES = "transformer.pos_emb"
_TIED = ("to_logits.1", "text_emb.linear", "image_emb.linear")
# 8192 radians times a frequency rounded to float32 is good to 5e-4; anything further off is another model.
_ANGLE_TOLERANCE = 2e-3


def published_names(config: DalleConfig, *, later: bool = False) -> dict[str, list[str]]:
    """Our parameter name -> published names without the prefix "model.", for every parameter.

    ``later`` gives the names of dalle-pytorch 1.4 and after, which wrap the modules once more. Raises
    UsageError for a model without tied embeddings, rotary embeddings or token shift: such weights were never
    published.
    """
    for feature in ("tied_embeddings", "rotary", "shift_tokens"):
        if not getattr(config, feature):
            raise UsageError(f"model: {feature} is false; published names exist only for models that have it")
    names: dict[str, list[str]] = {}
    attention_path = "fn.fn.fn.fn.fn" if later else "fn.fn.fn"
    feed_forward_path = "fn.fn.fn.fn" if later else "fn.fn.fn"
    for layer in range(config.depth):
        shared = config.weight_set(layer)
        for index, branch in enumerate(("attention", "feed_forward")):
            if config.reversible:
                root = f"transformer.layers.blocks.{layer}.{'fg'[index]}.net"
            else:
                root = f"transformer.layers.layers.{layer}.{index}"
            own = f"layers.{layer}.{branch}"
            pairs = {f"{own}.scale": f"{root}.scale"}
            for leaf in ("weight", "bias"):
                pairs[f"{own}.norm.{leaf}"] = f"{root}.fn.norm.{leaf}"
                if branch == "attention":
                    pairs[f"attention.{shared}.out.{leaf}"] = f"{root}.{attention_path}.to_out.0.{leaf}"
                else:
                    pairs[f"feed_forward.{shared}.expand.{leaf}"] = f"{root}.{feed_forward_path}.net.0.{leaf}"
                    pairs[f"feed_forward.{shared}.contract.{leaf}"] = f"{root}.{feed_forward_path}.net.3.{leaf}"
            if branch == "attention":
                pairs[f"attention.{shared}.qkv"] = f"{root}.{attention_path}.to_qkv.weight"
            for ours, theirs in pairs.items():
                names.setdefault(ours, []).append(theirs)
    for leaf in ("weight", "bias"):
        names[f"norm.{leaf}"] = [f"to_logits.0.{leaf}"]
        names[f"logits.{leaf}"] = [f"{module}.{leaf}" for module in _TIED]
    return names


@torch.no_grad()
def load_published(dalle: Dalle, state: Mapping[str, Tensor]) -> None:
    """Copy a published state dict into the model; the model is untouched if anything is wrong.

    Reads the paper's naming and that of dalle-pytorch 1.4 and after, with or without the prefix "model.".
    Raises UsageError naming the tensor that is missing, unexpected, misshapen, not finite, or that differs
    from another tensor that should be the same one.
    """
    given = {key.removeprefix(_PREFIX): value for key, value in state.items()}
    config = dalle.config
    names = published_names(config)
    later = published_names(config, later=True)
    if names["attention.0.qkv"][0] not in given and later["attention.0.qkv"][0] in given:
        names = later
    expected = {_ANGLES, *(name for aliases in names.values() for name in aliases)}
    missing, unexpected = sorted(expected - given.keys()), sorted(given.keys() - expected)
    if missing or unexpected:
        trunk = "reversible" if config.reversible else "sequential"
        parts = [
            f"{len(keys)} {what} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
            for what, keys in (("missing", missing), ("unexpected", unexpected))
            if keys
        ]
        raise UsageError(
            f"weights do not fit the {trunk} model of depth {config.depth}: {'; '.join(parts)};"
            " use the run file that they were trained with"
        )
    parameters = dict(dalle.named_parameters())
    for ours, aliases in names.items():
        _check_aliases(parameters[ours], aliases, given)
    angles = _published_angles(dalle)
    _check(_ANGLES, given[_ANGLES], angles.shape)
    if not given[_ANGLES].is_meta and (given[_ANGLES].to(angles) - angles).abs().max() > _ANGLE_TOLERANCE:
        raise UsageError(f"weights: {_ANGLES} holds other rotary angles than this model's; use its own run file")
    for ours, aliases in names.items():
        parameters[ours].copy_(given[aliases[0]].reshape(parameters[ours].shape))


def export_published(dalle: Dalle) -> dict[str, Tensor]:
    """The weights under the paper's names with the prefix "model."; aliases share their storage."""
    parameters = dict(dalle.named_parameters())
    state = {_PREFIX + _ANGLES: _published_angles(dalle)}
    for ours, aliases in published_names(dalle.config).items():
        tensor = parameters[ours].detach()
        if ours.endswith(".scale"):
            tensor = tensor.view(1, 1, -1)
        state.update((_PREFIX + alias, tensor) for alias in aliases)
    return state


def _published_angles(dalle: Dalle) -> Tensor:
    """Each angle stands twice, once for either channel of its pair: (1, positions, rotated channels)."""
    return dalle.rotary.angles.repeat_interleave(2, dim=1)[None]


def _check_aliases(parameter: Tensor, aliases: list[str], given: Mapping[str, Tensor]) -> None:
    first = given[aliases[0]]
    shape = (1, 1, *parameter.shape) if aliases[0].endswith(".scale") else tuple(parameter.shape)
    _check(aliases[0], first, shape)
    for alias in aliases[1:]:
        other = given[alias]
        if other is first:
            continue
        _check(alias, other, shape)
        if not other.is_meta and not torch.equal(other, first):
            raise UsageError(f"weights: {alias} and {aliases[0]} differ, but this model shares them; use its run file")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise UsageError(
            f"weights: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(shape)};"
            " use the run file that they were trained with"
        )
    if not tensor.is_floating_point():
        raise UsageError(f"weights: {name} is {tensor.dtype}, not floating point; the file is not a model's")
    if not tensor.is_meta and not torch.isfinite(tensor).all():
        raise UsageError(f"weights: {name} holds values that are not finite; take an earlier checkpoint")
