"""Examples that are held in memory: built-in ones, a subset that is the same for all peers, and held-out ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import Any

import numpy as np

from tt_cli.data import builtin
from tt_cli.data.examples import Example, RowFilter, missing_columns
from tt_cli.data.memory_bound import bounded
from tt_cli.data.row_rules import RowRules
from tt_cli.data.stream.plan import ReadPlan, plan_of
from tt_cli.data.stream.prefetch import Prefetch
from tt_cli.data.stream.shard_locations import NoSplit
from tt_cli.errors import TTError, UsageError
from tt_cli.hub.dataset_errors import dataset_errors
from tt_cli.hub.hub_files import NO_DATA_SET
from tt_cli.run import DalleRun, RunConfig

# Shards that fill the shuffle buffer side by side. The default opens ten before the first row; and with two or more,
# `datasets` sleeps 5 s at the end of every group of parquet shards (a guard against an Arrow bug in its threads).
SHARDS_AT_ONCE = 1
ROWS_AT_ONCE = 512  # that are filtered together
HELD_OUT = ("heldout", "validation", "test")


def subset_examples(run: RunConfig, split: str = "train") -> list[Example]:
    """The training examples of the run: all of a built-in data set, or the `data.subset` first of a shuffled one.

    Shuffled by the run's seed, so that all peers get the same list in the same order. split: another one of a built-in
    data set, of which there is no subset. Raises UsageError for any other data set without `data.subset` (it would not
    fit in memory), and what `ExampleStream.batches` raises.
    """
    run = DalleRun.of(run)
    vqgan, data = run.vqgan, run.data
    if data.source == "builtin":
        built_in = builtin.examples(data.name, split)
        for example in built_in:
            if len(example.codes) != vqgan.grid**2 or example.codes.max() >= vqgan.codebook_size:
                raise UsageError(f"the codes of the built-in data '{data.name}' do not fit the run file's [vqgan]")
        if data.subset == 0 or split != "train":
            return built_in
        if data.subset > len(built_in):
            raise UsageError(
                f"data.subset is {data.subset}, but the built-in data '{data.name}' have {len(built_in)} examples"
            )
        order = np.random.default_rng(run.run.seed).permutation(len(built_in))
        return [built_in[i] for i in order[: data.subset]]
    if data.subset == 0:
        raise UsageError("data.subset is 0, and a whole data set is only ever streamed; set data.subset")
    if data.source == "files":
        examples = _first_of(plan_of(run, "train", run.run.seed, strict=True), data.subset)
        if len(examples) < data.subset:
            raise TTError(f"data.subset is {data.subset}, but {data.name} has fewer usable examples: {len(examples)}")
        return examples
    row_filter = RowFilter(RowRules.of(run))
    seed = int(np.random.SeedSequence(run.run.seed).generate_state(1)[0])
    rows = _rows_in_order(run, seed)
    examples = []
    while len(examples) < data.subset and (chunk := list(islice(rows, ROWS_AT_ONCE))):
        captions, codes, _ = row_filter.sift(chunk)
        examples += [Example(*pair) for pair in zip(captions, codes, strict=True)]
    if len(examples) < data.subset:
        raise TTError(f"data.subset is {data.subset}, but {data.name} has fewer: {row_filter.counts.in_words()}")
    return examples[: data.subset]


def heldout_examples(run: RunConfig, most: int) -> list[Example]:
    """Up to `most` examples on which nobody trains, the same ones each time; none where the data have no such split.

    Raises TTError when they cannot be read.
    """
    if run.data.source == "builtin":
        return builtin.examples(run.data.name, "heldout")[:most]
    for split in HELD_OUT:
        try:
            return _first_of(replace(plan_of(run, split, run.run.seed, strict=True), shuffle_buffer=most), most)
        except NoSplit:
            continue
    return []


def _first_of(plan: ReadPlan, wanted: int) -> list[Example]:
    """Up to `wanted` of what is read by a plan, none twice."""
    with closing(Prefetch(plan, lambda trouble, remedy: None)) as reader:  # whose memory is bounded
        blocks = takewhile(lambda block: not block.epoch, iter(reader.next, None))  # then all were seen
        rows = (row for block in blocks for row in zip(block.captions, block.codes, strict=True))
        return [Example(*row) for row in islice(rows, wanted)]


def _rows_in_order(run: DalleRun, seed: int) -> Iterator[Mapping[str, Any]]:
    """One pass over a data set of the Hub, through `datasets`, in the order that `seed` gives."""
    import datasets

    name, buffer = run.data.name, run.data.shuffle_buffer
    reading = partial(dataset_errors, f"cannot read the data set {name}", NO_DATA_SET)
    with reading():
        data_set = datasets.load_dataset(name, revision=run.data.revision, split="train", streaming=True)
        rows = bounded(data_set.shuffle(seed=seed, buffer_size=buffer, max_buffer_input_shards=SHARDS_AT_ONCE))
        first = next(rows, None)
    if first is None:
        return
    if missing := missing_columns(first):
        raise UsageError(
            f"the data set {name} has no column {' and '.join(missing)}; it has {', '.join(sorted(first))}"
        )
    with reading():
        yield first
        yield from rows
