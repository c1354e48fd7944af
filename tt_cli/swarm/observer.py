"""A client of a run's DHT that only reads: the way to the swarm for whoever is no peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2

from tt_cli.errors import TTError
from tt_cli.run import RunConfig
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.board import View, read_history, read_records
from tt_cli.swarm.dht import start_dht, stop_dht
from tt_cli.swarm.handover import receive_state
from tt_cli.swarm.records import HistoryRecord, PeerRecord

Accepted = TypeVar("Accepted")
LOOK_SECONDS = 2.0
LAST_LOOKS = 4


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

    def fetch_state(
        self,
        max_bytes: int,
        accept: Callable[[bytes, frozenset[tuple[int, str]]], Accepted],
        on_bytes: Callable[[int, int], None] = lambda received, total: None,
    ) -> tuple[str, Accepted]:
        """The state that the swarm holds: the donor and what `accept` makes of it. Call it once.

        accept(data, held): data is as a donor sent it, unchecked; held are the (step, digest) pairs that members
        signed meanwhile, of each step the one that most of them hold. Where it raises TTError or ValueError, the next
        donor is asked. on_bytes: called with the bytes received and the bytes that the donor says there are. Raises
        TTError when no donor is left.
        """
        return asyncio.run(self._fetch_state(max_bytes, accept, on_bytes))

    async def _fetch_state(
        self,
        max_bytes: int,
        accept: Callable[[bytes, frozenset[tuple[int, str]]], Accepted],
        on_bytes: Callable[[int, int], None],
    ) -> tuple[str, Accepted]:
        p2p = await self._dht.replicate_p2p()
        held: set[tuple[int, str]] = set()
        lock = asyncio.Lock()

        async def look() -> list[PeerRecord]:
            async with lock:
                records = await asyncio.to_thread(self.records)
            held.update(_held(records))
            return records

        async def keep_looking() -> None:
            # Members may be steps ahead when a long download ends: what they signed on the way is remembered.
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                await look()

        records = await look()
        view = View.of(records)
        looking, problems = asyncio.create_task(keep_looking()), []
        try:
            for donor in view.donors() if view.digest else []:
                try:
                    claimed, data = await self._fetch_from(p2p, donor, max_bytes, on_bytes)
                except Exception as error:  # a donor may fail in any way; the next one is asked
                    problems.append(f"{donor}: {_printable(str(error)) or type(error).__name__}")
                    continue
                for _ in range(LAST_LOOKS):  # it may have stepped just before it answered: its record follows
                    if claimed in held:
                        break
                    await look()
                try:
                    return donor, accept(data, frozenset(held))
                except (TTError, ValueError) as error:
                    problems.append(f"{donor}: {_printable(str(error))}")
        finally:
            looking.cancel()
            await p2p.shutdown()
        if not problems:
            raise TTError(
                f"none of {len(records)} peers can hand over a state of run {self._run.identity}: wait for the first "
                "steps, or check that the address and --run belong together"
            )
        raise TTError(f"no peer handed over a state that can be used ({'; '.join(problems)}): try again")

    async def _fetch_from(
        self, p2p: P2P, donor: str, max_bytes: int, on_bytes: Callable[[int, int], None]
    ) -> tuple[tuple[int, str], bytes]:
        received = 0

        def count(size: int, total: int) -> None:
            nonlocal received
            received += size
            on_bytes(received, min(max(received, total), max_bytes))

        stub = Averager.get_stub(p2p, PeerID.from_base58(donor), namespace=self._run.identity)
        stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        found = await receive_state(
            stream, max_bytes=max_bytes, chunk_timeout=self._run.swarm.next_chunk_timeout, on_bytes=count
        )
        if found is None:
            raise ValueError("it has none")
        metadata, blob = found
        step, digest = metadata.get("epoch"), metadata.get("digest")
        if not isinstance(step, int) or not isinstance(digest, str):
            raise ValueError("it does not say which state this is")
        return (step, digest), blob.numpy().tobytes()

    def close(self) -> None:
        """End the client and its daemon."""
        stop_dht(self._dht)


def _held(records: Iterable[PeerRecord]) -> set[tuple[int, str]]:
    """Of each step the digest that most of those hold who can hand it over."""
    records = list(records)
    views = (View.of(r for r in records if r.epoch == step) for step in {record.epoch for record in records})
    return {(view.epoch, view.digest) for view in views if view.digest}


def _printable(words: str) -> str:
    """One short line: a donor may have chosen some of these words, and a terminal will show them."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in words).split())[:200]
