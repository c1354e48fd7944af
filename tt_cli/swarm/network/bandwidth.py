"""This peer's line: what it carries, and caps on what is sent and received: then all streams of the averager are paced.

Notable:
- parts, averages, fetched parts and chunks of states travel on libp2p streams of one process. The daemon's end of each
  is a socket: reading it slowly holds the sender back (backpressure), and nothing that uses streams can forget the cap;
- a byte costs more than a byte on the line: headers, and acknowledgements in the other direction. Both are charged
  (`OVERHEAD`, `ACKNOWLEDGED`), so that the cap holds at the router;
- no bursts: bytes go in small pieces, so that a game or a call on the same line does not wait behind a megabyte;
- what it carries is measured in rounds: the most that the others' kernels acknowledged in a second (`UploadMeter`). No
  buffer counts, and no line is tested. A round of less than a second says nothing, and needs no shares by bandwidth.
  One in which the line had less to send than it could says how much it carries at least, and lowers nothing;
- rounds come first: while one moves bytes, chunks of states get a twentieth of the line, or 1 Mbit/s;
- who has a slow line among the members keeps its own queue short: written ahead of the line, its parts made rounds a
  quarter longer (why was not looked for). The first seconds of a round go as fast as they can, and are measured.

The cap is true over a round or a download; within a second the daemon may read 256 KiB ahead for each open stream. The
DHT's records, some kB/s, belong to another process: `RESERVED` is kept free for them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import torch
from hivemind.p2p import P2P

OVERHEAD = 1.07  # 1,448 of 1,514 bytes of a frame are TCP's payload; the rest is TLS, libp2p, repeated segments
ACKNOWLEDGED = 0.03  # an acknowledgement of 66 bytes for every second segment
RESERVED = 20_000.0  # bits a second, at most a tenth of the cap
PIECE = 2**15
PACE, FREE_SECONDS = 0.92, 2.0  # of what a slow line carries; of a round, in which nothing waits for that
REST, LEAST_REST, REST_SECONDS = 1 / 20, 1e6, 10.0  # for states in rounds: of the line; bits a second; to wait for that
LOOK_SECONDS, WINDOW_SECONDS, ROUNDS = 0.25, 1.0, 5  # at what was sent; in which that is counted; that count
STRAINED = 0.5  # of the looks at a round: as often something must wait to be sent
CATCH_UP_SECONDS = 0.02  # a sleep that ends late is made up for; more than that is not saved


class TokenBucket:
    """One direction. rate: bits a second on the line; infinite without a cap. clock: seconds."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        if not rate > 0:
            raise ValueError(f"a rate of {rate} bit/s")
        self._clock = clock
        self._seconds_per_byte = 8 / (rate - min(RESERVED, rate / 10))
        self._free_at = 0.0

    def charge(self, count: float) -> float:
        """Count bytes, and return the time by the clock at which the line has carried them."""
        now = self._clock()
        self._free_at = max(self._free_at, now - CATCH_UP_SECONDS) + count * self._seconds_per_byte
        return self._free_at

    def seconds(self, count: float) -> float:
        """Seconds that so many bytes of ours take."""
        return count * OVERHEAD * self._seconds_per_byte


class UploadMeter:
    """The upload that a line was seen to carry. acknowledged: connection → bytes that its other side's kernel has.

    rate: bits a second, in the best second of the last rounds; 0 before there was one. strained: in the newest round
    something waited to be sent most of the time, so that the line, or one that receives, was what held it up. waiting:
    writers that wait now. Made before the averager's process forks: both sides see rate and strained.
    """

    def __init__(self, acknowledged: Callable[[], Mapping[int, int]], clock: Callable[[], float] = time.monotonic):
        self._acknowledged, self._clock = acknowledged, clock
        self._best: deque[float] = deque(maxlen=ROUNDS)
        self._rate = torch.zeros(2, dtype=torch.float64).share_memory_()  # and whether the line was strained
        self.waiting = self._waited = self._looked = 0
        self._before: Mapping[int, int] = {}
        self._looks: deque[tuple[float, int]] = deque()  # when, and bytes until then

    @property
    def rate(self) -> float:
        return float(self._rate[0])

    @property
    def strained(self) -> bool:
        return bool(self._rate[1])

    def begin(self) -> None:
        """A round begins."""
        if self._best and not self.strained:  # what it did not need it may carry still
            self._best[-1] = self.rate
        self._waited = self._looked = 0
        self._before = self._acknowledged()
        self._looks = deque([(self._clock(), 0)])
        self._best.append(0.0)

    async def watch(self) -> None:
        """Look at all of a round, until it is cancelled."""
        self.begin()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Look at what was sent in the last second."""
        now, counts = self._clock(), self._acknowledged()
        self._looked, self._waited = self._looked + 1, self._waited + bool(self.waiting)
        self._rate[1] = self._waited > STRAINED * self._looked
        sent = sum(max(0, count - self._before.get(connection, 0)) for connection, count in counts.items())
        self._looks.append((now, self._looks[-1][1] + sent))
        self._before = counts
        while self._looks[1][0] <= now - WINDOW_SECONDS:
            self._looks.popleft()
        (since, first), (_, last) = self._looks[0], self._looks[-1]
        if now - since >= WINDOW_SECONDS:
            self._best[-1] = max(self._best[-1], 8 * (last - first) / (now - since))
            self._rate[0] = max(self._best)


class BandwidthLimiter:
    """This peer's line. max_upload, max_download: bits a second, None without a cap. capped: whether one has any.

    meter: of what it carries. clock: seconds, as the event loop's.
    """

    def __init__(
        self,
        max_upload: float | None = None,
        max_download: float | None = None,
        meter: UploadMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        caps = [math.inf if cap is None else cap for cap in (max_upload, max_download)]
        self._up, self._down = (TokenBucket(cap, clock) for cap in caps)
        self._most, self._meter, self._clock = caps[0], meter, clock
        self._round, self._free_until = TokenBucket(math.inf, clock), math.inf
        self._rest: TokenBucket | None = None  # for states, in a round
        self._over = asyncio.Event()
        self.capped = max_upload is not None or max_download is not None

    @property
    def upload(self) -> int:
        """Kbit/s that this line sends, 0 where it is not known: the cap, before anything was measured."""
        measured = self._meter.rate if self._meter is not None else 0.0
        known = min(self._most, measured or math.inf)
        return max(1, int(known / 1000)) if known < math.inf else 0

    def begin(self, slow: bool) -> None:
        """A round begins. slow: this line is, among the members'."""
        rate = self._meter.rate if self._meter is not None else 0.0
        self._rest, self._over = TokenBucket(max(LEAST_REST, REST * 1e3 * self.upload), self._clock), asyncio.Event()
        if slow and rate:
            self._round = TokenBucket(PACE * rate, self._clock)
            self._free_until = self._clock() + FREE_SECONDS

    def end(self) -> None:
        """The round is over."""
        self._free_until, self._rest = math.inf, None
        self._over.set()

    async def give_way(self, count: int) -> bool:
        """Wait until so many bytes of a state may go: at once, in a round at the rest's rate. False: that is long."""
        if (rest := self._rest) is not None:
            now = self._clock()
            if rest.charge(0) > now + REST_SECONDS:
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), rest.charge(count * OVERHEAD) - now)
        return True

    @asynccontextmanager
    async def measured(self, slow: bool) -> AsyncIterator[None]:
        """A round, in which what this peer sends is measured. slow: see `begin`."""
        self.begin(slow)
        looking = asyncio.create_task(self._meter.watch()) if self._meter is not None else None
        try:
            yield
        finally:
            if looking is not None:
                looking.cancel()
            self.end()

    def seconds(self, up: float, down: float) -> float:
        """Seconds that so many bytes each way take at least because of the caps; 0 without any."""
        return max(self._up.seconds(up), self._down.seconds(down))

    def too_slow(self, most: int, limit: float) -> str:
        """Words about caps with which so many bytes each way do not fit into a round of `limit` seconds, or ""."""
        seconds = self.seconds(most, most)
        if seconds <= limit / 2:
            return ""
        need = most * OVERHEAD * 16 / limit
        allow = math.ceil(min(need + RESERVED, need / 0.9) / 1e5) / 10
        return (
            f"with these caps on traffic a round may take this peer {seconds:.0f} s, and the others wait {limit:.0f} s "
            f"at most: allow {allow} Mbit/s each way, or use --client-mode, which halves what travels"
        )

    def measured_too_slow(self, count: int, limit: float, what: str, remedy: str) -> str:
        """Words about a line that was seen to need more than `limit` seconds to send so many bytes, or ""."""
        rate = self._meter.rate if self._meter is not None and self._meter.strained else 0.0
        if not rate or 8 * count <= limit * rate:
            return ""
        return (
            f"this line sends {rate / 1e6:.2f} Mbit/s, as measured in the last rounds: {what} takes "
            f"{8 * count / rate:.0f} s, and the others wait {limit:.0f} s. It needs {8e-6 * count / limit:.2f} Mbit/s: "
            f"free the line, or {remedy}"
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Something waits to be sent."""
        meter = self._meter
        if meter is not None:
            meter.waiting += 1
        try:
            yield
        finally:
            if meter is not None:
                meter.waiting -= 1

    async def send(self, count: int) -> None:
        """Wait until `count` bytes may go out."""
        if self._free_until < math.inf:
            carried = self._round.charge(count * OVERHEAD)
            if (now := self._clock()) >= self._free_until:
                await asyncio.sleep(max(0.0, carried - now))
        await self._carry(count * OVERHEAD, count * ACKNOWLEDGED)

    async def receive(self, count: int) -> None:
        """Wait until the line has had time for `count` bytes that came in."""
        await self._carry(count * ACKNOWLEDGED, count * OVERHEAD)

    async def _carry(self, up: float, down: float) -> None:
        wait = max(self._up.charge(up), self._down.charge(down)) - self._clock()
        if wait > 0:
            await asyncio.sleep(wait)

    def pace(self, p2p: P2P) -> P2P:
        """Pace all streams that this node opens or accepts from now on; unary calls (some kB a round) are not."""
        if not self.capped and self._meter is None:
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
        if not self._line.capped:
            return await self._reader.readexactly(n)
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
        with self._line.writing():
            for data in waiting:
                size = PIECE if self._line.capped else max(1, len(data))  # whole parts: one stream after the other
                for start in range(0, len(data), size):
                    piece = data[start : start + size]
                    await self._line.send(len(piece))
                    self._writer.write(piece)
                    await self._writer.drain()

    def close(self) -> None:
        """As asyncio's."""
        self._writer.close()
