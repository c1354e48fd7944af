"""Measure how fast `tt data encode` turns pictures into codes, beside the plain loop.

The plain loop takes one picture at a time: open, RGB, resize, cut, encode with the same VQGAN on the same device, and
one parquet file at the end. `tt data encode` filters, decodes in processes of its own where the device is a GPU, gives
the device batches, and writes down every batch so that nothing is lost. Both read JPEGs of 512 x 384 pixels with noise
and shapes in them: for the built-in VQGAN (64 x 64 pixels), and for one of the published sizes at 256 x 256 pixels with
random weights, which compute as fast as any others. The two take turns; the best of each counts.

JSON keys: device, small_per_second, small_ratio (over the plain loop), large_per_second, large_ratio.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image, ImageDraw, ImageOps

from scripts.benchmarks.harness import in_turns
from tt_cli.data.build import encoder as encoding
from tt_cli.data.build.journal import Journal
from tt_cli.data.build.picture_sources import open_source
from tt_cli.model.vqgan import PUBLISHED, Vqgan
from tt_cli.run import DalleRun, RunConfig, load_run
from tt_cli.task.picture_codec import load_vqgan

QUICK = "few pictures, one turn"


def draw_pictures(folder: Path, count: int) -> None:
    """JPEGs with captions beside them."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        noise = random.integers(0, 80, (384, 512, 3), dtype=np.uint8)
        picture = Image.fromarray(noise + random.integers(0, 175, 3, dtype=np.uint8))
        pen = ImageDraw.Draw(picture)
        for x, y, size in random.integers(0, 300, (8, 3)):
            pen.ellipse((x, y, x + size, y + size), fill=tuple(random.integers(0, 256, 3).tolist()))
        picture.save(folder / f"{number:05d}.jpg", quality=90)
        (folder / f"{number:05d}.txt").write_text(f"picture number {number}")


def plain_loop(folder: Path, out: Path, vqgan: Vqgan, side: int, device: torch.device) -> int:
    """One picture at a time; returns how many."""
    rows = []
    for path in sorted(folder.glob("*.jpg")):
        square = ImageOps.fit(Image.open(path).convert("RGB"), (side, side), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1)[None].float().div(255)
        codes = vqgan.encode(pixels.to(device))[0].to(torch.int16).cpu().numpy()
        rows.append({"caption": path.with_suffix(".txt").read_text(), "code": codes.astype("<i2").tobytes()})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out, compression="brotli")
    return len(rows)


def ours(folder: Path, out: Path, vqgan: Vqgan, run: RunConfig, device: torch.device) -> int:
    """As `tt data encode`; returns how many pictures were kept."""
    source = open_source(str(folder))
    for each in (out, out / "data", out / "progress"):
        each.mkdir()
    journal = Journal(out, 0, ".parquet")
    workers = 1 if device.type == "cpu" else max(1, len(os.sched_getaffinity(0)) - 1)
    encoder = encoding.PictureEncoder(vqgan.to(device), device)
    batch, _ = encoding.choose_batch(device, DalleRun.of(run).vqgan.pixels)
    fields = encoding.fields_of(source)
    job = encoding.EncodingJob(source, run, fields=fields, batch=batch, workers=workers)
    done = encoding.encode(job, encoder, journal)
    journal.close()
    return done.counts["kept"]


def beside(run: RunConfig, vqgan: Vqgan, pictures: int, turns: int, device: torch.device) -> tuple[float, float]:
    """Pictures per second of ours, and over those of the plain loop."""
    vqgan.to(device).eval()
    pixels = DalleRun.of(run).vqgan.pixels
    made: set[int] = set()
    numbers = count()

    def rate(encode: Callable[[Path], int]) -> float:
        began = time.monotonic()
        pictures = encode(folder / str(next(numbers)))
        made.add(pictures)
        return pictures / (time.monotonic() - began)

    with tempfile.TemporaryDirectory(prefix="tt-bench-encode-") as scratch:
        folder = Path(scratch)
        draw_pictures(folder / "pictures", pictures)
        source = folder / "pictures"
        rates = in_turns(
            {
                "ours": lambda: rate(lambda out: ours(source, out, vqgan, run, device)),
                "plain": lambda: rate(lambda out: plain_loop(source, out, vqgan, pixels, device)),
            },
            turns,
        )
    if len(made) > 1:
        sys.exit(f"unlike numbers of pictures were encoded: {made}")
    best = {name: max(each) for name, each in rates.items()}
    return best["ours"], best["ours"] / best["plain"]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both VQGANs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small, turns = load_run("emoji"), 1 if args.quick else 3
    sizes = {"source": "hub", "filename": "x.safetensors", "grid": 32, "pixels": 256, "codebook_size": 8192}
    large = small.replaced({f"vqgan.{key}": value for key, value in sizes.items()})
    many = 20 if device.type == "cpu" else 1
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    counts = {"small": 100 if args.quick else 600, "large": max(4, (80 if args.quick else 480) // many)}
    for name, run, vqgan in (("small", small, load_vqgan(small)), ("large", large, Vqgan(PUBLISHED))):
        per_second, ratio = beside(run, vqgan, counts[name], turns, device)
        figures |= {f"{name}_per_second": per_second, f"{name}_ratio": ratio}
    return figures
