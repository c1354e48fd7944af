"""Weights to draw with: a checkpoint on this machine, on the Hub, from the swarm or built in, and why it was chosen.

Notable:
- a checkpoint of tt carries its run file; weights that others published do not, so their run must be named;
- what comes from elsewhere passes the same checks as a file: format, digest, finite numbers, shapes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tt_cli.checkpoint.checkpoint_files import load, newest
from tt_cli.checkpoint.hash_tree import StateTree
from tt_cli.checkpoint.published_weights import is_checkpoint, read_published
from tt_cli.checkpoint.training_state import TrainingState, received_state
from tt_cli.draw.drawing import DrawingModels
from tt_cli.errors import TTError, UsageError, first_line
from tt_cli.hub.hub_files import download, repository_files
from tt_cli.model.allocator import keep_freed_memory
from tt_cli.run import RunConfig, folders
from tt_cli.run.checkpoint_names import BUILT_IN, step_in
from tt_cli.run.run_source import builtin_runs
from tt_cli.task import task_of
from tt_cli.task.built_in_weights import built_in
from tt_cli.task.dalle_task import DalleTask
from tt_cli.task.picture_codec import load_vqgan

WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
_HUB_PLACE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+))?")


@dataclass(frozen=True)
class WeightsSource:
    """Parameters to draw with. step: None where nobody wrote it down. origin: the file, or the peer it came from.

    published: the parameters have the names of the published checkpoint.
    """

    run: RunConfig
    step: int | None
    origin: str
    reason: str
    parameters: dict[str, Tensor]
    published: bool = False


def find_checkpoint(
    run: RunConfig | None,
    place: Path | str | None,
    *,
    revision: str | None = None,
    on_message: Callable[[str], None] = lambda message: None,
) -> WeightsSource:
    """The checkpoint at `place`, else the newest of `run` on this machine, else the weights built in for it.

    place: a file, a folder of checkpoints, a run's folder, or BUILT_IN; what is not on this machine and looks like it
    is taken as ORGANISATION/REPOSITORY on the Hub, with /FILE for another file than the newest checkpoint. If both are
    given, the checkpoint must be one of that run; published weights need a run. Raises UsageError for what is not
    there, CheckpointError for what cannot be used, HubUnreachable; `on_message` is told of damaged files that were
    passed over, and of downloads.
    """
    if place is None:
        if revision is not None:
            raise UsageError("--revision is one of a Hub repository: name it with --checkpoint ORGANISATION/REPOSITORY")
        return _newest_here(run, on_message)
    path = Path(os.path.expanduser(place))
    if place == BUILT_IN and run is not None and revision is None:
        if source := _built_in(run, "as --checkpoint says"):
            return source
        raise UsageError(f"--checkpoint {BUILT_IN}: no weights come with tt for run {run.run.name}")
    if not path.exists() and (there := _on_the_hub(str(place))):
        return _from_hub(run, *there, revision, on_message)
    if revision is not None:
        raise UsageError(f"--revision is one of a Hub repository, but --checkpoint {place} is on this machine")
    if not path.exists():
        raise UsageError(f"--checkpoint {place}: no such file or folder")
    if path.is_file():
        return _from_file(run, path, "named by --checkpoint")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if checkpoint := newest(folder, None if run is None else run.identity, on_message):
        return _source(checkpoint[1], str(checkpoint[0]), f"the newest in {folder}")
    raise UsageError(f"--checkpoint {place}: no usable checkpoint (step-*.safetensors) in {folder}")


def fetch_from_swarm(
    run: RunConfig, peers: Sequence[str], on_bytes: Callable[[int, int], None] = lambda received, total: None
) -> WeightsSource:
    """The state that the swarm of `run` holds, through any of `peers` (multiaddrs with /p2p/…).

    Only the parameters travel. Most members signed them, and they are of this run, finite, and fit its model. on_bytes:
    called with the bytes received and the bytes that there are. Raises TTError when nobody answers or has such a state.
    Call it before CUDA is used.
    """
    from tt_cli.swarm.observer import Observer

    read_tree = partial(StateTree.parse, identity=run.identity, shapes=task_of(run).shapes())
    with Observer(run, peers) as observer:
        taken = observer.fetch_state(read_tree, lambda tree: tree.parameter_chunks, on_bytes)
    state = received_state(taken.tree, taken.chunks.whole(), run.to_toml(), parameters_only=True)
    return _source(state, f"peer {taken.donors[0]}", "handed over by the swarm")


def multiply(device: torch.device) -> None:
    """Compute something there. Raises RuntimeError where torch has no kernels for this GPU."""
    torch.mm(*torch.ones(2, 8, 8, device=device)).cpu()


def torch_device(name: str, try_out: Callable[[torch.device], None] = multiply) -> torch.device:
    """The device of "cpu", "cuda", "cuda:N" or "auto": the first GPU that works. Raises UsageError for none such."""
    match = re.fullmatch(r"auto|cpu|cuda(?::([0-9]+))?", name)
    if match is None:
        raise UsageError(f"--device {name}: no such device: give auto, cpu, cuda or cuda:N")
    gpus, index = torch.cuda.device_count() if torch.cuda.is_available() else 0, int(match[1] or 0)
    if index >= gpus and name not in ("auto", "cpu"):
        raise UsageError(f"--device {name}: torch finds {gpus or 'no'} GPU{'s' * (gpus > 1)} here; use --device cpu")
    for number in range(gpus) if name == "auto" else [index] if name != "cpu" else []:
        try:
            try_out(device := torch.device("cuda", number))
            return device
        except RuntimeError as error:
            why = f"{first_line(error)}: see `tt doctor`, or use --device cpu"
            if name != "auto":
                raise UsageError(f"--device {name}: {why}") from error
            print(f"tt: cuda:{number} is left out: {why}", file=sys.stderr)
    return torch.device("cpu")


def load_models(source: WeightsSource, device: str = "auto") -> DrawingModels:
    """The decoder with the checkpoint's parameters, and the VQGAN and the tokenizer of its run.

    device: see `torch_device`. Raises UsageError when there is no GPU and TTError for parameters that do not fit.
    """
    where = torch_device(device)
    if where.type == "cpu":
        keep_freed_memory()
    task = DalleTask(source.run)
    if source.published:
        from tt_cli.model.published_names import load_published

        model = task.unfilled_model()
        load_published(model, source.parameters)
    else:
        model = task.filled_model(source.parameters, source.origin)
    decoder, vqgan = model.to(where).eval(), load_vqgan(source.run).to(where)
    return DrawingModels(task.run, decoder, vqgan, task.tokenizer)


def _newest_here(run: RunConfig | None, on_message: Callable[[str], None]) -> WeightsSource:
    if run is None:
        raise ValueError("neither a run nor a place is given")
    folder = folders.checkpoints(run)
    if checkpoint := newest(folder, run.identity, on_message):
        return _source(checkpoint[1], str(checkpoint[0]), f"the newest of this run in {folder}")
    name = run.run.name if run.run.name in builtin_runs() else "RUN"
    train = f"`tt join {name}{'' if run.peers.initial else ' --new-swarm'}`"
    advice = f"a checkpoint of your own takes its place: {train}, or --peer for the swarm's"
    if source := _built_in(run, advice):
        return source
    peer = next(iter(run.peers.initial), "MULTIADDR")
    raise TTError(
        f"there is no checkpoint of run {run.identity} on this machine: take it from its swarm with --peer {peer}, "
        "name a file, a folder or ORGANISATION/REPOSITORY on the Hub with --checkpoint, or train one with `tt demo` "
        f"or {train}"
    )


def _built_in(run: RunConfig, advice: str) -> WeightsSource | None:
    state = built_in(run)
    return _source(state, "the weights that come with tt", f"built in; {advice}") if state is not None else None


def _on_the_hub(place: str) -> tuple[str, str | None] | None:
    """(repository, file or None) where the words can mean one on the Hub and nothing on this machine."""
    match = _HUB_PLACE.fullmatch(place)
    if match is None or Path(place.partition("/")[0]).exists():
        return None
    repository, file = match.groups()
    return None if file is None and place.endswith(WEIGHTS) else (repository, file)


def _from_hub(
    run: RunConfig | None, repository: str, file: str | None, revision: str | None, on_message: Callable[[str], None]
) -> WeightsSource:
    commit, names = repository_files(repository, revision)
    where = f"{repository} at {revision or commit[:12]}"
    if file is None:
        steps = [(step, name) for name in names if (step := step_in(Path(name).name)) is not None]
        if not steps:
            weights = [name for name in names if name.endswith(WEIGHTS)]
            have = f"; it has {', '.join(weights[:3])}" if weights else ""
            raise UsageError(
                f"--checkpoint {repository}: no checkpoint of tt (step-*.safetensors) in {where}{have}; "
                f"name a file with --checkpoint {repository}/FILE"
            )
        file = max(steps)[1]
    elif file not in names:
        raise UsageError(f"--checkpoint {repository}/{file}: no such file in {where}")
    on_message(f"taking {file} from the Hub, {where}")
    path = download(repository, file, commit)
    source = _from_file(run, path, f"on the Hub in {where}")
    return replace(source, origin=f"{repository}/{file} at {commit}")


def _from_file(run: RunConfig | None, path: Path, reason: str) -> WeightsSource:
    """A checkpoint of tt, of `run` where one is given, or weights that were published for it."""
    if path.suffix not in WEIGHTS:
        raise UsageError(f"{path} is no checkpoint: its name ends in none of {', '.join(WEIGHTS)}")
    if path.suffix == ".safetensors" and (run is None or is_checkpoint(path)):
        source = _source(load(path), str(path), reason)
        if run is not None and run.identity != source.run.identity:
            unlike = run.differences(source.run)
            more = f" and {len(unlike) - 3} more" if len(unlike) > 3 else ""
            raise UsageError(
                f"{path} belongs to another run, {source.run.identity}: {'; '.join(unlike[:3])}{more}; "
                "leave out --run to use it"
            )
        return source
    if run is None:
        raise UsageError(f"{path} does not say which model it belongs to: name its run too, such as --run dalle")
    return WeightsSource(run, None, str(path), f"{reason}, as published", read_published(path), published=True)


def _source(state: TrainingState, origin: str, reason: str) -> WeightsSource:
    run = RunConfig.from_toml(state.run_toml, f"{origin}, the run file inside")
    return WeightsSource(run, state.step, origin, reason, state.parameters)
