"""Schedules in which lines lose messages, and part the swarm; one that fails is made smaller and printed."""

from __future__ import annotations

import pytest
from simulation.report import first_broken

pytestmark = pytest.mark.slow

COUNTS = {"lossy": 220, "partition": 300, "split": 150, "moment": 150, "long": 20, "pair": 350}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", COUNTS)
def test_no_line_breaks_what_the_protocol_promises(scenario: str) -> None:
    assert not (broken := first_broken(scenario, range(COUNTS[scenario]))), broken
