"""Inspection of shards: counts, sizes, captions, how often each code is there, and random rows as pictures again."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tt_cli.data.build.journal import SETTINGS, SHARDS
from tt_cli.data.codes import CODE_COLUMNS, ID_COLUMNS
from tt_cli.data.columns import Row
from tt_cli.data.examples import RowFilter
from tt_cli.data.row_rules import RowRules
from tt_cli.data.shard_format import CONTAINERS, container_of, read_batches
from tt_cli.data.text.token_reader import SHOWN_TOKENS, TextTokenizer
from tt_cli.errors import TTError, UsageError
from tt_cli.run import CausalLmRun, DalleRun, RunConfig
from tt_cli.run.sections import VqganPart
from tt_cli.terminal.chart import SPARKS
from tt_cli.terminal.format import byte_count, plural


@dataclass
class Inspection:
    """The facts about `shards` files."""

    column: str
    codebook_size: int
    shards: int = 0
    rows: int = 0
    bytes: int = 0
    used: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # counts of each code (codebook_size,)
    caption_characters: int = 0
    problems: Counter[str] = field(default_factory=Counter)  # rows that training would not take, by what is wrong
    damaged: list[str] = field(default_factory=list)  # a line for each shard that cannot be read to its end
    samples: list[tuple[str, np.ndarray]] = field(default_factory=list)  # captions and codes (n,) of random rows

    @property
    def entropy(self) -> float:
        """Bits of a code, if each were drawn by itself."""
        share = self.used[self.used > 0] / max(1, self.used.sum())
        return float(-(share * np.log2(share)).sum())

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        good = max(1, self.rows - sum(self.problems.values()))
        return {
            "shards": self.shards,
            "rows": self.rows,
            "bytes": self.bytes,
            "bytes_per_row": round(self.bytes / max(1, self.rows), 1),
            "column": self.column,
            "codes_used": int((self.used > 0).sum()),
            "codebook_size": self.codebook_size,
            "bits_per_code": round(self.entropy, 3),
            "caption_characters": round(self.caption_characters / good, 1),
            "problems": dict(self.problems),
            "damaged": self.damaged,
        }

    def histogram(self) -> list[int]:
        """Counts of the codes in each of up to 64 stretches of the codebook."""
        parts = np.array_split(self.used, min(64, self.codebook_size))
        return [int(part.sum()) for part in parts]


def shard_files(path: Path) -> list[Path]:
    """The shards that a path means: itself, those in a folder, or in the `data` of a folder of `tt data encode`.

    Raises UsageError where there is none.
    """
    if path.is_file() and container_of(path.name):
        return [path]
    for folder in (path / SHARDS, path):
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        if shards := [file for file in files if container_of(file.name) and not file.name.startswith(".")]:
            return shards
    raise UsageError(f"there are no shards in {path}: their names end in {', '.join(CONTAINERS)}")


def run_of(path: Path, run: RunConfig) -> RunConfig:
    """`run` with the VQGAN that `tt data encode` wrote down beside these shards; as it is where nothing is written.

    Raises UsageError where that cannot be read.
    """
    beside = (folder / SETTINGS for folder in (path, *path.resolve().parents[:2]))
    file = next((file for file in beside if file.is_file()), None)
    if file is None:
        return run
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if "tokenizer" in settings:
            raise ValueError("of tokens")
        known = settings["vqgan"]
        return run.replaced({f"vqgan.{key}": known.get(key) for key in VqganPart.model_fields})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise UsageError(f"cannot read {file} ({error}); name the run that they are of with --run") from error


def inspect(files: Sequence[Path], run: RunConfig, samples: int, seed: int) -> Inspection:
    """Read all rows of the shards. samples: rows to keep, each as likely as any other; seed: which.

    Raises UsageError where no row has codes.
    """
    rng = np.random.default_rng(seed)
    size = DalleRun.of(run).vqgan.codebook_size
    result = Inspection("", size, used=np.zeros(size, np.int64))
    row_filter = RowFilter(replace(RowRules.of(run), filtered=False), hopeless=math.inf)
    for batch in _batches(files, result):
        result.rows += len(batch)
        result.column = result.column or next((column for column in CODE_COLUMNS if column in batch[0]), "")
        captions, codes, _ = row_filter.sift(batch)
        result.used += np.bincount(codes.ravel(), minlength=result.codebook_size)
        result.caption_characters += sum(map(len, captions))
        first = row_filter.counts["kept"] - len(captions)
        for taken, example in enumerate(zip(captions, codes, strict=True), first + 1):
            place = len(result.samples) if len(result.samples) < samples else int(rng.integers(taken))
            if place < samples:
                result.samples[place : place + 1] = [example]
    if not result.column and not result.damaged:
        raise UsageError(f"the shards have no column {' or '.join(CODE_COLUMNS)}")
    result.problems = row_filter.counts.problems()
    return result


def inspect_tokens(files: Sequence[Path], run: CausalLmRun, samples: int, seed: int) -> Inspection:
    """As `inspect`, of the shards of `tt data tokenize`: ids for codes, beginnings of documents for captions."""
    rng, tokenizer = np.random.default_rng(seed), TextTokenizer(run.tokenizer)
    result = Inspection("", tokenizer.size, used=np.zeros(tokenizer.size, np.int64))
    for row in chain.from_iterable(_batches(files, result)):
        result.rows += 1
        column = next((column for column in ID_COLUMNS if column in row), "")
        result.column = result.column or column
        content, dtype = row.get(column) or b"", ID_COLUMNS.get(column, np.dtype("<u2"))
        ids = np.frombuffer(content if len(content) % dtype.itemsize == 0 else b"", dtype)
        if not len(ids) or ids.max() >= tokenizer.size or ids[-1] != tokenizer.end:
            result.problems["other_tokenizer" if len(ids) else "no_ids"] += 1
            continue
        result.used += np.bincount(ids, minlength=tokenizer.size)
        words = tokenizer.backend.decode(ids[:SHOWN_TOKENS].tolist())
        result.caption_characters += len(tokenizer.backend.decode(ids.tolist()))
        place = len(result.samples) if len(result.samples) < samples else int(rng.integers(result.rows))
        if place < samples:
            result.samples[place : place + 1] = [(words, ids)]
    return result


def _batches(files: Sequence[Path], result: Inspection) -> Iterator[Sequence[Row]]:
    """The rows of all shards, of each as far as it can be read; shards, bytes and damage are counted."""
    for path in files:
        result.shards += 1
        try:
            result.bytes += path.stat().st_size
            with path.open("rb") as file:
                yield from read_batches(file, path.name)
        except OSError as error:
            result.damaged.append(f"cannot read {path}: {error.strerror or error}")
        except TTError as error:
            result.damaged.append(str(error))


def as_text(result: Inspection) -> str:
    """For a terminal."""
    facts = result.facts()
    bins, what = result.histogram(), "tokens" if result.column in ID_COLUMNS else "codes"
    lines = [
        f"{plural(result.rows, 'row')} in {plural(result.shards, 'shard')} of {byte_count(result.bytes)} together: "
        f"{facts['bytes_per_row']:,.1f} bytes a row",
        f"{what}: {facts['codes_used']:,} of {result.codebook_size:,} are used, "
        f"{facts['bits_per_code']:.2f} bits each (column {result.column})",
        "".join(SPARKS[8 * count // (max(*bins, 1) + 1)] for count in bins),
        f"text: {facts['caption_characters']:,.1f} characters on average",
    ]
    lines += [f"not to be trained on, {key.replace('_', ' ')}: {count:,}" for key, count in result.problems.items()]
    if what == "tokens":
        lines += [f"  {words!r} …" for words, _ in result.samples]
    return "\n".join([*lines, *result.damaged])


def as_page(result: Inspection, pictures: np.ndarray, title: str) -> str:
    """One HTML page that needs no other file. pictures: of the samples, (b, H, W, 3) uint8."""
    bins = result.histogram()
    most = max(*bins, 1)
    bars = "".join(
        f'<rect x="{10 * place}" y="{100 - 100 * count / most:.1f}" width="9" height="{100 * count / most:.1f}"/>'
        for place, count in enumerate(bins)
    )
    figures = "".join(
        f'<figure><img alt="" src="{_inline(picture)}"><figcaption>{html.escape(caption)}</figcaption></figure>'
        for (caption, _), picture in zip(result.samples, pictures, strict=True)
    )
    summary, name = html.escape(as_text(result)), html.escape(title)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: 1rem }}
figure {{ margin: 0 }} img {{ width: 100% }} figcaption {{ font-size: .85rem; overflow-wrap: anywhere }}
</style>
<h1>{name}</h1><pre>{summary}</pre>
<h2>How often each part of the codebook is used</h2>
<svg role="img" aria-label="histogram of codes" viewBox="0 0 {10 * len(bins)} 100" width="100%">{bars}</svg>
<h2>Random rows, decoded</h2><main>{figures}</main></html>
"""


def _inline(picture: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
