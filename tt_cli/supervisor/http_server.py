"""The HTTP server of the run's page and of the authority: uvicorn on a socket that listens before the app is served.

An error of either is {"detail": "one line for a person"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from tt_cli.errors import os_errors
from tt_cli.identity.rate_limit import Crowded, Places, address_key

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


@dataclass(frozen=True)
class HttpOptions:
    """Address and limits of a server.

    port: 0 for any that is free. port_flag: the command-line flag that the error names where it is taken. more_ports:
    after this one, which are tried then. connections: at once; to one more it answers 503. grace_seconds: for the
    requests under way when it stops. trusted_proxy: whose X-Forwarded-For is believed; without one it means nothing.
    each: connections of one address, but for the trusted proxy; one more is hung up on. silence: seconds until a
    connection must have asked for something, whole, and again after an answer.
    """

    host: str
    port: int
    port_flag: str
    more_ports: int = 0
    connections: int = 500
    grace_seconds: int = 3
    trusted_proxy: str = ""
    each: int | None = None
    silence: float = 10.0


class HttpServer:
    """An ASGI app on a port. Listens when it is made, or raises TTError."""

    def __init__(self, app: Any, options: HttpOptions):
        import uvicorn

        self._socket = _listen(options, options.port)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_connections(options),
                ws="none",  # by itself it takes WebSockets where it finds a package for them, past `_connections`
                log_level="error",  # a stranger's request can have a warning written
                access_log=False,
                server_header=False,
                limit_concurrency=options.connections,
                timeout_keep_alive=math.ceil(options.silence),
                timeout_graceful_shutdown=options.grace_seconds,
                proxy_headers=bool(options.trusted_proxy),
                forwarded_allow_ips=options.trusted_proxy or None,
            )
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._socket.getsockname()[1])

    def run(self, until: threading.Event | None = None) -> None:
        """Serve until `stop`, until this event is set, or, in the main thread, until Ctrl-C."""
        if until is not None:
            threading.Thread(target=self.stop, args=(until,), daemon=True).start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self, when: threading.Event | None = None) -> None:
        """Have `run` return after the requests under way; from any thread. when: waits for this event first."""
        if when is not None:
            when.wait()
        self._server.should_exit = True


def _connections(options: HttpOptions) -> type[asyncio.Protocol]:
    """The class of a connection that keeps to `each` and `silence`."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    places = Places(options.each or options.connections, 2 * options.connections)

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast("asyncio.Transport", transport))
            self._place = contextlib.ExitStack()
            self._await_request()
            host = self.client[0] if self.client else ""
            try:
                if host != options.trusted_proxy:
                    self._place.enter_context(places.one(address_key(host)))
            except Crowded:
                transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._place.close()
            self._deadline.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._deadline.cancel()
            self._await_request()

        def _await_request(self) -> None:
            before = self.cycle

            def hang_up() -> None:
                if self.cycle is before and (before is None or before.response_complete):
                    self.transport.close()

            self._deadline = self.loop.call_later(options.silence, hang_up)

    return Connection


def _listen(options: HttpOptions, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with os_errors(f"cannot listen on {options.host} port {port}", f"choose another {options.port_flag}"):
        try:
            return socket.create_server((options.host, port), family=family, backlog=512)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port >= options.port + options.more_ports:
                raise
    return _listen(options, port + 1)


class Problem(BaseModel):
    """The reason of a refusal, in one line."""

    detail: str


def problems(reasons: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """What FastAPI is told of refusals. reasons: of each status, in words."""
    return {code: {"model": Problem, "description": words} for code, words in reasons.items()}


def problem(status: int, words: str, wait: float | None = None) -> Response:
    """An error. wait: seconds until it may be tried again."""
    from starlette.responses import JSONResponse

    headers = None if wait is None else {"Retry-After": str(max(1, math.ceil(wait)))}
    return JSONResponse({"detail": words}, status, headers)


def malformed(request: Request, error: Exception) -> Response:
    """FastAPI's RequestValidationError: which field is wrong and how, without what was sent, which may be a token."""
    first = error.errors()[0]  # type: ignore[attr-defined]
    where = ".".join(str(step) for step in first["loc"] if step not in ("body", "query")) or "the body"
    return problem(422, f"{where}: {first['msg']}"[:300])
