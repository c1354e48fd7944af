"""Drawings as PNG files that say where they come from, under names that overwrite nothing."""

from __future__ import annotations

import errno
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tt_cli.draw.contact_sheet import contact_sheet
from tt_cli.errors import TTError

if TYPE_CHECKING:
    from tt_cli.draw.drawing import Drawing

LONGEST_SLUG = 60


def slug(text: str) -> str:
    """`text` as part of a file name: lower-case ASCII letters and digits with hyphens, 1 to 60 characters."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:LONGEST_SLUG].strip("-") or "prompt"


@contextmanager
def output_folder(named: Path | None, stem: str) -> Iterator[Path]:
    """The folder `named`, else a new one: drawings/stem-001, drawings/stem-002, …

    It is made at once, so that a place that cannot be written is found before the work, and removed again if
    nothing came into it. Raises TTError.
    """
    folder = _make(named) if named is not None else _make_new(Path("drawings"), stem)
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds pictures
            folder.rmdir()


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _cannot_write(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    return folder


def _make_new(parent: Path, stem: str) -> Path:
    _make(parent)
    for number in itertools.count(1):
        folder = parent / f"{stem}-{number:03}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_write(parent, error) from error
        return folder
    raise AssertionError("numbers do not run out")


def save_drawings(
    drawings: Sequence[Drawing],
    folder: Path,
    facts: Mapping[str, str],
    similarities: Sequence[float] | None = None,
) -> tuple[list[Path], Path]:
    """Write each drawing, and the contact sheet of all, into `folder`; returns their paths.

    `facts` (settings, seed, run, step, …) become text chunks of every file, beside the prompt, the drawing's index
    among its candidates and, where given, its similarity. Files of one prompt are numbered in the order given. A
    file that is already there keeps its name, the new one gets a number. Raises TTError.
    """
    _make(folder)
    numbers: Counter[str] = Counter()
    try:
        paths = []
        for place, drawing in enumerate(drawings):
            chunks = {"prompt": drawing.prompt, "index": str(drawing.index), **facts}
            if similarities is not None:
                chunks["clip_similarity"] = f"{similarities[place]:.4f}"
            numbers[drawing.prompt] += 1
            stem = f"{slug(drawing.prompt)}-{numbers[drawing.prompt]}"
            paths.append(_write(Image.fromarray(drawing.picture), folder, stem, chunks))
        prompts = "\n".join(dict.fromkeys(drawing.prompt for drawing in drawings))
        sheet = _write(contact_sheet(drawings), folder, "contact-sheet", {"prompts": prompts, **facts})
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return paths, sheet


def text_chunks(facts: Mapping[str, str]) -> PngInfo:
    """Facts as text chunks of a PNG file, to be given to Pillow as `pnginfo`."""
    info = PngInfo()
    for key, value in facts.items():
        info.add_itxt(key, value)
    return info


def _write(picture: Image.Image, folder: Path, stem: str, chunks: Mapping[str, str]) -> Path:
    info = text_chunks(chunks)
    for number in itertools.count(1):
        path = folder / (f"{stem}.png" if number == 1 else f"{stem}-{number:03}.png")
        try:
            file = path.open("xb")
        except FileExistsError:
            continue
        try:
            with file:
                picture.save(file, format="PNG", pnginfo=info)
        except OSError:
            path.unlink(missing_ok=True)  # half a picture is of no use
            raise
        return path
    raise AssertionError("numbers do not run out")


def _cannot_write(folder: Path, error: OSError) -> TTError:
    return TTError(f"cannot write pictures to {folder}: {error.strerror or error}; choose another folder with --out")
