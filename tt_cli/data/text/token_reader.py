"""Token ids of documents, and examples cut from them: what the process that reads text ahead runs, without torch.

Notable:
- a document longer than an example goes on in the next; a short one shares its example with others;
- every peer and every epoch (pass over the data) has an order of its own, of documents and of what is cut from them;
- the built-in text is held in memory as tokens, once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import Any, ClassVar

import numpy as np
import tokenizers
from pydantic import TypeAdapter

from tt_cli.data.codes import ID_COLUMNS
from tt_cli.data.examples import RowCounts
from tt_cli.data.stream.plan import Plan
from tt_cli.data.stream.row_reader import Block
from tt_cli.data.stream.shard_locations import NoSplit
from tt_cli.data.stream.subset import HELD_OUT
from tt_cli.data.text.documents import documents
from tt_cli.data.tokenizer import read_tokenizer
from tt_cli.errors import TTError, UsageError
from tt_cli.run.text_parts import TextDataPart, TextTokenizerPart

POOL = 1024  # examples that are shuffled together, for neighbours come from one document
SENT = 32  # examples of a message
SHOWN_TOKENS = 24  # of an example, for people
# Letters that a tokenizer takes at once, up to a space where there is one: it holds hundreds of bytes for each token.
PIECE = re.compile(r".{1,262144}(?=\s|\Z)|.{1,262144}", re.DOTALL)
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive hivemind's forks


class TextTokenizer:
    """The tokenizer that a run file names. backend: what was read of it before. end: the id that ends a document.

    Raises UsageError, TTError.
    """

    def __init__(self, part: TextTokenizerPart, backend: tokenizers.Tokenizer | None = None) -> None:
        self.backend, self.name = backend or read_tokenizer(part), part.name
        end = self.backend.token_to_id(part.document_end)
        if end is None:
            raise UsageError(f"tokenizer.document_end = {part.document_end!r}: {part.name} has no such token")
        self.end: int = end
        self.size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    def document(self, text: str) -> np.ndarray:
        """Ids (n,) int64 with the end."""
        plain = text.encode("utf-8", "replace").decode("utf-8")  # without halves of surrogate pairs
        encode = self.backend.encode_batch_fast  # as a batch, for that lets other threads of Python go on meanwhile
        pieces = (piece for text in PIECE.findall(plain) for piece in encode([text], add_special_tokens=False))
        return np.concatenate([*(np.array(piece.ids, dtype=np.int64) for piece in pieces), [self.end]])

    def words(self, example: np.ndarray) -> str:
        """The first words of an example."""
        return self.backend.decode(example[:SHOWN_TOKENS].tolist())


@dataclass(frozen=True)
class TextPlan(Plan):
    """The work of a process that reads text. vocabulary: the tokenizer, as the training process has it.

    A state gives another order, for it has no places in the one that was given before.
    """

    reader: ClassVar[str] = "tt_cli.data.text.token_reader:packed_blocks"
    memory: ClassVar[int] = 3 << 29  # `datasets` holds a group of rows whole: 0.9 GiB for one of 200 MB of text
    data: TextDataPart
    tokenizer: TextTokenizerPart
    vocabulary: str
    length: int
    seed: int

    @property
    def taken(self) -> int:
        """Examples that an earlier process gave."""
        return int(self.state["position"]["taken"]) if self.state else 0


def packed_blocks(plan: bytes, on_trouble: Callable[[str, str], None]) -> Iterator[dict[str, Any]]:
    """Examples of a plan, as the process sends them."""
    work = TypeAdapter(TextPlan).validate_json(plan)
    tokenizer = TextTokenizer(work.tokenizer, tokenizers.Tokenizer.from_str(work.vocabulary))
    counts, told, taken = RowCounts(), RowCounts(), work.taken
    examples = token_examples(work, tokenizer, counts)
    while True:
        some = list(islice(examples, SENT))
        words, state = [tokenizer.words(example) for example in some], {"position": {"taken": taken}}
        yield Block(words, np.stack(some).astype(np.int32), state, dict(counts - told)).packed()
        told, taken = counts.copy(), taken + SENT


def token_examples(plan: TextPlan, tokenizer: TextTokenizer, counts: RowCounts) -> Iterator[np.ndarray]:
    """Examples (length + 1,) without end. counts: documents, "kept" or why not. Raises what `documents` does."""
    seed = _drawn(plan.seed, plan.taken) if plan.taken else plan.seed
    random = np.random.default_rng(seed)
    return shuffled(cut(_endless(plan, tokenizer, seed, counts), plan.length, random), random)


def _endless(plan: TextPlan, tokenizer: TextTokenizer, seed: int, counts: RowCounts) -> Iterator[np.ndarray]:
    """Documents without end, those of each epoch in an order of their own."""
    known = _in_memory(plan.data, plan.tokenizer) if plan.data.source == "builtin" else None
    for epoch in count():
        order, before = _drawn(seed, epoch), counts["kept"]
        of_epoch: Iterator[np.ndarray]
        if known is not None:
            of_epoch = (known[place] for place in np.random.default_rng(order).permutation(len(known)))
        else:
            of_epoch = token_ids(plan.data, tokenizer, "train", order, counts)
        for ids in of_epoch:
            counts["kept"] += 1
            yield ids
        if counts["kept"] == before:
            raise TTError(f"the data set {plan.data.name} has no text ({counts.in_words()})")


def _drawn(seed: int, number: int) -> int:
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


@cache
def _in_memory(data: TextDataPart, part: TextTokenizerPart) -> list[np.ndarray]:
    return list(token_ids(data, TextTokenizer(part), "train"))


def held_out_ids(
    data: TextDataPart, tokenizer: TextTokenizer, counts: RowCounts | None = None, skip: int = 0
) -> Iterator[np.ndarray]:
    """The ids of each document on which nobody trains. counts, skip: as `token_ids`."""
    for split in HELD_OUT:
        with suppress(NoSplit):
            yield from token_ids(data, tokenizer, split, None, counts, skip)
            return


def token_ids(
    data: TextDataPart,
    tokenizer: TextTokenizer,
    split: str,
    seed: int | None = None,
    counts: RowCounts | None = None,
    skip: int = 0,
) -> Iterator[np.ndarray]:
    """The ids of each document of a split, see `documents`, from number `skip` on. counts: takes in what is no text."""
    before = ID_COLUMNS.get(data.column)  # `tt data tokenize` made them
    for found in islice(documents(data, split, seed), skip, None):
        text = found.decode("utf-8", "replace") if before is None and isinstance(found, bytes) else found
        if before is not None and isinstance(text, bytes) and len(text) % before.itemsize == 0 < len(text):
            ids = np.frombuffer(text, before).astype(np.int64)
            if ids.max() >= tokenizer.size or ids[-1] != tokenizer.end:
                raise UsageError(f"the data set {data.name} has ids of another tokenizer than {tokenizer.name}")
            yield ids
        elif before is None and isinstance(text, str) and text.strip():
            yield tokenizer.document(text)
        elif counts is not None:
            counts["no_text"] += 1


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
