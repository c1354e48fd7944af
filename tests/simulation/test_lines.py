"""Schedules in which lines lose messages, and part the swarm; one that fails is made smaller and printed."""

from __future__ import annotations

import pytest
from simulation.report import first_broken

pytestmark = pytest.mark.slow

COUNTS = {"lossy": 110, "partition": 150, "split": 80, "moment": 80, "long": 10, "pair": 180}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", COUNTS)
def test_no_line_breaks_what_the_protocol_promises(scenario: str) -> None:
    assert not (broken := first_broken(scenario, range(COUNTS[scenario]))), broken
