"""Examples of a language model: tokens of documents in a row, each document with an end, cut to one length.

Notable:
- a document longer than an example goes on in the next; a short one shares its example with others;
- every peer and every epoch (pass over the data) has an order of its own, of documents and of what is cut from them;
- the built-in text is held in memory as tokens, once; all else a thread streams and tokenises, some examples ahead.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import count, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from tt_cli.data.codes import ID_COLUMNS
from tt_cli.data.examples import Batch, RowCounts
from tt_cli.data.stream.plan import session_seed
from tt_cli.data.stream.shard_locations import NoSplit
from tt_cli.data.stream.subset import HELD_OUT
from tt_cli.data.text.documents import documents
from tt_cli.data.tokenizer import read_tokenizer
from tt_cli.errors import TTError, UsageError

if TYPE_CHECKING:
    from tt_cli.run import CausalLmRun
    from tt_cli.run.text_parts import TextDataPart, TextTokenizerPart

AHEAD = 256  # examples
POOL = 1024  # examples that are shuffled together, for neighbours come from one document
SHOWN_TOKENS = 24  # of an example, for people
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive hivemind's forks


class TextTokenizer:
    """The tokenizer that a run file names. end: the id that ends a document. Raises UsageError, TTError."""

    def __init__(self, part: TextTokenizerPart) -> None:
        self.backend, self.name = read_tokenizer(part), part.name
        end = self.backend.token_to_id(part.document_end)
        if end is None:
            raise UsageError(f"tokenizer.document_end = {part.document_end!r}: {part.name} has no such token")
        self.end: int = end
        self.size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    def document(self, text: str) -> np.ndarray:
        """Ids (n,) int64 with the end."""
        plain = text.encode("utf-8", "replace").decode("utf-8")  # without halves of surrogate pairs
        # As a batch, for that lets other threads of Python go on meanwhile.
        (encoded,) = self.backend.encode_batch_fast([plain], add_special_tokens=False)
        return np.array([*encoded.ids, self.end], dtype=np.int64)


class TokenStream:
    """Batches {"ids": (b, length + 1) int64} without end; each example begins with the last token of another.

    seed, peer: equal ones give equal batches. counts: documents, "kept" or why not.
    """

    def __init__(self, run: CausalLmRun, tokenizer: TextTokenizer, seed: int, *, peer: str = "") -> None:
        self.counts, self._run, self._tokenizer = RowCounts(), run, tokenizer
        self._seed = session_seed(seed, peer)
        self._in_memory = _in_memory(run.data, run.tokenizer) if run.data.source == "builtin" else None

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of exactly `batch_size` examples. Raises UsageError and TTError, see `documents`."""
        random = np.random.default_rng(self._seed)
        examples = shuffled(cut(self._documents(), self._run.model.length, random), random)
        if self._in_memory is None:
            examples = read_ahead(examples)
        while True:
            yield batch_of(self._tokenizer, list(islice(examples, batch_size)))

    def close(self) -> None:
        """Nothing is open."""

    def _documents(self) -> Iterator[np.ndarray]:
        """Documents without end, those of each epoch in an order of their own."""
        for epoch in count():
            seed, before = int(np.random.SeedSequence((self._seed, epoch)).generate_state(1)[0]), self.counts["kept"]
            of_epoch: Iterator[np.ndarray]
            if (known := self._in_memory) is not None:
                of_epoch = (known[place] for place in np.random.default_rng(seed).permutation(len(known)))
            else:
                of_epoch = token_ids(self._run.data, self._tokenizer, "train", seed, self.counts)
            for ids in of_epoch:
                self.counts["kept"] += 1
                yield ids
            if self.counts["kept"] == before:
                raise TTError(f"the data set {self._run.data.name} has no text ({self.counts.in_words()})")


def held_out(run: CausalLmRun, tokenizer: TextTokenizer, most: int, size: int) -> list[Batch]:
    """Up to `most` examples that nobody trains on, `size` at a time; none where the data have no such split."""
    examples = list(islice(cut(held_out_ids(run.data, tokenizer), run.model.length), most))
    return [batch_of(tokenizer, examples[first : first + size]) for first in range(0, len(examples), size)]


def held_out_ids(data: TextDataPart, tokenizer: TextTokenizer, counts: RowCounts | None = None) -> Iterator[np.ndarray]:
    """The ids of each document on which nobody trains. counts: as `token_ids`."""
    for split in HELD_OUT:
        with suppress(NoSplit):
            yield from token_ids(data, tokenizer, split, None, counts)
            return


@cache
def _in_memory(data: TextDataPart, part: TextTokenizerPart) -> list[np.ndarray]:
    return list(token_ids(data, TextTokenizer(part), "train"))


def token_ids(
    data: TextDataPart, tokenizer: TextTokenizer, split: str, seed: int | None = None, counts: RowCounts | None = None
) -> Iterator[np.ndarray]:
    """The ids of each document of a split, see `documents`. counts: takes in what is no text."""
    before = ID_COLUMNS.get(data.column)  # `tt data tokenize` made them
    for text in documents(data, split, seed):
        if before is not None and isinstance(text, bytes) and len(text) % before.itemsize == 0 < len(text):
            ids = np.frombuffer(text, before).astype(np.int64)
            if ids.max() >= tokenizer.size or ids[-1] != tokenizer.end:
                raise UsageError(f"the data set {data.name} has ids of another tokenizer than {tokenizer.name}")
            yield ids
        elif before is None and isinstance(text, str) and text.strip():
            yield tokenizer.document(text)
        elif counts is not None:
            counts["no_text"] += 1


def batch_of(tokenizer: TextTokenizer, examples: Sequence[np.ndarray]) -> Batch:
    """A batch of examples (length + 1,)."""
    words = [tokenizer.backend.decode(example[:SHOWN_TOKENS].tolist()) for example in examples]
    return Batch({"ids": torch.from_numpy(np.stack(examples))}, words)


def cut(parts: Iterator[np.ndarray], length: int, random: np.random.Generator | None = None) -> Iterator[np.ndarray]:
    """Examples (length + 1,) of ids in a row; the last few ids, too few for one, are left out.

    random: chooses where the first begins, so that a later epoch is cut elsewhere.
    """
    rest = np.zeros(0, dtype=np.int64)
    skip = int(random.integers(length)) if random is not None else 0
    for ids in parts:
        rest, skip = np.concatenate((rest, ids[skip:])), max(0, skip - len(ids))
        while len(rest) > length:
            yield rest[: length + 1]
            rest = rest[length:]


def shuffled(examples: Iterator[np.ndarray], random: np.random.Generator) -> Iterator[np.ndarray]:
    """The same examples, each in place of a random one of the last POOL."""
    pool: list[np.ndarray] = []
    for example in examples:
        if len(pool) < POOL:
            pool.append(example)
            continue
        place = int(random.integers(POOL))
        yield pool[place]
        pool[place] = example
    yield from pool


def read_ahead(examples: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The same examples, AHEAD of them got by a thread before they are wanted; what they raise comes in its turn."""
    reader = ThreadPoolExecutor(1)
    try:
        coming = deque(reader.submit(next, examples) for _ in range(AHEAD))
        while True:
            yield coming.popleft().result()
            coming.append(reader.submit(next, examples))
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
