"""`tt infer "a red apple"`: draw pictures with the newest checkpoint of a run."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


EXAMPLES = """\
tt infer "a red apple"                       four pictures with the newest checkpoint of the run emoji
tt infer sailboat "hot beverage" --samples 8
tt infer "red heart" --seed 7 --temperature 0.8
tt infer sailboat --checkpoint step-00000200.safetensors --out sailboats
tt infer --from prompts.txt --json           {"run", "step", "seed", …, "drawings": [{"prompt", "path"}]}"""

DEFAULT_RUN = "emoji"
# A young model knows the likeliest code long before it is sure of it: at 1.0 a wrong first code spoils the rest.
TEMPERATURE = 0.5
PLAIN_INTERVAL = 10.0  # seconds between two lines of progress without a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `tt infer`."""
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="what to draw")
    parser.add_argument("--from", dest="file", metavar="FILE", help="more prompts, one a line; - reads stdin")
    source = parser.add_argument_group("what to draw with")
    source.add_argument("--run", help=f"the run: name, TOML file or ORGANISATION/REPOSITORY (default {DEFAULT_RUN})")
    source.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a checkpoint, or a folder of which the newest is taken",
    )
    source.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    how = parser.add_argument_group("how to draw")
    how.add_argument("--samples", type=int, default=4, metavar="N", help="pictures for each prompt (default 4)")
    how.add_argument(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        metavar="T",
        help=f"lower: surer, less varied (default {TEMPERATURE})",
    )
    how.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="choose among the K likeliest codes (default 0: off)",
    )
    how.add_argument(
        "--top-p",
        type=float,
        default=0.9,
        metavar="P",
        help="… among the likeliest that have share P (default 0.9; 1: off)",
    )
    how.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same pictures (default: a new one)")
    how.add_argument("--batch", type=int, metavar="N", help="pictures drawn side by side; fewer need less memory")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to save (default: a new folder in ./drawings)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Draw, save, print the paths."""
    from tt_cli.errors import TTError, UsageError
    from tt_cli.run import load_run
    from tt_cli.supervisor.screen import write_line

    prompts = _prompts(args.prompts, args.file)
    for flag in ("samples", "batch"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag} {value}: must be 1 or more")
    named = args.run or (None if args.checkpoint else DEFAULT_RUN)
    config = load_run(named) if named else None
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed

    import torch

    from tt_cli.draw import cut_prompts, draw, find_checkpoint, load_models, output_folder, save_drawings
    from tt_cli.model.sampling import check_sampling

    check_sampling(args.temperature, args.top_k, args.top_p)
    say = _say_nothing if args.json else lambda line: write_line(sys.stdout, line)
    source = find_checkpoint(config, args.checkpoint, lambda line: write_line(sys.stderr, f"tt: {line}"))
    say(f"Checkpoint: step {source.step} of run {source.run.identity} ({source.reason})")
    say(f"            {source.path}")
    model, vqgan, tokenizer = load_models(source, args.device)
    for prompt, read in cut_prompts(tokenizer, prompts).items():
        length = tokenizer.text_length
        write_line(sys.stderr, f'tt: of "{prompt}" the model reads only the first {length} tokens: "{read}"')
    settings = {name: getattr(args, name) for name in ("samples", "temperature", "top_k", "top_p")}
    facts = {"run": source.run.identity, "step": source.step, "seed": seed, **settings}
    with output_folder(args.out, source.run.run.name) as folder:
        started = time.monotonic()
        try:
            with _progress() as on_progress:
                drawings = draw(
                    source.run, model, vqgan, tokenizer, prompts,
                    seed=seed, batch=args.batch, on_progress=on_progress, **settings,
                )  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise TTError(
                "the GPU has not enough memory: draw fewer at once (--batch 1) or without it (--device cpu)"
            ) from error
        seconds = time.monotonic() - started
        paths, sheet = save_drawings(drawings, folder, {name: str(value) for name, value in facts.items()})
    codes = sum(len(drawing.codes) for drawing in drawings)
    if args.json:
        listed = [
            {"prompt": drawing.prompt, "index": drawing.index, "path": str(path)}
            for drawing, path in zip(drawings, paths, strict=True)
        ]
        where = {"checkpoint": str(source.path), "contact_sheet": str(sheet)}
        cost = {"codes": codes, "seconds": round(seconds, 3)}
        print(json.dumps({**facts, **where, **cost, "drawings": listed}))
        return 0
    rate = codes / max(seconds, 1e-3)
    say(f"Drew {len(drawings)} pictures in {seconds:.1f} s ({rate:.0f} codes/s). Again: --seed {seed}")
    for path in [*paths, sheet]:
        say(str(path))
    return 0


def _prompts(given: list[str], file: str | None) -> list[str]:
    """The prompts of the command line and of `file`, each once. Raises UsageError."""
    from tt_cli.errors import UsageError

    if any(not prompt.strip() for prompt in given):
        raise UsageError('a prompt is empty; say what to draw, such as tt infer "a red apple"')
    prompts = list(given)
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--from {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--from {file}: not UTF-8 text; give a file with one prompt a line") from error
        prompts += [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise UsageError('no prompt; say what to draw, such as tt infer "a red apple"')
    return list(dict.fromkeys(prompts))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """What to call with the codes drawn and to draw: a bar on a terminal, else some lines, on stderr."""
    from tt_cli.supervisor.screen import output_mode, write_line

    if output_mode(sys.stderr) == "live":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("Drawing"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} codes, {task.fields[rate]:.0f}/s"),
            TimeRemainingColumn(),
        )
        begun = time.monotonic()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=1, rate=0.0)
            yield lambda done, total: bar.update(
                task, completed=done, total=total, rate=done / max(time.monotonic() - begun, 1e-3)
            )
        return
    begun = said = time.monotonic()

    def lines(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= PLAIN_INTERVAL:
            said = now
            write_line(sys.stderr, f"Drawing: {done} of {total} codes, {done / (now - begun):.0f}/s")

    yield lines


def _say_nothing(line: str) -> None:
    """Where lines for people go when the output is JSON."""
