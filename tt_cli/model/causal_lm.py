"""Causal language models of transformers: with first weights that a seed decides, or others', and adapters on these.

Notable:
- a configuration is canonical JSON with all defaults written out: a later version's default changes nothing in it, and
  the same model is the same text, as part of a run's identity;
- weights are drawn from numpy by each parameter's name: equal bytes on all machines, as torch's draws are not;
- models are made by classes of the installed transformers; neither a configuration nor weights can bring code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss

from tt_cli.errors import TTError, UsageError
from tt_cli.model.layers.fused import fused, fusion

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from tt_cli.run.text_parts import LoraPart, PretrainedPart

# Keys of a config.json that say nothing of the function that is trained: where it came from, how it is called.
_BESIDE = {
    "_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
_SETTINGS: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.float32, "trust_remote_code": False}
_PIECES = 16  # of logits: what is in float32 grows with the examples, as all else does
_SCALE = 2.0**15  # of the gradient of logits: in fp16 those of unlikely tokens would vanish
_REFUSED = ("auto_map", "quantization_config")  # code of others, and weights that are not trained


def canonical(fields: Mapping[str, Any]) -> str:
    """Canonical JSON (sorted keys, no spaces) of a config.json's fields, with the defaults of its `model_type`.

    Raises UsageError for a model_type that transformers does not know, and for fields that it does not take.
    """
    config = _config(fields)
    kept = {key: value for key, value in config.to_dict().items() if key not in _BESIDE}
    try:
        return json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the configuration cannot be written as JSON ({error})") from None


def causal_lm(configuration: str, seed: int | None) -> nn.Module:
    """The model of a `canonical` configuration in float32, with attention by SDPA and the first weights of this seed.

    None: with any weights; on the device "meta", names and shapes alone. Raises UsageError for no such model.
    """
    config = _config(json.loads(configuration))
    from transformers import AutoModelForCausalLM

    try:
        model: nn.Module = AutoModelForCausalLM.from_config(config, **_SETTINGS)
    except (ValueError, TypeError) as error:
        raise UsageError(f"no causal language model of {config.model_type}: {_words(error)}") from None
    if seed is not None:
        _initialise(model, seed, config)
    return model


def pretrained(configuration: str, folder: Path, origin: str) -> nn.Module:
    """The model of a `canonical` configuration in float32, with the weights in a folder of a Hub's repository.

    origin: begins the errors: TTError for weights that cannot be read, UsageError for those of another model.
    """
    config = _config(json.loads(configuration))
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            generation_config=GenerationConfig.from_model_config(config),  # else it would have to be in the folder
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **_SETTINGS,
        )
    except Exception as error:  # bytes from anyone: the reader raises whatever they lead it to
        raise TTError(f"{origin}: its weights cannot be read: {_words(error)}") from error
    if missing := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise UsageError(f"{origin} has no weights for {len(missing)} tensors of model.config, such as {missing[0]}")
    return cast(nn.Module, model.train())


def adapted(model: nn.Module, lora: LoraPart, source: PretrainedPart, seed: int | None) -> nn.Module:
    """The model with peft's adapters of low rank (LoRA, Hu et al. 2021), which alone require gradients.

    The first matrix of each is drawn as peft draws it, but by its name; the second is zero, so that the model begins as
    the one that it is made of: `source`, which is named where the adapters are written. seed: None: with any weights.
    """
    logging.disable(logging.WARNING)  # bitsandbytes, which peft imports, names kernels for some CPUs that it lacks
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise TTError(f"adapters need peft ({error}): pip install 'tt-cli[lm]'") from None
    finally:
        logging.disable(logging.NOTSET)
    cast(Any, model).name_or_path = source.name
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": "all-linear", "revision": source.revision}
    with warnings.catch_warnings(action="ignore"):  # they are for developers
        result: nn.Module = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in result.named_parameters():
        if seed is not None and ".lora_A." in name:
            _draw(name, parameter, seed, 1 / math.sqrt(parameter.shape[1]))
    return result


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each token after the first, of ids (b, n) int64; softmax in float32."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cast(Tensor, _CrossEntropy.apply(logits.flatten(0, 1), ids[:, 1:].flatten()))


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy that holds two tensors of the logits' size, these and their gradient, in their dtype.

    The usual one holds logits, float32 copies of them and of their logarithms, and two gradients: with the vocabularies
    of today most of a pass. Here a piece at a time is in float32, and the gradient is made on the way.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (n, ids) and targets (n,)."""
        wanted, total = ctx.needs_input_grad[0], logits.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(logits) if wanted else logits
        rows = -(-len(targets) // _PIECES)
        for piece, target, out in zip(logits.split(rows), targets.split(rows), gradient.split(rows), strict=True):
            logarithms = log_softmax(piece.float(), dim=1)
            total += nll_loss(logarithms, target, reduction="sum")
            if wanted:
                shares = logarithms.exp_()
                shares[torch.arange(len(target), device=target.device), target] -= 1
                out.copy_(shares.div_(len(targets) / _SCALE))
        ctx.save_for_backward(gradient)
        return total / len(targets)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (outer[0] / _SCALE).to(gradient.dtype), None


def fuse_layers(model: nn.Module) -> None:
    """Have each layer compiled where training does so; a model whose layers are others runs as it is."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in model.modules() if fusion.devices else ():
        if isinstance(layer, GradientCheckpointingLayer) and "forward" not in vars(layer):
            layer.forward = fused(layer.forward)


def checkpoint_layers(model: Any, on: bool) -> None:
    """Have each layer computed again for the backward pass, instead of kept; a model that cannot do so keeps them."""
    on = on and model.supports_gradient_checkpointing
    if model.is_activation_checkpointing != on:
        (model.activation_checkpointing_enable if on else model.activation_checkpointing_disable)()


def check_fit(configuration: str, length: int, ids: int) -> None:
    """Raises UsageError for a model that has no places for so many tokens, or no embeddings for so many ids."""
    config = _config(json.loads(configuration))
    for name, needed in (("max_position_embeddings", length), ("vocab_size", ids)):
        if (has := getattr(config, name, None)) is not None and has < needed:
            raise UsageError(f"model.config: its {name} is {has:,}, and the run needs {needed:,}")


@torch.no_grad()
def _initialise(model: nn.Module, seed: int, config: PretrainedConfig) -> None:
    """Draw all matrices; norms and biases, which transformers sets to one value each, stay.

    Uniform with the variance of `initializer_range`: numpy's normal draws go through the C library, which differs. The
    projections into the residual stream of a GPT-2 are narrower by sqrt(2 n_layer) (Radford et al. 2019).
    """
    std = getattr(config, "initializer_range", 0.02)
    for name, parameter in model.named_parameters():
        if bool((parameter == parameter.flatten()[0]).all()):
            continue
        if parameter.dim() < 2:
            raise UsageError(f"models of {config.model_type} cannot be begun anew: {name} has first values of its own")
        narrow = config.model_type == "gpt2" and name.endswith("c_proj.weight")
        bound = std * math.sqrt(3) / (math.sqrt(2 * config.num_hidden_layers) if narrow else 1)
        _draw(name, parameter, seed, bound)


@torch.no_grad()
def _draw(name: str, parameter: Tensor, seed: int, bound: float) -> None:
    """Fill a parameter with numbers from -bound to bound that its name and the seed decide."""
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "big")))
    values = generator.random(tuple(parameter.shape), dtype=np.float32)
    values -= np.float32(0.5)
    values *= np.float32(2 * bound)
    parameter.copy_(torch.from_numpy(values))


def _config(fields: Mapping[str, Any]) -> PretrainedConfig:
    try:
        from transformers import AutoConfig
        from transformers.utils import logging
    except ImportError as error:
        raise TTError(f"language models need transformers ({error}): pip install 'tt-cli[lm]'") from None
    logging.set_verbosity_error()  # its warnings are for developers
    logging.disable_progress_bar()
    if refused := next((key for key in _REFUSED if key in fields), None):
        raise UsageError(f"{refused}: a configuration that is trained here has none")
    known = {key: value for key, value in fields.items() if key not in _BESIDE}
    kind = known.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **known)
    except Exception as error:  # fields that anyone wrote: the library raises whatever they lead it to
        raise UsageError(f"model_type = {json.dumps(kind, default=str)}: {_words(error)}") from None


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
