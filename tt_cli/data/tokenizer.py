"""Captions to token ids, through `tokenizers`: the built-in byte-level BPE, or a Hub repository's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tokenizers

from tt_cli.data import builtin
from tt_cli.data.word_cache import Words
from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import download
from tt_cli.run import DalleRun, RunConfig
from tt_cli.run.sections import TokenizerSource

if TYPE_CHECKING:  # the process that reads text ahead does without
    import torch

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Right-padded, truncated ids without special tokens, as the model takes them.

    `vocab_size` is the number of ids that the model has embeddings for; id 0 is left to the model, which reads it as
    "no token here". A tokenizer that could give a larger id is refused.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, text_length: int, vocab_size: int, pad_id: int) -> None:
        largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise UsageError(
                f"tokenizer.vocab_size is {vocab_size}, but the tokenizer has ids up to {largest}; "
                f"set it to {largest + 1}"
            )
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self._words = Words(backend)
        self.text_length = text_length
        self.vocab_size = vocab_size
        self.pad_id = pad_id

    def encode(self, captions: Sequence[str]) -> torch.Tensor:
        """Captions → ids (b, text_length) int64."""
        from torch import from_numpy

        ids = np.full((len(captions), self.text_length), self.pad_id, dtype=np.int64)
        for row, caption in zip(ids, captions, strict=True):
            # One by one: the batch call starts threads, which do not survive hivemind's forks.
            known = self._words.ids(caption)[: self.text_length]
            row[: len(known)] = known  # through numpy: a tensor for each caption takes as long as its tokens
        return from_numpy(ids)

    def decode(self, ids: torch.Tensor) -> list[str]:
        """Ids (b, t) → captions, without the padding (and without what truncation cut off)."""
        return [self.backend.decode([i for i in row if i not in (0, self.pad_id)]) for row in ids.tolist()]


def load_tokenizer(run: RunConfig) -> Tokenizer:
    """The tokenizer that the run file names.

    Raises UsageError for an unknown name or a vocabulary that does not fit, TTError when it cannot be read.
    """
    run = DalleRun.of(run)
    part, length = run.tokenizer, run.model.text_length
    return Tokenizer(read_tokenizer(part), text_length=length, vocab_size=part.vocab_size, pad_id=part.pad_id)


def read_tokenizer(part: TokenizerSource) -> tokenizers.Tokenizer:
    """The tokenizer of this place. Raises UsageError for an unknown name, TTError when it cannot be read."""
    if part.source == "builtin":
        path = builtin.checked_file(part.name, TOKENIZER_FILE)
    else:
        path = download(part.name, TOKENIZER_FILE, part.revision)
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise TTError(f"the tokenizer {path} cannot be read ({error}); fetch it again") from error
