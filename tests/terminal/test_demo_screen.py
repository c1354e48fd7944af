"""The screen of `tt demo`: exact lines of several workers, and the fit."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from terminal.happened import SIZES, TITLES, TRAINING, made, progress, stepped, swarm

from tt_cli.supervisor import events as e
from tt_cli.terminal.demo_screen import DemoScreen


def test_the_demo_in_plain_lines_tells_steps_of_one_peer_alone() -> None:
    stream = io.StringIO()
    happened: list[tuple[str, e.Event]] = [
        ("aux", e.Phase("serving", at=0.0)),
        ("anna", e.Choice("micro-batch", "16", "fastest", at=0.0)),
        ("anna", e.Phase("training", "towards step 1", at=1.0)),
        ("ben", e.Phase("training", "towards step 1", at=1.0)),
        ("anna", progress(2.0, epoch=0)),
        ("anna", progress(40.0, epoch=0)),
        ("ben", made(41.0, 1, members=["a", "b"])),
        ("ben", stepped(41.0, 1)),
        ("anna", stepped(41.2, 1)),
        ("aux", e.Snapshot(swarm(1), at=41.5)),
        ("ben", e.Failure("killed", at=42.0)),
        ("anna", stepped(51.2, 2)),
        ("anna", e.Log("lost ben", "warning", at=52.0)),
        ("anna", e.Log("a detail", at=52.0)),
    ]
    with DemoScreen("tt demo", "emoji-1a2b3c4d", 120, stream=stream) as one:
        for name, event in happened:
            one.show(name, event)
    assert stream.getvalue() == (
        "00:00:00 aux    phase        serving\n"
        "00:00:01 anna   phase        training: towards step 1\n"
        "00:00:01 ben    phase        training: towards step 1\n"
        "00:00:41 ben    step         1 of 120, loss 3.250, 2 peers, 256 samples, 40.0 s, digest 3fa9c1d2\n"
        "00:00:42 ben    failure      killed\n"
        "00:00:51 anna   step         2 of 120, loss 3.250, 3 peers, 10.0 s, digest 3fa9c1d2\n"
        "00:00:52 anna   warning      lost ben\n"
    )


def test_what_the_demo_says_itself() -> None:
    stream = io.StringIO()
    with DemoScreen("tt demo", "emoji-1a2b3c4d", 120, stream=stream) as one:
        one.say("cleo joins now")
    assert stream.getvalue()[8:] == " demo   cleo joins now\n"
    assert one.states == {}


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_view_of_the_demo_fits(width: int, height: int) -> None:
    screen = DemoScreen(*TITLES, 120, stream=io.StringIO())
    for event in TRAINING:
        for name in ("aux", "anna", "ben", "a-name-that-is-very-long"):
            screen.show(name, event)
        lines = screen.frame(width, height, 50.0)
        assert len(lines) <= height
        assert max(cell_len(line.plain) for line in lines) <= width


def test_the_view_of_the_demo() -> None:
    screen = DemoScreen(*TITLES, 120, stream=io.StringIO())
    screen.show("aux", e.Snapshot(swarm(12), at=5.0))
    screen.show("aux", e.Phase("serving", "the newest state is kept", at=5.0))
    for event in TRAINING[:13]:
        screen.show("anna", event)
    screen.show("cleo", e.Phase("syncing", "taking over step 12", at=16.0))
    lines = [line.plain.rstrip() for line in screen.frame(80, 24, 20.0)]
    assert lines[2:10] == [
        "loss      ▄  last 3.250  min 3.250  max 3.250",
        "next step ━━━━━━━━━━╸─────────────────── 90 of 256 samples · in 4 s",
        "run       ━━━─────────────────────────── 12 of 120 steps · 18 min 43 s left",
        "",
        "peer  phase     samples/s  share  step  digest    last round",
        "aux   serving           –      –    12  aa        the newest state is kept",
        "anna  training       12.1   34 %    12  3fa9c1d2  step 12 made with 2 others, 2…",
        "cleo  syncing           –      –     –  –         taking over step 12",
    ]
