"""Schedules in which machines crash, hang and are slow; one that fails is made smaller and printed."""

from __future__ import annotations

import pytest
from simulation.report import first_broken

pytestmark = pytest.mark.slow

COUNTS = {"calm": 30, "crash": 100, "restart": 50, "hang": 100, "everything": 180}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", COUNTS)
def test_no_machine_breaks_what_the_protocol_promises(scenario: str) -> None:
    assert not (broken := first_broken(scenario, range(COUNTS[scenario]))), broken
