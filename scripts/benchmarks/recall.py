"""Measure how well weights draw: pictures recognised, loss and bits per code, of training and held-out captions.

- Every caption is drawn once, each time the likeliest code, so that neither luck nor a choice of captions helps.
- `recognised`: the nearest of all training pictures, by the L2 distance of pixels, is the caption's own. Training
  captions only; by CLDR's groups too.
- `same_subgroup`: of held-out captions, whose pictures nobody trained on, the nearest training picture is of the same
  subgroup of CLDR's labels (`unicode-cldr-core`, labels.txt; who has no label there is left out on both sides). Beside
  it `by_chance`, as if any training picture were drawn at random, and `untrained`, the first weights of the seed.
- `loss` is the training loss, `bits_per_code` that of a picture's codes alone, which has no more than `bits_at_random`.
- `--fresh` also builds the wheel, installs it into a new environment and times the first `tt infer` in it.

    scripts/bench recall --fresh
    scripts/bench recall --checkpoint step-00001600.safetensors

JSON keys: step, training_recognised, heldout_same_subgroup, heldout_by_chance, heldout_untrained, heldout_over_chance,
{training,heldout}_{loss,bits_per_code,pictures}, groups, weights_mb; of the run's history, docs/emoji-run.csv,
run_steps, run_minutes, run_sent_mb (by one of two trainers), best_heldout_loss and _step; with --fresh package_mb and
infer_seconds.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch

from scripts.benchmarks.harness import ROOT, progress
from tt_cli.data import builtin
from tt_cli.data.codes import bits_per_code
from tt_cli.draw.drawing import DrawingModels, DrawingSettings, draw
from tt_cli.draw.recall import nearest_neighbour_score
from tt_cli.draw.weights_source import find_checkpoint, load_models
from tt_cli.model.sampling.code_choice import Sampling
from tt_cli.run import DalleRun, load_run
from tt_cli.run.checkpoint_names import BUILT_IN
from tt_cli.task import task_of
from tt_cli.task.built_in_weights import FILE
from tt_cli.task.picture_codec import decode_pictures
from tt_cli.terminal.progress import progress as bar

QUICK = "the first 64 captions of each split"
LABELS = Path("/usr/share/unicode/cldr/common/properties/labels.txt")
HISTORY = ROOT / "docs/emoji-run.csv"
LIKELIEST = DrawingSettings(samples=1, sampling=Sampling(top_k=1))
SMALL, BATCH = 64, 64
UNLABELLED = ("no label", "")
UNSEEN = {"\ufe0f", *map(chr, range(0x1F3FB, 0x1F400))}  # variation selector, skin tones
FIRST_PROMPT = "a red apple"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default=BUILT_IN, help="weights of the run emoji (default: the built-in ones)")
    parser.add_argument("--fresh", action="store_true", help="also time the first `tt infer` after an installation")


class Split:
    """Captions, codes and labels of one split of the built-in emoji. labels: (group, subgroup) of each."""

    def __init__(self, name: str, labels: dict[str, tuple[str, str]], most: int | None) -> None:
        table = pyarrow.parquet.read_table(builtin.checked_file("emoji", f"{name}.parquet")).slice(0, most)
        self.captions: list[str] = table["caption"].to_pylist()
        self.codes = np.stack([np.frombuffer(code, "<i2") for code in table["code"].to_pylist()]).astype(np.int64)
        characters = ["".join(chr(int(each, 16)) for each in row.split()) for row in table["codepoints"].to_pylist()]
        self.labels = [labels.get(bare(each), UNLABELLED) for each in characters]


def bare(characters: str) -> str:
    """An emoji without its skin tones; a skin tone as it is."""
    return "".join(each for each in characters if each not in UNSEEN) or characters


def read_labels(path: Path) -> dict[str, tuple[str, str]]:
    """Emoji → (group, subgroup) of CLDR's labels: lines of sets such as [a-c{de}] ; group ; subgroup."""
    labels: dict[str, tuple[str, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            characters, group, subgroup = (part.strip() for part in line.split(";"))
            labels |= {bare(each): (group, subgroup) for each in _members(characters[1:-1])}
    return labels


def _members(characters: str) -> Iterator[str]:
    for several, first, last, one in re.findall(r"\{(.+?)\}|(.)-(.)|(.)", characters):
        yield from map(chr, range(ord(first), ord(last) + 1)) if first else [several or one]


def drawn(models: DrawingModels, captions: Sequence[str]) -> np.ndarray:
    """Pictures (n, H, W, 3) of captions, each code the likeliest."""
    with bar("Drawing", "tokens") as on_progress:
        return np.stack([one.picture for one in draw(models, captions, LIKELIEST, on_progress=on_progress)])


def losses(models: DrawingModels, split: Split) -> tuple[float, float]:
    """The training loss, and bits of one picture code."""
    total = image = 0.0
    for start in range(0, len(split.captions), BATCH):
        text = models.tokenizer.encode(split.captions[start : start + BATCH])
        with torch.inference_mode():
            found = models.decoder.loss(text, torch.from_numpy(split.codes[start : start + BATCH]))
        total += float(found.total) * len(text)
        image += float(found.figures()["image_loss"]) * len(text)
    return total / len(split.captions), image / len(split.captions) / float(np.log(2))


def same_subgroup(nearest: Sequence[int], heldout: Split, training: Split) -> float:
    """The share of labelled held-out captions whose nearest training picture has their label."""
    pairs = [(own, training.labels[place]) for own, place in zip(heldout.labels, nearest, strict=True)]
    labelled = [own == other for own, other in pairs if own != UNLABELLED]
    return sum(labelled) / len(labelled)


def by_chance(heldout: Split, training: Split) -> float:
    """The same, if any labelled training picture were as likely as another."""
    there = Counter(label for label in training.labels if label != UNLABELLED)
    labelled = [there[label] for label in heldout.labels if label != UNLABELLED]
    return sum(labelled) / len(labelled) / there.total()


def run_history() -> dict[str, Any]:
    """Figures of the run that the built-in weights come from, by scripts/build_emoji_story.py."""
    with HISTORY.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    best = min((row for row in rows if row["heldout_loss"]), key=lambda row: float(row["heldout_loss"]))
    return {
        "run_steps": int(rows[-1]["step"]),
        "run_minutes": float(rows[-1]["minutes"]),
        "run_sent_mb": float(rows[-1]["sent_mb"]),
        "best_heldout_loss": float(best["heldout_loss"]),
        "best_heldout_step": int(best["step"]),
    }


def first_drawing() -> dict[str, Any]:
    """Size of the wheel, and seconds of the first `tt infer` where nothing but it was installed."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(command, check=True)
        (wheel,) = place.glob("*.whl")
        progress("wheel", wheel.name)
        venv.create(place / "new", with_pip=True)
        python = place / "new/bin/python"
        limits = ROOT / "scripts/constraints.txt"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--constraint", limits, wheel], check=True)
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TT_"))}
        started = time.monotonic()
        subprocess.run(
            [place / "new/bin/tt", "infer", FIRST_PROMPT, "--out", place / "drawn", "--preview", "never"],
            check=True,
            cwd=place,
            env={**alone, "TT_HOME": str(place / "home")},
            stdout=subprocess.DEVNULL,
        )
        seconds = time.monotonic() - started
        return {"package_mb": wheel.stat().st_size / 1e6, "infer_seconds": seconds}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one set of weights."""
    if not LABELS.exists():
        sys.exit(f"missing {LABELS}: apt install unicode-cldr-core")
    run, labels = load_run("emoji"), read_labels(LABELS)
    source = find_checkpoint(run, args.checkpoint)
    models = load_models(source, "cpu")
    training, heldout = Split("train", labels, None), Split("heldout", labels, SMALL if args.quick else None)
    asked = slice(SMALL if args.quick else None)
    pictures = decode_pictures(models.vqgan, training.codes)
    own = range(len(training.captions))[asked]
    score = nearest_neighbour_score(drawn(models, training.captions[asked]), own, pictures)
    progress("training captions recognised", score.fraction)
    right = [place == nearest for place, nearest in zip(own, score.nearest, strict=True)]
    group_of = [training.labels[place][0] for place in own]
    groups = {
        group: {
            "captions": count,
            "recognised": sum(r for r, g in zip(right, group_of, strict=True) if g == group) / count,
        }
        for group, count in Counter(group_of).most_common()
    }
    alike = {}
    untrained = DrawingModels(run, task_of(run).new_model().eval(), models.vqgan, models.tokenizer)
    for name, those in {"same_subgroup": models, "untrained": untrained}.items():
        nearest = nearest_neighbour_score(drawn(those, heldout.captions), [0] * len(heldout.captions), pictures).nearest
        alike[name] = same_subgroup(nearest, heldout, training)
        progress(f"held-out captions, {name}", alike[name])
    chance = by_chance(heldout, training)
    training_loss, heldout_loss = (losses(models, split) for split in (training, heldout))
    return {
        "step": source.step,
        "training_pictures": len(own),
        "training_recognised": score.fraction,
        "training_loss": training_loss[0],
        "training_bits_per_code": training_loss[1],
        "heldout_pictures": len(heldout.captions),
        "heldout_labelled": sum(label != UNLABELLED for label in heldout.labels),
        "heldout_same_subgroup": alike["same_subgroup"],
        "heldout_by_chance": chance,
        "heldout_over_chance": alike["same_subgroup"] / chance,
        "heldout_untrained": alike["untrained"],
        "heldout_loss": heldout_loss[0],
        "heldout_bits_per_code": heldout_loss[1],
        "bits_at_random": bits_per_code(DalleRun.of(run).vqgan.codebook_size),
        "weights_mb": builtin.checked_file("emoji", FILE).stat().st_size / 1e6,
        "groups": groups,
        **run_history(),
        **(first_drawing() if args.fresh else {}),
    }
