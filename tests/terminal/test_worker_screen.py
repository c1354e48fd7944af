"""The screens of `tt join` and `tt aux-peer`: what events add up to, exact lines, and the fit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from terminal.happened import ID, LAN, LOOPBACK, SIZES, TITLES, TRAINING, made, progress, stepped, swarm

from tt_cli.monitor.views import swarm_view
from tt_cli.supervisor import events as e
from tt_cli.supervisor.peer_state import CURVE, PeerState
from tt_cli.terminal import live_view
from tt_cli.terminal.log_lines import best_address, join_line
from tt_cli.terminal.worker_screen import Screen

AT_START = PeerState(run="emoji", identity=TITLES[1], total_steps=2000)


TRAINING_LINES = f"""\
00:00:00 phase        starting: joining the DHT
00:00:01 choice       micro-batch 16: fastest of 4, 8, 16 on cpu
00:00:02 listening    peer {ID}, {LAN}
00:00:03 phase        syncing: taking over step 11
00:00:05 synchronised state of step 11 from peer …Na2r1C, 34.0 MB in 2.5 s, digest 77b0aa
00:00:06 phase        training: towards step 12
00:00:16 step         12 of 2,000, loss 3.250, 3 peers, 256 samples, 10.4 s, digest 3fa9c1d2
00:00:16 contributed  100 samples of this peer went into step 12
00:00:26 trouble      round repeated: no group formed in time: it is sought again
00:00:30 round        step 13 made with 2 others, 256 samples; refused …badbad (not finite)
00:00:30 step         13 of 2,000, loss –, 3 peers, 256 samples, 13.6 s, digest 3fa9c1d2
00:00:37 progress     90 of 256 samples to step 14; 3 peers; 12.1 samples/s here (34 %); loss 3.500; \
sent 12.1 MB, received 33.4 MB
00:00:38 step         14 of 2,000, loss 3.000, alone, 256 samples, 8.0 s, digest 3fa9c1d2
00:00:39 saved        checkpoint of step 14: /home/anna/step-00000014.safetensors
00:00:40 warning      2 records of another form were left out
00:00:41 phase        leaving: writing a backup
00:00:42 finished     left
"""


def shown(happened: list[e.Event], **options: Any) -> str:
    stream = io.StringIO()
    with Screen("tt join emoji", AT_START, stream=stream, **options) as one:
        for event in happened:
            one.show(event)
    return stream.getvalue()


def test_plain_lines_of_a_training_peer() -> None:
    assert shown(TRAINING) == TRAINING_LINES


def test_inner_steps_are_told_where_there_are_some() -> None:
    local = {"inner_steps": 7, "inner_steps_due": 20, "sent_per_hour": 222_000_000, "received_per_hour": 223_000_000}
    happened = [e.Phase("training", "towards step 12", at=0.0), progress(1.0), progress(31.0, **local)]
    assert "256 samples to step 12, in 4 s; 7 of 20 inner steps here; 3 peers;" in shown(happened)
    assert "sent 12.1 MB, received 33.4 MB, 222 MB up and 223 MB down an hour" in shown(happened)
    screen = "\n".join(drawn(happened, 100, 24, 32.0))
    assert "this peer 12.1 samples/s · 7 of 20 inner steps · 34 % of the swarm · 5,000 samples so far" in screen
    assert "sent 12.1 MB · received 33.4 MB · 222 MB up and 223 MB down an hour" in screen


def test_json_lines_are_the_events() -> None:
    lines = shown(TRAINING[:6], json=True).splitlines()
    assert [e.from_json(line) for line in lines] == TRAINING[:6]


def test_the_way_to_join_is_one_line_that_can_be_pasted() -> None:
    lines = shown([e.Listening(ID, [LOOPBACK, LAN], False, at=2.0)], join_run="emoji").splitlines()
    assert lines[1] == f"00:00:02 join         tt join emoji --peer {LAN}"
    assert "join  " not in shown([e.Listening(ID, [], True, at=2.0)], join_run="emoji")


def test_the_address_that_most_can_reach_is_named() -> None:
    public, name = f"/ip4/203.0.113.7/tcp/1/p2p/{ID}", f"/dns4/aux.example.org/tcp/1/p2p/{ID}"
    addresses = [LOOPBACK, LAN, "/ip4/8.8.8.8/udp/1/quic", "/ip4/8.8.8.8/tcp/1"]
    assert best_address([*addresses, public, name]) == name
    assert best_address(addresses) == "/ip4/8.8.8.8/tcp/1"
    assert best_address([LOOPBACK, LAN]) == LAN
    assert join_line("emoji", [LOOPBACK]) == f"tt join emoji --peer {LOOPBACK}"
    assert join_line("my runs/a.toml", [LAN]) == f"tt join 'my runs/a.toml' --peer {LAN}"
    assert join_line("emoji", []) is None


def test_plain_lines_of_an_auxiliary_peer_come_with_news_alone() -> None:
    happened: list[e.Event] = [
        e.Phase("serving", "", at=0.0),
        e.Snapshot(swarm(0, 0, loss=None, digest="", samples_per_second=0.0), at=1.0),
        e.Snapshot(swarm(3), at=2.0),
        e.Snapshot(swarm(3, samples=200), at=3.0),
        e.Snapshot(swarm(4, loss=2.5), at=4.0),
        e.Snapshot(swarm(4, 1, loss=2.5), at=5.0),
    ]
    assert shown(happened) == (
        "00:00:00 phase        serving\n"
        "00:00:01 swarm        step 0 of 2,000, loss –, 0 trainers, 0.00 samples/s, digest –\n"
        "00:00:02 swarm        step 3 of 2,000, loss 3.000, 2 trainers, 24.0 samples/s, digest aa\n"
        "00:00:04 swarm        step 4 of 2,000, loss 2.500, 2 trainers, 24.0 samples/s, digest aa\n"
        "00:00:05 swarm        step 4 of 2,000, loss 2.500, 1 trainer, 24.0 samples/s, digest aa\n"
    )


def test_a_failure_is_left_to_the_command_line() -> None:
    assert shown([e.Failure("the port is taken", at=1.0)]) == ""


def test_no_message_can_write_to_the_terminal() -> None:
    evil = "\x1b[2J\x9b1m\nowned"
    happened: list[e.Event] = [
        e.Log(evil, at=0.0),
        e.Phase(evil, evil, at=0.0),
        e.Choice(evil, evil, evil, at=0.0),
        made(0.0, 1, "dropped", words=evil),
        made(0.0, 1, rejected={evil: evil}),
        e.Synchronised(1, evil, evil, 1.0, 1, at=0.0),
        e.Saved(1, evil, at=0.0),
        e.Trouble(evil, evil, evil, at=0.0),
        e.Finished(evil, at=0.0),
    ]
    lines = shown(happened).split("\n")
    assert len(lines) == len(happened) + 1
    assert all(line.isprintable() for line in lines)


def test_a_stream_of_few_characters_gets_question_marks() -> None:
    raw = io.BytesIO()
    with Screen("t", AT_START, stream=io.TextIOWrapper(raw, encoding="ascii")) as one:
        one.show(e.Log("Zoë", at=0.0))
    assert raw.getvalue() == b"00:00:00 log          Zo?\n"


@pytest.mark.parametrize("form", ["plain", "json"])
def test_a_full_disk_that_takes_no_line_ends_nothing(form: str) -> None:
    """Nor the threads beside the peer that tell a line: of its pass, of the web page."""
    one = Screen("t", AT_START, **{form: True})
    with contextlib.suppress(OSError), open("/dev/full", "w") as one.stream:  # closing it flushes once more
        for event in TRAINING:
            one.show(event)
    assert one.state.saved_step == 14


def test_a_disk_that_has_room_again_has_no_half_of_a_line(tmp_path: Path) -> None:
    with open(tmp_path / "events", "w") as file, Screen("t", AT_START, stream=file, json=True) as one:
        with contextlib.suppress(OSError), open("/dev/full", "w") as one.stream:
            one.show(e.Log("lost" * 1000))
        one.stream = file
        one.show(e.Log("there"))
    (line,) = (tmp_path / "events").read_text().splitlines()
    assert json.loads(line)["message"] == "there"


@pytest.mark.parametrize("form", ["plain", "json"])
@pytest.mark.parametrize("opened", [os.pipe, pty.openpty])
def test_lines_that_nobody_reads_hold_nobody_up(
    opened: Callable[[], tuple[int, int]], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `| less`; who reads again has the first of them at once, and how many are missing."""
    monkeypatch.setattr(live_view, "PATIENCE", 0.0)
    reading, writing = opened()
    with (
        open(reading) as out,
        open(writing, "w") as stream,
        Screen("t", AT_START, stream=stream, **{form: True}) as one,
    ):

        def tell() -> None:
            for number in range(7000):
                one.show(e.Log(f"line {number} {'ü' * 40}"))

        def read() -> None:
            while not lines or " lines left out" not in lines[-1]:
                lines.append(out.readline())

        lines = list[str]()
        telling, reads = (threading.Thread(target=work, daemon=True) for work in (tell, read))
        telling.start()
        telling.join(60.0)
        assert not telling.is_alive(), "it waits for a reader"
        monkeypatch.setattr(live_view, "PATIENCE", 60.0)
        reads.start()
        assert select.select([], [stream], [], 60.0)[1]
        one.show(e.Log("one more"))
        reads.join(60.0)
        assert not reads.is_alive(), "it leaves the reader waiting"
    *seen, last = lines
    assert all(f"line {number} " in line for number, line in enumerate(seen))
    assert len(seen) + int(re.split(r"\D", last.replace(",", "").partition(" lines left")[0])[-1]) == 7001


def drawn(happened: list[e.Event], width: int, height: int, now: float, **options: Any) -> list[str]:
    """The live view after these events."""
    screen = Screen(TITLES[0], AT_START, stream=io.StringIO(), **options)
    for event in happened:
        screen.show(event)
    return [line.plain.rstrip() for line in screen.frame(width, height, now)]


def applied(happened: list[e.Event]) -> PeerState:
    state = PeerState(run="", identity="", total_steps=2000)
    for event in happened:
        state.apply(event)
    return state


def test_what_the_events_add_up_to() -> None:
    view = applied(TRAINING[:-2])
    assert (view.step, view.digest, view.saved_step, view.peer_id) == (14, "3fa9c1d2aa55", 14, ID)
    assert view.curve == [(12, 3.25), (14, 3.0)]
    assert list(view.step_seconds) == pytest.approx([10.4, 13.6, 8.0])
    assert view.steps_seconds_left() == pytest.approx((2000 - 14) * 32 / 3)
    assert view.seconds_to_step(40.0) is None  # its last progress gave no time
    assert not view.ended and applied(TRAINING).ended


def test_the_time_to_the_next_step_runs_down() -> None:
    view = applied([progress(100.0, eta=10.0)])
    assert [view.seconds_to_step(now) for now in (100.0, 104.0, 120.0, 90.0)] == [10.0, 6.0, 0.0, 10.0]


def test_the_step_being_made_is_the_last_of_the_curve() -> None:
    view = applied([stepped(1.0, 12, 3.25), progress(2.0, epoch=12, loss=3.0)])
    assert view.losses() == [(12, 3.25), (13, 3.0)]
    view.apply(stepped(3.0, 13, 2.9))
    assert view.losses() == [(12, 3.25), (13, 2.9)]


def test_a_worker_started_again_is_not_one_long_step() -> None:
    view = applied([stepped(1.0, 1), e.Phase("starting", at=500.0), e.Phase("training", at=900.0), stepped(905.0, 2)])
    assert list(view.step_seconds) == [5.0]


def test_a_clock_that_is_set_back_is_no_step_of_less_than_nothing() -> None:
    view = applied([stepped(5000.0, 1), stepped(5004.0, 2), stepped(1408.0, 3)])
    assert (view.step_took, list(view.step_seconds)) == (None, [4.0])
    view.apply(stepped(1413.0, 4))
    assert list(view.step_seconds) == [4.0, 5.0]


def test_a_run_that_was_taken_back_shows_the_loss_of_the_steps_made_since() -> None:
    """Else a screen would tell the loss of before the organiser's order until that step is made again, days later."""
    view = applied([*(stepped(float(at), at, 9.0 / at) for at in range(1, 8)), stepped(9.0, 4, 2.0)])
    assert view.losses() == [(1, 9.0), (2, 4.5), (3, 3.0), (4, 2.0)]
    told = applied([e.Snapshot(swarm(6, loss=1.0), at=1.0), e.Snapshot(swarm(3, loss=5.0, history=[]), at=2.0)])
    assert told.losses() == [(1, 9.0), (2, 4.5), (3, 3.0)]


def test_an_endless_curve_is_thinned_where_it_is_old() -> None:
    view = applied([stepped(float(i), i) for i in range(1, 3 * CURVE)])
    steps = [step for step, _ in view.curve]
    assert len(steps) <= CURVE and steps == sorted(set(steps))
    assert steps[0] < 4 and steps[-100:] == list(range(3 * CURVE - 100, 3 * CURVE))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("peers", [0, 3, 60])
def test_the_view_of_an_auxiliary_peer_fits(width: int, height: int, peers: int) -> None:
    happened = [e.Snapshot(swarm(40, peers), at=1.0), *[e.Log("陈" * 200, at=1.0)] * 20]
    lines = drawn(happened, width, height, 50.0, draw_swarm=swarm_view)
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width
    if height > 12:
        assert sum("anna" in line for line in lines) == min(peers, 3) or peers > 3


def test_the_view_of_a_training_peer() -> None:
    assert drawn(TRAINING[:13], 80, 24, 21.0) == [
        "tt join emoji                                                     emoji-1a2b3c4d",
        "training for 4 s · towards step 13",
        "",
        "loss      ▁█  last 3.500  min 3.250  max 3.500",
        "next step ━━━━━━━━━━╸─────────────────── 90 of 256 samples · in 3 s",
        "run       ────────────────────────────── 12 of 2,000 steps · 5 h 44 min left",
        "",
        "swarm     3 peers · 35.2 samples/s",
        "this peer 12.1 samples/s · 34 % of the swarm · 5,000 samples so far",
        "traffic   sent 12.1 MB · received 33.4 MB",
        "averaging step 12 made with 2 others, 256 samples · 3.5 s",
        "weights   digest 3fa9c1d2 · peer …9A2r1C",
        "",
        "00:00:01  micro-batch 16: fastest of 4, 8, 16 on cpu",
        "00:00:05  state of step 11 from peer …Na2r1C, 34.0 MB in 2.5 s, digest 77b0aa",
        "00:00:16  100 samples of this peer went into step 12",
        "",
        "Ctrl-C leaves cleanly; again at once",
    ]


def on_a_terminal(happened: list[e.Event]) -> str:
    """What a Screen writes to a real pseudo-terminal."""
    master, slave = pty.openpty()
    read: list[bytes] = []

    def drain() -> None:
        with contextlib.suppress(OSError):  # what Linux says when the other end is closed
            while data := os.read(master, 1 << 16):
                read.append(data)

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        with (
            open(slave, "w", encoding="utf-8") as stream,
            Screen("tt join emoji", AT_START, join_run="emoji", stream=stream) as one,
        ):
            for event in happened:
                one.show(event)
    finally:
        reader.join()
        os.close(master)
    return b"".join(read).decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_a_live_view_and_its_cursor_back() -> None:
    text = on_a_terminal([TRAINING[2], TRAINING[5], progress(7.0)])
    assert "next step" in text and "training" in text
    assert f"tt join emoji --peer {LAN}" in text  # unbroken, to be copied
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.usefixtures("terminal")
def test_a_worker_started_again_and_again_leaves_room_for_the_view() -> None:
    text = on_a_terminal([*[TRAINING[2]] * 30, TRAINING[5], progress(7.0)])
    assert "this peer" in text.rpartition(f"--peer {LAN}")[2]


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("TERM", "dumb")
    assert on_a_terminal(TRAINING[:2]) == "".join(TRAINING_LINES.splitlines(keepends=True)[:2]).replace("\n", "\r\n")


def test_forced_plain_lines_have_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown(TRAINING, plain=True) == TRAINING_LINES
    assert json.loads(shown(TRAINING[:1], json=True))["kind"] == "phase"


PAUSED: list[e.Event] = [
    *TRAINING[:8],
    e.Phase("leaving", "to pause until 23:00 (--hours 23:00-07:00)", at=20.0),
    e.Saved(12, "/home/anna/step-00000012.safetensors", at=21.0),
    e.Phase("paused", "until 23:00 (--hours 23:00-07:00)", 400.0, at=22.0),
]


def test_a_paused_peer_says_why_and_until_when_and_shows_no_speed() -> None:
    lines = drawn(PAUSED, 80, 24, 82.0)
    assert lines[1] == "paused for 1 min 00 s · until 23:00 (--hours 23:00-07:00)"
    assert not [line for line in lines if "samples/s" in line or " · in " in line]
    assert shown(PAUSED).splitlines()[-1] == "00:00:22 phase        paused: until 23:00 (--hours 23:00-07:00)"
    view = applied([*PAUSED, e.Phase("training", "towards step 13", at=90.0), progress(91.0)])
    assert view.samples is not None and list(view.step_seconds) == []


DOWNLOAD: list[e.Event] = [
    e.Phase("syncing", "taking over step 11", at=3.0),
    e.Download(12_000_000, 34_000_000, 3, 5_000_000.0, 4.4, at=4.0),
    e.Download(17_000_000, 34_000_000, 0, 0.0, None, at=5.0),
    e.Download(30_000_000, 34_000_000, 1, 1e6, 4.0, at=40.0),
]


def test_a_state_on_its_way_has_a_bar_and_now_and_then_a_line() -> None:
    lines = drawn(DOWNLOAD[:2], 100, 24, 5.0)
    assert "state     ━━━" in lines[4]
    assert lines[4].endswith(" 12.0 MB of 34.0 MB from 3 donors at 5.0 MB/s, 4 s left")
    assert shown(DOWNLOAD).splitlines()[1:] == [
        "00:00:04 download     12.0 MB of 34.0 MB from 3 donors at 5.0 MB/s, 4 s left",
        "00:00:40 download     30.0 MB of 34.0 MB from 1 donor at 1.0 MB/s, 4 s left",
    ]
    taken = e.Synchronised(11, "QmWjTgY4Hjbz8pQ4kYNa2r1C", "77b0aa", 2.5, 34_000_000, chunks=33, at=41.0)
    assert applied([*DOWNLOAD, taken]).download is None
    assert applied([*DOWNLOAD, e.Phase("waiting", "for a donor", at=41.0)]).download is None


TROUBLES: list[e.Event] = [
    e.Trouble("clock", "this machine's clock is 4 s ahead", "set it by NTP", at=1.0),
    e.Trouble("state download", "peer …2r1C went away", at=2.0),
    e.Trouble("clock", "this machine's clock is 5 s ahead", "set it by NTP", at=3.0),
]


def test_troubles_are_told_and_counted() -> None:
    assert shown(TROUBLES).splitlines()[1:] == [
        "00:00:02 trouble      peer …2r1C went away",
        "00:00:03 trouble      this machine's clock is 5 s ahead: set it by NTP",
    ]
    assert "troubles  clock 2, state download 1" in drawn(TROUBLES, 80, 24, 5.0)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(
    "happened",
    [*(TRAINING[:count] for count in (0, 1, 6, 8, 17)), TRAINING, PAUSED, DOWNLOAD, [*TRAINING, *TROUBLES]],
    ids=range(9),
)
def test_the_view_of_a_training_peer_fits(happened: list[e.Event], width: int, height: int) -> None:
    lines = drawn(happened, width, height, 50.0)
    assert lines[-1].startswith("Ctrl-C leaves")
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= width
