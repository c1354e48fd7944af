"""The swarm of `tt demo`: one auxiliary peer and three trainers, of which the third joins midway."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tt_cli.errors import TTError
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Event, Failure, Round, Saved, Step, Synchronised
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

FIRST, LATE = ("anna", "ben"), "cleo"
JOINS_AT = 0.4  # of the steps
STALL_SECONDS = 180.0
LAST_STATE_SECONDS = 60.0


@dataclass(frozen=True)
class DemoResult:
    """Outcome of the demo. seconds: from the first process to the last state on the disk."""

    checkpoint: Path
    steps: int
    loss: float | None
    seconds: float
    received_min: float
    digests: int  # different final states among the peers: 1 when all agree
    late_joined_at: int | None


def run_demo(
    run: RunConfig, folder: Path, show: Callable[[str, Event], None], say: Callable[[str], None]
) -> DemoResult:
    """Train `run` to its last step with real peers on this machine. Raises TTError when they all fail."""
    started = time.monotonic()
    total = run.schedule.total_steps
    with LocalSwarm(run.to_toml(), folder, show) as swarm:
        say("starting an auxiliary peer: it welcomes the others and keeps the swarm's state")
        aux = swarm.start_aux()
        say(f"starting {' and '.join(FIRST)}: each is a training peer in a process of its own")
        trainers = [swarm.start_trainer(name, seed=seed) for seed, name in enumerate(FIRST)]
        _wait_for_step(swarm, trainers, max(1, int(total * JOINS_AT)))
        say(f"{LATE} joins the run in the middle, and takes the state over from the others")
        trainers.append(swarm.start_trainer(LATE, seed=len(FIRST)))
        _wait_for_step(swarm, trainers, total)
        say("the last step is made; the auxiliary peer fetches the final state")

        def saved() -> list[Saved]:
            return [event for event in aux.of(Saved) if event.epoch >= total]

        swarm.wait(lambda: bool(saved()) or not aux.running, LAST_STATE_SECONDS)
        if not saved():
            raise TTError(f"the auxiliary peer did not get the last state: see {aux.worker.log}")
        seconds = time.monotonic() - started
        swarm.leave(*swarm.members)
    steps = [event for trainer in trainers for event in trainer.of(Step)]
    rounds = [event for trainer in trainers for event in trainer.of(Round) if event.outcome == "committed"]
    final = [event for event in steps if event.epoch == total]
    late = trainers[-1].of(Synchronised)
    return DemoResult(
        checkpoint=Path(saved()[-1].path),
        steps=total,
        loss=next((event.loss for event in final if event.loss is not None), None),
        seconds=seconds,
        received_min=min((event.received for event in rounds), default=0.0),
        digests=len({event.digest for event in final}),
        late_joined_at=late[0].epoch if late else None,
    )


def _wait_for_step(swarm: LocalSwarm, trainers: list[LocalPeer], step: int) -> None:
    """Wait until some trainer has made `step`. Raises TTError when all ended or nothing moves any more."""

    def newest() -> int:
        return max((event.epoch for trainer in trainers for event in trainer.of(Step)), default=0)

    def moved(made: int) -> bool:
        return newest() > made or not any(trainer.running for trainer in trainers)

    while (made := newest()) < step:
        if not swarm.wait(partial(moved, made), STALL_SECONDS):
            raise TTError(f"no step was made for {STALL_SECONDS:.0f} s: see the logs in {swarm.folder}")
        if newest() == made:
            failures = [event.message for trainer in trainers for event in trainer.of(Failure)]
            why = failures[-1] if failures else f"see the logs in {swarm.folder}"
            raise TTError(f"all training peers ended: {why}")
