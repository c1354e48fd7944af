"""`tt infer "a red apple"`: draw pictures with what a run has learned."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tt_cli.draw import WeightsSource
    from tt_cli.draw.clip_ranking import Clip

EXAMPLES = """\
tt infer "a red apple"                       four pictures with the newest checkpoint of the run emoji
tt infer sailboat "hot beverage" --candidates 8
tt infer "red heart" --seed 7 --temperature 0.8
tt infer sailboat --checkpoint step-00000200.safetensors --out sailboats
tt infer sailboat --checkpoint ORGANISATION/REPOSITORY --revision v1
tt infer sailboat --run emoji --peer /ip4/203.0.113.7/tcp/31337/p2p/Qm…
tt infer "a cat on a sofa" --run dalle --checkpoint published.pt --candidates 128 --keep 4 --top-k 256 --top-p 0.75
tt infer --from prompts.txt --json           {"run", "step", "seed", …, "drawings": [{"prompt", "path", …}]}
echo "red apple" | tt infer -"""

DEFAULT_RUN = "emoji"
CANDIDATES = 4
# A young model knows the likeliest code long before it is sure of it: at 1.0 a wrong first code spoils the rest.
TEMPERATURE = 0.5
TOP_P = 0.9
PLAIN_INTERVAL = 10.0  # seconds between two lines of progress without a terminal
PREVIEWS = ("auto", "never", "blocks", "kitty", "iterm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `tt infer`."""
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="what to draw; - reads prompts from stdin")
    parser.add_argument("--from", dest="file", metavar="FILE", help="more prompts, one a line; - reads stdin")
    source = parser.add_argument_group("what to draw with")
    source.add_argument("--run", help=f"the run: name, TOML file or ORGANISATION/REPOSITORY (default {DEFAULT_RUN})")
    source.add_argument(
        "--checkpoint",
        metavar="PLACE",
        help="a file, a folder, or ORGANISATION/REPOSITORY[/FILE] on the Hub; of several checkpoints the newest. "
        "Published weights (.pt, .safetensors) need --run too",
    )
    source.add_argument("--revision", metavar="R", help="commit, branch or tag of the Hub repository")
    source.add_argument(
        "--peer",
        metavar="MULTIADDR",
        action="append",
        default=[],
        help="take the state from the run's swarm, found through this peer (may be given several times)",
    )
    source.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    how = parser.add_argument_group("how to draw")
    how.add_argument(
        "--candidates",
        "--samples",
        type=_positive,
        default=CANDIDATES,
        metavar="N",
        help=f"pictures for each prompt (default {CANDIDATES})",
    )
    how.add_argument("--keep", type=_positive, metavar="K", help="save only the K that CLIP ranks best, best first")
    how.add_argument(
        "--clip",
        metavar="MODEL",
        help="rank with this CLIP: a folder, or OWNER/NAME[@REVISION] on the Hub (default: OpenAI's ViT-B/32)",
    )
    how.add_argument(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        metavar="T",
        help=f"lower: surer, less varied (default {TEMPERATURE})",
    )
    how.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest codes (default 0: off)"
    )
    how.add_argument(
        "--top-p",
        type=float,
        default=TOP_P,
        metavar="P",
        help=f"… among the likeliest that have share P (default {TOP_P}; 1: off)",
    )
    how.add_argument(
        "--temperature-first",
        action="store_true",
        help="apply the temperature before top-k and top-p, as is usual, not after them as the paper's authors do",
    )
    how.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same pictures (default: a new one)")
    how.add_argument("--batch", type=_positive, metavar="N", help="pictures drawn side by side (default: what fits)")
    how.add_argument("--memory", type=_bytes, metavar="SIZE", help="use at most this much for drawing, such as 4GB")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to save (default: a new folder in ./drawings)")
    parser.add_argument(
        "--preview",
        choices=PREVIEWS,
        default="auto",
        help="show the pictures in a terminal that can (default auto); never in pipes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Draw, rank, save, print the paths."""
    from tt_cli.errors import UsageError
    from tt_cli.terminal.live_view import write_line

    prompts = _prompts(args.prompts, args.file)
    if args.keep is not None and args.keep > args.candidates:
        raise UsageError(
            f"--keep {args.keep}: there are only {args.candidates} candidates; draw more with --candidates"
        )
    if args.peer and (args.checkpoint or args.revision):
        raise UsageError("--peer draws with the swarm's state: leave out --checkpoint and --revision, or --peer")
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed

    from tt_cli import __version__
    from tt_cli.draw import DrawingSettings, cut_prompts, draw, load_models, output_folder, save_drawings
    from tt_cli.model.sampling.code_choice import Sampling

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.temperature_first)
    say = _say_nothing if args.json else lambda line: write_line(sys.stdout, line)

    def warn(line: str) -> None:
        write_line(sys.stderr, f"tt: {line}")

    source = _source(args, warn)
    step = "unknown step" if source.step is None else f"step {source.step}"
    say(f"Checkpoint: {step} of run {source.run.identity} ({source.reason})")
    say(f"            {source.origin}")
    models = load_models(source, args.device)
    clip = _clip(args, next(models.decoder.parameters()).device)
    for prompt, read in cut_prompts(models.tokenizer, prompts).items():
        length = models.tokenizer.text_length
        warn(f'of "{prompt}" the model reads only the first {length} tokens: "{read}"')
    facts = {"run": source.run.identity, "step": source.step, "seed": seed, "candidates": args.candidates}
    facts |= vars(sampling)
    if clip is not None:
        facts |= {"keep": args.keep or args.candidates, "clip": clip.name}
    with output_folder(args.out, source.run.run.name) as folder:
        started = time.monotonic()
        with _progress("Drawing", "tokens") as on_progress:
            drawings = draw(
                models,
                prompts,
                DrawingSettings(args.candidates, sampling, seed, args.batch, args.memory),
                on_progress=on_progress,
                on_message=lambda line: write_line(sys.stderr, f"Drawing: {line}"),
            )
        seconds = time.monotonic() - started
        drawn, tokens = len(drawings), sum(len(drawing.codes) for drawing in drawings)
        similarities = None
        if clip is not None:
            from tt_cli.draw.clip_ranking import keep_best

            with _progress("Ranking", "pictures") as on_progress:
                ranked = keep_best(clip, drawings, args.keep, on_progress=on_progress)
            drawings, similarities = [one.drawing for one in ranked], [one.similarity for one in ranked]
        about = {**facts, "checkpoint": source.origin, "software": f"tt {__version__}"}
        chunks = {name: str(value) for name, value in about.items() if value is not None}
        paths, sheet = save_drawings(drawings, folder, chunks, similarities)
    rate = tokens / max(seconds, 1e-3)
    if args.json:
        listed: list[dict[str, Any]] = [
            {"prompt": drawing.prompt, "index": drawing.index, "path": str(path)}
            for drawing, path in zip(drawings, paths, strict=True)
        ]
        for entry, similarity in zip(listed, similarities or [], strict=False):
            entry["clip_similarity"] = round(similarity, 4)
        where = {"checkpoint": source.origin, "contact_sheet": str(sheet)}
        cost = {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_s": round(rate, 1)}
        print(json.dumps({**facts, **where, **cost, "drawings": listed}))
        return 0
    kept = f", kept the best {len(drawings)}" if len(drawings) < drawn else ""
    say(f"Drew {drawn} pictures in {seconds:.1f} s ({rate:.0f} tokens/s){kept}. Again: --seed {seed}")
    for path in [*paths, sheet]:
        say(str(path))
    _show(drawings, args.preview)
    return 0


def _source(args: argparse.Namespace, warn: Callable[[str], None]) -> WeightsSource:
    """What the flags say to draw with."""
    from tt_cli.auth.peer_admission import observing
    from tt_cli.cli.join import checked_peers
    from tt_cli.draw import fetch_from_swarm, find_checkpoint
    from tt_cli.run import load_run
    from tt_cli.terminal.live_view import output_mode, write_line

    peers = checked_peers(args.peer)
    named = args.run or (None if args.checkpoint else DEFAULT_RUN)
    config = load_run(named) if named else None
    if peers and config is not None:
        if output_mode(sys.stderr) == "live":
            write_line(sys.stderr, f"Asking {len(peers)} peer(s) of {config.identity} …")
        with (
            observing(config, lambda line, level: warn(line)),
            _progress(f"Taking the state of {config.identity}", "bytes") as on_bytes,
        ):
            return fetch_from_swarm(config, peers, on_bytes)
    return find_checkpoint(config, args.checkpoint, revision=args.revision, on_message=warn)


def _clip(args: argparse.Namespace, device: Any) -> Clip | None:
    """The model that ranks, before anything is drawn in vain; None where nothing is to be ranked."""
    if args.keep is None and args.clip is None:
        return None
    from tt_cli.draw.clip_ranking import DEFAULT, load_clip

    return load_clip(args.clip or DEFAULT, device)


def _show(drawings: list[Any], wanted: str) -> None:
    from tt_cli.draw import preview, way_to_show

    way = way_to_show(sys.stdout, os.environ, wanted)
    if way is not None:
        columns, lines = shutil.get_terminal_size()
        sys.stdout.write(preview(drawings, way, columns, lines))
        sys.stdout.flush()


def _positive(text: str) -> int:
    number = int(text) if re.fullmatch(r"\d{1,9}", text) else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1")
    return number


def _bytes(text: str) -> int:
    """Such as 4GB, 1.5 GiB, 800M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text}: write a size such as 4GB or 800MB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1))


def _prompts(given: list[str], file: str | None) -> list[str]:
    """The prompts of the command line, of `file` and of stdin where one is "-", each once. Raises UsageError."""
    from tt_cli.errors import UsageError

    if any(not prompt.strip() for prompt in given):
        raise UsageError('a prompt is empty; say what to draw, such as tt infer "a red apple"')
    prompts: list[str] = []
    for place, from_file in [*((prompt, False) for prompt in given), *([(file, True)] if file is not None else [])]:
        if place != "-" and not from_file:
            prompts.append(place)
            continue
        try:
            text = sys.stdin.read() if place == "-" else Path(place).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--from {place}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            name = "stdin" if place == "-" else f"--from {place}"
            raise UsageError(f"{name}: not UTF-8 text; give one prompt a line") from error
        prompts += [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise UsageError('no prompt; say what to draw, such as tt infer "a red apple"')
    return list(dict.fromkeys(prompts))


@contextmanager
def _progress(label: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """What to call with what is done and to do: a bar on a terminal, else some lines, on stderr."""
    from tt_cli.terminal.live_view import output_mode, write_line

    begun = said = time.monotonic()

    def words(done: float, total: float) -> str:
        rate = done / max(time.monotonic() - begun, 1e-3)
        if unit == "bytes":
            return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
        return f"{done:.0f} of {total:.0f} {unit}, {rate:.0f} {unit}/s"

    if output_mode(sys.stderr) == "live":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(label), BarColumn(), TextColumn("{task.fields[words]}, ETA"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None, words="…")
            yield lambda done, total: bar.update(task, completed=done, total=total, words=words(done, total))
        return

    def lines(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= PLAIN_INTERVAL or (unit == "bytes" and done == total):
            said = now
            eta = f", ETA {(total - done) * (now - begun) / done:.0f} s" if 0 < done < total else ""
            write_line(sys.stderr, f"{label}: {words(done, total)}{eta}")

    yield lines


def _say_nothing(line: str) -> None:
    """Where lines for people go when the output is JSON."""
