"""Measure the data side of a peer: rows per CPU second, the training process's share, bytes, time to the first batch.

- Pipeline: kept rows per CPU second of all processes, from the first batch on, through `ExampleStream` against the
  paper's pipeline (baselines/dalle_hivemind_data.py) on the same shards: 32 x 32 codes of 8,192, captions,
  labels and sizes, one row in ten to be left out. Each is a process of its own on one thread; they take turns. Both
  pad to 256 ids, and tokenize with a tokenizer of T5's kind (a unigram model over words, trained on the captions here:
  the paper's run has T5's own); and once more with the built-in one, a byte-level BPE.
- Main process: CPU time of the training process for one micro-batch of 64, over a step of one second.
- Bytes: of a row in a shard with the `code13` column, all that is in the file, over 1,664 bytes, which 1,024 codes of
  13 bits are; and 256 x 256 JPEGs (quality 85) over it. The codes are random, the worst there is; the pictures are
  mosaics of the built-in emoji, drawn by their VQGAN.
- First batch: from the making of a stream to its first batch of 64, shards at a web server behind a link of 100
  Mbit/s each way (network namespaces: needs root), an empty disk cache; and what came over the link until then.

    scripts/bench data --minutes 60          # memory of both processes, and how it grows

JSON keys: pipeline_ratio, main_process_share, bytes_vs_bound, jpeg_ratio, first_batch_s, first_batch_mb (null without
root), rows_per_cpu_second, paper_rows_per_cpu_second; pipeline_ratio_builtin: with the built-in tokenizer.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from testbed.namespaces import Network, NoNetwork
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from scripts.benchmarks.harness import printed_by, progress
from scripts.benchmarks.process_figures import cpu_seconds, status_bytes
from tt_cli.data import builtin
from tt_cli.data.codes import to_column
from tt_cli.data.shard_format import write_shard
from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from tt_cli.run import DalleRun, RunConfig, load_run
from tt_cli.task.picture_codec import decode_pictures, load_vqgan

QUICK = "fewer rows, one turn"
CODES, CODEBOOK, BATCH = 1024, 8192, 64
BOUND = CODES * 13 // 8
SHARD_ROWS = 5500
ROWS_PER_SECOND = 640.0  # with --minutes
PROBE = """
import sys, time, urllib.request
for _ in range(100):
    try:
        urllib.request.urlopen(sys.argv[1])
        break
    except OSError:
        time.sleep(0.1)
"""


def run_on(place: str) -> RunConfig:
    """A run of the paper's sizes whose examples lie in a folder or at an address; with the built-in tokenizer."""
    where = {"data.source": "files", "data.location": place, "data.allow_http": True}
    changes = {**where, "data.shuffle_buffer": 8192, "model.text_length": 256}
    vqgan = {"source": "hub", "filename": "x.safetensors", "grid": 32, "pixels": 256, "codebook_size": CODEBOOK}
    return load_run("emoji").replaced({**changes, **{f"vqgan.{key}": value for key, value in vqgan.items()}})


def captions() -> list[str]:
    """Of the built-in data, lengthened to what captions of pictures on the web are like."""
    names = [example.caption for example in builtin.examples("emoji")]
    return [f"{one}, {two} and {three}" for one, two, three in zip(names, names[7:], names[19:], strict=False)]


def write_shards(folder: Path, column: str, count: int, seed: int = 0) -> tuple[int, int]:
    """Shards of random codes; returns rows and bytes. One row in ten fails a filter."""
    folder.mkdir(parents=True)
    random, words = np.random.default_rng(seed), captions()
    entries, total = [], 0
    for shard in range(count):
        codes = to_column(column, random.integers(0, CODEBOOK, (SHARD_ROWS, CODES)), CODEBOOK)
        rows = [
            {
                "caption": words[int(random.integers(len(words)))],
                "NSFW": "UNLIKELY" if number % 20 else "UNSURE",
                "original_width": int(random.integers(300, 400)) * (3 if number % 20 == 10 else 1),
                "original_height": int(random.integers(300, 400)),
                column: code,
            }
            for number, code in enumerate(codes)
        ]
        facts = write_shard(folder / f"train-{shard:05d}.parquet", rows)
        entries.append({"name": facts.name, "bytes": facts.bytes, "sha256": facts.sha256})
        total += facts.bytes
    (folder / "index.json").write_text(json.dumps({"shards": entries}))
    return count * SHARD_ROWS, total


def settled(pid: int) -> float:
    """CPU seconds of the process that reads ahead, once it holds all that it may: so many rows left as came."""
    before = -1.0
    while (now := cpu_seconds(pid)) != before:
        before = now
        time.sleep(0.5)
    return now


def consume(place: str, wanted: str, tokenizer_file: str) -> None:
    """Print as JSON what rows of a stream cost, from the first batch on."""
    import tokenizers

    run = run_on(place)
    backend = tokenizers.Tokenizer.from_file(tokenizer_file)
    sizes = {"text_length": DalleRun.of(run).model.text_length, "vocab_size": backend.get_vocab_size(), "pad_id": 0}
    stream = ExampleStream(run, Tokenizer(backend, **sizes), seed=0)
    batches = stream.batches(BATCH)
    next(batches)
    assert stream._prefetch is not None
    reader = stream._prefetch.pid
    before, mine, started, seen = settled(reader), time.process_time(), time.monotonic(), 0
    while seen < int(wanted):
        seen += len(next(batches).captions)
    mine = time.process_time() - mine
    facts = {"rows": seen, "main_cpu": mine, "cpu_seconds": mine + settled(reader) - before}
    print(json.dumps({**facts, "seconds": time.monotonic() - started}))
    stream.close()


def first_batch(place: str, cache: str) -> None:
    """Print the seconds to the first batch when a line comes on stdin."""
    run = run_on(place)
    tokenizer = load_tokenizer(run)
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    stream = ExampleStream(run, tokenizer, seed=0, folder=Path(cache))
    next(stream.batches(BATCH))
    print(time.monotonic() - started, flush=True)
    sys.stdin.readline()
    stream.close()


def on_a_link(folder: Path, cache: Path, mbit: float) -> tuple[float, float]:
    """Seconds to the first batch over such a link, and the megabytes that came until then."""
    cache.mkdir()
    with Network(hosts=2, mbit=mbit) as network:
        server, peer = network.hosts
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        server.start([sys.executable, "-m", "http.server", "8000", "-d", str(folder)], **silent)
        url = f"http://{server.address}:8000"
        peer.run([sys.executable, "-c", PROBE, f"{url}/"])
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = peer.start([sys.executable, "-m", __spec__.name, "first-batch", url, str(cache)], **pipes)
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        before = network.traffic()[1]
        print(file=process.stdin, flush=True)
        seconds = float(process.stdout.readline())
        came = network.traffic()[1].since(before).received
        process.communicate("\n")
    return seconds, came / 1e6


def jpeg_bytes(pictures: int) -> float:
    """Mean bytes of 256 x 256 mosaics of the built-in pictures, as JPEG of quality 85."""
    from PIL import Image

    run = load_run("emoji")
    chosen = np.random.default_rng(0).permutation(len(examples := builtin.examples("emoji")))[: pictures * 16]
    tiles = decode_pictures(load_vqgan(run), np.stack([examples[i].codes for i in chosen]))
    sizes = []
    for mosaic in tiles.reshape(-1, 4, 4, 64, 64, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 256, 256, 3):
        file = io.BytesIO()
        Image.fromarray(mosaic).save(file, "JPEG", quality=85)
        sizes.append(file.tell())
    return statistics.mean(sizes)


def of_t5s_kind(texts: list[str], size: int) -> Backend:
    """A tokenizer like T5's, a unigram model over words (Kudo 2018), trained on texts."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(texts, trainer)
    return backend


def pipelines(folder: Path, tokenizer: Path, turns: int, rows: int, paper_rows: int) -> dict[str, float]:
    """Both pipelines in turns; the best of each counts, for others may be using the machine."""
    paper = ("scripts.benchmarks.baselines.dalle_hivemind_data", folder, "--tokenizer", tokenizer)
    ours, papers = [], []
    for _ in range(turns):
        ours.append(printed_by(__spec__.name, "consume", folder, rows, tokenizer))
        papers.append(printed_by(*paper, "--rows", paper_rows, "--batch", BATCH))
    mine = max(one["rows"] / one["cpu_seconds"] for one in ours)
    theirs = max(one["rows"] / one["cpu_seconds"] for one in papers)
    return {
        "pipeline_ratio": mine / theirs,
        "rows_per_cpu_second": mine,
        "paper_rows_per_cpu_second": theirs,
        "main_process_share": min(one["main_cpu"] / one["rows"] * BATCH for one in ours),
    }


def watch_memory(place: str, minutes: float) -> dict[str, Any]:
    """Stream at a steady pace; MB of both processes, and by how much they grew. Prints them on the way."""
    run = run_on(place)
    with tempfile.TemporaryDirectory() as folder:
        stream = ExampleStream(run, load_tokenizer(run), seed=0, folder=Path(folder))
        batches = stream.batches(BATCH)
        began = told = time.monotonic()
        first: tuple[int, int] | None = None
        rows = 0
        while (now := time.monotonic()) < began + minutes * 60:
            rows += len(next(batches).captions)
            time.sleep(max(0.0, began + rows / ROWS_PER_SECOND - time.monotonic()))
            if now < told + min(30.0, minutes * 6):
                continue
            told = now
            assert stream._prefetch is not None
            taken = status_bytes("VmRSS"), status_bytes("VmRSS", stream._prefetch.pid)
            first = first or taken  # after the first interval, when all is loaded
            grown = [(new - old) / 1e6 for new, old in zip(taken, first, strict=True)]
            figures = {
                "minutes": round((now - began) / 60, 1),
                "rows": rows,
                "memory_mb": {"training process": taken[0] / 1e6, "reader": taken[1] / 1e6},
                "grown_mb": {"training process": grown[0], "reader": grown[1]},
            }
            progress("memory", figures)
        stream.close()
    return figures


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--minutes", type=float, help="watch the memory for so long instead")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, or with --minutes the memory."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tt-bench-data-") as scratch:
        folder = Path(scratch)
        shards = 2 if args.quick else 8
        write_shards(folder / "code", "code", shards)
        if args.minutes:
            return watch_memory(str(folder / "code"), args.minutes)
        rows, size = write_shards(folder / "code13", "code13", shards)
        much = (1, 16_000, 4_000) if args.quick else (3, 80_000, 20_000)
        of_t5s_kind(captions(), 4000).save(str(folder / TOKENIZER_FILE))
        figures: dict[str, Any] = pipelines(folder / "code", folder / TOKENIZER_FILE, *much)
        theirs = builtin.checked_file("emoji", TOKENIZER_FILE)
        figures["pipeline_ratio_builtin"] = pipelines(folder / "code", theirs, *much)["pipeline_ratio"]
        figures["bytes_vs_bound"] = size / rows / BOUND
        figures["jpeg_ratio"] = jpeg_bytes(16 if args.quick else 128) / (size / rows)
        try:
            figures["first_batch_s"], figures["first_batch_mb"] = on_a_link(folder / "code13", folder / "cache", 100.0)
        except NoNetwork as error:
            print(f"no link to measure on: {error}", file=sys.stderr)
            figures["first_batch_s"] = figures["first_batch_mb"] = None
    return figures


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "consume":
        consume(*sys.argv[2:])
    else:
        first_batch(*sys.argv[2:])
