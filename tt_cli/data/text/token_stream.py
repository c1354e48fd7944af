"""Batches of a language model's examples: built-in text from memory, all else from a process that reads ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from tt_cli.data.examples import Batch, RowCounts
from tt_cli.data.stream.plan import session_seed
from tt_cli.data.stream.prefetch import Prefetch
from tt_cli.data.text.token_reader import TextPlan, TextTokenizer, cut, held_out_ids, token_examples

if TYPE_CHECKING:
    from tt_cli.run import CausalLmRun

WordsAndIds = tuple[str, np.ndarray]


class TokenStream:
    """Batches {"ids": (b, length + 1) int64} without end; each example begins with the last token of another.

    seed, peer: equal ones give equal batches. counts: documents, "kept" or why not. tell: hears of troubles that the
    stream lives with, words and a remedy.
    """

    def __init__(
        self,
        run: CausalLmRun,
        tokenizer: TextTokenizer,
        seed: int,
        *,
        peer: str = "",
        tell: Callable[[str, str], None] = lambda words, remedy: None,
    ) -> None:
        self.counts, self._tokenizer, self._tell = RowCounts(), tokenizer, tell
        vocabulary, own = tokenizer.backend.to_str(), session_seed(seed, peer)
        self._plan = TextPlan(run.data, run.tokenizer, vocabulary, run.model.length, own)
        self._prefetch: Prefetch | None = None
        self._ahead = self._read_ahead()

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of exactly `batch_size` examples. Raises UsageError and TTError, see `documents`.

        Of text that is read ahead, all iterators together give what one would; of the built-in, each begins anew.
        """
        examples = self._held() if self._plan.data.source == "builtin" else self._ahead
        while True:
            yield batch_of(list(islice(examples, batch_size)))

    def close(self) -> None:
        """End the process that reads ahead."""
        if self._prefetch is not None:
            self._prefetch.close()

    def _held(self) -> Iterator[WordsAndIds]:
        for example in token_examples(self._plan, self._tokenizer, self.counts):
            yield self._tokenizer.words(example), example

    def _read_ahead(self) -> Iterator[WordsAndIds]:
        self._prefetch = Prefetch(self._plan, self._tell)
        while True:
            block = self._prefetch.next()
            self.counts.update(block.counts)
            yield from zip(block.captions, block.codes, strict=True)


def held_out(run: CausalLmRun, tokenizer: TextTokenizer, most: int, size: int) -> list[Batch]:
    """Up to `most` examples that nobody trains on, `size` at a time; none where the data have no such split."""
    examples = islice(cut(held_out_ids(run.data, tokenizer), run.model.length), most)
    pairs = [(tokenizer.words(example), example) for example in examples]
    return [batch_of(pairs[first : first + size]) for first in range(0, len(pairs), size)]


def batch_of(examples: Sequence[WordsAndIds]) -> Batch:
    """A batch of examples (length + 1,) with their first words."""
    ids = np.stack([ids for _, ids in examples], dtype=np.int64)
    return Batch({"ids": torch.from_numpy(ids)}, [words for words, _ in examples])
