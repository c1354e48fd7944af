"""Bodies of requests to the authority: none is longer, or slower, than it may be."""

from __future__ import annotations

import asyncio

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tt_cli.supervisor.http_server import problem

MAX_BODY = 16 * 1024  # bytes
BODY_SECONDS = 10.0  # for all of it


class BodyTooLong(Exception):
    """limit: bytes that would have been taken."""

    def __init__(self, limit: int):
        self.limit = limit


class BodyTooSlow(Exception):
    """seconds: in which it had to come."""

    def __init__(self, seconds: float):
        self.seconds = seconds


async def bounded_body(receive: Receive, limit: int, seconds: float) -> bytes:
    """All of a request's body. Raises BodyTooLong, BodyTooSlow."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > limit:
                    raise BodyTooLong(limit)
                if message["type"] != "http.request" or not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise BodyTooSlow(seconds) from None


class BoundedBodies:
    """Reads the whole body before anything else does: at most MAX_BODY bytes, within BODY_SECONDS.

    but_for: a path whose bodies are larger, and are read by what answers there.
    """

    def __init__(self, app: ASGIApp, but_for: str):
        self._app, self._but_for = app, but_for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"] == self._but_for:
            await self._app(scope, receive, send)
            return
        try:
            body = await bounded_body(receive, MAX_BODY, BODY_SECONDS)
        except BodyTooSlow as error:
            await too_slow(Request(scope), error)(scope, receive, send)
            return
        except BodyTooLong as error:
            await too_long(Request(scope), error)(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)


def too_long(request: Request, error: Exception) -> Response:
    """413."""
    assert isinstance(error, BodyTooLong)
    return problem(413, f"the body is longer than {error.limit} bytes")


def too_slow(request: Request, error: Exception) -> Response:
    """408."""
    assert isinstance(error, BodyTooSlow)
    return problem(408, f"the body did not come within {error.seconds:.0f} s")
