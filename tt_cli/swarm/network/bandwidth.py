"""A cap on what this peer sends and what it receives: every stream of the averager's process is paced.

Notable:
- parts, averages, fetched parts and chunks of states travel on libp2p streams of one process. The daemon's end of each
  is a socket: reading it slowly holds the sender back (backpressure), and nothing that uses streams can forget the cap;
- a byte costs more than a byte on the line: headers, and acknowledgements in the other direction. Both are charged
  (`OVERHEAD`, `ACKNOWLEDGED`), so that the cap holds at the router;
- no bursts: bytes go in small pieces, so that a game or a call on the same line does not wait behind a megabyte.

The cap is true over a round or a download; within a second the daemon may read 256 KiB ahead for each open stream. The
DHT's records, some kB/s, belong to another process: `RESERVED` is kept free for them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.p2p import P2P

OVERHEAD = 1.07  # 1,448 of 1,514 bytes of a frame are TCP's payload; the rest is TLS, libp2p, repeated segments
ACKNOWLEDGED = 0.03  # an acknowledgement of 66 bytes for every second segment
RESERVED = 20_000.0  # bits a second, at most a tenth of the cap
PIECE = 2**15
CATCH_UP_SECONDS = 0.02  # a sleep that ends late is made up for; more than that is not saved


class TokenBucket:
    """One direction. rate: bits a second on the line; infinite without a cap."""

    def __init__(self, rate: float):
        if not rate > 0:
            raise ValueError(f"a rate of {rate} bit/s")
        self._seconds_per_byte = 8 / (rate - min(RESERVED, rate / 10))
        self._free_at = 0.0

    def charge(self, count: float) -> float:
        """Count bytes, and return the time (monotonic) at which the line has carried them."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - CATCH_UP_SECONDS) + count * self._seconds_per_byte
        return self._free_at

    def seconds(self, count: float) -> float:
        """Seconds that so many bytes of ours take."""
        return count * OVERHEAD * self._seconds_per_byte


class BandwidthLimiter:
    """This peer's line. max_upload, max_download: bits a second, None without a cap. capped: whether one has any."""

    def __init__(self, max_upload: float | None = None, max_download: float | None = None):
        self._up, self._down = (TokenBucket(math.inf if cap is None else cap) for cap in (max_upload, max_download))
        self.capped = max_upload is not None or max_download is not None

    def seconds(self, up: float, down: float) -> float:
        """Seconds that so many bytes each way take at least because of the caps; 0 without any."""
        return max(self._up.seconds(up), self._down.seconds(down))

    def too_slow(self, most: int, limit: float) -> str:
        """Words about caps with which so many bytes each way do not fit into a round of `limit` seconds, or ""."""
        seconds = self.seconds(most, most)
        if seconds <= limit / 2:
            return ""
        return (
            f"with these caps on traffic a round may take this peer {seconds:.0f} s, and the others wait {limit:.0f} s "
            f"at most: allow {most * OVERHEAD * 16 / limit / 1e6:.1f} Mbit/s each way, or use --client-mode, which "
            "halves what travels"
        )

    async def send(self, count: int) -> None:
        """Wait until `count` bytes may go out."""
        await self._carry(count * OVERHEAD, count * ACKNOWLEDGED)

    async def receive(self, count: int) -> None:
        """Wait until the line has had time for `count` bytes that came in."""
        await self._carry(count * ACKNOWLEDGED, count * OVERHEAD)

    async def _carry(self, up: float, down: float) -> None:
        wait = max(self._up.charge(up), self._down.charge(down)) - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)

    def pace(self, p2p: P2P) -> P2P:
        """Pace all streams that this node opens or accepts from now on; unary calls (some kB a round) are not."""
        if not self.capped:
            return p2p
        open_stream, add_handler = p2p.call_binary_stream_handler, p2p.add_binary_stream_handler

        async def call_binary_stream_handler(*args: Any) -> tuple[Any, Any, Any]:
            info, reader, writer = await open_stream(*args)
            return info, PacedReader(reader, self), PacedWriter(writer, self)

        async def add_binary_stream_handler(
            name: str, handler: Callable[[Any, Any, Any], Awaitable[None]], **more: Any
        ) -> None:
            async def paced(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await handler(info, PacedReader(reader, self), PacedWriter(writer, self))

            await add_handler(name, paced, **more)

        p2p.call_binary_stream_handler = call_binary_stream_handler
        p2p.add_binary_stream_handler = add_binary_stream_handler
        return p2p


class PacedReader:
    """The part of asyncio.StreamReader that hivemind uses."""

    def __init__(self, reader: asyncio.StreamReader, line: BandwidthLimiter):
        self._reader, self._line = reader, line

    async def readexactly(self, n: int) -> bytes:
        """As asyncio's, no faster than the line's cap."""
        pieces = []
        for start in range(0, n, PIECE):
            pieces.append(await self._reader.readexactly(min(PIECE, n - start)))
            await self._line.receive(len(pieces[-1]))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class PacedWriter:
    """The part of asyncio.StreamWriter that hivemind uses."""

    def __init__(self, writer: asyncio.StreamWriter, line: BandwidthLimiter):
        self._writer, self._line = writer, line
        self._waiting: list[memoryview] = []

    def write(self, data: bytes | memoryview) -> None:
        """Keep it until `drain`, as it is: it must not change."""
        self._waiting.append(memoryview(data))

    async def drain(self) -> None:
        """Send what was written, no faster than the line's cap."""
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                await self._line.send(len(piece))
                self._writer.write(piece)
                await self._writer.drain()

    def close(self) -> None:
        """As asyncio's."""
        self._writer.close()
