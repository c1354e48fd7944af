"""Token sequences from streamed texts: English C4 on the Hub, or a local file in its format, read by `datasets`.

Used by scripts/finetune_gpt2.py.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import hub_errors

C4 = ("allenai/c4", "en")


class Stream:
    """Sequences of `length` ids, cut from texts that stand one after the other, each with `end` behind it, for ever."""

    def __init__(self, file: Path | None, encode: Callable[[str], list[int]], length: int, end: int) -> None:
        """file: JSON lines with a "text", also as .gz; None: C4. Raises TTError."""
        import datasets

        self.what = str(file) if file else C4[0]
        self.encode, self.length, self.end = encode, length, end
        self.left: list[int] = []  # ids of texts that were read, for the next sequences
        if file and not file.is_file():
            raise UsageError(f"cannot read {file}: no such file")
        self.of_hub = file is None
        with readable(self.what, of_hub=self.of_hub):
            if file:
                texts = datasets.load_dataset("json", data_files=str(file), split="train", streaming=True)
            else:
                texts = datasets.load_dataset(*C4, split="train", streaming=True)
            self.texts = texts.repeat(None)
        self._rows: Iterator[Any] | None = None

    def batch(self, count: int) -> Tensor:
        """The next sequences: (count, length) int64. Raises TTError."""
        while len(self.left) < count * self.length:
            with readable(self.what, of_hub=self.of_hub):
                self._rows = self._rows or iter(self.texts)
                row = next(self._rows, None)
            if row is None:
                raise UsageError(f"cannot read {self.what}: it holds no texts")
            if not isinstance(row.get("text"), str):
                raise UsageError(f'cannot read {self.what}: a line has no "text"')
            self.left += [*self.encode(row["text"]), self.end]
        ids, self.left = self.left[: count * self.length], self.left[count * self.length :]
        return torch.tensor(ids).view(count, self.length)

    def state(self) -> dict[str, Any]:
        """The place in the stream, for JSON."""
        return {"texts": self.texts.state_dict(), "left": self.left}

    def go_on(self, state: dict[str, Any]) -> None:
        """From a place that state() gave, before the first batch."""
        self.texts.load_state_dict(state["texts"])
        self.left = list(state["left"])


@contextlib.contextmanager
def readable(what: str, *, of_hub: bool = False) -> Iterator[None]:
    """Raise what Hugging Face's libraries raise in the block as one line. Their errors have nothing in common."""
    from datasets.exceptions import DatasetNotFoundError

    action = f"cannot read {what}"
    try:
        with hub_errors(action) if of_hub else contextlib.nullcontext():
            try:
                yield
            except DatasetNotFoundError as error:  # hub_errors would take it for a full disk
                raise UsageError(f"{action}: the Hub has no such data set; check the name") from error
            except StopIteration as error:  # what an empty file leads to
                raise UsageError(f"{action}: it holds no texts") from error
    except TTError:
        raise
    except Exception as error:  # files that anyone made: the libraries raise whatever these lead them to
        raise (TTError if of_hub else UsageError)(f"{action}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def write_shard(pages: Iterable[Path], shard: Path) -> Path:
    """A .jsonl.gz in C4's format, made of text files: a text for each of their sections, in an order drawn once."""
    texts = [(text, page.name) for page in pages for text in page.read_text(encoding="utf-8").split("\n## ")]
    random.Random(0).shuffle(texts)
    with gzip.open(shard, "wt", encoding="utf-8") as file:
        for text, name in texts:
            file.write(json.dumps({"text": text, "timestamp": "", "url": name}) + "\n")
    return shard
