"""`tt data ACTION`: pictures with captions to a data set of codes, or text to one of tokens; published, looked at."""

from __future__ import annotations

import json as codec
import os
import sys
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tt_cli.cli.main import app
from tt_cli.cli.options import Json, argument, option, switch
from tt_cli.errors import UsageError
from tt_cli.terminal.format import duration, plural
from tt_cli.terminal.live_view import output_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tt_cli.data.build.encoder import EncodingProgress

EXAMPLES = """\
tt data encode photos/ codes --run my-run/run.toml   photos/a.jpg with its caption in photos/a.txt, and so on
tt data encode captions.csv codes --run my-run/run.toml      columns file_name and caption; .jsonl and .parquet too
tt data encode shards/ codes --run dalle             WebDataset tars
tt data encode acme/photos codes --run dalle --shard 2/8     a data set on the Hub; the second of eight machines
tt data tokenize stories.toml tokens             the text of a language model's run, held-out text too
tt data publish codes acme/my-codes --licence cc-by-4.0
tt data inspect codes --page codes.html      what is in it, and random rows as pictures

What is interrupted goes on when the same line is typed again. `tt data ACTION --help` says more about each.
encode and tokenize --json print one JSON object a line: {"event": "progress" or "done", "seen", "kept",
"left_out": {reason: n}, "shards", "bytes", "seconds", "per_second", "eta_s"}, and "tokens" of text.
publish --json prints {"published", "rows", "shards", "bytes"}.
inspect --json prints {"shards", "rows", "bytes", "bytes_per_row", "column", "codes_used", "codebook_size",
"bits_per_code", "caption_characters", "problems": {reason: n}, "damaged": […], "histogram": […],
"samples": [caption]}."""

DEFAULT_RUN = "dalle"


def share(text: str) -> tuple[int, int]:
    """A share such as 2/8: its index, from 0, and how many there are."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count) <= 999):
        raise typer.BadParameter(f"{text} is no share such as 2/8, from 1/N to N/N")
    return int(index) - 1, int(count)


data = typer.Typer(epilog=EXAMPLES)
app.add_typer(data, name="data")


@data.command(help="Encode pictures with the run's VQGAN. The filters are those of the run file's [data].")
def encode(
    source: Annotated[str, argument("SOURCE", "folder, .tar, .csv, .jsonl, .parquet, or OWNER/NAME on the Hub")],
    out: Annotated[Path, argument("OUT", "folder of the shards; an interrupted one is gone on with")],
    run: Annotated[str, option("RUN", f"whose VQGAN and filters to use (default {DEFAULT_RUN})")] = DEFAULT_RUN,
    split: Annotated[str, option("SPLIT", "of a data set on the Hub (default train)")] = "train",
    revision: Annotated[str | None, option("R", "commit, branch or tag of a data set on the Hub")] = None,
    shard: Annotated[Any, option("I/N", "do the I-th of N shares, from 1", parser=share)] = "1/1",
    column: Annotated[
        Literal["code", "code13"] | None,
        option(None, "how codes are written (default: [data] code_column of the run file)"),
    ] = None,
    container: Annotated[
        Literal["parquet", "tar", "jsonl.br"], option(None, "kind of file (default parquet)")
    ] = "parquet",
    device: Annotated[str, option("DEVICE", "cpu, cuda or cuda:N; default: a GPU if there is one")] = "auto",
    batch: Annotated[int | None, option("N", "pictures encoded side by side (default: what fits)", min=1)] = None,
    workers: Annotated[int | None, option("N", "processes that decode (default: by the cores)", min=1)] = None,
    json: Annotated[bool, switch("--json", "print one JSON object a line")] = False,
) -> None:
    """Encode what is not encoded yet."""
    from tt_cli.data.build import encoder as encoding
    from tt_cli.data.build import journal
    from tt_cli.data.build.picture_sources import open_source
    from tt_cli.draw.weights_source import torch_device
    from tt_cli.run import DalleRun, load_run
    from tt_cli.task.picture_codec import load_vqgan

    config = load_run(run)
    chosen = torch_device(device)
    pictures = open_source(source, split=split, revision=revision)
    fields = encoding.fields_of(pictures)
    column = column or DalleRun.of(config).data.code_column
    job = encoding.EncodingJob(pictures, config, encoding.WorkShare(*shard), column, fields)
    journal.agree_on(out, job.settings(container))
    with closing(journal.Journal(out, job.share.index, f".{container}")) as work:
        encoder = encoding.PictureEncoder(load_vqgan(config).to(chosen), chosen)
        fitting, reason = encoding.choose_batch(chosen, DalleRun.of(config).vqgan.pixels)
        if batch:
            reason = f"{batch} pictures at a time, as --batch says"
        workers = workers or (max(1, min(16, len(os.sched_getaffinity(0)) - 1)) if chosen.type != "cpu" else 1)
        how = f"on {chosen}; {reason}; {plural(workers, 'worker')} to decode them"
        tell = _teller(json, f"Encoding {how}.", "pictures are encoded")
        job = replace(job, batch=batch or fitting, workers=workers)
        done = encoding.encode(job, encoder, work, lambda progress: tell("progress", progress))
        journal.write_sums(out, job.share.count)
        tell("done", done)


@data.command(help="Tokenise the text of a language model's run, so that peers need not; held-out text too.")
def tokenize(
    run: Annotated[str, argument("RUN", "name or TOML file: whose text and tokenizer")],
    out: Annotated[Path, argument("OUT", "folder of the shards; an interrupted one is gone on with")],
    json: Annotated[bool, switch("--json", "print one JSON object a line")] = False,
) -> None:
    """Tokenise what is not tokenised yet."""
    from tt_cli.data.build.token_shards import tokenize as tokenize_run
    from tt_cli.run import CausalLmRun, load_run

    config = CausalLmRun.of(load_run(run))
    tell = _teller(json, "Tokenising.", "documents are tokenised")
    done = tokenize_run(config, out, lambda progress: tell("progress", progress))
    tell("done", done)


@data.command(help="Put all shards on the Hub in one commit, with a card and checksums, once every share is finished.")
def publish(
    out: Annotated[Path, argument("OUT", "the folder that `tt data encode` made")],
    name: Annotated[str, argument("OWNER/NAME", "the data set; it is made where it is missing")],
    licence: Annotated[str, option("ID", "of the data, as the Hub names it: cc-by-4.0, …")],
    private: Annotated[bool, switch("--private", "make it private, if it has to be made")] = False,
    json: Json = False,
) -> None:
    """Publish the folder, say where it is."""
    from tt_cli.data.build.dataset_publishing import finished_folder
    from tt_cli.data.build.dataset_publishing import publish as publish_folder
    from tt_cli.memory import shown

    encoded = finished_folder(out)
    tell = partial(print, file=sys.stderr, flush=True)
    address = publish_folder(encoded, name, licence, private=private or None, tell=tell)
    rows, shards = encoded.counts["kept"], len(encoded.shards)
    size = sum(facts.bytes for facts in encoded.shards)
    if json:
        print(codec.dumps({"published": address, "rows": rows, "shards": shards, "bytes": size}))
    else:
        print(f"Published: {address}, {rows:,} rows in {plural(shards, 'shard')} of {shown(size)} together.")


@data.command(help="Read shards: counts, sizes, how often each code or token is there; and decode random rows.")
def inspect(
    path: Annotated[Path, argument("PATH", "a shard, or a folder of them")],
    run: Annotated[
        str | None,
        option(
            "RUN",
            f"whose VQGAN the codes are of (default: as written by `encode` beside them, else {DEFAULT_RUN}), or whose "
            "tokenizer the tokens",
        ),
    ] = None,
    samples: Annotated[int, option("N", "random rows to show (default 16)", min=1)] = 16,
    seed: Annotated[int, option("N", "another seed shows other rows (default 0)", min=0)] = 0,
    page: Annotated[Path | None, option("FILE", "write one HTML page with everything in it")] = None,
    sheet: Annotated[Path | None, option("FILE", "write the pictures as one, such as sheet.png")] = None,
    json: Json = False,
) -> None:
    """Print what is in it; exit code 1 where a shard is damaged."""
    from tt_cli.data.build import inspection
    from tt_cli.draw.contact_sheet import contact_sheet
    from tt_cli.draw.drawing import Drawing
    from tt_cli.run import CausalLmRun, load_run
    from tt_cli.task.picture_codec import decode_pictures, load_vqgan

    files = inspection.shard_files(path)
    config = load_run(run) if run else inspection.run_of(path, load_run(DEFAULT_RUN))
    if isinstance(config, CausalLmRun):
        if page or sheet:
            raise UsageError("--page and --sheet: there are no pictures in tokens")
        contents = inspection.inspect_tokens(files, config, samples, seed)
    else:
        contents = inspection.inspect(files, config, samples, seed)
    if json:
        captions = [caption for caption, _ in contents.samples]
        print(codec.dumps({**contents.facts(), "histogram": contents.histogram(), "samples": captions}))
    else:
        print(inspection.as_text(contents))
    if contents.samples and (page or sheet):
        import numpy as np

        codes = np.stack([codes for _, codes in contents.samples])
        pictures = decode_pictures(load_vqgan(config), codes)
        if page:
            with _writing(page):
                page.write_text(inspection.as_page(contents, pictures, str(path)), encoding="utf-8")
        if sheet:
            drawings = [
                Drawing(caption, place, code, picture)
                for place, ((caption, code), picture) in enumerate(zip(contents.samples, pictures, strict=True))
            ]
            with _writing(sheet):
                contact_sheet(drawings).save(sheet)
    if contents.damaged:
        raise typer.Exit(1)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: no kind of picture that Pillow writes
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot write {path}: {reason}; name another file") from error


def _teller(as_json: bool, how: str, what: str) -> Callable[[str, EncodingProgress], None]:
    """A display of progress: JSON lines, a line that is renewed on a terminal, or a line now and then.

    how: a line before it. what: is done at the end, such as "pictures are encoded".
    """
    begin, end = ("\r\x1b[K", "") if output_mode(sys.stderr) == "live" else ("", "\n")
    if not as_json:
        print(how, file=sys.stderr)

    def tell(event: str, progress: EncodingProgress) -> None:
        if as_json:
            print(codec.dumps({"event": event, **progress.to_json()}), flush=True)
        elif event == "done":
            print(begin, end="", file=sys.stderr)
            print(_summary(progress, what))
        else:
            seen, kept = (progress.counts.get(name, 0) for name in ("seen", "kept"))
            left = "" if progress.eta is None else f", {duration(progress.eta)} left"
            line = f"{seen:,} seen, {kept:,} kept, {progress.per_second:,.1f}/s{left}"
            print(f"{begin}{line}", end=end, file=sys.stderr, flush=True)

    return tell


def _summary(progress: EncodingProgress, what: str) -> str:
    from tt_cli.data.build.encoder import LEFT_OUT
    from tt_cli.memory import shown

    counts = progress.counts
    shards = f"{plural(progress.shards, 'shard')} of {shown(progress.bytes)} together"
    tokens = f", {counts['tokens']:,} tokens" if "tokens" in counts else ""
    lines = [f"{counts.get('kept', 0):,} of {counts.get('seen', 0):,} {what}{tokens}, in {shards}."]
    lines += [f"  left out, {words}: {counts[key]:,}" for key, words in LEFT_OUT.items() if counts.get(key)]
    return "\n".join(lines)
