"""`tt convert FILE OUT`: published weights into a checkpoint of tt and back, without running what is in them."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from tt_cli.model import Dalle
    from tt_cli.run import RunConfig

EXAMPLES = """\
tt convert dalle.pt weights.safetensors --step 31250           the paper's weights, to draw with --checkpoint
tt convert dalle.pt weights.safetensors --run my-run.toml      of a run of your own
tt convert step-00000200.safetensors dalle.pt --to published   under the names of the paper's checkpoint
tt convert last.ckpt vqgan.safetensors                         a VQGAN, without the rest of its training
tt convert dalle.pt weights.safetensors --json                 {"kind", "from", "to", "run", "step", …, "bytes"}"""

DEFAULT_RUN = "dalle"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `tt convert`."""
    parser.add_argument("file", metavar="FILE", type=Path, help=".pt, .pth, .ckpt, .bin or .safetensors to read")
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="the file to write: .safetensors, or .pt for --to published"
    )
    parser.add_argument("--run", help=f"the run that they are weights of: name or TOML file (default {DEFAULT_RUN})")
    parser.add_argument("--step", type=int, metavar="N", help="the global step that they are of (default 0)")
    parser.add_argument(
        "--to",
        choices=("checkpoint", "published"),
        default="checkpoint",
        help="what to write: a checkpoint of tt (default), or published names from one",
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Read, check, write, say what was written."""
    from tt_cli.errors import UsageError

    _check_paths(args)
    from tt_cli.checkpoint import is_checkpoint, read_published

    say = _say_nothing if args.json else _say
    if args.to == "published":
        if not is_checkpoint(args.file):
            raise UsageError(f"{args.file} is no checkpoint of tt; --to published reads what tt wrote")
        if args.run is not None or args.step is not None:
            raise UsageError(f"--to published takes run and step from {args.file}; leave out --run and --step")
        facts = _publish(args.file, args.out, say)
    else:
        if is_checkpoint(args.file):
            raise UsageError(f"{args.file} is a checkpoint of tt already; for the published names add --to published")
        say(f"Reading {args.file}")
        state = read_published(args.file)
        if {"decoder.conv_in.weight", "quantize.embed.weight"} <= state.keys():
            if args.run is not None or args.step is not None:
                raise UsageError(f"{args.file} holds a VQGAN, which is of no run; leave out --run and --step")
            facts = _keep_vqgan(state, args.out, say)
        else:
            facts = _adopt(state, args.run or DEFAULT_RUN, args.step or 0, args.out, say)
    facts = {"kind": facts.pop("kind"), "from": str(args.file), "to": str(args.out), **facts}
    facts["bytes"] = args.out.stat().st_size
    if args.json:
        print(json.dumps(facts))
        return 0
    what = {"checkpoint": "a checkpoint", "published": "published weights", "vqgan": "a VQGAN"}[facts["kind"]]
    print(f"Wrote {what} of {facts['elements']:,} parameters, {facts['bytes'] / 1e6:.1f} MB: {args.out}")
    if facts["kind"] == "checkpoint":
        print(f'Draw with it: tt infer "a red apple" --checkpoint {args.out}')
    return 0


def _check_paths(args: argparse.Namespace) -> None:
    """Everything that can be wrong before the long work. Raises UsageError."""
    from tt_cli.errors import UsageError

    file, out = args.file, args.out
    if not file.is_file():
        raise UsageError(f"cannot read {file}: " + ("a folder; name a file in it" if file.is_dir() else "no such file"))
    if args.step is not None and not 0 <= args.step < 10**15:
        raise UsageError(f"--step {args.step}: must be 0 or more and have at most 15 digits")
    suffixes = (".safetensors", *TORCH_SUFFIXES) if args.to == "published" else (".safetensors",)
    if out.suffix not in suffixes:
        raise UsageError(f"{out}: must end in {' or '.join(suffixes)}")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}; make it first")
    if out.is_dir():
        raise UsageError(f"{out} is a folder; name a file in it")
    if out.exists() and out.samefile(file):
        raise UsageError(f"{out} is what is to be read; name another file to write")
    if out.exists() and not args.force:
        raise UsageError(f"{out} exists; name another file, or overwrite it with --force")


def _adopt(state: dict[str, Tensor], run_name: str, step: int, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Published weights of a decoder → a checkpoint of its run, with no optimizer state."""
    import torch

    from tt_cli.checkpoint import TrainingState, serialised, write
    from tt_cli.model.published_names import from_published
    from tt_cli.run import load_run

    config = load_run(run_name)
    say(f"Checking {len(state)} tensors against the model of run {config.identity}")
    found = from_published(_empty_model(config), state)
    parameters = {name: tensor.to(torch.float32).contiguous() for name, tensor in found.items()}
    pieces = serialised(TrainingState(step, parameters, {}, config.to_toml(), config.identity))
    with _progress(sum(len(piece) for piece in pieces), say) as on_bytes:
        write(out, pieces, on_bytes)
    return {"kind": "checkpoint", "run": config.identity, "step": step, **_counted(parameters)}


def _publish(file: Path, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """A checkpoint of a decoder → its weights under the published names."""
    from tt_cli.checkpoint import load_model, write_published
    from tt_cli.errors import TTError
    from tt_cli.model.published_names import to_published

    say(f"Reading {file}")
    config, parameters = load_model(file)
    model = _empty_model(config)
    own = {name: tensor.shape for name, tensor in model.named_parameters()}
    if own != {name: tensor.shape for name, tensor in parameters.items()}:
        raise TTError(
            f"{file} does not fit the run file inside it; it was written by another version of tt, or changed"
        )
    state = to_published(model.config, parameters)
    with _progress(sum(tensor.nbytes for tensor in parameters.values()), say) as on_bytes:
        write_published(out, state, on_bytes)
    return {"kind": "published", "run": config.identity, **_counted(parameters), "names": len(state)}


def _keep_vqgan(state: dict[str, Tensor], out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Published weights of a VQGAN → the same without what only its training needed."""
    import torch

    from tt_cli.checkpoint import write_published
    from tt_cli.model.vqgan import PUBLISHED, Vqgan

    say(f"Checking {len(state)} tensors against the published VQGAN")
    with torch.device("meta"):
        vqgan = Vqgan(PUBLISHED, with_encoder="encoder.conv_in.weight" in state)
    tensors = {name: tensor.contiguous() for name, tensor in vqgan.checked(state).items()}
    with _progress(sum(tensor.nbytes for tensor in tensors.values()), say) as on_bytes:
        write_published(out, tensors, on_bytes)
    return {"kind": "vqgan", **_counted(tensors)}


def _empty_model(config: RunConfig) -> Dalle:
    """The run's model without values: its names and shapes."""
    from tt_cli.task import task_of

    return task_of(config).unfilled_model("meta")


def _counted(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {"tensors": len(tensors), "elements": sum(tensor.numel() for tensor in tensors.values())}


@contextmanager
def _progress(total: int, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """What to call with the bytes just written, of `total`: a bar on a terminal, on stderr."""
    from tt_cli.terminal.live_view import output_mode

    say(f"Writing {total / 1e6:.1f} MB")
    if output_mode(sys.stderr) != "live":
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def _say(line: str) -> None:
    from tt_cli.terminal.live_view import write_line

    write_line(sys.stderr, line)


def _say_nothing(line: str) -> None:
    """Where lines for people go when the output is JSON."""
