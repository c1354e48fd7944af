"""A run's text to shards of token ids, beforehand: the way of `tt data tokenize`.

Peers that read them need no tokenizer's time. A row is a document with its end, as the run's tokenizer has it; the
held-out text has shards of its own. What was interrupted goes on from the last batch of documents: see `journal`.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tt_cli.data.build.encoder import REPORT_SECONDS, EncodingProgress
from tt_cli.data.build.journal import Journal, agree_on, write_sums
from tt_cli.data.codes import ID_COLUMNS
from tt_cli.data.examples import RowCounts
from tt_cli.data.shard_format import ShardFacts
from tt_cli.data.text.token_reader import TextTokenizer, held_out_ids, token_ids
from tt_cli.errors import UsageError
from tt_cli.run import CausalLmRun

CONTAINER = "parquet"
SPLITS = ("train", "validation")
AT_ONCE, TOKENS_AT_ONCE = 256, 1 << 22  # documents, of about so many tokens at most: what a kill costs


def settings_of(run: CausalLmRun, tokenizer: TextTokenizer, column: str) -> dict[str, Any]:
    """The facts that hold for the whole folder, as JSON; no path of this machine."""
    digest = hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest()
    place = hashlib.sha256((run.data.location or "").encode()).hexdigest()
    source = run.data.model_dump(include={"source", "name", "configuration", "revision", "column"})
    return {
        "format": 1,
        "tokenizer": run.tokenizer.model_dump(include={"name", "revision", "document_end"}) | {"sha256": digest},
        "source": source | {"location_sha256": place},
        "shares": len(SPLITS),
        "column": column,
        "container": CONTAINER,
        "columns": [column],
    }


def tokenize(run: CausalLmRun, out: Path, on_progress: Callable[[EncodingProgress], None]) -> EncodingProgress:
    """Tokenise what is left of the run's training text and its held-out text into the folder `out`.

    on_progress: is called about once a second. Raises UsageError and TTError, see `documents` and `Journal`.
    """
    data = run.data
    if data.column in ID_COLUMNS:
        raise UsageError(f"the data set {data.name} is of token ids already: its column is {data.column}")
    tokenizer = TextTokenizer(run.tokenizer)
    column = next(name for name, dtype in ID_COLUMNS.items() if tokenizer.size - 1 <= np.iinfo(dtype).max)
    agree_on(out, settings_of(run, tokenizer, column))
    started, reported, worked = time.monotonic(), 0.0, 0
    finished, shards = Counter[str](), list[ShardFacts]()

    def progress(counts: Counter[str]) -> EncodingProgress:
        seconds = time.monotonic() - started
        size = sum(facts.bytes for facts in shards)
        return EncodingProgress(finished + counts, len(shards), size, seconds, worked / max(seconds, 1e-9), None)

    for share, split in enumerate(SPLITS):
        with closing(Journal(out, share, f".{CONTAINER}", split=split)) as journal:
            counts, past = RowCounts(), journal.counts["seen"]
            train = token_ids(data, tokenizer, "train", None, counts, past)
            rest = held_out_ids(data, tokenizer, counts, past) if share else train
            while not journal.finished.done:
                batch: list[np.ndarray] = []
                for ids in islice(rest, AT_ONCE):
                    batch.append(ids)
                    if sum(map(len, batch)) >= TOKENS_AT_ONCE:
                        break
                skipped = counts.pop("no_text", 0)
                if not batch and not skipped:
                    journal.seal(done=True)
                    break
                rows = [{column: ids.astype(ID_COLUMNS[column]).tobytes()} for ids in batch]
                added = {"seen": len(batch) + skipped, "kept": len(batch), "no_text": skipped}
                past, worked = past + added["seen"], worked + len(batch)
                journal.record((0, past), rows, added | {"tokens": sum(map(len, batch))}, [])
                if journal.full:
                    journal.seal()
                if time.monotonic() - reported >= REPORT_SECONDS:
                    reported = time.monotonic()
                    on_progress(progress(journal.counts))
            finished += journal.counts
            shards += journal.finished.shards
    write_sums(out, len(SPLITS))
    return progress(Counter())
