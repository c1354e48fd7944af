"""What records cost the lines of a small swarm, and that all see all of them: real nodes on a virtual clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from scripts.benchmarks.records import Links, measure_simulated

GOAL = 0.05  # Mbit/s up of a peer, mean


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def test_records_cost_a_small_swarms_lines_little_and_are_soon_seen() -> None:
    figures = measure_simulated(Links(peers=8, steps=1))
    assert figures["between_mbit_mean"] < GOAL and figures["in_rounds_mbit_mean"] < GOAL
    assert figures["trigger_late_s"] < 5.0 and figures["told_s"] < 5.0  # seconds of the virtual clock
