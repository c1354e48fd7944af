"""Members that make local steps hold equal bytes after each outer round, whoever comes, dies or cannot listen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peer.states import layers
from simulation.local_steps import CLIENT, JOINER, KILLED, Held, local_run, measure

from tt_cli.peer.trained_state import TrainedState
from tt_cli.supervisor.events import Step

ROUNDS, ARMS = 10, ("dense", "sparse", "delayed")


def test_no_bit_differs_among_members_with_a_joiner_a_kill_and_a_client() -> None:
    figures = measure(ROUNDS)
    assert figures["bits_differing"] == 0
    made = [figures[f"{arm}_steps_of"] for arm in ARMS]
    for number in (0, CLIENT):  # lost messages cost either a round now and then
        assert (
            sum(of[number] for of in made) >= len(made) * (ROUNDS - 1) and min(of[number] for of in made) >= ROUNDS - 2
        )
    for of in made:
        assert of[KILLED] >= ROUNDS // 2 <= of[JOINER]
    assert not any(figures[f"{arm}_steps_alone"] for arm in ARMS)


def test_one_bit_that_differs_is_counted() -> None:
    held = Held()
    for number in range(3):
        state = TrainedState(local_run(0), layers(0, 24), None)
        if number == 1:
            state.state().parameters["1.bias"][2] *= 2  # the exponent is one higher
        machine: Any = SimpleNamespace(number=number, state=state)
        held(machine, Step(1, None, 0.0, 0.0, "00"), False)
    assert held.differing >= 1 and held.made[1] == {0, 1, 2}
