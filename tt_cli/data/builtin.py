"""The built-in data set: emoji and their names, as codes, with the VQGAN and the tokenizer that belong to them.

Made by scripts/build_emoji.py; its manifest lists every file with its SHA-256, and a file is checked before it is
read, so that a broken installation says so instead of training on something else.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np

from tt_cli.data.codes import CODE_DTYPE
from tt_cli.data.examples import Example
from tt_cli.errors import TTError, UsageError

MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")


def folder() -> Path:
    """The folder of the built-in data sets, each in one of its own."""
    return Path(__file__).parent / "builtin"


def names() -> list[str]:
    return sorted(path.parent.name for path in folder().glob(f"*/{MANIFEST}"))


def has(name: str, filename: str) -> bool:
    """True if the built-in data set `name` comes with that file; it may yet be damaged, see `checked_file`."""
    return (folder() / name / filename).is_file()


def checked_file(name: str, filename: str) -> Path:
    """The path of a file of the built-in data set `name`, its content checked against the manifest.

    Raises UsageError for an unknown data set, TTError for a file that is missing or damaged.
    """
    if name not in names():
        known = ", ".join(names()) or "none in this installation"
        raise UsageError(f"no built-in data set is called '{name}'; built in: {known}")
    path, advice = folder() / name / filename, "install tt again"
    try:
        manifest = json.loads((path.parent / MANIFEST).read_text(encoding="utf-8"))
        expected = manifest["files"][filename]["sha256"]
        content = path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TTError(f"the built-in file {path} cannot be read ({error}); {advice}") from error
    if hashlib.sha256(content).hexdigest() != expected:
        raise TTError(f"the built-in file {path} is damaged: its SHA-256 is not that of the manifest; {advice}")
    return path


@cache
def examples(name: str, split: str = "train") -> list[Example]:
    """All examples of a split ("train" or "heldout"), in the order of the file. Do not change the list.

    Raises UsageError for an unknown name or split, TTError for a damaged file.
    """
    import pyarrow
    import pyarrow.parquet

    if split not in SPLITS:
        raise UsageError(f"the built-in data have no split '{split}'; they have {' and '.join(SPLITS)}")
    path = checked_file(name, f"{split}.parquet")
    try:
        table = pyarrow.parquet.read_table(path, columns=["caption", "code"]).to_pydict()
    except (pyarrow.ArrowException, OSError) as error:
        raise TTError(f"the built-in file {path} cannot be read ({error}); install tt again") from error
    return [
        Example(caption, np.frombuffer(code, dtype=CODE_DTYPE))
        for caption, code in zip(table["caption"], table["code"], strict=True)
    ]
