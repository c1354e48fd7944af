"""A client of a run's DHT that only reads: the way to the swarm for every screen that is not a peer's own."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from tt_cli.run import RunConfig
from tt_cli.swarm.board import read_history, read_records
from tt_cli.swarm.dht import start_dht, stop_dht
from tt_cli.swarm.records import HistoryRecord, PeerRecord


class Observer:
    """A context manager. initial_peers: multiaddrs with /p2p/…, of which at least one must answer."""

    def __init__(self, run: RunConfig, initial_peers: Sequence[str]):
        self._run = run
        self._dht = start_dht(run, None, initial_peers=initial_peers, client_mode=True)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def records(self) -> list[PeerRecord]:
        """The newest valid record of every peer that has not left."""
        return [record for record in read_records(self._dht, self._run) if not record.left]

    def history(self) -> HistoryRecord | None:
        """What an auxiliary peer remembers of the run."""
        return read_history(self._dht, self._run)

    def close(self) -> None:
        """End the client and its daemon."""
        stop_dht(self._dht)
