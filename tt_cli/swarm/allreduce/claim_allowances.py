"""How many samples a member may claim in a round: what its record says, and what it can have computed since."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.shared_memory import shared_bytes

SPARE = 2.0  # times as many: records are a few seconds old, and speeds are means
ROOM = 2**17  # bytes, for some thousand members


def allowances(records: Iterable[PeerRecord], now: float) -> dict[str, float]:
    """Peer id → samples. now: DHT time. Who has published none yet, or no speed, is not in it: see `Reducer`."""
    return {
        record.peer_id: SPARE
        * (record.samples + record.samples_per_second * max(0.0, now - record.time) + record.micro_batch)
        for record in records
        if record.samples and record.samples_per_second
    }


class ClaimAllowances:
    """On their way from the process that knows the records to the averager's. Make it before the fork."""

    def __init__(self) -> None:
        self._memory = shared_bytes(ROOM)

    def write(self, allowed: Mapping[str, float]) -> None:
        """For the next round. What finds no room is left out: it is bounded as if nothing were known."""
        packed = json.dumps(allowed).encode()
        if len(packed) > ROOM - 4:
            packed = b"{}"
        self._memory[4 : 4 + len(packed)] = packed
        self._memory[:4] = len(packed).to_bytes(4, "little")

    def read(self, share: float = 0.0) -> dict[str, float]:
        """What was written last, and for each a `share` more: of whose speed just rose the record says too little."""
        size = int.from_bytes(self._memory[:4], "little")
        allowed = json.loads(bytes(self._memory[4 : 4 + size])) if size else {}
        return {peer_id: most + share for peer_id, most in allowed.items()}
