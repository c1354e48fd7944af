"""Text that a language model's run writes on from a prompt, token by token, by transformers' own generation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from tt_cli.data.text.token_reader import TextTokenizer, held_out_ids, token_ids
from tt_cli.data.text.trigram import trigram_perplexity
from tt_cli.draw.weights_source import WeightsSource, torch_device
from tt_cli.errors import UsageError, first_line
from tt_cli.hub.hub_files import hub_errors
from tt_cli.model.allocator import keep_freed_memory
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.task.causal_lm_task import CausalLmTask

SCORED_AT_ONCE = 16
SAID_SHARE = 0.75  # of a model's places for what was said; the rest is for the answer
BEGINNINGS, BEGINNING = 3, 16  # of documents that were held out, and tokens of each


@dataclass(frozen=True)
class HeldOutScore:
    """Perplexities of text that nobody trained on, the model's and a trigram's. beginnings: of some of it."""

    perplexity: float
    trigram: float
    tokens: int
    beginnings: tuple[str, ...]


@dataclass(frozen=True)
class Writer:
    """A run's model, and the task that it was trained for."""

    model: nn.Module
    task: CausalLmTask

    @classmethod
    def of(cls, source: WeightsSource, device: str = "auto") -> Writer:
        """Raises UsageError for no such device or another kind of run, TTError for weights that do not fit."""
        where = torch_device(device)
        if where.type == "cpu":
            keep_freed_memory()
        task = CausalLmTask(source.run)
        model = task.filled_model(source.parameters, source.origin).to(where).eval().requires_grad_(False)
        return cls(model, task)

    def held_out(self) -> HeldOutScore:
        """The model beside a trigram of its training text. Raises UsageError for data with no such split, TTError."""
        run, tokenizer = self.task.run, self.task.tokenizer
        batches = self.task.held_out(sys.maxsize, SCORED_AT_ONCE)
        if not batches:
            raise UsageError(f"the data set {run.data.name} has no held-out text")
        with torch.no_grad():
            losses = [self.task.losses(self.model, batch)[0].item() * len(batch) for batch in batches]
        examples = torch.cat([batch.tensors["ids"] for batch in batches])
        trigram = trigram_perplexity(
            np.concatenate(list(token_ids(run.data, tokenizer, "train"))),
            torch.cat((examples[0, :1], examples[:, 1:].flatten())).numpy(),
            tokenizer.size,
        )
        some = (ids[:BEGINNING].tolist() for ids in islice(held_out_ids(run.data, tokenizer), BEGINNINGS))
        beginnings = tuple(tokenizer.backend.decode(ids).rpartition(" ")[0] for ids in some)  # of whole words
        perplexity = math.exp(sum(losses) / len(examples))
        return HeldOutScore(perplexity, trigram, examples.numel() - len(examples), beginnings)

    def conversation(self, said: list[dict[str, str]]) -> str:
        """The prompt for what comes next in a conversation, by the template of the run's tokenizer.

        said: {"role": "user" or "assistant", "content"}; its beginning is taken out when it has no place any more.
        Raises UsageError where there is no template, or none for this.
        """
        talker, tokenizer = self._talker, self.task.tokenizer
        if talker.chat_template is None:
            raise UsageError(f"--chat: the tokenizer {self.task.run.tokenizer.name} has no template for conversations")
        while True:
            try:
                prompt = str(talker.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
            except Exception as error:  # templates are anybody's
                raise UsageError(f"--chat: the template refuses this conversation ({first_line(error)})") from error
            if len(said) < 3 or len(tokenizer.document(prompt)) <= SAID_SHARE * self.task.run.model.length:
                return prompt
            del said[:2]

    @cached_property
    def _talker(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        part = self.task.run.tokenizer
        if part.source == "builtin":
            return PreTrainedTokenizerFast(tokenizer_object=self.task.tokenizer.backend)
        with hub_errors(f"cannot read the tokenizer {part.name}"):
            return PreTrainedTokenizerFast.from_pretrained(part.name, revision=part.revision)

    def write(
        self, prompt: str, sampling: Sampling, seed: int, tokens: int | None, on_text: Callable[[str], None]
    ) -> tuple[str, int]:
        """The continuation of a prompt and its number of tokens; equal seeds write the same.

        tokens: at most so many; None: as many as there are places. The temperature comes before top-k and top-p, as is
        usual for text. on_text: takes the pieces as they come. Raises UsageError for a prompt that leaves no place.
        """
        tokenizer, length = self.task.tokenizer, self.task.run.model.length
        ids = torch.from_numpy(tokenizer.document(prompt)[None, :-1])
        if (room := length - ids.shape[1]) < 1:
            raise UsageError(f"a prompt of {ids.shape[1]} tokens: the model has places for {length}; shorten it")
        ids = ids.to(device := next(self.model.parameters()).device)
        pieces, generate = _Pieces(tokenizer, on_text), cast(Any, self.model).generate
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed % 2**64)  # which is all that it takes
            generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                max_new_tokens=min(room, tokens or room),
                eos_token_id=tokenizer.end,
                pad_token_id=tokenizer.end,
                streamer=pieces,
            )
        return pieces.text, len(pieces.ids)


class _Pieces:
    """Takes ids from transformers' generation, and gives out text as soon as its letters are whole."""

    def __init__(self, tokenizer: TextTokenizer, on_text: Callable[[str], None]) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._prompt, self.ids, self.text = list[int](), list[int](), ""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, and then each token."""
        if self._prompt:
            self.ids += value.tolist()
            self._give(unfinished="\ufffd")
        else:
            self._prompt = value.flatten().tolist()

    def end(self) -> None:
        """Give out what is left."""
        self._give()

    def _give(self, unfinished: str = "") -> None:
        decode = self._tokenizer.backend.decode  # which drops the space before a first word of SentencePiece's
        text = decode(self._prompt + self.ids)[len(decode(self._prompt)) :].rstrip(unfinished)
        if len(text) > len(self.text):
            self._on_text(text[len(self.text) :])
            self.text = text
