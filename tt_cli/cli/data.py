"""`tt data ACTION`: pictures with captions to a data set of codes, published on the Hub, looked at."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tt_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from tt_cli.data.build.encoder import EncodingProgress

EXAMPLES = """\
tt data encode photos/ codes --run my-run            photos/a.jpg with its caption in photos/a.txt, and so on
tt data encode captions.csv codes --run my-run       columns file_name and caption; .jsonl and .parquet too
tt data encode shards/ codes --run dalle             WebDataset tars
tt data encode acme/photos codes --run dalle --shard 2/8     a data set on the Hub; the second of eight machines
tt data publish codes acme/my-codes --licence cc-by-4.0
tt data inspect codes --page codes.html      what is in it, and random rows as pictures

What is interrupted goes on when the same line is typed again. `tt data ACTION --help` says more about each.
encode --json prints one JSON object a line: {"event": "progress" or "done", "seen", "kept", "left_out": {reason: n},
"shards", "bytes", "seconds", "per_second", "eta_s"}.
publish --json prints {"published", "rows", "shards", "bytes"}.
inspect --json prints {"shards", "rows", "bytes", "bytes_per_row", "column", "codes_used", "codebook_size",
"bits_per_code", "caption_characters", "problems": {reason: n}, "damaged": […], "histogram": […],
"samples": [caption]}."""

DEFAULT_RUN = "dalle"
LEFT_OUT = {
    "no_caption": "no caption",
    "short_caption": "caption too short",
    "not_utf8": "caption not UTF-8",
    "nsfw": "label not allowed",
    "aspect_ratio": "too long or too high",
    "missing": "no picture",
    "too_large": "picture too large",
    "broken": "picture broken",
    "damaged_file": "files of the source damaged",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_encode(
        actions.add_parser(
            "encode",
            help="pictures with captions into shards of codes",
            description="Encode pictures with the run's VQGAN. The filters are those of the run file's [data].",
            allow_abbrev=False,
        )
    )
    publish = actions.add_parser(
        "publish",
        help="an encoded folder as a data set on the Hub",
        description="Put all shards on the Hub in one commit, with a card and checksums, once every share is finished.",
        allow_abbrev=False,
    )
    publish.add_argument("out", metavar="OUT", type=Path, help="the folder that `tt data encode` made")
    publish.add_argument("name", metavar="OWNER/NAME", help="the data set; it is made where it is missing")
    publish.add_argument(
        "--licence", required=True, metavar="ID", help="of the data, as the Hub names it: cc-by-4.0, …"
    )
    publish.add_argument("--private", action="store_true", help="make it private, if it has to be made")
    publish.add_argument("--json", action="store_true", help="print one JSON object")
    inspect = actions.add_parser(
        "inspect",
        help="what is in shards, and random rows as pictures",
        description="Read shards: counts, sizes, how often each code is there; and decode random rows.",
        allow_abbrev=False,
    )
    inspect.add_argument("path", metavar="PATH", type=Path, help="a shard, or a folder of them")
    inspect.add_argument(
        "--run", help=f"whose VQGAN the codes are of (default: as written by `encode` beside them, else {DEFAULT_RUN})"
    )
    inspect.add_argument("--samples", type=_positive, default=16, metavar="N", help="random rows to show (default 16)")
    inspect.add_argument("--seed", type=int, default=0, metavar="N", help="another seed shows other rows (default 0)")
    inspect.add_argument("--page", type=Path, metavar="FILE", help="write one HTML page with everything in it")
    inspect.add_argument("--sheet", type=Path, metavar="FILE", help="write the pictures as one, such as sheet.png")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")


def _add_encode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="folder, .tar, .csv, .jsonl, .parquet, or OWNER/NAME on the Hub"
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="folder of the shards; an interrupted one is gone on with"
    )
    parser.add_argument("--run", default=DEFAULT_RUN, help=f"whose VQGAN and filters to use (default {DEFAULT_RUN})")
    parser.add_argument("--split", default="train", help="of a data set on the Hub (default train)")
    parser.add_argument("--revision", metavar="R", help="commit, branch or tag of a data set on the Hub")
    parser.add_argument("--shard", type=_part, default=(0, 1), metavar="I/N", help="do the I-th of N shares, from 1")
    parser.add_argument(
        "--column",
        choices=("code", "code13"),
        help="how codes are written (default: [data] code_column of the run file)",
    )
    parser.add_argument(
        "--container", choices=("parquet", "tar", "jsonl.br"), default="parquet", help="kind of file (default parquet)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--batch", type=_positive, metavar="N", help="pictures encoded side by side (default: what fits)"
    )
    parser.add_argument("--workers", type=_positive, metavar="N", help="processes that decode (default: by the cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Do one action."""
    return {"encode": _encode, "publish": _publish, "inspect": _inspect}[args.action](args)


def _inspect(args: argparse.Namespace) -> int:
    from tt_cli.data.build.inspection import as_page, as_text, inspect, run_of, shard_files
    from tt_cli.draw import Drawing, contact_sheet
    from tt_cli.run import load_run
    from tt_cli.task.picture_codec import decode_pictures, load_vqgan

    files = shard_files(args.path)
    config = load_run(args.run) if args.run else run_of(args.path, load_run(DEFAULT_RUN))
    found = inspect(files, config, args.samples, args.seed)
    if args.json:
        captions = [caption for caption, _ in found.samples]
        print(json.dumps({**found.facts(), "histogram": found.histogram(), "samples": captions}))
    else:
        print(as_text(found))
    if found.samples and (args.page or args.sheet):
        import numpy as np

        codes = np.stack([codes for _, codes in found.samples])
        pictures = decode_pictures(load_vqgan(config), codes)
        if args.page:
            with _writing(args.page):
                args.page.write_text(as_page(found, pictures, str(args.path)), encoding="utf-8")
        if args.sheet:
            drawings = [
                Drawing(caption, place, one, picture)
                for place, ((caption, one), picture) in enumerate(zip(found.samples, pictures, strict=True))
            ]
            with _writing(args.sheet):
                contact_sheet(drawings).save(args.sheet)
    return 1 if found.damaged else 0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: no kind of picture that Pillow writes
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot write {path}: {reason}; name another file") from error


def _publish(args: argparse.Namespace) -> int:
    from tt_cli.data.build.dataset_publishing import finished_folder, publish
    from tt_cli.memory import shown
    from tt_cli.terminal.format import plural

    encoded = finished_folder(args.out)

    def tell(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    address = publish(encoded, args.name, args.licence, private=args.private or None, tell=tell)
    rows, size = encoded.counts["kept"], sum(facts.bytes for facts in encoded.shards)
    if args.json:
        print(json.dumps({"published": address, "rows": rows, "shards": len(encoded.shards), "bytes": size}))
    else:
        shards = plural(len(encoded.shards), "shard")
        print(f"Published: {address}, {rows:,} rows in {shards} of {shown(size)} together.")
    return 0


def _encode(args: argparse.Namespace) -> int:
    from tt_cli.data.build import encoder as encoding
    from tt_cli.data.build import journal
    from tt_cli.data.build.picture_sources import open_source
    from tt_cli.run import load_run
    from tt_cli.task.picture_codec import load_vqgan
    from tt_cli.terminal.format import plural

    config = load_run(args.run)
    device = _device(args.device)
    source = open_source(args.source, split=args.split, revision=args.revision)
    fields = encoding.fields_of(encoding.first_picture(source))
    column = args.column or config.data.code_column
    job = encoding.EncodingJob(source, config, encoding.WorkShare(*args.shard), column, fields)
    journal.agree_on(args.out, job.settings(args.container))
    work = journal.Journal(args.out, job.share.index, f".{args.container}")
    try:
        encoder = encoding.PictureEncoder(load_vqgan(config).to(device), device, config.vqgan.codebook_size)
        batch, reason = encoding.choose_batch(device, config.vqgan.pixels)
        if args.batch:
            batch, reason = args.batch, f"{args.batch} pictures at a time, as --batch says"
        workers = args.workers or (max(1, min(16, encoding.cores() - 1)) if device.type != "cpu" else 1)
        tell = _teller(args.json, f"{device}; {reason}; {plural(workers, 'worker')} to decode them")
        job = replace(job, batch=batch, workers=workers)
        done = encoding.encode(job, encoder, work, lambda progress: tell("progress", progress))
        journal.write_sums(args.out, job.share.count)
        tell("done", done)
        return 0
    finally:
        work.close()


def _teller(as_json: bool, how: str) -> Callable[[str, EncodingProgress], None]:
    """What shows how far it is: JSON lines, a line that is renewed on a terminal, or a line now and then."""
    terminal = sys.stderr.isatty() and not as_json
    if not as_json:
        print(f"Encoding on {how}.", file=sys.stderr)

    def tell(event: str, progress: EncodingProgress) -> None:
        if as_json:
            print(json.dumps({"event": event, **_facts(progress)}), flush=True)
        elif event == "done":
            print("\r\x1b[K" if terminal else "", end="", file=sys.stderr)
            print(_summary(progress))
        else:
            words = f"{progress.counts.get('seen', 0):,} seen, {progress.counts.get('kept', 0):,} kept, "
            words += f"{progress.per_second:,.1f}/s{_left(progress.eta)}"
            print(f"\r\x1b[K{words}" if terminal else words, end="" if terminal else "\n", file=sys.stderr, flush=True)

    return tell


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f", {hours}:{minutes:02}:{rest:02} left" if hours else f", {minutes}:{rest:02} left"


def _summary(progress: EncodingProgress) -> str:
    from tt_cli.memory import shown
    from tt_cli.terminal.format import plural

    counts = progress.counts
    lines = [
        f"{counts.get('kept', 0):,} of {counts.get('seen', 0):,} pictures are encoded, in "
        f"{plural(progress.shards, 'shard')} of {shown(progress.bytes)} together."
    ]
    lines += [f"  left out, {words}: {counts[key]:,}" for key, words in LEFT_OUT.items() if counts.get(key)]
    return "\n".join(lines)


def _facts(progress: EncodingProgress) -> dict[str, Any]:
    counts = progress.counts
    return {
        "seen": counts.get("seen", 0),
        "kept": counts.get("kept", 0),
        "left_out": {key: counts[key] for key in LEFT_OUT if counts.get(key)},
        "shards": progress.shards,
        "bytes": progress.bytes,
        "seconds": round(progress.seconds, 3),
        "per_second": round(progress.per_second, 3),
        "eta_s": None if progress.eta is None else round(progress.eta, 1),
    }


def _device(wanted: str) -> torch.device:
    import torch

    gpu = torch.cuda.is_available()
    if wanted == "cuda" and not gpu:
        raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
    return torch.device("cuda" if gpu and wanted != "cpu" else "cpu")


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count) <= 999):
        raise argparse.ArgumentTypeError(f"{text} is no share such as 2/8, from 1/N to N/N")
    return int(index) - 1, int(count)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)
