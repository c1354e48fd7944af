"""One peer's state on its way to another: what hivemind's averager needs to give it and to take it.

A peer is two processes. The host trains and holds the state; the averager's process speaks libp2p. The state passes
between them in a `StateBuffer`, in memory that both see. `server.py` and `client.py` are the protocol
that docs/protocol.md tells; they need no averager.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import torch
from hivemind.dht import DHT
from hivemind.p2p import P2P
from hivemind.utils import MPFuture

from tt_cli.run import RunConfig
from tt_cli.supervisor.processes import keep_objects_shared
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS
from tt_cli.swarm.membership.admission import membership_at
from tt_cli.swarm.network import stream_limits
from tt_cli.swarm.network.bandwidth import BandwidthLimiter
from tt_cli.swarm.network.reachability import DialBack
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import read_records
from tt_cli.swarm.shared_memory import Passage, StateBuffer
from tt_cli.swarm.shared_state import Tree, TreeReader
from tt_cli.swarm.state.client import PATIENCE, STREAMS, Chunks, NoState, ReceivedState, StateClient, WantedState
from tt_cli.swarm.state.server import StateServer
from tt_cli.swarm.state.trusted_digests import TrustedDigests

__all__ = ["Chunks", "NoState", "StateBuffer", "StateBridge", "StateSource", "ReceivedState", "TreeReader"]

ALIVE_SECONDS = 1.0

StateSource = Callable[[], tuple[bytes, StateBuffer] | None]
"""Manifest and bytes of the present state, in a buffer that nobody changes any more; None: there is none yet."""

OnProgress = Callable[[int, int, int], None]
"""(bytes that came, bytes there will be, 0 while nobody has said; donors that give now)."""


class StateBridge:
    """Mixed into a DecentralizedAverager, before it, with `allow_state_sharing=False`: hivemind's own door is closed.

    Call `share_state` before hivemind's `__init__`, which forks.
    """

    future_type: Callable[[], Any] = MPFuture  # an answer of the averager's process
    secret = ""  # see `TrustedDigests`
    taking_may_wait: Callable[[], bool]  # whether a state that is taken over leaves the line to something else for now
    traffic: torch.Tensor
    clock: Clock
    era: int
    prefix: str
    client_mode: bool
    _line: BandwidthLimiter
    serializer: Any
    _outer_pipe: Any

    def share_state(self, run: RunConfig, dht: DHT, peer_id: str, source: StateSource, read_tree: TreeReader) -> None:
        """Say what is handed over. peer_id: this peer's. traffic: int64 (2,) in shared memory, bytes out and in.

        source is called in a thread of the host process, read_tree in both processes.
        """
        self._run, self._dht_of_run, self._own_id = run, dht, peer_id
        self._source, self._read_tree = source, read_tree
        self._membership = membership_at(dht)
        self._passage = Passage()
        self._server = StateServer(self._offer, read_tree, self._count_sent, self._membership, self._line.give_way)
        self._services = self._server, DialBack()
        self._taking: asyncio.Task[None] | None = None
        self._progress = torch.zeros(3, dtype=torch.int64).share_memory_()  # bytes that came, all, donors giving

    # ---------------------------------------------------------------- in the host process

    def start(self) -> None:
        keep_objects_shared()
        super().start()  # type: ignore[misc]

    def take_state(
        self,
        own: Tree | None,
        timeout: float,
        on_progress: OnProgress | None = None,
        *,
        at_once: int = STREAMS,
        without: frozenset[str] = frozenset(),
        absent: tuple[PeerRecord, ...] = (),
    ) -> ReceivedState:
        """The state that most of the foremost hold, without the chunks that `own` holds alike.

        timeout: seconds without a byte. on_progress: called about once a second while chunks come. at_once: donors at
        most, each of which makes a copy of its state. without: peer ids whose word and state do not count. absent: see
        `SwarmState`. Raises NoState. May be called by one thread at a time.
        """
        buffer, future = StateBuffer.new(), self.future_type()
        number = self._passage.send(buffer)
        self._progress.zero_()
        manifest = b"" if own is None else own.manifest()
        self._outer_pipe.send(("_take_state", [number, manifest, future, at_once, without, absent, self.era], {}))
        try:
            manifest, indexes, *outcome = self._await(future, timeout, on_progress)
            tree = self._read_tree(manifest)
            return ReceivedState(tree, Chunks(tree, indexes, buffer), *outcome)
        except BaseException:
            buffer.close()
            self._outer_pipe.send(("_drop_taking", [], {}))
            raise

    def _await(self, future: MPFuture, timeout: float, on_progress: OnProgress | None) -> Any:
        before, came = int(self.traffic[1]), self.clock.monotonic()
        while True:
            try:
                return future.result(timeout=ALIVE_SECONDS)
            except concurrent.futures.TimeoutError:
                if not self.is_alive():  # type: ignore[attr-defined]
                    raise NoState("the averager process of this peer ended") from None
                received, total, donors = self._progress.tolist()
                if (moved := int(self.traffic[1])) != before:  # it may be an average, to which a state gives way
                    before, came = moved, self.clock.monotonic()
                if self.clock.monotonic() > came + timeout:
                    raise NoState(f"nothing came for {timeout:.0f} s") from None
                if on_progress is not None:
                    on_progress(received, total, donors)

    def get_current_state(self) -> tuple[dict[str, Any], list[torch.Tensor], None]:
        """Called by hivemind in the host process when the averager's process asks for a copy of the state."""
        offered = self._source()
        if offered is None:
            return {}, [], None
        manifest, buffer = offered
        return {"manifest": manifest, "number": self._passage.send(buffer)}, [], None

    # ---------------------------------------------------------------- in the averager's process

    @property
    def _p2p(self) -> P2P:  # hivemind sets it when this process starts
        return self._node

    @_p2p.setter
    def _p2p(self, p2p: P2P) -> None:
        stream_limits.guard(p2p, self._membership, MAX_MEMBERS)
        self._node = p2p

    async def add_p2p_handlers(self, p2p: P2P, *args: Any, namespace: str | None = None, **kwargs: Any) -> None:
        """As hivemind's, those of the donor, and of those who dial back."""
        await super().add_p2p_handlers(p2p, *args, namespace=namespace, **kwargs)  # type: ignore[misc]
        for service in self._services:
            await service.add_p2p_handlers(p2p, namespace=namespace)

    async def remove_p2p_handlers(self, p2p: P2P, *, namespace: str | None = None) -> None:
        """As hivemind's, and those that were added."""
        for service in self._services:
            await service.remove_p2p_handlers(p2p, namespace=namespace)
        await super().remove_p2p_handlers(p2p, namespace=namespace)  # type: ignore[misc]

    def _count_sent(self, count: int) -> None:
        self.traffic[0] += count

    async def _offer(self) -> tuple[bytes, StateBuffer] | None:
        metadata, _, _ = await self._get_current_state_from_host_process()  # type: ignore[attr-defined]
        offered = self.serializer.loads(metadata)
        return (offered["manifest"], self._passage.receive(offered["number"])) if offered else None

    async def _take_state(
        self,
        number: int,
        own: bytes,
        future: MPFuture,
        at_once: int,
        without: frozenset[str],
        absent: tuple[PeerRecord, ...],
        era: int,
    ) -> None:
        self._taking = asyncio.current_task()
        received_before, complete, buffer = 0, False, self._passage.receive(number)

        def count(received: int, total: int) -> None:
            nonlocal received_before
            self.traffic[1] += received - received_before
            received_before = received
            self._progress.copy_(torch.tensor([received, total, taker.count("giving")]))

        def records() -> list[PeerRecord]:
            read = read_records(self._dht_of_run, self._run, self.clock.dht_time())
            # this process may not know of an order yet
            return [record for record in read if record.peer_id not in without and record.era == era]

        try:
            taker = StateClient(
                self._p2p,
                self.prefix,
                TrustedDigests(records, self._own_id, absent, self.secret),
                buffer,
                WantedState(
                    self._read_tree,
                    PATIENCE * self._run.swarm.next_chunk_timeout,
                    own=self._read_tree(own) if own else None,
                    on_bytes=count,
                    at_once=at_once,
                    hold=self.taking_may_wait,
                    lend=None if self.client_mode else self._server.lend,
                ),
            )
            state = await taker.take()
            outcome, complete = (state.donors, state.received, state.refused, state.lost), True
            future.set_result((state.tree.manifest(), list(state.chunks), *outcome))
        except NoState as error:
            future.set_exception(error)
        except Exception as error:
            future.set_exception(NoState(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._server.end_lending(complete)
            if self.client_mode:  # nobody else lets go of it before the next collection of garbage
                buffer.close()

    async def _drop_taking(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
