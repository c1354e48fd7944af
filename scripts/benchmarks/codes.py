"""How small codes get: bytes per picture of every way to write them, against their entropy and the packed bound.

Two sets of real codes: those of the built-in emoji, and pictures that are drawn here (gradients, discs, lines, words)
and encoded with the built-in VQGAN, both 8 x 8 codes of 1,024. Codes of the published VQGAN are not to be had without
its weights; for them, codes drawn evenly say what is left to gain if all 8,192 are as likely: nothing.
All figures are of codes alone, without captions, compressed a shard at a time.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pyarrow
from PIL import Image, ImageDraw

from tt_cli.data import builtin
from tt_cli.data.codes import bits_per_code, to_column
from tt_cli.run import load_run
from tt_cli.task.picture_codec import load_vqgan

QUICK = "fewer pictures"
WORDS = ("red", "apple", "sea", "tower", "night", "bridge", "green", "seven")


def drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    """Codes (count, 64) of pictures that nobody has drawn before."""
    import torch

    vqgan = load_vqgan(load_run("emoji"))
    pictures = np.stack([np.asarray(drawing(rng)) for _ in range(count)])
    codes = vqgan.encode(torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255)
    return codes.numpy().astype(np.int16)


def drawing(rng: np.random.Generator) -> Image.Image:
    left, right = rng.integers(0, 256, (2, 3))
    ramp = np.linspace(0, 1, 64)[None, :, None]
    ground = np.broadcast_to(left * (1 - ramp) + right * ramp, (64, 64, 3)).astype(np.uint8)
    picture = Image.fromarray(np.rot90(ground, int(rng.integers(4))).copy())
    pen = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(2, 7))):
        x, y, size = (int(value) for value in rng.integers(0, 60, 3))
        colour = tuple(int(value) for value in rng.integers(0, 256, 3))
        kind = int(rng.integers(4))
        if kind == 0:
            pen.ellipse((x, y, x + size, y + size), fill=colour)
        elif kind == 1:
            pen.rectangle((x, y, x + size, y + size // 2 + 1), fill=colour)
        elif kind == 2:
            pen.line((x, y, size, y + size), fill=colour, width=3)
        else:
            pen.text((x // 2, y), str(rng.choice(WORDS)), fill=colour)
    return picture


def measured(codes: np.ndarray, codebook_size: int) -> dict[str, Any]:
    count, each = codes.shape
    bound = each * bits_per_code(codebook_size) / 8
    int16 = codes.astype("<i2")
    packed = b"".join(to_column("code13", codes, codebook_size))
    planes = int16.view(np.uint8).reshape(count, each, 2).transpose(2, 0, 1).tobytes()
    by_place = np.ascontiguousarray(int16.T)
    ways = {
        "int16": int16.nbytes,
        "packed": len(packed),
        "packed, brotli": brotli(packed),
        "int16, brotli": brotli(int16.tobytes()),
        "int16 as byte planes, brotli": brotli(planes),
        "int16 by place in picture, brotli": brotli(by_place.tobytes()),
        "entropy of order 0, table for free": entropy(codes) * each / 8 * count,
        "entropy of order 0, with its table": entropy(codes) * each / 8 * count + table(codes, codebook_size),
    }
    sizes = {way: size / count for way, size in ways.items()}
    return {"pictures": count, "codes": each, "used": int(len(np.unique(codes))), "bound": bound, "bytes": sizes}


def brotli(content: bytes) -> int:
    return pyarrow.Codec("brotli", compression_level=8).compress(content).size


def entropy(values: np.ndarray) -> float:
    """Bits of one value, if each is drawn by itself."""
    _, counts = np.unique(values, return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum())


def table(codes: np.ndarray, codebook_size: int) -> float:
    """Bytes that say how often each code is there, so that a shard can be read by itself."""
    counts = np.bincount(codes.ravel(), minlength=codebook_size)
    return float(np.where(counts > 0, 2 * np.log2(counts + 1) + 1, 1).sum() / 8)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes per picture of every set, by way."""
    rng = np.random.default_rng(0)
    sets = {
        "emoji": (np.stack([example.codes for example in builtin.examples("emoji")]), 1024),
        "drawn": (drawn(rng, 64 if args.quick else 512), 1024),
        "even": (rng.integers(0, 8192, (256 if args.quick else 4096, 1024)).astype(np.int16), 8192),
    }
    return {name: measured(codes, size) for name, (codes, size) in sets.items()}
