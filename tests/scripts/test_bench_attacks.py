"""The table of attacks: its rows, and what is made of the measurements."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from testbed.attacked import Size, attacked_run, outcome
from testbed.attacks.table import ATTACKS
from testbed.peer import in_one_order

from scripts.benchmarks import attacks, harness
from tt_cli.supervisor.local_swarm import LocalPeer
from tt_cli.supervisor.worker_process import Worker
from tt_cli.task import task_of
from tt_cli.task.task import Task

CALM = {"row": "no attack", "side": "ours", "loss": 5.0, "seconds_per_step": 2.0, "longest_step_s": 2.5}
CALM |= {"rounds_lost": 0, "finished": 7}
FIRST = 7.0  # loss of the first weights


def compared(**changes: Any) -> dict[str, Any]:
    return attacks.compared({**CALM, "row": "sign flip x100", **changes}, CALM, FIRST)


def test_every_attack_is_one_row_and_the_baseline_has_no_other() -> None:
    from scripts.benchmarks.baselines import hivemind_attacked_swarm  # bitsandbytes: seconds, in each process of pytest

    assert len(ATTACKS) == 39
    assert set(hivemind_attacked_swarm.ROWS) <= set(ATTACKS)
    assert {name for name, attack in ATTACKS.items() if attack.newcomer} == {"false donor", "overwritten donor record"}


def test_losses_and_times_are_told_beside_those_without_an_attack() -> None:
    row = compared(loss=5.05, longest_step_s=30.0, rounds_lost=2)
    assert (row["loss_ratio"], row["learned"], row["stall_s"], row["rounds_lost"]) == (1.01, 0.975, 28.0, 2)
    assert row["target_met"] and row["refused"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": 5.2},
        {"loss": None},
        {"longest_step_s": 40.0},
        {"strangers": {"state": {"tries": 2, "refused": 1, "got": "some bytes"}}},
        {"newcomer": {"taken": 1, "false": 1}},
    ],
)
def test_what_does_not_reach_the_goal(changes: dict[str, Any]) -> None:
    assert not compared(**changes)["target_met"]


def test_who_copies_has_the_same_examples_as_the_others_of_its_seed_and_nobody_else_has() -> None:
    run = attacked_run(Size(1, 1, 30), 1)

    def first(task: Task[Any], peer: str) -> torch.Tensor:
        with closing(task.examples(100, peer=peer)) as stream:
            return next(iter(stream.batches(8))).tensors["text"]

    assert torch.equal(first(in_one_order(run), "mallory-0"), first(in_one_order(run), "mallory-1"))
    assert not torch.equal(first(task_of(run), "anna"), first(task_of(run), "ben"))


def test_a_sign_flip_of_three_in_ten_has_a_limit_of_its_own() -> None:
    assert compared(row="sign flip x1", loss=5.2)["target_met"]


def test_refused_means_at_every_try() -> None:
    doors = {"state": {"tries": 2, "refused": 2, "got": ""}, "group": {"tries": 3, "refused": 3, "got": ""}}
    assert compared(strangers=doors)["refused"] is True
    doors["group"] = {"tries": 3, "refused": 2, "got": "in a group of 8"}
    row = compared(strangers=doors)
    assert row["refused"] is False and row["open_doors"] == {"group": "in a group of 8"}


def test_a_swarm_that_stopped_is_told() -> None:
    stopped = {"row": "epoch 10^9", "side": "ours", "problem": "no step after 2 within 150 s"}
    row = attacks.compared(stopped, CALM, FIRST)
    assert row["loss_ratio"] is None and row["problem"]
    assert "no step after 2" in harness.table({"rows": [row]})
    size, worker = Size(1, 1, 30), cast(Worker, None)
    never = {**stopped, **outcome(attacked_run(size, 0), size, [LocalPeer("ada", worker, Path())])}
    assert "did not make two steps" in attacks.compared(never, CALM, FIRST)["problem"]


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        harness.run("attacks", ["--only", "weight 1e10"])
    assert "no row weight 1e10" in capsys.readouterr().err
