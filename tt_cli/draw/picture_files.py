"""Drawings as PNG files that say where they come from, under names that overwrite nothing."""

from __future__ import annotations

import errno
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tt_cli.draw.contact_sheet import contact_sheet
from tt_cli.errors import os_errors

if TYPE_CHECKING:
    from tt_cli.draw.drawing import Drawing

LONGEST_SLUG = 60
Made = TypeVar("Made")


def slug(text: str) -> str:
    """`text` as part of a file name: lower-case ASCII letters and digits with hyphens, 1 to 60 characters."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:LONGEST_SLUG].strip("-") or "prompt"


@contextmanager
def output_folder(named: Path | None, stem: str) -> Iterator[Path]:
    """The folder `named`, else a new one: drawings/stem-001, drawings/stem-002, …

    It is made at once, so that a place that cannot be written is found before the work, and what was made is removed
    again if nothing came into it. Raises TTError.
    """
    parent = named or Path("drawings")
    there = named is not None and named.exists()
    with _writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        numbered = (parent / f"{stem}-{number:03}" for number in itertools.count(1))
        folder = named or _first_free(numbered, Path.mkdir)[0]
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds pictures
            if not there:
                folder.rmdir()


def save_drawings(drawings: Sequence[Drawing], folder: Path, facts: Mapping[str, str]) -> list[Path]:
    """Write each drawing into `folder`; returns their paths.

    `facts` (settings, seed, run, step, …) become text chunks of every file, beside the prompt, the drawing's index
    among its candidates and, where it was ranked, its similarity. Files of one prompt are numbered in the order
    given. A file that is already there keeps its name, the new one gets a number. Raises TTError.
    """
    numbers: Counter[str] = Counter()
    paths = []
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in drawings:
            chunks = {"prompt": drawing.prompt, "index": str(drawing.index), **facts}
            if drawing.similarity is not None:
                chunks["clip_similarity"] = f"{drawing.similarity:.4f}"
            numbers[drawing.prompt] += 1
            stem = f"{slug(drawing.prompt)}-{numbers[drawing.prompt]}"
            paths.append(_write(Image.fromarray(drawing.picture), folder, stem, chunks))
    return paths


def save_sheet(drawings: Sequence[Drawing], folder: Path, facts: Mapping[str, str]) -> Path:
    """Write the contact sheet of drawings, as `save_drawings` writes them."""
    prompts = "\n".join(dict.fromkeys(drawing.prompt for drawing in drawings))
    with _writing(folder):
        return _write(contact_sheet(drawings), folder, "contact-sheet", {"prompts": prompts, **facts})


def text_chunks(facts: Mapping[str, str]) -> PngInfo:
    """Facts as text chunks of a PNG file, to be given to Pillow as `pnginfo`."""
    info = PngInfo()
    for key, value in facts.items():
        info.add_itxt(key, value)
    return info


def _write(picture: Image.Image, folder: Path, stem: str, chunks: Mapping[str, str]) -> Path:
    names = itertools.chain([stem], (f"{stem}-{number:03}" for number in itertools.count(2)))
    path, file = _first_free((folder / f"{name}.png" for name in names), lambda path: path.open("xb"))
    try:
        with file:
            picture.save(file, format="PNG", pnginfo=text_chunks(chunks))
    except BaseException:
        path.unlink(missing_ok=True)  # half a picture is of no use
        raise
    return path


def _first_free(paths: Iterator[Path], make: Callable[[Path], Made]) -> tuple[Path, Made]:
    """The first path that is not there yet, and what `make` made of it."""
    for path in paths:
        with suppress(FileExistsError):
            return path, make(path)
    raise AssertionError("numbers do not run out")


def _writing(folder: Path) -> AbstractContextManager[None]:
    return os_errors(f"cannot write pictures to {folder}", "choose another folder with --out")
