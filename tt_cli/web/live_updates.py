"""Server-sent events: one look at the database for all clients, and every message encoded and compressed once.

A gzip stream may be put together from pieces that were compressed apart, as long as each ends at a byte and refers to
nothing before it. So each message is deflated once, and every client's stream is a header and those same pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tt_cli.errors import TTError
from tt_cli.web.queries import Answers, NothingYet

LOOK_SECONDS = 2.0
KEEP_ALIVE_SECONDS = 15.0  # proxies close what is silent for a minute
MOST_CLIENTS = 2000
REMEMBERED = 64  # messages; a client that is further behind goes on with the newest snapshot
MOST_STEPS = 32  # told one by one at once
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


@dataclass(frozen=True)
class Message:
    """One piece of the stream, plain and deflated."""

    plain: bytes
    deflated: bytes

    @classmethod
    def of(cls, text: str) -> Message:
        """Of an event's lines."""
        plain = text.encode()
        deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
        return cls(plain, deflate.compress(plain) + deflate.flush(zlib.Z_FULL_FLUSH))


KEEP_ALIVE = Message.of(": keep-alive\n\n")
BEGIN = Message.of("retry: 5000\n\n")


def event(name: str, content: Any) -> Message:
    """An event with JSON for data."""
    return Message.of(f"event: {name}\ndata: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n")


class Live:
    """All clients of one server. It looks while there are any. Used from the event loop only."""

    def __init__(self, answers: Answers, look_seconds: float = LOOK_SECONDS):
        self._answers, self._look_seconds = answers, look_seconds
        self._messages: deque[Message] = deque(maxlen=REMEMBERED)
        self._sent = 0  # messages ever
        self._snapshot: Message | None = None
        self._snapshot_time: Any = None
        self._news, self._looking = asyncio.Event(), asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.clients = 0

    async def messages(self) -> AsyncIterator[Message]:
        """What one client is told, without an end."""
        self.clients += 1
        if self._task is None:
            await self._look()  # so that the first client begins with a snapshot too
            self._task = self._task or asyncio.create_task(self._follow())
        try:
            yield BEGIN
            if self._snapshot is not None:
                yield self._snapshot
            told = self._sent
            while True:
                news = self._news
                missed = self._sent - told
                told = self._sent
                if missed > len(self._messages):
                    if self._snapshot is not None:
                        yield self._snapshot
                elif missed:
                    for message in list(self._messages)[-missed:]:
                        yield message
                else:
                    await news.wait()
        finally:
            self.clients -= 1
            if not self.clients and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _follow(self) -> None:
        silent = 0.0
        while True:
            await asyncio.sleep(self._look_seconds)
            found = await self._look()
            silent = 0.0 if found else silent + self._look_seconds
            if silent >= KEEP_ALIVE_SECONDS:
                found, silent = [KEEP_ALIVE], 0.0
            if found:
                self._messages.extend(found)
                self._sent += len(found)
                news, self._news = self._news, asyncio.Event()
                news.set()

    async def _look(self) -> list[Message]:
        try:
            async with self._looking:
                return await run_in_threadpool(self._changes)
        except TTError:  # the page tells how old what it shows is
            return []

    def _changes(self) -> list[Message]:
        found = []
        known = self._answers.history.newest
        new = self._answers.history.look()
        for step, at, loss, peers, speed in new[-MOST_STEPS:] if known is not None else []:
            row = {"step": step, "time": at, "loss": loss, "peers": peers, "samples_per_second": speed}
            found.append(event("step", row))
        with contextlib.suppress(NothingYet):
            snapshot = self._answers.snapshot()
            if snapshot["time"] != self._snapshot_time:
                self._snapshot_time = snapshot["time"]
                self._snapshot = event("snapshot", snapshot)
                found.append(self._snapshot)
        return found


class EventStream(Response):
    """An ASGI response that lasts until the client leaves."""

    def __init__(self, live: Live, gzip: bool):
        super().__init__()
        self._live, self._gzip = live, gzip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is new for as long as somebody is there."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"vary", b"Accept-Encoding"),
            (b"x-accel-buffering", b"no"),  # nginx passes on what comes at once
        ]
        if self._gzip:
            headers.append((b"content-encoding", b"gzip"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        header = GZIP_HEADER if self._gzip else b""
        async with contextlib.aclosing(self._live.messages()) as messages:  # type: ignore[type-var]
            async for message in messages:
                body = header + (message.deflated if self._gzip else message.plain)
                header = b""
                await send({"type": "http.response.body", "body": body, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
