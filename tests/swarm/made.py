"""Records made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tt_cli.swarm.clock import Clock
from tt_cli.swarm.records.peer_record import PeerRecord

USUAL = {
    "peer_id": "a",
    "role": "trainer",
    "client_mode": False,
    "epoch": 5,
    "digest": "aa",
    "samples": 10,
    "samples_per_second": 2.0,
    "total_samples": 100,
    "time": 1000.0,
}


def record(peer_id: str = "a", **changes: object) -> PeerRecord:
    """A trainer at step 5 with digest "aa" and 10 samples, except for `changes`."""
    return PeerRecord.model_validate({**USUAL, "peer_id": peer_id, **changes})


class SteppedClock(Clock):
    """Stands until it is set."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def monotonic(self) -> float:
        return self.now

    dht_time = boottime = __call__ = monotonic


NO_PROOFS: Any = SimpleNamespace(proofs=SimpleNamespace(guilty=frozenset))  # in the place of an averager's audits
