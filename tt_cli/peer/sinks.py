"""Sinks for this peer's curves: TensorBoard, Weights & Biases, trackio. Off by default.

    with logged(screen.show, open_sink("tensorboard:logs", run)) as show:
        supervise(start, show, …)

What goes wrong there never touches training: a thread of its own writes, what it cannot take
is dropped, and the first failure is told and ends the logging.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tt_cli.errors import UsageError, first_line
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor import events
from tt_cli.supervisor.peer_state import PeerState

KINDS = ("tensorboard", "wandb", "trackio")
MOST_DUE = 1000  # steps that wait for a sink that is slow
CLOSE_SECONDS = 10.0


Sink = Callable[[int, Mapping[str, float]], object]
"""Takes the values of one global step, by name; may raise anything."""


def check_sink(wanted: str) -> str:
    """KIND or KIND:WHERE. Raises ValueError."""
    kind, colon, where = wanted.partition(":")
    if kind not in KINDS or (colon and not where.strip()):
        raise ValueError(f"must be one of {', '.join(KINDS)}, each with :DIR or :PROJECT if you like")
    return wanted


def open_sink(wanted: str, run: RunConfig) -> Callable[[], AbstractContextManager[Sink]]:
    """Make what opens the sink in the thread that will use it. Raises UsageError if its package is not installed."""
    kind, _, where = wanted.partition(":")
    if importlib.util.find_spec(kind) is None:
        raise UsageError(f"--log-to {kind}: {kind} is not installed: pip install 'tt-cli[{kind}]'")
    if kind == "tensorboard":
        folder = Path(os.path.expanduser(where)) if where else folders.run_folder(run) / "tensorboard"
        return partial(_tensorboard, folder)
    return partial(_project, kind, where or run.run.name, run)


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Sink]:
    """Event files in a folder, by TensorBoard's own writer: torch is not needed here."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))

    def log(step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))
        writer.flush()

    yield log
    writer.close()


@contextmanager
def _project(kind: str, project: str, run: RunConfig) -> Iterator[Sink]:
    """A run in a project of wandb, or of trackio, whose functions are the same."""
    library: Any = importlib.import_module(kind)
    with redirect_stdout(sys.stderr):  # they greet, and standard output may be JSON lines
        library.init(project=project, name=run.identity, config=run.model_dump(mode="json"))
    yield lambda step, values: library.log(dict(values), step=step)
    with redirect_stdout(sys.stderr):
        library.finish()


@contextmanager
def logged(emit: events.Emit, open: Callable[[], AbstractContextManager[Sink]]) -> Iterator[events.Emit]:
    """What passes all events on to `emit`, and logs each global step. It never waits for the sink, in whose own thread
    `open` is called.
    """
    state, due = PeerState(run="", identity=""), queue.Queue[tuple[int, dict[str, float]] | None](MOST_DUE)

    def write() -> None:
        try:
            with open() as log:
                while (figures := due.get()) is not None:
                    log(*figures)
        except Exception as error:  # three libraries, the disk and the network have no common error
            emit(events.Log(f"logging has ended, training goes on: {first_line(error)}", "warning"))

    def show(event: events.Event) -> None:
        emit(event)
        state.apply(event)
        if isinstance(event, events.Step) and writing.is_alive() and not due.full():
            due.put_nowait((event.epoch, _figures(event, state)))

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    try:
        yield show
    finally:
        with suppress(queue.Full):
            due.put(None, timeout=CLOSE_SECONDS)
            writing.join(CLOSE_SECONDS)


def _figures(step: events.Step, state: PeerState) -> dict[str, float]:
    """Figures at a step, by name; without what is not known yet."""
    made = state.round
    known = {
        "loss": step.loss,
        "learning rate": step.learning_rate,
        "gradient norm": step.gradient_norm,
        "peers": state.peers,
        "samples per second/swarm": state.swarm_samples_per_second,
        "samples per second/mine": state.samples_per_second,
        "share": state.share,
        "bytes/sent": None if state.peers is None else state.bytes_sent,
        "bytes/received": None if state.peers is None else state.bytes_received,
        "round/received": None if made is None else made.received,
        "round/seconds": None if made is None else math.fsum(made.seconds.values()),
        **state.figures,
    }
    return {name: value for name, value in known.items() if value is not None}
