"""uvicorn around the page of one run."""

from __future__ import annotations

import errno
import os
import socket

import uvicorn
from fastapi import FastAPI

from tt_cli.errors import TTError

PORT = 8471
MOST_CONNECTIONS = 3000


class WebServer:
    """Listens when it is made, or raises TTError. `run` blocks until `stop`, which another thread may call.

    more: of the ports after this one, how many are tried where it is taken.
    """

    def __init__(self, app: FastAPI, host: str, port: int, more: int = 0):
        self._socket = _listen(host, port, more)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=1,  # live updates have no end of their own
            )
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def run(self) -> None:
        """Serve; in the main thread also until Ctrl-C."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Have `run` return."""
        self._server.should_exit = True


def _listen(host: str, port: int, more: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and more:
            return _listen(host, port + 1, more - 1)
        raise TTError(
            f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}; choose another --web-port"
        ) from error
