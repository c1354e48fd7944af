"""One picture file to the square of pixels that a VQGAN encodes. Runs in worker processes; neither torch nor files out.

Notable:
- the shorter side becomes the square's side, the rest is cut off evenly (as the paper's data were prepared), in one
  step: only the square is resampled. A JPEG is decoded at the scale that is needed;
- any mode becomes RGB: CMYK, palettes, 16 bits of grey; what is transparent is laid on white; of an animation, the
  first frame; a camera's "this side up" is followed;
- pictures of over MOST_PIXELS are not decoded: a few kilobytes can hold gigabytes of one colour;
- only FORMATS are tried, whatever a file is called: else Pillow would start Ghostscript on a stranger's PostScript.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = {  # Pillow's names, each with the endings of its files: what the web is made of, decoded in this process
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
}
MOST_PIXELS = 89_478_485  # Pillow's own limit, at which it only warns: 256 MiB of RGB
MOST_BYTES = 1 << 28  # of a picture file
_ORIENTATION = 0x0112  # EXIF
_TURNS = dict(enumerate(map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), 2))  # for each orientation: its undoing


@dataclass(frozen=True)
class Decoded:
    """pixels: (side, side, 3) uint8. width, height: of the whole picture as it is to be looked at."""

    pixels: np.ndarray
    width: int
    height: int


@dataclass(frozen=True)
class Undecodable:
    """A picture that cannot be used. reason: "missing", "too_large" or "broken"; words: more, on one line."""

    reason: str
    words: str


def decode(content: bytes | Path, side: int) -> Decoded | Undecodable:
    """The square of `side` pixels in a picture file or its content. Never raises for what is in it."""
    picture = _read(content) if isinstance(content, Path) else content
    if isinstance(picture, Undecodable):
        return picture
    if not picture:
        return Undecodable("missing", "there are no bytes")
    try:
        return _decode(picture, side)
    except MemoryError:
        return Undecodable("too_large", "there is not enough memory to decode it")
    except UnidentifiedImageError:
        return Undecodable("broken", f"it is no picture of a known kind ({', '.join(FORMATS)})")
    except Exception as error:  # Pillow's plugins raise whatever the bytes lead them to
        return Undecodable("broken", " ".join(str(error).split())[:200] or type(error).__name__)


def _read(path: Path) -> bytes | Undecodable:
    try:
        # Without waiting: a named pipe that nobody writes to would stop everything.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return Undecodable("broken", "it is no plain file")
            if status.st_size > MOST_BYTES:
                return Undecodable("too_large", f"the file has {status.st_size:,} bytes")
            return file.read()
    except FileNotFoundError:
        return Undecodable("missing", "there is no such file")
    except (OSError, ValueError) as error:
        return Undecodable("broken", getattr(error, "strerror", None) or str(error))


def _decode(content: bytes, side: int) -> Decoded | Undecodable:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata; sizes are looked at here
        try:
            picture = Image.open(io.BytesIO(content), formats=list(FORMATS))
        except Image.DecompressionBombError as error:
            return Undecodable("too_large", str(error))
        with picture:
            width, height = picture.size
            if width * height > MOST_PIXELS:
                return Undecodable("too_large", f"it has {width} x {height} pixels")
            if not (width and height):
                return Undecodable("broken", "it has no pixels")
            orientation = 1
            with suppress(Exception):  # metadata that cannot be read do no harm to the picture
                orientation = picture.getexif().get(_ORIENTATION, 1)
            picture.draft("RGB", (2 * side, 2 * side))  # JPEG only: at half the size where that is still plenty
            square = _square(_as_rgb(picture), side)
    if (turn := _TURNS.get(orientation)) is not None:
        square = square.transpose(turn)
    if orientation in (5, 6, 7, 8):
        width, height = height, width
    return Decoded(np.asarray(square), width, height)


def _as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I") or picture.mode == "F":  # more than 8 bits, which a plain conversion would clip
        grey = np.asarray(picture, dtype=np.float32)
        most = 65535.0 if picture.mode.startswith("I;16") or grey.max() > 255 else 255.0
        return Image.fromarray((grey.clip(0, most) * (255 / most)).round().astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        above = picture.convert("RGBA")
        paper = Image.new("RGBA", above.size, (255, 255, 255, 255))
        return Image.alpha_composite(paper, above).convert("RGB")
    return picture.convert("RGB")


def _square(picture: Image.Image, side: int) -> Image.Image:
    shorter = min(picture.size)
    left, top = (picture.width - shorter) / 2, (picture.height - shorter) / 2
    box = (left, top, left + shorter, top + shorter)
    return picture.resize((side, side), Image.Resampling.LANCZOS, box=box, reducing_gap=3.0)
