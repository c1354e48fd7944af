"""Endless batches of examples for one peer, in an order of its own.

Notable:
- a data set from the Hub, from a folder or from an http(s) address is read ahead by another process (see `prefetch`),
  whatever its size, from shards in this peer's own random order (see `order`): the training process unpacks codes and
  captions and nothing else;
- where it is in that order is written down after every batch, so that a peer that comes back goes on there, with
  shards that are still on its disk;
- every epoch (pass over the data) is shuffled anew, so that no two peers are in step;
- the built-in data, and a subset (`data.subset`), are small: those are shuffled here. A subset is drawn by the run's
  seed, not the peer's: all peers train on the same examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tt_cli.atomic_write import atomic_write
from tt_cli.data.examples import Batch, RowFilter
from tt_cli.data.stream.plan import plan_of, session_seed
from tt_cli.data.stream.prefetch import Chunk, Prefetch
from tt_cli.data.stream.subset import rows_in_order, subset_examples
from tt_cli.data.tokenizer import Tokenizer
from tt_cli.run import RunConfig

SHARDS = "shards"  # the folder of downloaded ones, in the run's


class ExampleStream:
    """The run's examples as batches without end.

    `seed` is the peer's: equal seeds give equal batches. `counts` says what became of the rows so far.

    peer: its identity, which makes its order its own even where peers were given one seed. folder: the run's folder;
    shards are kept and shared there, and where this peer is in its order, under `name`. tell: hears of troubles that
    the stream lives with, words and a remedy.
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
        self.run = run
        self.tokenizer = tokenizer
        self.seed = seed
        self.split = split
        self.filter = RowFilter(run)
        self.counts = self.filter.counts
        self._subset = subset_examples(run) if run.data.subset and split == "train" else None
        self._elsewhere = self._subset is None and run.data.source != "builtin"
        self._peer, self._folder, self._tell = peer, folder, tell
        self._state_path = folder / f"{name}.json" if folder is not None else None
        self._prefetch: Prefetch | None = None
        self._rest: Chunk | None = None  # of what came, the examples that no batch had room for
        self._state: dict[str, Any] | None = None

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of exactly `batch_size` examples; an epoch's last examples share a batch with the next's first.

        Of data that are read ahead, all iterators together give every example once; of the others, each begins anew.
        Raises UsageError if the data set has no such split or columns, TTError if it cannot be read or has no
        usable row.
        """
        if self._elsewhere:
            self._started()
            return self._read_ahead(batch_size)
        return self._shuffled_here(batch_size)

    def state(self) -> dict[str, Any] | None:
        """The position of this stream as JSON: after the last batch that was asked for and done with; None before."""
        return self._state

    def close(self) -> None:
        """End the process that reads ahead."""
        if self._prefetch is not None:
            self._prefetch.close()

    # ------------------------------------------------------------ read ahead

    def _read_ahead(self, batch_size: int) -> Iterator[Batch]:
        while True:
            captions: list[str] = []
            parts: list[np.ndarray] = []
            state: dict[str, Any] = {}
            while len(captions) < batch_size:
                chunk = self._rest or self._next_chunk()
                taken = min(batch_size - len(captions), len(chunk.captions))
                captions += chunk.captions[:taken]
                parts.append(chunk.codes[:taken])
                state = chunk.state_after(taken)
                self._rest = None
                if taken < len(chunk.captions):
                    self._rest = Chunk(chunk.captions[taken:], chunk.codes[taken:], state, {})
            self.counts.kept += batch_size
            image = torch.from_numpy(np.concatenate(parts, dtype=np.int64))
            yield Batch(self.tokenizer.encode(captions), image, captions)
            self._save(state)

    def _next_chunk(self) -> Chunk:
        chunk = self._started().next()
        self.counts.add(chunk.counts)
        return chunk

    def _started(self) -> Prefetch:
        if self._prefetch is None:
            cache = None if self._folder is None else self._folder / SHARDS
            seed = session_seed(self.seed, self._peer)
            plan = plan_of(self.run, self.split, seed, cache=cache, state=self._loaded())
            self._prefetch = Prefetch(plan, self._tell)
        return self._prefetch

    def _loaded(self) -> dict[str, Any] | None:
        """The position of this peer the last time, as far as that can be read."""
        try:
            state = json.loads(self._state_path.read_text(encoding="utf-8")) if self._state_path else None
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def _save(self, state: dict[str, Any]) -> None:
        self._state = state
        if self._state_path is None:
            return
        try:
            atomic_write(self._state_path, json.dumps(state), durable=False)
        except OSError as error:
            self._state_path = None
            self._tell(
                f"cannot write down which examples were read ({error.strerror or error})",
                "goes on; after a restart some may come again",
            )

    # ------------------------------------------------------------ shuffled here

    def _shuffled_here(self, batch_size: int) -> Iterator[Batch]:
        captions: list[str] = []
        codes = np.zeros((0, self.run.vqgan.grid**2), dtype=np.int16)
        for more_captions, more_codes in self._chunks(batch_size):
            captions += more_captions
            codes = np.concatenate([codes, more_codes]) if len(codes) else more_codes
            while len(captions) >= batch_size:
                image = torch.from_numpy(codes[:batch_size].astype(np.int64))
                yield Batch(self.tokenizer.encode(captions[:batch_size]), image, captions[:batch_size])
                captions, codes = captions[batch_size:], codes[batch_size:]

    def _chunks(self, size: int) -> Iterator[tuple[list[str], np.ndarray]]:
        """Captions and codes (k, n) int16 of up to `size` rows at a time, epoch after epoch."""
        for epoch in count():
            seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
            if self._subset is not None:
                order = np.random.default_rng(seed).permutation(len(self._subset))
                for part in np.array_split(order, range(size, len(order), size)):
                    chosen = [self._subset[i] for i in part]
                    self.counts.kept += len(chosen)
                    yield (
                        [example.caption for example in chosen],
                        np.stack([example.codes for example in chosen]),
                    )
                continue
            kept = self.counts.kept
            rows = rows_in_order(self.run, self.split, seed)
            while chunk := list(islice(rows, size)):
                yield self.filter.sift(chunk)[:2]
            if self.counts.kept == kept:
                raise self.filter.unusable()
