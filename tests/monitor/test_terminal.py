"""The monitor's live view and its text: what they say, and that they fit."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from rich.cells import cell_len

from tt_cli.monitor import PeerView, Snapshot
from tt_cli.monitor.terminal import Curves, draw, follow, one_truth, plain_text

TRAINER = PeerView(
    peer_id="12D3KooWQwEw2y9KSEWsKbqcYQDtxHSbBqvzhdT6Sr2ncf9A2r1C",
    user="anna",
    role="trainer",
    device="NVIDIA H200",
    client_mode=False,
    epoch=7,
    lag=0,
    samples_per_second=12.14,
    share=0.75,
    samples=60,
    total_samples=9000,
    loss=3.0,
    round="step 7 made with 2 others, 256 samples",
    digest="3fa9c1d2aa",
    in_agreement=True,
    resynced_chunks=0,
    age_s=4.0,
)
EVIL = "\x1b[2J\x9b1m\nowned"


def trainer(**changes: object) -> PeerView:
    return PeerView(**{**vars(TRAINER), **changes})  # type: ignore[arg-type]


def snapshot(**changes: object) -> Snapshot:
    usual = {
        "run": "emoji",
        "identity": "emoji-1a2b3c4d",
        "time": 1_000_000.0,
        "epoch": 7,
        "total_steps": 2000,
        "target_batch_size": 256,
        "samples": 100,
        "samples_per_second": 16.2,
        "eta_s": 9.6,
        "loss": 3.214,
        "digest": "3fa9c1d2aa",
        "holders": 1,
        "agreeing": 1,
        "resynced_chunks": 0,
        "trainers": 1,
        "peers": [TRAINER],
        "history": [(step, 7.0 - step, 10.0 * step) for step in range(1, 7)],
    }
    return Snapshot(**{**usual, **changes})  # type: ignore[arg-type]


def crowd(count: int) -> list[PeerView]:
    return [
        trainer(peer_id=f"QmWjTgY4Hjbz8pQ4kYN{i:05d}", user=["陈" * 40, "anna", ""][i % 3], lag=i * 10**6)
        for i in range(count)
    ]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 12), (20, 6), (100, 10)])
@pytest.mark.parametrize("peers", [0, 1, 5, 60])
def test_the_live_view_fits(width: int, height: int, peers: int) -> None:
    seen = snapshot(peers=crowd(peers), trainers=peers, samples=10**12, identity="e" * 50)
    lines = draw(seen, Curves().add(seen), width, height, now=seen.time + 1)
    assert len(lines) <= height
    assert max(cell_len(line.plain) for line in lines) <= width
    assert not any("\n" in line.plain for line in lines)


def test_the_live_view_of_a_small_swarm() -> None:
    helper = trainer(user="", role="aux", device="", samples_per_second=0.0, share=0.0, round="")
    wrong = {"lag": 2, "digest": "77b0aa0011", "in_agreement": False}
    stray = trainer(user="ben", age_s=90.0, share=0.25, device="cpu", **wrong)
    seen = snapshot(peers=[TRAINER, stray, helper], trainers=2, holders=3, agreeing=2)
    lines = [line.plain.rstrip() for line in draw(seen, Curves().add(seen), 120, 24, now=seen.time + 2)]
    assert lines[0] == "tt monitor emoji" + " " * 90 + "emoji-1a2b3c4d"
    assert lines[2] == "one truth: 2 of 3 peers hold 3fa9c1d2; ben …9A2r1C holds 77b0aa00"
    assert lines[3] == "swarm     2 trainers, 1 aux peer · 16.2 samples/s · loss 3.214 · digest 3fa9c1d2"
    assert lines[4].startswith("next step ━") and lines[4].endswith("─ 100 of 256 samples · in 10 s")
    assert lines[5].endswith("─ 7 of 2,000 steps · 8 h 44 min left")
    assert lines[7].startswith("  6.000 ⠉⠑")
    assert " ".join(lines[-6].split()) == "peer role device samples/s share lag state last round age"
    assert lines[-5].split("  ")[:2] == ["anna …9A2r1C", "trainer"]
    assert lines[-5].endswith("12.1   75 %    0  same     step 7 made with 2 others, 256 samples         4 s")
    assert " 25 %    2  differs  " in lines[-4] and lines[-4].endswith("1 min 30 s")
    assert lines[-3].split() == ["…9A2r1C", "aux", "–", "–", "0", "same", "4", "s"]
    assert lines[-1] == "asked 2 s ago · Ctrl-C ends"


def test_peers_that_do_not_fit_are_counted() -> None:
    peers = [trainer(user="", peer_id=f"QmWjTgY4Hjbz8pQ4kYN{i:05d}") for i in range(60)]
    seen = snapshot(peers=peers, trainers=60)
    text = "\n".join(line.plain for line in draw(seen, [], 80, 24, now=seen.time))
    shown = text.count("…N0")
    assert shown > 5 and f"and {60 - shown} more peers" in text


def test_an_empty_swarm_is_said_to_be_empty() -> None:
    seen = snapshot(peers=[], trainers=0, history=[], loss=None, eta_s=None, samples_per_second=0.0)
    text = "\n".join(line.plain for line in draw(seen, [], 80, 24, now=seen.time))
    assert "no peer trains now" in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"peers": []}, ""),
        ({"peers": [trainer(digest="")]}, ""),
        ({"peers": [TRAINER] * 5, "holders": 5, "agreeing": 5}, "one truth: 5 of 5 peers hold 3fa9c1d2"),
        (
            {"peers": [TRAINER], "resynced_chunks": 1},
            "one truth: 1 of 1 peer holds 3fa9c1d2; 1 chunk resynced",
        ),
        (
            {"peers": [trainer(in_agreement=False)] * 5, "holders": 5, "agreeing": 0, "digest": ""},
            "one truth: no state has a majority among 5 peers" + "; anna …9A2r1C holds 3fa9c1d2" * 3 + " and 2 more",
        ),
    ],
    ids=range(5),
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
        "  anna …9A2r1C: trainer, NVIDIA H200, 12.1 samples/s (75 %), in step, "
        "step 7 made with 2 others, 256 samples, 4 s ago",
        "  …9A2r1C: trainer, cpu, 12.1 samples/s (25 %), 1 step behind, state differs, 2 chunks resynced, 4 s ago",
        "  tt …9A2r1C: aux, in step, 4 s ago",
    ]


def test_no_peer_can_write_to_the_terminal() -> None:
    evil = trainer(user=EVIL, device=EVIL, round=EVIL, peer_id=EVIL)
    seen = snapshot(peers=[evil])
    shown = plain_text(seen).split("\n")
    shown += [line.plain for line in draw(seen, [], 200, 50, now=seen.time)]
    assert len(plain_text(seen).split("\n")) == 2
    assert all(line.isprintable() for line in shown)


def test_the_curve_keeps_what_went_by() -> None:
    curves = Curves()
    curves.add(snapshot(epoch=1, loss=6.0, history=[]))
    curves.add(snapshot(epoch=3, loss=4.0, history=[]))
    assert curves.add(snapshot(epoch=3, loss=4.5, history=[(2, 5.0, 0.0), (3, 4.25, 0.0)])) == [
        (1, 6.0),
        (2, 5.0),
        (3, 4.25),
    ]
    assert Curves().add(snapshot(epoch=0, loss=9.0, history=[])) == []


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
        ]
    )
    stream = io.StringIO()

    def look() -> Snapshot:
        for moment in moments:
            return moment
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(look, stream, "json", interval=0.0, watch=True)
    times = [json.loads(line)["time"] - 1_000_000 for line in stream.getvalue().splitlines()]
    assert times == [0, 2, 3, 33]
