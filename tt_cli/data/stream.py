"""Endless batches of examples for one peer, in an order of its own, read through `datasets` streaming.

Notable:
- plain rows, our own filter, and one `np.frombuffer` for a whole batch: about five times the rows per CPU second of
  `map` and `with_format`;
- every epoch (pass over the data) is shuffled anew from the peer's seed, so that no two peers are in step and a peer
  that returns does not begin with the same examples;
- a subset (`data.subset`) is drawn by the run's seed, not the peer's: all peers train on the same examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from tt_cli.data import builtin
from tt_cli.data.examples import COLUMNS, Batch, Example, RowFilter
from tt_cli.data.tokenizer import Tokenizer
from tt_cli.errors import TTError, UsageError
from tt_cli.run import RunConfig
from tt_cli.run.hub import hub_errors

# Shards that fill the shuffle buffer side by side. The default opens ten before the first row; and with two or more,
# `datasets` sleeps 5 s at the end of every group of parquet shards (a guard against an Arrow bug in its threads).
SHARDS_AT_ONCE = 1


class ExampleStream:
    """The run's examples as batches without end.

    `seed` is the peer's: equal seeds give equal batches. `counts` says what became of the rows so far.
    """

    def __init__(self, run: RunConfig, tokenizer: Tokenizer, seed: int, split: str = "train") -> None:
        self.run = run
        self.tokenizer = tokenizer
        self.seed = seed
        self.split = split
        self.filter = RowFilter(run)
        self.counts = self.filter.counts
        self._subset = subset_examples(run) if run.data.subset and split == "train" else None

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of exactly `batch_size` examples; an epoch's last examples share a batch with the next's first.

        Raises UsageError if the data set has no such split or columns, TTError if it cannot be read or has no
        usable row.
        """
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
            rows = self.filter(_rows(self.run, self.split, seed))
            while chunk := list(islice(rows, size)):
                yield self.filter.collate(chunk)
            if self.counts.kept == kept:
                raise self.filter.unusable()


def subset_examples(run: RunConfig) -> list[Example]:
    """The training examples of the run: all of a built-in data set, or the `data.subset` first of a shuffled one.

    Shuffled by the run's seed, so that all peers get the same list in the same order. Raises UsageError for a data
    set on the Hub without `data.subset` (it would not fit in memory), and what `ExampleStream.batches` raises.
    """
    data = run.data
    if data.source == "builtin":
        examples = builtin.examples(data.name, "train")
        row_filter = RowFilter(run)
        for example in examples:
            if len(example.codes) != run.vqgan.grid**2 or example.codes.max() >= row_filter.codebook_size:
                raise UsageError(f"the codes of the built-in data '{data.name}' do not fit the run file's [vqgan]")
        if data.subset == 0:
            return list(examples)
        if data.subset > len(examples):
            raise UsageError(
                f"data.subset is {data.subset}, but the built-in data '{data.name}' have {len(examples)} examples"
            )
        order = np.random.default_rng(run.run.seed).permutation(len(examples))
        return [examples[i] for i in order[: data.subset]]
    if data.subset == 0:
        raise UsageError("data.subset is 0, and a whole data set from the Hub is only ever streamed; set data.subset")
    row_filter = RowFilter(run)
    seed = int(np.random.SeedSequence(run.run.seed).generate_state(1)[0])
    rows = row_filter(_rows(run, "train", seed))
    found: list[Example] = []
    while len(found) < data.subset and (chunk := list(islice(rows, data.subset - len(found)))):
        captions, codes = row_filter.collate(chunk)
        found += [Example(*pair) for pair in zip(captions, codes, strict=True)]
    if len(found) < data.subset:
        raise TTError(f"data.subset is {data.subset}, but {data.name} has fewer: {row_filter.counts.in_words()}")
    return found


def _rows(run: RunConfig, split: str, seed: int) -> Iterator[Mapping[str, Any]]:
    """One pass over the data in the order that `seed` gives."""
    with _reading(run):
        rows = iter(
            _open(run, split).shuffle(
                seed=seed, buffer_size=run.data.shuffle_buffer, max_buffer_input_shards=SHARDS_AT_ONCE
            )
        )
        first = next(rows, None)
    if first is None:
        return
    missing = [column for column in COLUMNS if column not in first]
    if missing:
        raise UsageError(
            f"the data set {run.data.name} has no column {' and '.join(missing)}; it has {', '.join(sorted(first))}"
        )
    with _reading(run):
        yield first
        yield from rows


def _open(run: RunConfig, split: str) -> Any:
    """The data set as `datasets` streams it."""
    import datasets

    if run.data.source == "builtin":
        if split not in builtin.SPLITS:
            raise UsageError(f"the built-in data have no split '{split}'; they have {' and '.join(builtin.SPLITS)}")
        path = builtin.checked_file(run.data.name, f"{split}.parquet")
        return datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    return datasets.load_dataset(run.data.name, revision=run.data.revision, split=split, streaming=True)


@contextmanager
def _reading(run: RunConfig) -> Iterator[None]:
    """Turns what `datasets` raises while opening or reading into one line."""
    import datasets.exceptions
    import pyarrow

    action = f"cannot read the data set {run.data.name}"
    try:
        with hub_errors(action):
            try:
                yield
            except datasets.exceptions.DatasetNotFoundError as error:
                raise UsageError(
                    f"{action}: the Hub has no such data set, or it is private; check data.name and data.revision, "
                    "or run `tt login`"
                ) from error
            except datasets.exceptions.DatasetsError as error:
                raise TTError(f"{action}: {_first_line(error)}") from error
            except pyarrow.ArrowException as error:
                raise TTError(f"{action}: a file of it is damaged ({_first_line(error)})") from error
    except ValueError as error:  # unknown split or configuration
        raise UsageError(f"{action}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
