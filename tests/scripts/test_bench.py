"""The harness of the benchmarks: every one starts by name, and says figures as a table or as one JSON object."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.benchmarks import harness, stored


def bench(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(harness.ROOT / "scripts/bench"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_it_names_all_benchmarks_from_any_folder(tmp_path: Path) -> None:
    done = bench(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in harness.names())


def test_an_unknown_name_is_one_line(tmp_path: Path) -> None:
    done = bench("codex", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no benchmark codex" in done.stderr and "codec" in done.stderr


@pytest.mark.parametrize("name", harness.names())
def test_each_has_help_with_the_flags_of_all(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        harness.run(name, ["--help"])
    words = capsys.readouterr().out
    assert ended.value.code == 0 and "--quick" in words and "--json" in words and f"scripts/bench {name}" in words


def test_figures_are_one_object_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    harness.run("monitor", ["--quick", "--json", "--steps", "10"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["machine"] and figures["steps"] == 10 and figures["peers"]["100"]["snapshot_ms"] > 0
    shown = harness.table(figures).splitlines()
    head = next(line for line in shown if "snapshot_ms" in line)
    row = next(line for line in shown if line.split()[0] == "100")
    assert len(head.split()) + 1 == len(row.split())


def test_figures_are_recorded_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.jsonl"
    file.touch()
    with pytest.raises(SystemExit) as ended:
        harness.run("codes", ["--compare"], file)
    assert ended.value.code == harness.NO_RECORD
    harness.run("codes", ["--quick", "--record"], file)
    harness.run("codes", ["--compare"], file)
    (record,) = stored.records(file)
    assert (record["id"], record["bench"], record["options"]) == ("codes-1", "codes", "--quick")
    assert record["machine"] == harness.machine() and record["figures"]["even"]["bound"] == 1664
    record["figures"]["even"]["bound"] = 1000
    file.write_text(json.dumps(record) + "\n")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        harness.run("codes", ["--compare"], file)
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[1:] == ["  even[bound]: was 1000, is 1664"]


def test_tests_that_failed_in_some_run_are_named_and_what_is_reported_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = '<testcase classname="tests.a" name="late"><failure message="assert 1 == 2&#10; more"/></testcase>'
    passed = '<testcase classname="tests.a" name="late"/><testcase classname="tests.a" name="other"/>'
    broken = '<testcase classname="tests.b" name="x"><error/></testcase>'
    for run, cases in enumerate((failed, passed, failed + broken), 1):
        (tmp_path / f"{run}-quick.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    harness.run("flakiness", ["--quick", "--json", "--runs", "3", "--reports", str(tmp_path)])
    figures = json.loads(capsys.readouterr().out)
    assert (figures["flaky_runs"], figures["flaky_tests"], figures["flaky_failures"]) == (3, 2, 3)
    assert figures["failures"] == [
        {"test": "tests.a::late", "times": 2, "reason": "assert 1 == 2"},
        {"test": "tests.b::x", "times": 1, "reason": ""},
    ]


def test_what_drifted_is_a_number_far_off_or_gone() -> None:
    before = {"share": 0.01, "each": [1, 2.0], "lost": 0, "said": "3 words", "same": True, "grown": -1}
    assert not stored.drifted(before, before | {"share": 0.014, "each": [0.7, 2.9], "said": "4 words", "new": 9})
    now = {"share": 0.016, "each": [0.5, 2.0], "lost": 1, "same": False}
    drifted = [line.partition(":")[0] for line in stored.drifted(before, now)]
    assert drifted == ["share", "each[0]", "lost", "same", "grown"]


def test_a_table_aligns_rows_and_says_what_was_not_measured() -> None:
    rows = [{"attack": "none", "loss": 1.5, "met": True}, {"attack": "sign flip", "loss": None, "met": False}]
    text = harness.table({"size": {"steps": 3}, "ratio": 0.123456, "count": 12345, "rows": rows})
    assert text.splitlines() == [
        "size:",
        "  steps  3",
        "ratio  0.1235",
        "count  12,345",
        "rows:",
        "  attack     loss  met",
        "  none        1.5  yes",
        "  sign flip     –   no",
    ]


def test_sides_are_measured_in_turns_after_one_to_warm_up() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    figures = harness.in_turns({"ours": lambda: side("ours"), "theirs": lambda: side("theirs")}, turns=2)
    assert calls == ["ours", "theirs"] * 3
    assert figures == {"ours": [3.0, 5.0], "theirs": [4.0, 6.0]}
