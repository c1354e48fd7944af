"""The task of a language model: to predict each next token of a text."""

from __future__ import annotations

from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from tt_cli.memory import Kind, Need
from tt_cli.memory.activations import Activations
from tt_cli.memory.trainer_account import peer_items
from tt_cli.run import CausalLmRun, RunConfig
from tt_cli.run.text_parts import LanguageModelPart
from tt_cli.task.task import Losses, Task

if TYPE_CHECKING:
    from torch import nn

    from tt_cli.data.examples import Batch
    from tt_cli.data.text.token_stream import TextTokenizer, TokenStream
    from tt_cli.model.traced_pass import Loss, Make


class CausalLmTask(Task["nn.Module"]):
    """The training task of a language model's run. Sizes and need are torch's and transformers' own answers."""

    def __init__(self, run: RunConfig) -> None:
        self.run: CausalLmRun = CausalLmRun.of(run)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the run file names. Raises TTError; UsageError where it does not fit the model."""
        from tt_cli.data.text.token_stream import TextTokenizer
        from tt_cli.model.causal_lm import check_fit

        tokenizer = TextTokenizer(self.run)
        check_fit(self.run.model.config, self.run.model.length, tokenizer.size)
        return tokenizer

    @property
    def width(self) -> int:
        from tt_cli.model.causal_lm import width

        return width(self.run.model.config)

    def prepare(self) -> None:
        self.tokenizer  # noqa: B018

    def model(self, seed: int | None) -> nn.Module:
        from tt_cli.model.causal_lm import causal_lm

        return causal_lm(self.run.model.config, seed)

    def examples(self, seed: int, *, peer: str = "", **_: Any) -> TokenStream:
        from tt_cli.data.text.token_stream import TokenStream

        return TokenStream(self.run, self.tokenizer, seed, peer=peer)

    def held_out(self, most: int, size: int) -> list[Batch]:
        from tt_cli.data.text.token_stream import held_out

        return held_out(self.run, self.tokenizer, most, size)

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        from tt_cli.model.causal_lm import next_token_loss

        loss = next_token_loss(model, batch.tensors["ids"])
        return loss, {"perplexity": loss.detach().exp()}

    def need(self, kind: Kind, *, itemsize: int = 4, micro_batch: int = 1, budget: int = 0) -> Need:
        shapes = self.shapes().values()
        sizes, matrices = ([shape.numel() for shape in shapes if len(shape) >= least] for least in (1, 2))
        kept = Activations(_pass_bytes(self.run.model, itemsize, micro_batch) - 4 * sum(sizes), 0, 0)
        return Need(peer_items(self.run, kind, sizes, matrices, kept), micro_batch, budget)

    def flops(self) -> int:
        from tt_cli.model.traced_pass import traced_flops

        return traced_flops(*_pass_of(self.run.model, 1))


_FEW, _MANY = 2, 64  # examples


def _pass_bytes(part: LanguageModelPart, itemsize: int, micro_batch: int) -> int:
    """Activations and gradients at the worst moment of a pass.

    With many examples that is the head, and it grows evenly; with few the end, when all gradients are there.
    """
    few = _bytes(part, itemsize, min(micro_batch, _FEW))
    if micro_batch <= _FEW:
        return few
    many, twice = (_bytes(part, itemsize, count) for count in (_MANY, 2 * _MANY))
    return max(few, many + (twice - many) * (micro_batch - _MANY) // _MANY)


@cache
def _bytes(part: LanguageModelPart, itemsize: int, count: int) -> int:
    from tt_cli.model.traced_pass import traced_bytes

    return traced_bytes(*_pass_of(part, count), itemsize)


def _pass_of(part: LanguageModelPart, count: int) -> tuple[Make, Loss]:
    """The model, and its loss for a batch of so many examples."""
    from unittest.mock import patch

    import torch

    from tt_cli.model.causal_lm import causal_lm, next_token_loss

    def loss(model: nn.Module) -> torch.Tensor:
        # Without a look at the values of positions, which are not there, transformers would take them for those of
        # several documents in a row, and attend with masks that training does without.
        with patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None, create=True):
            return next_token_loss(model, torch.zeros(count, part.length + 1, dtype=torch.int64))

    return partial(causal_lm, part.config, None), loss
