"""Endless batches of examples for one peer, in an order of its own.

Notable:
- a data set from the Hub, from a folder or from an http(s) address is read ahead by another process (see `prefetch`),
  whatever its size, from shards in this peer's own random order (see `shard_order`): the training process unpacks
  codes and captions and nothing else;
- where it is in that order is written down after every batch, so that a peer that comes back goes on there, with
  shards that are still on its disk;
- every epoch (pass over the data) is shuffled anew, so that no two peers are in step;
- the built-in data, and a subset (`data.subset`), are small: those are shuffled here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tt_cli.atomic_write import atomic_write
from tt_cli.data.examples import Batch, Example, RowCounts
from tt_cli.data.stream.plan import plan_of, session_seed
from tt_cli.data.stream.prefetch import Prefetch
from tt_cli.data.stream.row_reader import Block
from tt_cli.data.stream.subset import subset_examples
from tt_cli.data.tokenizer import Tokenizer
from tt_cli.run import DalleRun, RunConfig

CaptionAndCodes = tuple[str, np.ndarray]
SHARDS = "shards"  # the folder of downloaded ones, in the run's


def batch_of(tokenizer: Tokenizer, examples: Sequence[CaptionAndCodes]) -> Batch:
    """A batch of captions and codes (n,)."""
    captions = [caption for caption, _ in examples]
    image = np.concatenate([codes for _, codes in examples], dtype=np.int64).reshape(len(examples), -1)
    return Batch({"text": tokenizer.encode(captions), "image": torch.from_numpy(image)}, captions)


class ExampleStream:
    """The run's examples as batches without end. `counts` says what became of the rows so far.

    seed, peer: equal ones give equal batches. folder: the run's folder; shards are kept and shared there, and where
    this peer is in its order, under `name`. tell: hears of troubles that the stream lives with, words and a remedy.
    """

    def __init__(
        self,
        run: RunConfig,
        tokenizer: Tokenizer,
        seed: int,
        split: str = "train",
        *,
        peer: str = "",
        folder: Path | None = None,
        name: str = "examples",
        tell: Callable[[str, str], None] = lambda words, remedy: None,
    ) -> None:
        self.run = run = DalleRun.of(run)
        self.tokenizer = tokenizer
        self.seed = seed
        self.split = split
        self.counts = RowCounts()
        in_memory = run.data.source == "builtin" or (run.data.subset and split == "train")
        self._in_memory = subset_examples(run, split) if in_memory else None
        self._peer, self._folder, self._tell = peer, folder, tell
        self._state_path = folder / f"{name}.json" if folder is not None else None
        self._prefetch: Prefetch | None = None
        self._block: Block | None = None  # the last that came, and how many of its examples were taken
        self._taken = 0
        self._told_unwritten = False
        self.state: dict[str, Any] | None = None  # the position, after the last batch that was done with; JSON

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of exactly `batch_size` examples; an epoch's last examples share a batch with the next's first.

        Of data that are read ahead, all iterators together give every example once; of the others, each begins anew.
        Raises UsageError if the data set has no such split or columns, TTError if it has no row that can be used.
        """
        if self._in_memory is None:
            self._started()
        return self._batches(batch_size)

    def close(self) -> None:
        """End the process that reads ahead."""
        if self._prefetch is not None:
            self._prefetch.close()

    def _batches(self, batch_size: int) -> Iterator[Batch]:
        examples = self._read_ahead() if self._in_memory is None else self._shuffled(self._in_memory)
        while True:
            batch = list(islice(examples, batch_size))
            state = self._block.state_after(self._taken) if self._block else None
            yield batch_of(self.tokenizer, batch)
            if state is not None:
                self._save(state)

    # ------------------------------------------------------------ read ahead

    def _read_ahead(self) -> Iterator[CaptionAndCodes]:
        while True:
            block = self._block
            if block is None or self._taken == len(block.captions):
                self._block, self._taken = self._started().next(), 0
                self.counts.update(self._block.counts)
                continue
            self._taken += 1
            self.counts["kept"] += 1
            yield block.captions[self._taken - 1], block.codes[self._taken - 1]

    def _started(self) -> Prefetch:
        if self._prefetch is None:
            cache = None if self._folder is None else self._folder / SHARDS
            seed = session_seed(self.seed, self._peer)
            plan = plan_of(self.run, self.split, seed, cache=cache, state=self._loaded())
            self._prefetch = Prefetch(plan, self._tell)
        return self._prefetch

    def _loaded(self) -> dict[str, Any] | None:
        """The position of this peer the last time, as far as that can be read."""
        with suppress(OSError, ValueError):
            if self._state_path and isinstance(state := json.loads(self._state_path.read_text(encoding="utf-8")), dict):
                return state
        return None

    def _save(self, state: dict[str, Any]) -> None:
        self.state = state
        if self._state_path is None:
            return
        try:
            atomic_write(self._state_path, json.dumps(state), durable=False)
        except OSError as error:
            told, self._told_unwritten = self._told_unwritten, True
            if not told:  # a full disk may pass
                self._tell(
                    f"cannot write down which examples were read ({error.strerror or error})",
                    "goes on; after a restart some may come again",
                )

    # ------------------------------------------------------------ in memory

    def _shuffled(self, examples: Sequence[Example]) -> Iterator[CaptionAndCodes]:
        own = session_seed(self.seed, self._peer)
        for epoch in count():
            seed = int(np.random.SeedSequence((own, epoch)).generate_state(1)[0])
            for place in np.random.default_rng(seed).permutation(len(examples)):
                self.counts["kept"] += 1
                yield examples[place].caption, examples[place].codes
