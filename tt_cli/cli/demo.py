"""`tt demo`: a swarm of real peers on this machine learns to draw emoji, from nothing to pictures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.run import RunConfig
    from tt_cli.supervisor.demo_swarm import DemoResult

EXAMPLES = """\
tt demo
tt demo --out /tmp/first-try
tt demo --prompt "a pizza" --prompt "owl" --seed 3"""
RUN = "emoji-demo"
PROMPTS = 8
SAMPLES = 1
SCORED = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt demo` takes."""
    parser.add_argument("--run", default=RUN, metavar="RUN", help=f"the run to train from its start (default {RUN})")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where logs, checkpoints and pictures go (default: a new folder in ./tt-demo)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help=f"draw this at the end (may be given several times; default: {PROMPTS} captions of the training pictures)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the drawings (default 0)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--plain", action="store_true", help="plain lines, as when not on a terminal")
    form.add_argument("--json", action="store_true", help="no screen; one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    """Train, score, draw, and name what was saved."""
    from tt_cli.errors import UsageError
    from tt_cli.run import load_run
    from tt_cli.supervisor.demo_swarm import run_demo
    from tt_cli.terminal.demo_screen import DemoScreen

    if any(not prompt.strip() for prompt in args.prompt):
        raise UsageError('--prompt: it is empty; say what to draw, such as --prompt "a red apple"')
    config = load_run(args.run)
    folder = _new_folder(args.out)
    say = _silent if args.json else lambda line: print(line, flush=True)
    say(f"A swarm of real peers on this machine learns run {config.identity}; everything goes to {folder}")
    if args.json:
        result = run_demo(config, folder, lambda name, event: None, _silent)
    else:
        with DemoScreen(
            f"tt demo {args.run}", config.identity, config.schedule.total_steps, plain=args.plain
        ) as screen:
            result = run_demo(config, folder, screen.show, screen.say)
    _tell_training(result, say)
    return _draw(config, result, args, folder, say)


def _tell_training(result: DemoResult, say: Callable[[str], None]) -> None:
    agreed = "all peers hold the same parameters, to the last bit" if result.digests == 1 else "the peers DIFFER"
    loss = "unknown" if result.loss is None else f"{result.loss:.3f}"
    say(f"Trained {result.steps} steps in {_minutes(result.seconds)} to loss {loss}; {agreed}.")
    say(f"Of every averaged gradient at least {result.received_min:.0%} arrived.")
    if result.late_joined_at is not None:
        say(f"The third peer joined at step {result.late_joined_at} and took the state over from the others.")


def _draw(
    config: RunConfig, result: DemoResult, args: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> int:
    from tt_cli.draw import DrawingSettings, draw, find_checkpoint, load_models, recall, save_drawings
    from tt_cli.model.sampling.code_choice import Sampling

    started = time.monotonic()
    source = find_checkpoint(config, result.checkpoint)
    models = load_models(source, "cpu")
    with _progress("Drawing", args) as on_progress:
        score, known = recall(models, captions=SCORED, seed=args.seed, on_progress=on_progress)
        prompts = args.prompt or [drawing.prompt for drawing in known[:PROMPTS]]
        settings = DrawingSettings(SAMPLES, Sampling(top_p=0.9), args.seed)
        drawings = draw(models, prompts, settings, on_progress=on_progress)
    facts = {"run": config.identity, "step": source.step, "seed": args.seed}
    paths, sheet = save_drawings(drawings, folder / "pictures", {name: str(value) for name, value in facts.items()})
    seconds = result.seconds + time.monotonic() - started
    if args.json:
        report: dict[str, Any] = {
            **facts,
            "steps": result.steps,
            "loss": result.loss,
            "seconds": round(seconds, 1),
            "received_fraction_min": result.received_min,
            "peers_agree": result.digests == 1,
            "recognised": score.right,
            "recognised_of": score.total,
            "checkpoint": source.origin,
            "contact_sheet": str(sheet),
            "pictures": [str(path) for path in paths],
        }
        print(json.dumps(report))
        return 0
    say(
        f"Recognised: {score.right} of {score.total} drawings have their own emoji as nearest neighbour among "
        f"all {config.data.subset or 'the'} training pictures (pixel L2), that is {score.fraction:.0%}."
    )
    for path in [*paths, sheet]:
        say(str(path))
    say(f"Done in {_minutes(seconds)}. All {len(drawings)} pictures on one sheet: {sheet}")
    say(f'Draw more: tt infer "{prompts[0]}" --checkpoint {source.origin}')
    return 0


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes"


def _silent(line: str) -> None:
    """Where lines for people go when the output is JSON."""


def _new_folder(named: Path | None) -> Path:
    """Make the folder for this demo. Raises UsageError for one that is in use, TTError when it cannot be made."""
    from tt_cli.errors import TTError, UsageError

    folder = named or Path("tt-demo") / time.strftime("%Y-%m-%d-%H%M%S")
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: is not empty; name a new folder")
    except OSError as error:
        raise TTError(f"cannot make the folder {folder}: {error.strerror}; name another with --out") from error
    return folder


@contextmanager
def _progress(label: str, args: argparse.Namespace) -> Iterator[Callable[[int, int], None]]:
    from tt_cli.terminal.live_view import output_mode

    if args.json or output_mode(sys.stderr, plain=args.plain) != "live":
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
