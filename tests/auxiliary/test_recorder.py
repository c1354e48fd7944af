"""The steps of a run as an auxiliary peer records them."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import pytest
from swarm_units.made import record

from tt_cli.auxiliary.recorder import HISTORY_STEPS, Recorder
from tt_cli.errors import TTError
from tt_cli.swarm.board import View
from tt_cli.swarm.records import HistoryRecord


def view(step: int, **changes: object) -> View:
    return View.of([record(epoch=step, **{"loss": 2.5, **changes})])


def test_each_step_is_recorded_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    assert recorder.step == 0 and recorder.history().steps == []
    assert recorder.record(view(1))
    assert not recorder.record(view(1))
    assert not recorder.record(View.of([]))
    assert recorder.record(view(4, user="anna"))
    assert not recorder.record(view(3))
    rows = [json.loads(line) for line in recorder.path.read_text().splitlines()]
    assert [(row["step"], row["loss"], row["peers"], row["users"]) for row in rows] == [
        (1, 2.5, 1, ["a"]),
        (4, 2.5, 1, ["anna"]),
    ]
    again = Recorder(tmp_path)
    assert (again.step, again.history()) == (4, recorder.history())
    assert not again.record(view(4)) and again.record(view(5))


def test_a_step_without_a_loss_waits_for_one(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    assert not recorder.record(view(1, loss=None))
    assert not recorder.record(View.of([record("x", role="aux", epoch=1, loss=9.0)]))
    assert recorder.record(view(1))


def test_the_loss_is_weighted_by_speed_and_of_those_at_the_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record(
        View.of(
            [
                record("a", epoch=7, loss=1.0, samples_per_second=30.0),
                record("b", epoch=7, loss=5.0, samples_per_second=10.0),
                record("c", epoch=6, loss=100.0, samples_per_second=1000.0),
                record("x", role="aux", epoch=7, loss=100.0),
            ]
        )
    )
    assert recorder.history().steps[-1][:2] == (7, pytest.approx(2.0))


def test_peers_that_have_no_speed_yet_count_alike(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record(
        View.of([record(peer, loss=loss, samples_per_second=0.0) for peer, loss in (("a", 1.0), ("b", 3.0))])
    )
    assert recorder.history().steps[-1][1] == pytest.approx(2.0)


def test_the_wildest_records_that_may_be_published_leave_it_finite(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    wild = [record(peer, loss=1e39, samples_per_second=1e12) for peer in "abc"]
    assert recorder.record(View.of(wild))
    assert math.isfinite(recorder.history().steps[-1][1])
    assert Recorder(tmp_path).step == 5


@pytest.mark.parametrize("torn", [b"", b'{"step": 3, "loss": 2.', b'{"step": 3}', b"\xff\xfe"])
def test_a_torn_last_line_is_dropped_and_the_next_one_is_whole(torn: bytes, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in (1, 2):
        recorder.record(view(step))
    whole = recorder.path.read_bytes()
    recorder.path.write_bytes(whole + torn)
    again = Recorder(tmp_path)
    assert again.step == 2
    assert again.path.read_bytes() == whole
    again.record(view(3))
    assert [json.loads(line)["step"] for line in again.path.read_text().splitlines()] == [1, 2, 3]


def test_a_first_line_that_is_torn_leaves_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b'{"step": 1')
    recorder = Recorder(tmp_path)
    assert recorder.step == 0
    assert recorder.path.read_bytes() == b""


def test_damaged_lines_do_not_stop_the_others(tmp_path: Path) -> None:
    good = '{"step": 2, "loss": 2.5, "time": 1000.0}'
    lines = ["", "null", "[]", '"x"', "{}", '{"step": "many", "loss": 1, "time": 1}', good]
    lines += [good.replace("2.5", bad) for bad in ("NaN", "Infinity", "null", "1e999")]
    lines += [good.replace("2,", bad) for bad in ("-1,", "1e999,", "NaN,")]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines) + "\n")
    assert Recorder(tmp_path).history().steps == [(2, 2.5, 1000.0)]


@pytest.mark.parametrize("steps", [255, 256, 257, 1000, 5111])
def test_a_long_history_is_thinned_evenly_and_the_last_step_stays(steps: int, tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 2.5, "time": 1000.0 + step}) for step in range(1, steps + 1)]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines) + "\n")
    history = Recorder(tmp_path).history()
    kept = [step for step, _, _ in history.steps]
    assert len(kept) == min(steps, HISTORY_STEPS)
    assert (kept[0], kept[-1]) == (1, steps)
    gaps = {later - earlier for earlier, later in zip(kept, kept[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1 and min(gaps) >= 1
    assert HistoryRecord.model_validate(history.model_dump()) == history


def test_a_folder_that_cannot_be_written_is_one_line_and_the_step_stays_due(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "missing")
    with pytest.raises(TTError, match="^cannot record step 1 in .*steps.jsonl: No such file or directory$"):
        recorder.record(view(1))
    assert recorder.step == 0
    (tmp_path / "missing").mkdir()
    assert recorder.record(view(1))


def test_a_record_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").mkdir()
    with pytest.raises(TTError, match="^cannot read .*steps.jsonl: Is a directory") as caught:
        Recorder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_line_for_which_the_space_does_not_suffice_leaves_nothing_of_itself(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record(view(1))
    whole = recorder.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, hard))
    try:
        with pytest.raises(TTError, match="^cannot record step 2 in .*steps.jsonl: File too large$"):
            recorder.record(view(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorder.path.read_bytes() == whole
    assert recorder.record(view(2))
    assert Recorder(tmp_path).history() == recorder.history()
