"""The task of a language model: to predict each next token of a text."""

from __future__ import annotations

import math
import re
from functools import cache, cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import download, repository_files
from tt_cli.memory import Kind, Need
from tt_cli.memory.activations import Activations
from tt_cli.memory.trainer_account import MemoryComponent, peer_items, place_of
from tt_cli.run import CausalLmRun, RunConfig
from tt_cli.run.text_parts import LanguageModelPart, LoraPart, PretrainedPart
from tt_cli.task.task import Losses, Task, Tell, is_for_muon, narrow, trained

if TYPE_CHECKING:
    from torch import Size, nn

    from tt_cli.data.examples import Batch
    from tt_cli.data.text.token_reader import TextTokenizer
    from tt_cli.data.text.token_stream import TokenStream
    from tt_cli.model.traced_pass import Loss, Make

Parts = tuple[LanguageModelPart, PretrainedPart | None, LoraPart | None]
"""Of a run file: all that says what its model is."""


class CausalLmTask(Task["nn.Module"]):
    """The training task of a language model's run. Sizes and need are torch's and transformers' own answers."""

    recomputes, compiled_from = True, 0
    _budget: float = math.inf

    def __init__(self, run: RunConfig) -> None:
        self.run: CausalLmRun = CausalLmRun.of(run)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the run file names. Raises TTError; UsageError where it does not fit the model."""
        from tt_cli.data.text.token_reader import TextTokenizer
        from tt_cli.model.causal_lm import check_fit

        tokenizer = TextTokenizer(self.run.tokenizer)
        check_fit(self.run.model.config, self.run.model.length, tokenizer.size)
        return tokenizer

    @property
    def width(self) -> int:
        return int(cast(Any, self.unfilled_model("meta")).config.hidden_size)

    def prepare(self) -> None:
        self.tokenizer  # noqa: B018

    def keep(self, model: nn.Module, budget: int) -> None:
        self._budget = budget

    def model(self, seed: int | None) -> nn.Module:
        return _made(self._parts, seed)

    def unfilled_model(self, device: str = "cpu") -> nn.Module:
        """With adapters, the weights that stay are there wherever any are."""
        return super().unfilled_model(device) if self.run.lora is None or device == "meta" else self.new_model()

    def examples(self, seed: int, *, peer: str = "", tell: Tell = lambda words, remedy: None, **_: Any) -> TokenStream:
        from tt_cli.data.text.token_stream import TokenStream

        return TokenStream(self.run, self.tokenizer, seed, peer=peer, tell=tell)

    def held_out(self, most: int, size: int) -> list[Batch]:
        from tt_cli.data.text.token_stream import held_out

        few = max(1, _HELD_OUT_LOGITS // (self.run.model.length * self.tokenizer.size))
        return held_out(self.run, self.tokenizer, most, min(size, few))

    def samples(self, *of_checkpoint: Any) -> dict[str, bytes]:
        return cast(dict[str, bytes], resolve_name("tt_cli.draw.samples:texts")(self, *of_checkpoint))

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        import torch

        from tt_cli.model.causal_lm import checkpoint_layers, fuse_layers, next_token_loss

        fuse_layers(model)
        ids = batch.tensors["ids"]
        if torch.is_grad_enabled() and self._budget < math.inf:
            itemsize = 2 if torch.is_autocast_enabled(ids.device.type) else 4
            checkpoint_layers(model, self._activations(itemsize, len(ids), self._budget)[1])
        loss = next_token_loss(model, ids)
        return loss, {"perplexity": loss.detach().clamp_max(88).exp()}  # finite, or the batch would be left out

    def need(self, kind: Kind, *, itemsize: int = 4, micro_batch: int = 1, budget: int = 0) -> Need:
        shapes, frozen = _weights(self._parts, itemsize)
        sizes = [shape.numel() for shape in shapes.values()]
        matrices = [shape.numel() for name, shape in shapes.items() if is_for_muon(name, len(shape))]
        kept, _ = self._activations(itemsize, micro_batch, budget)
        stay = (MemoryComponent("weights that stay", frozen, place_of(kind)),) if frozen else ()
        items = peer_items(self.run, kind, sizes, matrices, Activations(kept, 0, 0))
        return Need((*items, *stay), micro_batch)

    def flops(self) -> int:
        return _flops(self._parts)

    def shapes(self) -> dict[str, Size]:
        return _weights(self._parts)[0]

    def _activations(self, itemsize: int, micro_batch: int, budget: float) -> tuple[int, bool]:
        """Bytes beside gradients at a pass's worst moment; whether layers are computed again to keep to `budget`."""
        for again in (False, True) if budget else (True,):
            kept = _pass_bytes(self._parts, itemsize, micro_batch, again) - 4 * sum(self.tensor_sizes())
            if kept <= budget:
                break
        return kept, again

    @property
    def _parts(self) -> Parts:
        return self.run.model, self.run.pretrained, self.run.lora


_HELD_OUT_LOGITS = 2**26  # at a time: 256 MiB, for the process that measures is small
_FEW, _MANY = 8, 64  # examples
_FILES = re.compile(r"model[\w.-]*\.safetensors(\.index\.json)?")  # of weights that transformers writes


def fetched_model(configuration: str, name: str, revision: str | None) -> tuple[nn.Module, str]:
    """The model of a `canonical` configuration with the weights of a repository on the Hub, and their digest.

    Raises UsageError where there are none that fit it, TTError where they cannot be fetched or read.
    """
    from tt_cli.checkpoint.hash_tree import tensor_digest
    from tt_cli.model.causal_lm import pretrained

    commit, names = repository_files(name, revision)
    files = [download(name, file, commit) for file in names if _FILES.fullmatch(file)]
    if not files:
        raise UsageError(f"{name} has no model.safetensors; other files of weights are not opened: they can run code")
    model = pretrained(configuration, files[0].parent, name)
    return model, tensor_digest({name: parameter.detach() for name, parameter in model.named_parameters()})


def _made(parts: Parts, seed: int | None) -> nn.Module:
    from tt_cli.model.causal_lm import adapted, causal_lm

    part, source, lora = parts
    if source is None or seed is None:
        model = causal_lm(part.config, seed)
    else:
        model, digest = fetched_model(part.config, source.name, source.revision)
        if digest != source.digest:
            raise TTError(f"{source.name}: its weights are not the run's, their digest is {digest}: ask the organiser")
    return model if source is None or lora is None else adapted(model, lora, source, seed)


@cache
def _weights(parts: Parts, itemsize: int = 4) -> tuple[dict[str, Size], int]:
    """Shapes of the weights that are trained, and the bytes of those that stay."""
    import torch

    with torch.device("meta"):
        model = _pass_of(parts, itemsize, 1, False)[0]()
    shapes = {name: parameter.shape for name, parameter in trained(model).items()}
    return shapes, sum(p.nbytes for p in model.parameters() if not p.requires_grad)


def _pass_bytes(parts: Parts, itemsize: int, micro_batch: int, again: bool) -> int:
    """Activations and gradients at the worst moment of a pass. again: layers are computed again for the backward pass.

    With many examples that is the head, and it grows evenly; with few it may be the end, when all gradients are there.
    """
    few = _bytes(parts, itemsize, min(micro_batch, _FEW), again)
    if micro_batch <= _FEW:
        return few
    many, twice = (_bytes(parts, itemsize, count, again) for count in (_MANY, 2 * _MANY))
    return max(few, many + (twice - many) * (micro_batch - _MANY) // _MANY)


@cache
def _bytes(parts: Parts, itemsize: int, count: int, again: bool) -> int:
    from tt_cli.model.traced_pass import traced_bytes

    return traced_bytes(*_pass_of(parts, itemsize, count, again), itemsize)


@cache
def _flops(parts: Parts) -> int:
    from tt_cli.model.traced_pass import traced_flops

    return traced_flops(*_pass_of(parts, 4, 1, False))


def _pass_of(parts: Parts, itemsize: int, count: int, again: bool) -> tuple[Make, Loss]:
    """The model, and its loss for a batch of so many examples. again: layers are computed again."""
    from unittest.mock import patch

    import torch

    from tt_cli.model.causal_lm import checkpoint_layers, next_token_loss

    def loss(model: nn.Module) -> torch.Tensor:
        checkpoint_layers(model, again)
        # Without a look at the values of positions, which are not there, transformers would take them for those of
        # several documents in a row, and attend with masks that training does without.
        with patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None, create=True):
            return next_token_loss(model, torch.zeros(count, parts[0].length + 1, dtype=torch.int64))

    return lambda: narrow(_made(parts, None), torch.bfloat16 if itemsize == 2 else None), loss
