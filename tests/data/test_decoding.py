"""Picture files of every kind to a square of pixels; what cannot be used is said, never raised."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tt_cli.data.build.picture_decoding import FORMATS, Decoded, Undecodable, decode

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def stored(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def striped(width: int, height: int) -> Image.Image:
    """Left third red, middle green, right blue; or from top to bottom if it is high."""
    line = np.array([(RED, GREEN, BLUE)[3 * i // max(width, height)] for i in range(max(width, height))], np.uint8)
    wide = np.repeat(line[None], min(width, height), axis=0)
    return Image.fromarray(wide if width >= height else wide.transpose(1, 0, 2))


def good(content: bytes | Path, side: int = 32) -> Decoded:
    found = decode(content, side)
    assert isinstance(found, Decoded), found
    assert found.pixels.shape == (side, side, 3)
    assert found.pixels.dtype == np.uint8
    return found


def near(pixel: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(pixel.astype(int) - colour).max() < 12)


@pytest.mark.parametrize("size", [(300, 100), (100, 300), (90, 30)])
def test_the_middle_is_kept(size: tuple[int, int]) -> None:
    found = good(stored(striped(*size)))
    assert (found.width, found.height) == size
    assert all(near(pixel, GREEN) for pixel in found.pixels[3:-3, 3:-3].reshape(-1, 3)[::7])


@given(st.integers(1, 400), st.integers(1, 400))
def test_any_size_fills_the_square(width: int, height: int) -> None:
    found = good(stored(Image.new("RGB", (width, height), BLUE)), side=16)
    assert (found.width, found.height) == (width, height)
    assert near(found.pixels[0, 0], BLUE) and near(found.pixels[15, 15], BLUE)


@pytest.mark.parametrize(
    ("picture", "kind", "colour"),
    [
        (Image.new("CMYK", (40, 40), (0, 255, 255, 0)), "JPEG", RED),
        (Image.new("CMYK", (40, 40), (0, 255, 255, 0)), "TIFF", RED),
        (Image.new("L", (40, 40), 128), "PNG", (128, 128, 128)),
        (Image.new("1", (40, 40), 1), "PNG", WHITE),
        (Image.fromarray(np.full((40, 40), 0x8080, np.uint16)), "PNG", (128, 128, 128)),
        (Image.new("LA", (40, 40), (0, 0)), "PNG", WHITE),
        (Image.new("RGBA", (40, 40), (255, 0, 0, 0)), "PNG", WHITE),
        (Image.new("RGBA", (40, 40), (255, 0, 0, 255)), "PNG", RED),
        (Image.new("RGB", (40, 40), RED).quantize(4), "PNG", RED),
        (Image.new("RGB", (40, 40), RED), "WEBP", RED),
        (Image.new("RGB", (40, 40), RED), "BMP", RED),
    ],
)
def test_every_mode_becomes_rgb(picture: Image.Image, kind: str, colour: tuple[int, int, int]) -> None:
    assert near(good(stored(picture, kind)).pixels[16, 16], colour)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_that_is_named_is_read(kind: str) -> None:
    assert near(good(stored(Image.new("RGB", (40, 40), RED), kind)).pixels[16, 16], RED)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "PPM", "ICO", "TGA", "JPEG2000"])
def test_no_other_format_is_tried(kind: str) -> None:
    found = decode(stored(Image.new("RGB", (40, 40), RED), kind), 32)
    assert isinstance(found, Undecodable) and found.words.startswith("it is no picture of a known kind (JPEG, PNG, ")


def test_postscript_never_reaches_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS that is called a JPEG. Ghostscript, as Pillow finds it, is a program that leaves a witness."""
    ghostscript, witness = tmp_path / "gs", tmp_path / "witness"
    ghostscript.write_text(f"#!/bin/sh\ntouch {witness}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "cat.jpg").write_bytes(stored(Image.new("RGB", (40, 40), RED), "EPS"))
    assert isinstance(decode(tmp_path / "cat.jpg", 32), Undecodable) and not witness.exists()
    with Image.open(tmp_path / "cat.jpg") as picture, pytest.raises(OSError):
        picture.load()
    assert witness.exists(), "what Pillow does by itself"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (40, 40), colour) for colour in (RED, GREEN, BLUE)]
    content = stored(frames[0], kind, save_all=True, append_images=frames[1:])
    assert near(good(content).pixels[16, 16], RED)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_says_what_is_up(orientation: int) -> None:
    upright = np.zeros((40, 60, 3), np.uint8)
    upright[:20, 10:30], upright[:20, 30:50], upright[20:, 10:30], upright[20:, 30:50] = RED, GREEN, BLUE, WHITE
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that makes the stored picture
    picture = Image.fromarray(upright)
    if orientation in undo:
        picture = picture.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = good(stored(picture, "JPEG", exif=exif, quality=95, subsampling=0))
    assert (found.width, found.height) == (60, 40)
    corners = [found.pixels[y, x] for y in (6, 25) for x in (6, 25)]
    assert all(near(pixel, colour) for pixel, colour in zip(corners, (RED, GREEN, BLUE, WHITE), strict=True))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_metadata_that_cannot_be_read_cost_no_picture(kind: str) -> None:
    for exif in (b"Exif\0\0no TIFF at all", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12", b"Exif\0\0"):
        assert near(good(stored(Image.new("RGB", (40, 40), RED), kind, exif=exif)).pixels[16, 16], RED)


def test_a_large_jpeg_is_as_good_as_a_png() -> None:
    y, x = np.mgrid[:900, :1200]
    smooth = Image.fromarray(np.stack([x % 256, y % 256, (x + y) // 9], axis=-1).astype(np.uint8))
    jpeg, png = good(stored(smooth, "JPEG", quality=95), 64), good(stored(smooth), 64)
    assert np.abs(jpeg.pixels.astype(int) - png.pixels).mean() < 6


def test_a_bomb_is_not_decoded() -> None:
    bomb = stored(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 20_000
    assert decode(bomb, 32) == Undecodable("too_large", "it has 10000 x 10000 pixels")
    found = decode(stored(Image.new("1", (16_000, 16_000))), 32)
    assert isinstance(found, Undecodable) and found.reason == "too_large"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
def test_any_damage_is_said(kind: str) -> None:
    content = stored(striped(90, 60), kind)
    for end in range(0, len(content), max(1, len(content) // 40)):
        found = decode(content[:end], 16)
        assert isinstance(found, Decoded) or (found.reason in ("broken", "missing") and "\n" not in found.words)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_picture(content: bytes) -> None:
    for start in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"II*\0", b"RIFF"):
        assert isinstance(decode(start + content, 8), Decoded | Undecodable)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(stored(striped(90, 60)))
    good(tmp_path / "a.png")
    assert decode(tmp_path / "b.png", 8) == Undecodable("missing", "there is no such file")
    (tmp_path / "empty.png").touch()
    assert decode(tmp_path / "empty.png", 8) == Undecodable("missing", "there are no bytes")
    os.mkfifo(tmp_path / "pipe.png")
    assert decode(tmp_path / "pipe.png", 8) == Undecodable("broken", "it is no plain file")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    assert decode(tmp_path / "loop.png", 8) == Undecodable("broken", "Too many levels of symbolic links")
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(1 << 29)
    assert decode(tmp_path / "huge.png", 8) == Undecodable("too_large", "the file has 536,870,912 bytes")
    assert decode(Path("a\0b"), 8) == Undecodable("broken", "embedded null byte")
