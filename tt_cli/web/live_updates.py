"""Server-sent events: one look at the database for all clients, and every message encoded and compressed once.

A gzip stream may be put together from pieces that were compressed apart, as long as each ends at a byte and refers to
nothing before it. So each message is deflated once, and every client's stream is a header and those same pieces. A
Brotli stream cannot: each client would need an encoder of its own, half a megabyte and the time of every message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections import Counter, deque
from collections.abc import AsyncGenerator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Send

from tt_cli.errors import TTError
from tt_cli.web.queries import Answers, NothingYet

LOOK_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 15.0  # proxies close what is silent for a minute
OLD_SECONDS = 15.0  # a snapshot of this age was not followed by another one in time
MOST_CLIENTS = 2000
MOST_OF_ADDRESS = MOST_CLIENTS // 8  # of a school's many
REMEMBERED = 64  # messages; a client that is further behind goes on with the newest snapshot
MOST_STEPS = 32  # sent one by one at once
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


class Message:
    """One piece of the stream, an event's lines, plain and deflated."""

    def __init__(self, text: str):
        deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        self.plain = text.encode()
        self.deflated = deflate.compress(self.plain) + deflate.flush(zlib.Z_FULL_FLUSH)


KEEP_ALIVE = Message(": keep-alive\n\n")
BEGIN = Message("retry: 5000\n\n")


def event(name: str, content: Any) -> Message:
    """An event with JSON for data."""
    return Message(f"event: {name}\ndata: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n")


class LiveUpdates:
    """All clients of one server. It looks while there are any. Used from the event loop only."""

    def __init__(self, answers: Answers):
        self._answers = answers
        self._messages: deque[Message] = deque(maxlen=REMEMBERED)
        self._sent = 0  # messages ever
        self._snapshot: Message | None = None
        self._step: Message | None = None  # the newest: it may have come after a client read the steps so far
        self._snapshot_time: Any = None
        self._mark: tuple[str, int] | None = None  # the steps that were told
        self._news, self._looking, self._beginning = asyncio.Event(), asyncio.Lock(), asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.clients = Counter[str]()  # by address

    def has_room(self, address: str) -> bool:
        """Tell whether one more client may follow from there."""
        return self.clients.total() < MOST_CLIENTS and self.clients[address] < MOST_OF_ADDRESS

    async def messages(self, address: str = "") -> AsyncGenerator[Message, None]:
        """The messages to one client, without an end."""
        self.clients[address] += 1
        try:
            async with self._beginning:  # of many who come at once the first looks
                if self._task is None:
                    await self._look()  # so that it begins with a snapshot too
                    self._task = asyncio.create_task(self._follow())
            position = self._sent
            for message in filter(None, (BEGIN, self._snapshot, self._step)):
                yield message
            while True:
                news = self._news
                missed, position = self._sent - position, self._sent
                if missed > len(self._messages) and self._snapshot is not None:
                    yield self._snapshot
                elif missed:
                    for message in list(self._messages)[-missed:]:
                        yield message
                else:
                    await news.wait()
        finally:
            self.clients -= Counter([address])
            if not self.clients and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _follow(self) -> None:
        silent = 0.0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            messages = await self._look()
            silent = 0.0 if messages else silent + LOOK_SECONDS
            if silent >= KEEP_ALIVE_SECONDS:
                messages, silent = [KEEP_ALIVE], 0.0
            if messages:
                self._messages.extend(messages)
                self._sent += len(messages)
                news, self._news = self._news, asyncio.Event()
                news.set()

    async def _look(self) -> list[Message]:
        try:
            async with self._looking:
                return await run_in_threadpool(self._changes)
        except TTError:  # the page tells how old what it shows is; who comes now is shown nothing
            self._snapshot = self._snapshot_time = None
            return []

    def _changes(self) -> list[Message]:
        messages, history, told = [], self._answers.history, self._mark
        history.look()
        self._mark = history.mark
        for step, at, loss, peers, speed in history.after(told or ("", 0), MOST_STEPS if told else 1):
            row = {"step": step, "time": at, "loss": loss, "peers": peers, "samples_per_second": speed}
            self._step = event("step", {**row, "era": self._mark[0]})
            messages.append(self._step)
        with contextlib.suppress(NothingYet):
            snapshot = self._answers.snapshot()
            if (new := snapshot["time"] != self._snapshot_time) or snapshot["age_s"] > OLD_SECONDS:
                self._snapshot_time = snapshot["time"]
                self._snapshot = event("snapshot", snapshot)  # an old one for those to come, who learn its age
                messages += [self._snapshot] * new
        return messages


class EventStream(StreamingResponse):
    """A response that lasts until the client leaves."""

    def __init__(self, live: LiveUpdates, gzip: bool, address: str):
        self._pieces = _pieces(live, gzip, address)
        headers = {
            "Cache-Control": "no-store",
            "Vary": "Accept-Encoding",
            "X-Accel-Buffering": "no",  # nginx passes on what comes at once
            **({"Content-Encoding": "gzip"} if gzip else {}),
        }
        super().__init__(self._pieces, headers=headers, media_type="text/event-stream")

    async def stream_response(self, send: Send) -> None:
        """Send what is new; the client is counted no longer as soon as this ends."""
        async with contextlib.aclosing(self._pieces):
            await super().stream_response(send)


async def _pieces(live: LiveUpdates, gzip: bool, address: str) -> AsyncGenerator[bytes, None]:
    if gzip:
        yield GZIP_HEADER
    async with contextlib.aclosing(live.messages(address)) as messages:
        async for message in messages:
            yield message.deflated if gzip else message.plain
