"""scripts/bench local_steps: how samples are counted, and that its members do what a swarm's do."""

from __future__ import annotations

import pytest

from scripts.benchmarks.local_steps import MEMBERS, LocalTraining, compared, local_run, samples_to


def test_samples_are_counted_between_two_looks() -> None:
    losses = {0: 8.0, 640: 4.0, 1280: 1.0}
    assert samples_to(losses, 4.0) == 640 and samples_to(losses, 2.0) == pytest.approx(960)
    assert samples_to(losses, 9.0) == 0 and samples_to(losses, 0.5) is None
    row = compared({"losses": losses, "rounds": 2, "up": 1.5}, {"losses": losses, "rounds": 10, "up": 1.5}, 2.0)
    same = {"samples_to_loss": 1.0, "bytes_to_loss": 0.2, "final_loss": 1.0}
    assert row == {"rounds": 2, "up_bytes": 3.0, "bytes_ratio": 0.2, **same}


def test_delayed_members_step_with_the_average_of_the_round_before() -> None:
    optimizer = {"inner_batch": 4, "delayed": True, "sparse": 64}
    training = LocalTraining(local_run(0, 2, 256, optimizer, 4e-3), [4] * MEMBERS, [2] * MEMBERS)
    steps, first = training.steps(), training.shared.digest
    assert next(steps)[1] == first != next(steps)[1] != next(steps)[1]
    assert training.shared.epoch == 2 and [member.samples for member in training._members] == [8] * MEMBERS


def test_its_members_make_their_own_steps_and_go_on_from_one_state() -> None:
    run = local_run(seed=0, inner_steps=2, samples=256, optimizer={"inner_batch": 4}, peak_lr=4e-3)
    assert run.swarm.target_batch_size == 8 * MEMBERS and run.schedule.total_steps == 8
    training = LocalTraining(run, [4] * MEMBERS, [2] * MEMBERS)
    steps = training.steps()
    digests = {training.shared.digest, next(steps)[1], next(steps)[1]}
    assert len(digests) == 3 and training.shared.epoch == 2
    assert [member.samples for member in training._members] == [0] * MEMBERS
