"""The monitor's text and JSON: what they say."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from monitor.made import EVIL, TRAINER, snapshot, trainer

from tt_cli.errors import TTError
from tt_cli.monitor.snapshot_text import follow, one_truth, plain_text
from tt_cli.monitor.views import figures
from tt_cli.swarm.records.snapshot import SwarmSnapshot


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"peers": []}, ""),
        ({"peers": [trainer(digest="")]}, ""),
        ({"peers": [TRAINER] * 5, "holders": 5, "agreeing": 5}, "one truth: 5 of 5 peers hold 3fa9c1d2"),
        ({"peers": [TRAINER], "resynced_chunks": 1}, "one truth: 1 of 1 peer holds 3fa9c1d2; 1 chunk resynced"),
        (
            {"peers": [trainer(user="ben", clipped_by=1)], "trainers": 2},
            "one truth: 1 of 1 peer holds 3fa9c1d2; ben …9A2r1C is clipped again and again",
        ),
        (
            {"peers": [trainer(user="ben", accused_by=2, clipped_by=1)], "trainers": 3},
            "one truth: 1 of 1 peer holds 3fa9c1d2; ben …9A2r1C made a wrong average",
        ),
        (
            {"peers": [trainer(user="ben", accused_by=1, clipped_by=1)], "trainers": 4},
            "one truth: 1 of 1 peer holds 3fa9c1d2",
        ),
        (
            {"peers": [trainer(in_agreement=False)] * 5, "holders": 5, "agreeing": 0, "digest": ""},
            "one truth: no state has a majority among 5 peers" + "; anna …9A2r1C holds 3fa9c1d2" * 3 + " and 2 more",
        ),
    ],
    ids=range(8),
)
def test_the_line_of_the_one_truth(changes: dict[str, object], line: str) -> None:
    assert one_truth(snapshot(**changes)).plain == line


def test_text_of_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"lag": 1, "digest": "77b0aa0011", "in_agreement": False}
    stray = trainer(user="", device="cpu", share=0.25, round="", resynced_chunks=2, **wrong)
    helper = trainer(user="tt", role="aux", device="", round="")
    lines = plain_text(snapshot(peers=[TRAINER, stray, helper])).split("\n")
    assert lines[0][8:] == (
        " emoji-1a2b3c4d: step 7 of 2,000, 100 of 256 samples to the next, next step in 10 s, "
        "end in 8 h 44 min, loss 3.214, 1 trainer, 16.2 samples/s, "
        "one truth: 1 of 1 peer holds 3fa9c1d2; …9A2r1C holds 77b0aa00"
    )
    assert lines[1:] == [
        "  anna …9A2r1C: trainer, NVIDIA H200, 12.1 samples/s (75 %), in step, version 0.1.0, step 7, samples 60, "
        "in all 9,000, loss 3.000, digest 3fa9c1d2, agrees yes, step 7 made with 2 others, 256 samples, 4 s ago",
        "  …9A2r1C: trainer, cpu, 12.1 samples/s (25 %), differs: holds 77b0aa00, 1 step behind, version 0.1.0, "
        "step 7, samples 60, in all 9,000, loss 3.000, digest 77b0aa00, resynced 2, 4 s ago",
        "  tt …9A2r1C: aux, in step, version 0.1.0, step 7, samples 60, in all 9,000, loss 3.000, digest 3fa9c1d2, "
        "agrees yes, 4 s ago",
    ]


def test_a_text_says_that_names_are_self_given() -> None:
    first, second = plain_text(snapshot(names_checked=False)).split("\n")
    assert first.endswith(", names are self-given") and second.startswith("  ~anna …9A2r1C: trainer")


def test_a_pause_is_told_in_text_and_in_figures() -> None:
    paused = snapshot(paused=EVIL, eta_s=None)
    assert "emoji-1a2b3c4d: the organiser paused the run: ?[2J?1m owned, step 7 of" in plain_text(paused)
    assert "100 of 256 samples · paused" in "\n".join(line.plain for line in figures(paused, "", 100))


@pytest.mark.parametrize(
    ("changes", "words"), [({"epoch": 2000}, "all steps made"), ({"eta_s": None}, "nobody computes"), ({}, "in 10 s")]
)
def test_what_comes_next_is_not_cut_off_though_there_are_inner_steps(changes: dict[str, object], words: str) -> None:
    local = snapshot(inner_steps=210, inner_steps_due=600, **changes)
    assert figures(local, "", 80)[1].plain.endswith(f"samples · 210 of 600 inner steps · {words}")


def test_no_peer_can_write_to_the_terminal() -> None:
    evil = trainer(user=EVIL, device=EVIL, round=EVIL, peer_id=EVIL)
    seen = snapshot(peers=[evil])
    shown = plain_text(seen).split("\n")
    assert len(shown) == 2
    assert all(line.isprintable() for line in shown)


def test_without_watch_one_snapshot_is_printed() -> None:
    stream = io.StringIO()
    follow(snapshot, stream, "json", interval=0.1, watch=False)
    assert json.loads(stream.getvalue()) == snapshot().to_json()
    assert stream.getvalue().count("\n") == 1


def test_watching_prints_changes_and_after_half_a_minute() -> None:
    moments = itertools.chain(
        [
            snapshot(),
            snapshot(samples=101, time=1_000_001.0),  # only progress
            snapshot(epoch=8, time=1_000_002.0),
            snapshot(epoch=8, time=1_000_003.0, peers=[trainer(in_agreement=False)]),
            snapshot(epoch=8, time=1_000_004.0, peers=[trainer(in_agreement=False)]),
            snapshot(epoch=8, time=1_000_033.0, peers=[trainer(in_agreement=False)]),
            snapshot(epoch=8, time=1_000_034.0, peers=[trainer(in_agreement=False)], paused="new data"),
        ]
    )
    stream = io.StringIO()

    def look() -> SwarmSnapshot:
        for moment in moments:
            return moment
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(look, stream, "json", interval=0.0, watch=True)
    times = [json.loads(line)["time"] - 1_000_000 for line in stream.getvalue().splitlines()]
    assert times == [0, 2, 3, 33, 34]


def test_watching_goes_on_after_a_look_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """The page is started anew, or the line is down for some seconds: a log of weeks does not end with it."""
    late = snapshot(epoch=8)
    away = TTError("it does not answer")
    looks: list[SwarmSnapshot | BaseException] = [snapshot(), away, away, late, KeyboardInterrupt()]

    def look() -> SwarmSnapshot:
        if isinstance(seen := looks.pop(0), BaseException):
            raise seen
        return seen

    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        follow(look, stream, "json", interval=0.0, watch=True)
    assert [json.loads(line)["epoch"] for line in stream.getvalue().splitlines()] == [7, 8]
    assert capsys.readouterr().err == "tt: it does not answer; asking again\n"

    looks.append(away)
    with pytest.raises(TTError):  # at the start somebody is there to read it
        follow(look, stream, "json", interval=0.0, watch=True)


@pytest.mark.parametrize("width", [60, 120])
def test_inner_steps_and_bytes_an_hour_are_told_where_there_are_some(width: int) -> None:
    assert "inner step" not in plain_text(snapshot()) + str(figures(snapshot(), "", width))
    moving = {"sent_per_hour": 220_000_000, "received_per_hour": 230_000_000, "inner_steps": 35}
    peers = [trainer(**moving), trainer(**moving), trainer(role="aux")]
    local = snapshot(peers=peers, inner_steps=70, inner_steps_due=200)
    assert "70 of 200 inner steps" in plain_text(local) and "up an hour 220 MB" in plain_text(local)
    screen = "\n".join(line.plain for line in figures(local, "", width))
    assert " · 70 of 200 inner steps" in screen and "…" not in screen.partition("one truth")[0]
    assert "traffic   220 MB up and 230 MB down an hour by each peer" in screen
