"""A client of a run's DHT that only reads: the way to the swarm for whoever is no peer.

A closed run shows itself to members only. There an observer has a key of its own on this machine (`observer.key` in the
run's folder), and a pass for it beside that; in an open run it is nobody, with a new key each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from tt_cli.errors import TTError
from tt_cli.identity.passes import Notice
from tt_cli.run import RunConfig, folders
from tt_cli.swarm.membership.admission import membership_at
from tt_cli.swarm.membership.pass_guard import PassGuard
from tt_cli.swarm.membership.rsa_identity import claim_identity
from tt_cli.swarm.network.dht_node import start_dht, stop_dht
from tt_cli.swarm.records.peer_record import HistoryRecord, PeerRecord
from tt_cli.swarm.records.publisher import hear_notice, read_history, read_records
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import TreeReader
from tt_cli.swarm.state.client import PATIENCE, NoState, ReceivedState, StateClient, WantedState
from tt_cli.swarm.state.trusted_digests import TrustedDigests

ROLE = "observer"


class Observer(ExitStack):
    """A context manager. initial_peers: multiaddrs with /p2p/…, of which at least one must answer.

    Raises NoPass where the run is closed and this machine has no pass to look at it with.
    """

    def __init__(self, run: RunConfig, initial_peers: Sequence[str]):
        super().__init__()
        self._run, identity = run, None
        with ExitStack() as so_far:
            if run.membership.closed:
                identity = claim_identity(folders.run_folder(run), ROLE)
                so_far.callback(identity.lock.close)
            self._dht = start_dht(run, identity, initial_peers=initial_peers, client_mode=True)
            so_far.callback(stop_dht, self._dht)
            hear_notice(self._dht, run)
            self.push(so_far.pop_all())

    def records(self) -> list[PeerRecord]:
        """The newest valid record of every peer that has not left."""
        hear_notice(self._dht, self._run)
        return [record for record in read_records(self._dht, self._run) if not record.left]

    def history(self) -> HistoryRecord | None:
        """The run's history, as an auxiliary peer remembers it."""
        return read_history(self._dht, self._run)

    def notice(self) -> Notice | None:
        """The organiser's newest notice as of the last look at the records, None without one."""
        return membership_at(self._dht).notice()

    def fetch_state(
        self,
        read_tree: TreeReader,
        select: Callable[[Any], Iterable[int]],
        on_bytes: Callable[[int, int], None] = lambda received, total: None,
    ) -> ReceivedState:
        """The chunks that `select` names of the state that the swarm holds, verified against what its members signed.

        read_tree: the tree in a manifest, or ValueError. on_bytes: called with the bytes received and the bytes that
        there are. Raises TTError when no donor is left. Call it once.
        """

        async def fetch() -> ReceivedState:
            p2p = await self._dht.replicate_p2p()
            try:
                PassGuard(membership_at(self._dht)).guard_calls(p2p)
                signatures = TrustedDigests(lambda: read_records(self._dht, self._run), str(p2p.peer_id))
                timeout = PATIENCE * self._run.swarm.next_chunk_timeout
                wanted = WantedState(read_tree, timeout, select=select, on_bytes=on_bytes)
                return await StateClient(p2p, self._run.identity, signatures, StateBuffer.new(), wanted).take()
            finally:
                await p2p.shutdown()

        try:
            return asyncio.run(fetch())
        except NoState as error:
            if error.asked:
                raise TTError(f"{error}: try again") from error
            raise TTError(
                f"{error} of run {self._run.identity}: wait for the first steps, or check that the address and --run "
                "belong together"
            ) from error
