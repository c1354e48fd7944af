"""The log's lines: what they say about two snapshots."""

from __future__ import annotations

import pytest
from monitor.made import EVIL, snapshot, trainer

from tt_cli.monitor.changes import changes, first_words
from tt_cli.swarm.records.snapshot import PeerView


def peer(name: str, **fields: object) -> PeerView:
    return trainer(user=name, peer_id=name, **fields)


ADA, BOB = peer("ada"), peer("bob")
AUX = peer("helper", role="aux")


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ({"peers": [ADA]}, {"peers": [ADA, BOB]}, ["bob bob joined"]),
        ({"peers": [ADA, BOB]}, {"peers": [ADA]}, ["bob bob left"]),
        ({"epoch": 40}, {"epoch": 41, "loss": 5.21}, ["step 41 made: loss 5.210"]),
        ({"epoch": 38}, {"epoch": 41, "loss": None}, ["steps 39 to 41 made"]),
        ({"epoch": 41}, {"epoch": 30}, ["the run went back from step 41 to step 30"]),
        ({}, {"paused": "new data"}, ["the organiser paused the run: new data"]),
        ({"paused": "new data"}, {}, ["the organiser lets the run go on"]),
        (
            {"peers": [ADA, BOB]},
            {"peers": [peer(name, round="round repeated: carla did not come") for name in ("ada", "bob")]},
            ["round repeated: carla did not come (so ada ada and bob bob)"],
        ),
        ({"peers": [ADA]}, {"peers": [peer("ada", round="step 8 made with bob, 200 samples")]}, []),
        ({"peers": [ADA]}, {"peers": [peer("ada", lag=1)]}, []),
        ({"peers": [ADA]}, {"peers": [peer("ada", lag=2)]}, ["ada ada fell 2 steps behind"]),
        ({"peers": [peer("ada", lag=2)]}, {"peers": [ADA]}, ["ada ada caught up"]),
        ({"peers": [AUX]}, {"peers": [peer("helper", role="aux", lag=9)]}, []),
        (
            {"peers": [ADA]},
            {"peers": [peer("ada", digest="77b0aa0011", in_agreement=False)]},
            ["ada ada came to another state than most: 77b0aa00"],
        ),
        ({"peers": [peer("ada", in_agreement=False)]}, {"peers": [ADA]}, ["ada ada agrees with most again"]),
        (
            {"peers": [ADA], "trainers": 3},
            {"peers": [peer("ada", accused_by=2, clipped_by=1)], "trainers": 3},
            ["ada ada made a wrong average, most say"],
        ),
    ],
    ids=range(16),
)
def test_lines(before: dict[str, object], after: dict[str, object], lines: list[str]) -> None:
    assert changes(snapshot(**before), snapshot(**after)) == lines


def test_many_are_counted() -> None:
    crowd = [peer(f"p{number}") for number in range(9)]
    assert changes(snapshot(peers=[]), snapshot(peers=crowd)) == ["p0 p0, p1 p1, p2 p2 and 6 others joined"]


def test_the_first_line() -> None:
    words = first_words(snapshot(epoch=1200, loss=5.21, trainers=2, peers=[ADA, BOB, AUX]))
    assert words == "watching 2 trainers and 1 aux peer at step 1,200, loss 5.210"


def test_no_peer_writes_lines_of_its_own() -> None:
    evil = peer(EVIL, round=EVIL, digest="aa", in_agreement=False, lag=5)
    lines = changes(snapshot(peers=[peer(EVIL)]), snapshot(peers=[evil])) + changes(
        snapshot(peers=[]), snapshot(peers=[evil])
    )
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
