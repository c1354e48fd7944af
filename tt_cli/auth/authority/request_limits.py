"""Bodies of requests to the authority: none is longer, or slower, than it may be."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tt_cli.auth.authority.issuer import RequestRefused
from tt_cli.supervisor.http_server import problem

MAX_BODY = 16 * 1024  # bytes
BODY_SECONDS = 10.0  # for all of it


async def bounded_body(receive: Receive, limit: int, seconds: float) -> bytes:
    """All of a request's body. Raises RequestRefused."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > limit:
                    raise RequestRefused(413, f"the body is longer than {limit} bytes")
                more = message["type"] == "http.request" and message.get("more_body", False)
    except TimeoutError:
        raise RequestRefused(408, f"the body did not come within {seconds:.0f} s") from None
    return bytes(body)


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
        except RequestRefused as error:
            await problem(error.status, str(error))(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)
