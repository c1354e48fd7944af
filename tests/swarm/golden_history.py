"""A tiny run of four members, step by step: prints a hash of their parameters and moments after each.

Everything in it is arithmetic of the swarm and of the optimizer, on gradients from numpy, so that every machine prints
the same. Run by test_golden.py, also as if on another processor.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from peer.states import layers, small_run
from swarm.rounds import CODEC, Member, run_round

from tt_cli.peer.trained_state import TrainedState
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, Partition

STEPS = 6


class Tiny(Member):
    """Gradients by step and member; the scale of a row is its own."""

    step = 0
    layout = Partition({name: p.shape for name, p in layers().named_parameters()}, 4096, CODEC.block)

    def gradients(self) -> dict[str, torch.Tensor]:
        random = np.random.default_rng([self.step, self.number])
        found = {}
        for name, shape in self.layout.shapes.items():
            scales = np.exp2(random.integers(-12, 1, (shape[0],) + (1,) * (len(shape) - 1)))
            found[name] = torch.from_numpy((random.standard_normal(shape) * scales).astype(np.float32))
        return found


def content(state: TrainedState) -> str:
    """A hash of all numbers, and not of the run's name or settings."""
    tensors = {**state.state().parameters, **state.state().optimizer}
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def history() -> list[str]:
    """One member in client mode, and weights that change."""
    run = small_run()
    states = [TrainedState(run, layers(), None) for _ in range(4)]
    hashes = [content(states[0])]
    for step in range(STEPS):
        members = [Tiny(number) for number in range(4)]
        members[step % 4].client = True
        for member in members:
            member.step = step
        outcomes = run_round(*members)
        for state, outcome in zip(states, outcomes, strict=True):
            assert not outcome.store.missing()
            state.step(DecodedGradients(outcome.store.buffer))
        assert len({state.digest for state in states}) == 1, "members differ"
        hashes.append(content(states[0]))
    return hashes


if __name__ == "__main__":
    print("\n".join(history()))
