"""Curves for researchers: real TensorBoard files, and what is said when a sink is not there or fails."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tt_cli.cli.main import main
from tt_cli.errors import UsageError
from tt_cli.peer.sinks import Sink, check_sink, logged, open_sink
from tt_cli.run import load_run
from tt_cli.supervisor.events import Event, Log, Progress, Round, Step


class Shown:
    """A screen that remembers, and can be waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.news = threading.Event()

    def show(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Log):
            self.news.set()


def step(epoch: int, loss: float | None) -> Step:
    return Step(epoch, loss, learning_rate=0.01, gradient_norm=2.0, digest="d")


def test_each_step_is_in_tensorboards_files(tmp_path: Path) -> None:
    shown = Shown()
    with logged(shown.show, open_sink(f"tensorboard:{tmp_path / 'logs'}", load_run("emoji"))) as show:
        show(step(1, 6.5))
        show(Progress(1, 8, 64, 3, 4, 10.0, 30.0, 0.33, 2.0, 6.4, 1000, 2000))
        show(Round(2, "committed", "made", ["a"], 1.0, 64, {"averaging": 1.5, "step": 0.5}))
        show(step(2, 6.25))
        show(step(3, None))
    assert len(shown.events) == 5
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(1, 6.5), (2, 6.25)]
    assert [(one.step, one.value) for one in found.Scalars("peers")] == [(2, 3.0), (3, 3.0)]
    assert found.Scalars("round/seconds")[0].value == 2.0


def test_by_default_they_lie_in_the_runs_folder(tt_home: Path) -> None:
    run = load_run("emoji")
    with logged(Shown().show, open_sink("tensorboard", run)) as show:
        show(step(1, 6.5))
    assert list((tt_home / "runs" / run.identity / "tensorboard").glob("events.out.*"))


@contextmanager
def broken() -> Iterator[Sink]:
    """A sink whose disk is full."""

    def log(step: int, values: Mapping[str, float]) -> None:
        raise OSError(28, "No space left on device")

    yield log
    raise AssertionError("nothing was open")


def test_a_folder_of_nobody_is_one_of_that_name() -> None:
    open_sink("tensorboard:~no-such-user/logs", load_run("emoji"))


def test_a_sink_that_fails_is_told_once_and_training_goes_on() -> None:
    shown = Shown()
    with logged(shown.show, broken) as show:
        show(step(1, 6.5))
        assert shown.news.wait(240)
        for epoch in range(2, 3000):
            show(step(epoch, 6.5))
    told = [event.message for event in shown.events if isinstance(event, Log)]
    assert told == ["logging has ended, training goes on: [Errno 28] No space left on device"]


def test_a_sink_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tt_cli.peer.sinks.CLOSE_SECONDS", 0.1)
    never = threading.Event()

    shown = Shown()
    with logged(shown.show, lambda: nullcontext(lambda step, values: never.wait())) as show:
        for epoch in range(3000):
            show(step(epoch, 6.5))
    assert len(shown.events) == 3000
    never.set()


@pytest.mark.parametrize("wrong", ["", "wandb:", "tensorbord", "csv:here"])
def test_what_is_no_sink(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="must be one of tensorboard, wandb, trackio"):
        check_sink(wrong)
    assert main(["join", "emoji", "--log-to", wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_package_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"--log-to trackio: trackio is not installed: pip install 'tt-cli\[trackio\]'"
    ):
        open_sink("trackio:mine", load_run("emoji"))
