"""The assistant of `tt aux-peer`: peers in client mode, of whom nobody accepts connections, train together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, committed, digests, last_step, local_swarm, tiny_run, wait_for_step
from testbed.aux_command import AuxCommand

from tt_cli.supervisor.events import Synchronised


@pytest.mark.promise(
    "Trainers in client mode alone train with the aux peer's assistant, which starts by itself",
    also="tests/auxiliary/test_standby.py",
)
@pytest.mark.promise("The assistant hands the state to trainers and to its aux peer that nobody else can hand it to")
def test_notebooks_alone_train_with_an_assistant_and_hand_the_state_on(tmp_path: Path) -> None:
    run = tiny_run()
    with (
        AuxCommand(run, tmp_path / "aux", "--no-web", "--port", "0") as aux,
        local_swarm(run, tmp_path / "trainers") as swarm,
    ):
        swarm.addresses = aux.addresses
        anna = swarm.start_trainer("anna", batch_size=4, seed=0, client_mode=True)
        ben = swarm.start_trainer("ben", batch_size=4, seed=1, client_mode=True)
        aux.need(lambda: bool(aux.said("assists from step 0")), "the assistant to start by itself")
        assert len(aux.said("in client mode, so nobody can make a step: starting the assistant")) == 1

        def of_three() -> bool:
            return any(len(event.members) == 3 and event.received == 1.0 for event in committed(anna))

        assert swarm.wait(lambda: bool(committed(ben)) and of_three(), WAIT), anna.worker.log.read_text()

        # A third one comes, and nobody but the assistant can hand it the state.
        step = last_step(anna)
        cleo = swarm.start_trainer("cleo", batch_size=4, seed=2, client_mode=True)
        wait_for_step(swarm, step + 2, "anna", "ben", "cleo")
        assert cleo.of(Synchronised)[0].epoch > 0
        assert all(len(found) == 1 for found in digests([anna, ben, cleo]).values())

        # The coordinator has checkpoints of the run, which it too can have from nobody else.
        aux.need(lambda: bool(aux.of("saved")), "a checkpoint")

        def shares() -> list[int]:
            return [
                int(found) for found in re.findall(r"(\d+)% of the swarm's traffic", "\n".join(aux.said("traffic")))
            ]

        # The only reducer: all that the others move goes to it or comes from it. Their records tell it a little later.
        aux.need(lambda: any(30 <= share <= 80 for share in shares()), "the assistant's share, about a half")
