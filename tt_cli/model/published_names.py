"""The published checkpoint's names (training code of the paper, and what later dalle-pytorch made of them).

Notable:
- a shared tensor stands under every layer that uses it, and the tied matrix under the embeddings too;
- reversible and sequential trunks have different names because they are different functions; weights do not
  carry over;
- dalle-pytorch 1.4 and after use one set of names with `optimize_for_inference` and without;
- nothing is copied: what comes out are views of what goes in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tt_cli.errors import UsageError
from tt_cli.model.layers.rotary import rotary_angles

if TYPE_CHECKING:
    from tt_cli.model.dalle import Dalle
    from tt_cli.model.dalle_config import DalleConfig

_PREFIX = "model."
_VAE = "vae."  # the public package saves the VQGAN along with the decoder
_ANGLES = "transformer.pos_emb"
_TIED = ("to_logits.1", "text_emb.linear", "image_emb.linear")
_SHARED = {
    "attention": {"out.weight": "to_out.0.weight", "out.bias": "to_out.0.bias", "qkv": "to_qkv.weight"},
    "feed_forward": {
        **{"expand.weight": "net.0.weight", "contract.weight": "net.3.weight"},
        **{"expand.bias": "net.0.bias", "contract.bias": "net.3.bias"},
    },
}
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
    for layer in range(config.depth):
        shared = config.weight_set(layer)
        for index, (branch, wrappers) in enumerate((("attention", 5), ("feed_forward", 4))):
            if config.reversible:
                root = f"transformer.layers.blocks.{layer}.{'fg'[index]}.net"
            else:
                root = f"transformer.layers.layers.{layer}.{index}"
            own, path = f"layers.{layer}.{branch}", f"{root}{'.fn' * (wrappers if later else 3)}"
            pairs = {f"{own}.scale": f"{root}.scale"}
            pairs |= {f"{own}.norm.{leaf}": f"{root}.fn.norm.{leaf}" for leaf in ("weight", "bias")}
            pairs |= {f"{branch}.{shared}.{ours}": f"{path}.{theirs}" for ours, theirs in _SHARED[branch].items()}
            for ours, theirs in pairs.items():
                names.setdefault(ours, []).append(theirs)
    for leaf in ("weight", "bias"):
        names[f"norm.{leaf}"] = [f"to_logits.0.{leaf}"]
        names[f"logits.{leaf}"] = [f"{module}.{leaf}" for module in _TIED]
    return names


@torch.no_grad()
def load_published(dalle: Dalle, state: Mapping[str, Tensor]) -> None:
    """Copy a published state dict into the model; the model is untouched if anything is wrong.

    Reads and refuses what from_published does.
    """
    parameters = dict(dalle.named_parameters())
    for ours, tensor in from_published(dalle, state).items():
        parameters[ours].copy_(tensor)


@torch.no_grad()
def from_published(dalle: Dalle, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameter name -> tensor (a view) of a published state dict, checked against the model's shape.

    Reads the paper's naming and that of dalle-pytorch 1.4 and after, with or without the prefix "model."; leaves
    out `vae.*`, which is no part of the decoder. The model lends its names and shapes only and may be on the meta
    device. Raises UsageError naming the tensor that is missing, unexpected, misshapen, not finite, or that differs
    from another tensor that should be the same one.
    """
    given: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key.removeprefix(_PREFIX)
        if name in given:
            raise UsageError(f"weights: {name} stands there twice, with the prefix {_PREFIX} and without")
        if not name.startswith(_VAE):
            given[name] = value
    names = _names_used(dalle.config, given)
    parameters = dict(dalle.named_parameters())
    for ours, aliases in names.items():
        _check_aliases(parameters[ours], aliases, given)
    angles = _published_angles(dalle.config)
    _check(_ANGLES, given[_ANGLES], angles.shape)
    if not given[_ANGLES].is_meta and (given[_ANGLES].to(angles) - angles).abs().max() > _ANGLE_TOLERANCE:
        raise UsageError(f"weights: {_ANGLES} holds other rotary angles than this model's; use its own run file")
    return {ours: given[aliases[0]].reshape(parameters[ours].shape) for ours, aliases in names.items()}


def to_published(config: DalleConfig, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters of a model with this configuration: our names to the published ones."""
    state = {_PREFIX + _ANGLES: _published_angles(config)}
    for ours, aliases in published_names(config).items():
        tensor = parameters[ours]
        if ours.endswith(".scale"):
            tensor = tensor.view(1, 1, -1)
        state.update((_PREFIX + alias, tensor) for alias in aliases)
    return state


def _names_used(config: DalleConfig, given: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The naming, of those that this trunk may have, that is given in full. Raises UsageError."""

    def expected(naming: dict[str, list[str]]) -> set[str]:
        return {_ANGLES, *(name for aliases in naming.values() for name in aliases)}

    def nearest(config: DalleConfig) -> dict[str, list[str]]:
        namings = [published_names(config), published_names(config, later=True)]
        return max(namings, key=lambda naming: len(expected(naming) & given.keys()))

    names = nearest(config)
    wanted = expected(names)
    missing, unexpected = sorted(wanted - given.keys()), sorted(given.keys() - wanted)
    if not missing and not unexpected:
        return names
    trunk, other = ("reversible", "sequential") if config.reversible else ("sequential", "reversible")
    parts = [
        f"{len(keys)} {what} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
        for what, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    of_other = expected(nearest(dataclasses.replace(config, reversible=not config.reversible))) == given.keys()
    raise UsageError(
        f"weights do not fit the {trunk} model of depth {config.depth}: {'; '.join(parts)};"
        + (f" they are a {other} model's, another function;" if of_other else "")
        + " use the run file that they were trained with"
    )


def _published_angles(config: DalleConfig) -> Tensor:
    """Each angle stands twice, once for either channel of its pair: (1, positions, rotated channels)."""
    angles = rotary_angles(config.dim_head, config.text_positions, config.image_size)
    return angles.repeat_interleave(2, dim=1)[None]


def _check_aliases(parameter: Tensor, aliases: list[str], given: Mapping[str, Tensor]) -> None:
    first = given[aliases[0]]
    shape = (1, 1, *parameter.shape) if aliases[0].endswith(".scale") else tuple(parameter.shape)
    _check(aliases[0], first, shape)
    for alias in aliases[1:]:
        other = given[alias]
        without_content = other.is_meta or first.is_meta
        if other is first or (not without_content and other.dtype == first.dtype and other.is_set_to(first)):
            continue  # as aliases in a file are
        _check(alias, other, shape)
        if not (without_content or torch.equal(other, first)):
            raise UsageError(f"weights: {alias} and {aliases[0]} differ, but this model shares them; use its run file")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise UsageError(
            f"weights: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(shape)};"
            " use the run file that they were trained with"
        )
    if not tensor.is_floating_point():
        raise UsageError(f"weights: {name} is {tensor.dtype}, not floating point; the file is not a model's")
    if not all_finite(tensor):
        raise UsageError(f"weights: {name} holds values that are not finite; take an earlier checkpoint")


def all_finite(tensor: Tensor) -> bool:
    """False if a floating-point tensor holds NaN, infinity or, in float64, what float32 cannot; meta passes."""
    if tensor.is_meta or not tensor.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor.detach())).float()).all())  # passes NaN on
