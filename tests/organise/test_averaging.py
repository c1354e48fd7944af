"""What `tt init` has members average: by their lines, with the arithmetic of `tt calc`, and `tt check` agrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tt_cli.memory.question import CalculatorQuestion
from tt_cli.memory.report import report
from tt_cli.organise.averaging import BUSY, LONG, PEERS, reason, run_pace
from tt_cli.organise.questions import RunAnswers, RunQuestion, answered
from tt_cli.organise.recipe import make, run_of
from tt_cli.organise.run_check import lines
from tt_cli.run import RunConfig, load_run


def defaults(question: RunQuestion, default: str) -> str:
    return default


def answers(**given: str) -> RunAnswers:
    return answered("mine", {"data": "acme/codes", **given}, defaults)


def examples(run: RunConfig) -> int:
    return run.schedule.total_steps * run.swarm.target_batch_size


@pytest.mark.parametrize(
    ("size", "line", "number"),
    [("paper", "5", 15), ("paper", "20", 0), ("paper", "100", 0), ("paper", "1000", 0)]
    + [("large", "10", 39), ("large", "20", 20), ("large", "100", 0), ("large", "1000", 0)],
)
def test_lines_choose_what_is_averaged(size: str, line: str, number: int) -> None:
    made = answers(size=size, line=line)
    run, fast = run_of(made), run_of(answers(size=size, line="1000"))
    assert made.inner_steps == number and run.sparse == (512 if number else 0)
    assert run.swarm.averaging_timeout > 2 * run_pace(run, PEERS, made.line).line
    if run.optimizer.name == "local":
        assert number * run.optimizer.inner_batch * PEERS == run.swarm.target_batch_size
        assert run.schedule.peak_lr == 1e-3, "AdamW's"
        assert 0 <= examples(run) - examples(fast) < run.swarm.target_batch_size
    else:
        assert number == 0 and run.replaced({"swarm.averaging_timeout": 180.0}) == fast


@pytest.mark.parametrize(
    ("size", "line", "peers", "number", "kept", "delayed"),
    [("medium", "20", "16", 10, 512, True), ("medium", "10", "16", 10, 128, True), ("large", "5", "16", 40, 128, False)]
    + [("large", "1", "16", 16, 64, True), ("paper", "0.5", "16", 50, 64, False), ("large", "1", "4", 34, 256, False)],
)
def test_slower_lines_have_fewer_elements_and_steps_beside_rounds(
    size: str, line: str, peers: str, number: int, kept: int, delayed: bool
) -> None:
    made = answers(size=size, line=line, peers=peers)
    run, members = run_of(made), (made.peers, made.line)
    assert (made.inner_steps, run.sparse, run.optimizer.delayed) == (number, kept, delayed)
    assert run.swarm.large_tensor == 1024
    pace, waiting = run_pace(run, *members), run_pace(run.replaced({"optimizer.delayed": False}), *members)
    assert pace.busy >= BUSY > waiting.busy or not delayed
    whole = run_pace(run.replaced({"optimizer.sparse": 0, "swarm.large_tensor": 65536}), *members)
    assert run.schedule.total_steps * kept >= 22 * 512, "what a message left out has its turn"
    assert whole.busy < BUSY or whole.line > LONG
    check = lines(run, members)
    assert (check.verdict, check.words) == ("pass", reason(run, members))
    assert f"the largest {kept} sent" in check.words
    assert ("local steps that go on beside rounds, for devices would wait" in check.words) == delayed


def test_so_many_inner_steps_as_were_asked_for_wait_where_that_keeps_devices_busy() -> None:
    few, many = (run_of(answers(size="medium", line="10", peers="4", **{"inner-steps": n})) for n in ("9", "80"))
    assert few.optimizer.delayed and not many.optimizer.delayed and few.sparse == many.sparse == 512


def test_no_more_inner_steps_than_keep_devices_busy() -> None:
    enough, fewer = (run_of(answers(size="paper", line="5", **{"inner-steps": number})) for number in ("15", "14"))
    fewer = fewer.replaced({"optimizer.sparse": enough.sparse})  # it would be less
    assert run_pace(fewer, PEERS, 5.0).busy < BUSY <= run_pace(enough, PEERS, 5.0).busy
    averaged = run_of(answers(size="paper", line="5", **{"inner-steps": "0"}))
    assert averaged.optimizer.name == "lamb8bit" and run_pace(averaged, PEERS, 5.0).busy < 0.3


def test_short_rounds_and_short_runs_are_left_as_they_are() -> None:
    tiny = {"data": "emoji", "size": "tiny"}
    assert answers(line="5", **tiny).inner_steps == 0, "a round of 5 s is not what a run waits for"
    few = answers(line="0.5", **tiny)
    assert (few.inner_steps, few.steps) == (5, 22), "of its 110 steps; with 512 of each 4,096 at least 22 remain"
    assert answers(size="paper", line="5", peers="1").inner_steps == 0, "nobody to average with"


def test_the_written_file_reads_back_and_the_check_says_what_init_said(tmp_path: Path) -> None:
    made = make(answers(size="paper", line="5", peers="8"), tmp_path / "mine")
    file = tmp_path / "mine" / "run.toml"
    run = load_run(str(file))
    assert run == made.run and run.optimizer.name == "local"
    check = lines(run, (8, 5.0))
    assert (check.verdict, check.words) == ("pass", made.lines)
    assert made.lines.startswith("Your members send 5 Mbit/s: local steps, and of each 4,096 numbers the largest ")
    note = " ".join(line.removeprefix("# ") for line in file.read_text().splitlines()[:7])
    assert made.lines in note
    network = report(CalculatorQuestion(str(file), peers=8, mbits=5.0)).network
    assert f"is busy {network['device_busy']:.0%}".replace("%", " %") in made.lines
    assert network["seconds"] == round(run_pace(run, 8, 5.0).line, 3)


def test_a_run_whose_lines_are_too_slow_is_told_what_to_do() -> None:
    dalle = load_run("dalle")
    slow = lines(dalle, (16, 5.0))
    assert slow.verdict == "warning" and "writes a run with 15 local steps, sparse = 512 in its place" in slow.fix
    slower = lines(dalle, (16, 0.5))
    assert slower.verdict == "warning" and "writes a run with 50 local steps, sparse = 64 in its place" in slower.fix
    beside = run_of(answers(size="large", line="1"))
    whole = beside.replaced({"optimizer.sparse": 0, "swarm.averaging_timeout": 3600.0})
    assert "16 local steps, sparse = 64, delayed = true in its place" in lines(whole, (16, 1.0)).fix
    waits = lines(beside.replaced({"optimizer.delayed": False}), (16, 1.0))
    assert waits.verdict == "warning" and waits.fix == lines(whole, (16, 1.0)).fix
    late = lines(dalle.replaced({"optimizer": {"name": "local", "sparse": 0}}), (16, 5.0))
    assert late.verdict == "warning" and "Rounds end after 180 s" in late.words and "averaging_timeout" in late.fix
    assert lines(dalle, (16, 100.0)).verdict == lines(load_run("emoji"), (16, 5.0)).verdict == "pass"
    assert "busy" not in reason(load_run("emoji"), (16, 20.0))
