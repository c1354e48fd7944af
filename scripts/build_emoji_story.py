#!/usr/bin/env python3
"""Tells of a run of `emoji` that was carried to its end: its history as a table, and its pictures.

    scripts/build_emoji_story.py AUX_FOLDER CHECKPOINTS EVENTS

AUX_FOLDER: the run's folder of an aux peer that ran with --samples. CHECKPOINTS: those kept along the way. EVENTS: what
`tt join emoji --json` of a trainer that was there all the time printed. It writes into docs/

- emoji-run.csv: step, minutes, training and held-out loss, rate, megabytes that this trainer has sent, digest;
- images/emoji-loss.svg: both losses over the steps;
- images/emoji-timelapse.png: PROMPTS, drawn with one seed from checkpoints along the way;
- images/emoji-gallery.png: 64 of all 3,621 captions, drawn at random by a seed, not chosen, with built-in weights.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[1]))
from tt_cli.checkpoint.checkpoint_files import checkpoints_in, step_of
from tt_cli.data import builtin
from tt_cli.draw.contact_sheet import contact_sheet
from tt_cli.draw.drawing import DrawingModels, DrawingSettings, draw
from tt_cli.draw.weights_source import find_checkpoint, load_models
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import FILE
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.run import load_run
from tt_cli.run.checkpoint_names import BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = DrawingSettings(samples=1, sampling=Sampling(0.5, 0, 0.9))  # those of `tt infer`
PROMPTS = ("red apple", "owl", "pizza", "sailboat", "red heart", "snowman", "tiger face", "rocket")
MOMENTS = 10  # of the time-lapse, ever farther apart
GALLERY, COLUMNS = 64, 8
CELL, LABEL = 80, 96  # pixels
WIDTH, HEIGHT, MARGIN = 720, 300, 48
COLOURS = {"loss": ("training", "#2458b3"), "heldout_loss": ("held out", "#b35c24")}
Row = dict[str, float | str]


def history(events: Path, aux: Path) -> list[Row]:
    """A row for each step of the run, in order."""
    heldout = {row["step"]: row["heldout_loss"] for row in HistoryReader(f"sqlite:///{aux / FILE}").checkpoints()}
    rows: dict[int, Row] = {}
    started, sent = math.inf, 0
    for line in events.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        sent = event.get("bytes_sent", sent)
        if event["kind"] == "progress":
            started = min(started, event["at"])
        if event["kind"] == "step":
            step = event["epoch"]
            rows[step] = {
                "step": step,
                "minutes": round((event["at"] - started) / 60, 2),
                "loss": round(event["loss"], 4),
                "heldout_loss": round(heldout[step], 4) if heldout.get(step) is not None else "",
                "rate": round(event["learning_rate"], 6),
                "sent_mb": round(sent / 1e6, 1),
                "digest": event["digest"][:16],
            }
    return [rows[step] for step in sorted(rows)]


def curves(rows: list[Row]) -> str:
    """The losses as an SVG."""
    last, top = float(rows[-1]["step"]), 12.0

    def place(row: Row, name: str) -> str:
        x = MARGIN + float(row["step"]) / last * (WIDTH - 2 * MARGIN)
        return f"{x:.1f},{HEIGHT - MARGIN - float(row[name]) / top * (HEIGHT - 2 * MARGIN):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        "<title>Training and held-out loss of the built-in run</title>",
        "<style>text { font: 12px sans-serif; fill: #222 } polyline { fill: none; stroke-width: 1.5 }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for loss in range(0, int(top) + 1, 3):
        y = HEIGHT - MARGIN - loss / top * (HEIGHT - 2 * MARGIN)
        lines.append(f'<path d="M{MARGIN},{y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        lines.append(f'<text x="{MARGIN - 10}" y="{y + 4:.1f}" text-anchor="end">{loss}</text>')
    for quarter in range(5):
        x = MARGIN + quarter / 4 * (WIDTH - 2 * MARGIN)
        lines.append(f'<text x="{x:.0f}" y="{HEIGHT - 28}" text-anchor="middle">{last * quarter / 4:,.0f}</text>')
    lines.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">global step</text>')
    for number, (name, (words, colour)) in enumerate(COLOURS.items()):
        points = " ".join(place(row, name) for row in rows if row[name] != "")
        lines.append(f'<polyline points="{points}" stroke="{colour}"/>')
        lines.append(f'<text x="{MARGIN + 90 * number}" y="26" style="fill:{colour}">{words}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def moments(checkpoints: Path) -> list[Path]:
    """Checkpoints from the first to the last, each about as many times farther on than the one before."""
    there = {step_of(path): path for path in reversed(checkpoints_in(checkpoints))}
    wanted = np.geomspace(max(20, min(there)), max(there), MOMENTS)
    return [there[step] for step in sorted({min(there, key=lambda step: abs(step - each)) for each in wanted})]


def time_lapse(checkpoints: Path) -> Image.Image:
    """A row for each prompt, a column for each checkpoint."""
    chosen = moments(checkpoints)
    page = Image.new("RGB", (LABEL + len(chosen) * CELL, 24 + len(PROMPTS) * CELL), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for y, prompt in enumerate(PROMPTS):
        pen.text((8, 24 + y * CELL + CELL // 2 - 8), prompt, fill="#222", font=font)
    for column, path in enumerate(chosen):
        pen.text((LABEL + column * CELL + 8, 4), f"step {step_of(path):,}", fill="#222", font=font)
        for row, drawing in enumerate(draw(load_models(find_checkpoint(None, path), "cpu"), PROMPTS, SETTINGS)):
            picture = Image.fromarray(drawing.picture).resize((CELL - 8, CELL - 8), Image.Resampling.BICUBIC)
            page.paste(picture, (LABEL + column * CELL, 24 + row * CELL))
    return page.quantize(256)


def gallery(models: DrawingModels) -> Image.Image:
    """GALLERY captions drawn at random from both splits; held-out ones are marked with *."""
    heldout = {example.caption for example in builtin.examples("emoji", "heldout")}
    captions = [example.caption for split in builtin.SPLITS for example in builtin.examples("emoji", split)]
    chosen = [captions[place] for place in np.random.default_rng(0).permutation(len(captions))[:GALLERY]]
    drawings = [
        replace(one, prompt=one.prompt + " *" * (one.prompt in heldout)) for one in draw(models, chosen, SETTINGS)
    ]
    sheet = contact_sheet(drawings, COLUMNS)
    return sheet.resize((sheet.width // 2, sheet.height // 2), Image.Resampling.LANCZOS).quantize(256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("aux_folder", "checkpoints", "events"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    rows, images = history(options.events, options.aux_folder), ROOT / "docs/images"
    with (ROOT / "docs/emoji-run.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (images / "emoji-loss.svg").write_text(curves(rows), encoding="utf-8")
    time_lapse(options.checkpoints).save(images / "emoji-timelapse.png", optimize=True)
    gallery(load_models(find_checkpoint(load_run("emoji"), BUILT_IN), "cpu")).save(
        images / "emoji-gallery.png", optimize=True
    )


if __name__ == "__main__":
    main()
