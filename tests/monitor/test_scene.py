"""What is said of peers, of the swarm's work, of contributions, and of a swarm that does not answer."""

from __future__ import annotations

import pytest
from monitor.made import EVIL, TRAINER, snapshot, trainer

from tt_cli.monitor.peer_tables import LEADER_COLUMNS, PEER_COLUMNS, leader_rows, peer_rows
from tt_cli.monitor.scene import Scene, flops_words, leaders_now, middle_speed, remarks
from tt_cli.swarm.records.snapshot import PeerView
from tt_cli.terminal.table import row_line, widths
from tt_cli.web.schemas import Leader

NOW = 1_000_000.0


def scene(**changes: object) -> Scene:
    usual = {"run": "emoji", "identity": "emoji-1a2b3c4d", "now": NOW, "asked_since": NOW - 12, "empty": False}
    return Scene(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (TRAINER, []),
        (trainer(lag=3), ["3 steps behind"]),
        (trainer(role="aux", lag=3, samples_per_second=0.0), []),
        (trainer(in_agreement=False, digest="77b0aa0011"), ["differs: holds 77b0aa00"]),
        (trainer(digest="", in_agreement=False), ["has no state yet"]),
        (trainer(clipped_by=1), ["clipped, say 1 peer"]),
        (trainer(slow_by=1), ["holds others up, say 1 peer"]),
        (trainer(slow_by=3), ["left out: holds others up, say 3 peers"]),
        (trainer(accused_by=2), ["made a wrong average, say 2 peers"]),
        (trainer(accused_by=1), ["accused by 1 peer"]),
        (trainer(samples_per_second=2.0), ["slow"]),
        (trainer(samples_per_second=0.0), ["computes nothing now"]),
        (trainer(age_s=75.0), ["silent for 1 min 15 s"]),
        (trainer(lag=1, clipped_by=4), ["clipped, say 4 peers", "1 step behind"]),
    ],
)
def test_what_is_not_as_it_should_be_is_said_in_words(peer: PeerView, words: list[str]) -> None:
    assert remarks(peer, trainers=4, middle=10.0) == words


def test_the_speed_in_the_middle_is_of_those_who_compute() -> None:
    peers = [trainer(samples_per_second=speed) for speed in (0.0, 2.0, 100.0, 3.0)]
    assert middle_speed(snapshot(peers=peers)) == 3.0
    assert middle_speed(snapshot(peers=[])) == 0.0


@pytest.mark.parametrize(
    ("flops", "words"),
    [
        (None, ""),
        (3.8e9, "3.80 GFLOP/s"),
        (9.999e11, "1.00 TFLOP/s"),
        (1.21e13, "12.1 TFLOP/s"),
        (2e15, "2.00 PFLOP/s"),
    ],
)
def test_floating_point_operations_in_words(flops: float | None, words: str) -> None:
    assert flops_words(flops) == words


def test_the_work_of_the_swarm_is_its_samples_times_the_models_operations() -> None:
    assert scene(snapshot=snapshot(samples_per_second=20.0), flops_per_sample=10**12).flops == 2e13


def test_without_an_aux_peers_records_the_leaders_are_those_who_are_here() -> None:
    peers = [
        trainer(user="ada", total_samples=100, age_s=5.0),
        trainer(user="ada", total_samples=200, age_s=1.0),
        trainer(user="", total_samples=100),
        trainer(user="helper", role="aux", total_samples=10**9),
    ]
    first, second = leaders_now(snapshot(peers=peers, time=NOW))
    assert (first.user, first.samples, first.seconds, first.peers, first.share) == ("ada", 300, 0.0, 2, 0.75)
    assert first.last_seen == NOW - 1.0
    assert second.user == TRAINER.peer_id
    assert [row.name for row in leader_rows([first, second], NOW)] == ["ada", "…9A2r1C"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"now": NOW - 11}, ""),
        ({}, "looking for peers (the DHT); asking since 12 s"),
        ({"trouble": "it broke"}, "it broke; asking since 12 s"),
        (
            {"snapshot": snapshot(peers=[])},
            "no peer trains: nobody has published anything for this run; asking since 12 s",
        ),
        ({"snapshot": snapshot(time=NOW - 9)}, ""),
        ({"snapshot": snapshot(time=NOW - 9, paused="new data")}, "the organiser paused the run: new data"),
        ({"snapshot": snapshot(time=NOW - 11)}, "no peer answers since 11 s; last seen: 1 peer at step 7, "),
        ({"snapshot": snapshot(time=NOW - 1), "empty": True}, "no peer answers since 1 s; last seen: 1 peer"),
        ({"snapshot": snapshot(time=NOW - 1), "trouble": "it broke"}, "no peer answers since 1 s; last seen"),
    ],
    ids=range(9),
)
def test_a_swarm_that_does_not_answer_is_told(changes: dict[str, object], words: str) -> None:
    alarm = scene(source="the DHT", **changes).alarm(patience=10.0)
    assert alarm.startswith(words) and bool(alarm) == bool(words)


def test_what_stays_on_the_terminal() -> None:
    seen = scene(snapshot=snapshot())
    assert seen.summary() == "emoji-1a2b3c4d: step 7, loss 3.214, 1 trainer; watched for 12 s"
    assert scene().summary() == "emoji-1a2b3c4d: no peer was seen; watched for 12 s"


def test_the_leaderboard_of_a_small_terminal_cuts_no_number() -> None:
    leader = Leader(user="ada", samples=10**9 - 1, seconds=7e6, peers=12, share=0.5, last_seen=NOW - 648)
    (row,) = leader_rows([leader], NOW)
    line = row_line(LEADER_COLUMNS, widths(LEADER_COLUMNS, 79), row).plain
    assert " ".join(line.split()) == "1 ada 999,999,999 81 d 0 h 50 % 12 10 min 48 s"


@pytest.mark.parametrize("width", [1, 14, 20, 40, 80, 120, 200, 400])
def test_rows_fit_and_hostile_text_stays_in_its_cell(width: int) -> None:
    peers = [TRAINER, trainer(user=EVIL, device=EVIL, round=EVIL, peer_id=EVIL), trainer(user="陈" * 40)]
    for row in peer_rows(snapshot(peers=peers)):
        line = row_line(PEER_COLUMNS, widths(PEER_COLUMNS, width), row)
        assert line.cell_len <= max(width, 14)
        assert line.plain.isprintable()


def test_the_state_of_a_peer_is_among_what_narrow_terminals_show() -> None:
    assert [PEER_COLUMNS[i].title for i in widths(PEER_COLUMNS, 40)] == ["peer", "samples/s", "state"]
    shown = ["peer", "samples/s", "share", "lag", "link", "state"]
    assert [PEER_COLUMNS[i].title for i in widths(PEER_COLUMNS, 80)] == shown
    assert [PEER_COLUMNS[i].title for i in widths(PEER_COLUMNS, 200)][-2:] == ["last round", "seen"]
    assert len(widths(PEER_COLUMNS, 500)) == len(PEER_COLUMNS)
