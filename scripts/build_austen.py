#!/usr/bin/env python3
"""Builds the built-in text: Jane Austen's six novels, chapter by chapter, and a tokenizer trained on them.

The text comes from the Debian package r-cran-janeaustenr, which `apt-get download` fetches where --package names no
file. Lines of a paragraph are joined, a paragraph is a line, and a chapter is a row; a few chapters are held out by
their number. docs/language-models.md tells what is learned from it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))
from tt_cli.data import builtin
from tt_cli.data.tokenizer import TOKENIZER_FILE

PACKAGE = "r-cran-janeaustenr"
NOVELS = ("Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility")
VOCABULARY = 512
DOCUMENT_END = "</s>"
HELDOUT_EVERY = 20
CHAPTER = re.compile(r"^(VOLUME|CHAPTER|Chapter)\b.*$|^THE END$|^F(INIS|inis)$")
LEAST_LETTERS = 1000  # of a chapter; what is shorter is a title or an end
NOTICE = f"""\
The texts in train.parquet and heldout.parquet are Jane Austen's six novels (1811 to 1818), which are in the public
domain, as the R package janeaustenr, Copyright Julia Silge, MIT licence, has them from Project Gutenberg:
LICENSE-janeaustenr.txt. Taken from Debian's package {PACKAGE}; scripts/build_austen.py cut them into chapters and
trained the tokenizer on them.
"""


def novels(database: bytes) -> Iterator[list[str]]:
    """The lines of each novel in an R lazy-load database: compressed character vectors, one after the other."""
    while database:
        stream = zlib.decompressobj()
        vector = stream.decompress(database[4:])  # after its length
        database = stream.unused_data
        place = 14 + 4 + int.from_bytes(vector[14:18]) + 4  # "X\n", three versions, the encoding's name, a type
        count, place = int.from_bytes(vector[place : place + 4]), place + 4
        lines = []
        for _ in range(count):
            size = int.from_bytes(vector[place + 4 : place + 8])
            lines.append(vector[place + 8 : place + 8 + size].decode())
            place += 8 + size
        yield lines


def chapters(lines: list[str]) -> Iterator[str]:
    """The chapters of a novel, a paragraph a line, without headings."""
    paragraphs: list[list[str]] = [[]]
    for line in [*lines, "THE END"]:
        if CHAPTER.match(line.strip()):
            text = "\n".join(re.sub(r"\s+", " ", " ".join(words)) for words in paragraphs if words)
            if len(text) >= LEAST_LETTERS:
                yield text + "\n"
            paragraphs = [[]]
        elif line.strip():
            paragraphs[-1].append(line.strip())
        else:
            paragraphs.append([])


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2's, with a token for the end of a document."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[DOCUMENT_END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(package: Path, out: Path) -> dict[str, object]:
    """Write the data set to `out`. Returns the manifest."""
    with tempfile.TemporaryDirectory() as name:
        unpacked = Path(name)
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        (database,) = unpacked.rglob("data/Rdata.rdb")
        splits: dict[str, list[tuple[str, str]]] = {"train": [], "heldout": []}
        numbered = (
            (novel, chapter)
            for novel, lines in zip(NOVELS, novels(database.read_bytes()), strict=True)
            for chapter in chapters(lines)
        )
        for number, row in enumerate(numbered):
            splits["heldout" if number % HELDOUT_EVERY == HELDOUT_EVERY // 2 else "train"].append(row)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (licence,) = unpacked.rglob("copyright")
        shutil.copyfile(licence, out / "LICENSE-janeaustenr.txt")
    for split, rows in splits.items():
        table = pyarrow.table({"title": [title for title, _ in rows], "text": [text for _, text in rows]})
        path = out / f"{split}.parquet"
        pyarrow.parquet.write_table(table, path, compression="brotli", compression_level=11, use_dictionary=["title"])
    train_tokenizer([text for _, text in splits["train"]]).save(str(out / TOKENIZER_FILE), pretty=False)
    (out / "NOTICE.txt").write_text(NOTICE, encoding="utf-8")
    content = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
    manifest: dict[str, object] = {
        "examples": {split: len(rows) for split, rows in splits.items()},
        "characters": {split: sum(len(text) for _, text in rows) for split, rows in splits.items()},
        "package_sha256": hashlib.sha256(package.read_bytes()).hexdigest(),
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in content.items()
        },
    }
    (out / builtin.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = builtin.folder() / "austen"
    parser.add_argument("--package", type=Path, help=f"the file {PACKAGE}_….deb")
    parser.add_argument("--out", type=Path, default=default, help=f"folder to write (default: {default})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.package is None:
            subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
        (package,) = [options.package] if options.package else Path(folder).glob("*.deb")
        print(json.dumps({key: value for key, value in write(package, options.out).items() if key != "files"}))


if __name__ == "__main__":
    main()
