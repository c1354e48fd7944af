"""What is known of a peer: what its events add up to, the file that keeps it, and how it is shown."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from tt_cli.supervisor import events as e
from tt_cli.supervisor.household.limits import Origin
from tt_cli.supervisor.peer_state import Counted, PeerState, Said, read_status
from tt_cli.supervisor.slot import SeenSlot, Slot
from tt_cli.terminal.status_lines import status_lines

NOW = 1_000_000.0
FOLDER = Path("/home/anna/runs/emoji-1a2b3c4d")


def progress(at: float, **changes: object) -> e.Progress:
    usual = e.Progress(11, 100, 256, 3, 5000, 12.14, 35.2, 0.345, 4.4, 3.5, 1_000_000, 2_000_000, at=at)
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


def folded(*happened: e.Event) -> PeerState:
    status = PeerState(run="emoji", identity="emoji-1a2b3c4d", total_steps=600, version="0.2")
    status.started, status.pid, status.log = NOW - 7500, 4711, "/home/anna/peer.log"
    for event in happened:
        status.apply(event)
    return status


TRAINING: tuple[e.Event, ...] = (
    e.Phase("starting", "joining the DHT", at=NOW - 100),
    e.Choice("micro-batch", "16", "fastest of 4, 8, 16 at 12.1 samples/s", at=NOW - 90),
    e.Listening("QmWjTgY4Hjbz8pQ4kYNa2r1C", ["/ip4/1.2.3.4/tcp/1/p2p/Qm"], False, at=NOW - 80),
    e.Phase("training", "towards step 12", at=NOW - 60),
    progress(NOW - 50),
    e.Round(11, "failed", "no group formed; trying again", [], 0.0, 90, {}, at=NOW - 40),
    e.Trouble("state download", "peer …2r1C went away", "goes on with another", at=NOW - 35),
    e.Trouble("clock", "this machine's clock is 4 s ahead", "set it by NTP", at=NOW - 32),
    e.Trouble("clock", "this machine's clock is 5 s ahead", "set it by NTP", at=NOW - 31),
    e.Round(12, "committed", "step 12 made with 2 others, 256 samples", ["a", "b", "c"], 1.0, 256, {}, at=NOW - 30),
    e.Step(12, 3.25, 0.01, 1.0, "3fa9", at=NOW - 30),
    e.Saved(12, "/home/anna/x", at=NOW - 20),
    e.Phase("training", "towards step 13", at=NOW - 10),
)


def shown(status: PeerState, *, running: bool = True, answers: bool = True, width: int = 100) -> list[str]:
    seen = SeenSlot(Slot(FOLDER, "peer"), status, running, answers)
    return [line.plain.rstrip() for line in status_lines(seen, NOW, width)]


def test_inner_steps_stand_beside_the_step() -> None:
    for counts, words in (({}, "1 inner step here"), ({"inner_steps_due": 20}, "1 of 20 inner steps here")):
        lines = shown(folded(progress(NOW, inner_steps=1, **counts)))
        (line,) = [line for line in lines if line.startswith("  step")]
        assert line == f"  step      11 of 600 · loss 3.500 · 100 of 256 samples to the next · {words}"


def test_traffic_is_told_by_the_hour_where_it_is_known() -> None:
    for hourly, words in (({}, ""), ({"sent_per_hour": 222_000_000}, " · 222 MB up and 0 B down an hour")):
        lines = shown(folded(progress(NOW, bytes_sent=500, bytes_received=0, **hourly)))
        assert f"  traffic   sent 500 B · received 0 B{words}" in lines


def test_a_training_peer() -> None:
    status = folded(*TRAINING)
    status.limits = [
        Origin(name="hours", value="23:00-07:00", source="--hours"),
        Origin(name="max_upload", value="8", source="~/.config/tt/config.toml"),
        Origin(name="idle_only", value="", source="--idle-only"),
    ]
    assert shown(status) == [
        "emoji · training for 1 min 00 s · towards step 13",
        "  step      12 of 600 · loss 3.250 · 100 of 256 samples to the next",
        "  speed     12.1 samples/s, 34 % of the swarm's 35.2",
        "  swarm     3 trainers",
        "  batch     16: fastest of 4, 8, 16 at 12.1 samples/s",
        "  round     step 12 made with 2 others, 256 samples",
        "  backup    of step 12",
        "  traffic   sent 1.0 MB · received 2.0 MB",
        "  limits    --hours 23:00-07:00 · max_upload 8 Mbit/s (~/.config/tt/config.toml) · --idle-only",
        "  troubles  clock 2, state download 1",
        "            31 s ago: this machine's clock is 5 s ahead: set it by NTP",
        "            more: `tt explain clock`",
        "  up        2 h 05 min · process 4711",
    ]
    assert max(map(len, shown(status, width=40)[1:])) <= 40


def test_a_paused_one_shows_no_speed_and_counts_bytes_of_all_its_workers() -> None:
    status = folded(*TRAINING, e.Phase("paused", "until 23:00 (--hours 23:00-07:00)", NOW + 60, at=NOW - 5))
    assert (status.until, status.samples_per_second, status.peers) == (NOW + 60, None, None)
    assert shown(status)[:2] == [
        "emoji · paused for 5 s · until 23:00 (--hours 23:00-07:00)",
        "  step      12 of 600 · loss 3.250",
    ]
    status.apply(e.Phase("starting", at=NOW - 4))
    status.apply(progress(NOW - 3, bytes_sent=500, bytes_received=0))
    assert (status.bytes_sent, status.bytes_received) == (1_000_500, 2_000_000)
    assert status.until is None


def test_a_state_on_its_way() -> None:
    download = e.Download(12_000_000, 48_000_000, 3, 5e6, 7.0, at=NOW - 5)
    status = folded(e.Phase("syncing", "taking over step 11", at=NOW - 9), download)
    assert "  state     12.0 MB of 48.0 MB have come, 25 %" in shown(status)
    status.apply(e.Phase("training", "towards step 12", at=NOW - 4))
    assert status.download_received is None


def test_weights_on_their_way() -> None:
    loading = e.Phase("starting", "loading the model and the data", at=NOW - 9)
    status = folded(loading, e.Download(1_000_000, 4_000_000, eta=7.0, at=NOW - 5))
    assert "  weights   1.0 MB of 4.0 MB have come, 25 %" in shown(status)
    status.apply(e.Phase("starting", "joining the DHT", at=NOW - 4))
    assert status.download_received is None


def test_one_that_does_not_answer() -> None:
    assert shown(folded(*TRAINING), answers=False)[1] == ("it does not answer (suspended?); this was known 10 s ago")


def test_one_that_is_gone() -> None:
    status = folded(*TRAINING, e.Log("the disk is nearly full", "warning", at=NOW - 9))
    lines = shown(status, running=False)
    assert lines[:3] == [
        "emoji · gone",
        "  its processes ended without a word: it was training at step 12, 9 s ago",
        "  its last words:",
    ]
    assert [line[14:] for line in lines[3:-1]] == [
        "this machine's clock is 4 s ahead",
        "this machine's clock is 5 s ahead",
        "the disk is nearly full",
    ]
    assert lines[-1] == "  `tt join emoji` goes on from the backup of step 12; its log is /home/anna/peer.log"


def test_one_that_has_ended_and_one_that_was_asked_to() -> None:
    assert shown(folded(*TRAINING, e.Finished("left", at=NOW - 60)), running=False) == [
        "emoji · ended 1 min 00 s ago · left"
    ]
    status = folded(*TRAINING)
    status.finish = True
    assert "  asked     to end after this step: `tt finish`" in shown(status)


def test_no_message_can_write_to_the_terminal() -> None:
    evil = "\x1b[2J\nowned"
    status = folded(*TRAINING)
    status.run = status.reason = status.last_round = evil
    status.troubles = {evil: Counted(count=1, words=evil, remedy=evil, at=NOW)}
    status.words = [Said(at=NOW, text=evil)]
    lines = [*shown(status), *shown(status, running=False)]
    assert all(line.isprintable() for line in lines)


def test_the_file_comes_back_as_it_was_and_never_half_written(tmp_path: Path) -> None:
    file = tmp_path / "peer.json"
    status = folded(*TRAINING, progress(NOW, eta=math.inf, loss=None))
    status.write(file)
    file.write_text(file.read_text().replace("{", '{"invented_later": [1],', 1))  # it is ignored
    again = read_status(file)
    assert again is not None
    assert again.model_dump() == status.model_copy(update={"eta": None}).model_dump()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["peer.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"run": "x"}'])
def test_a_damaged_file_is_as_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "peer.json").write_bytes(content)
    assert read_status(tmp_path / "peer.json") is None
    assert read_status(tmp_path / "missing") is None
