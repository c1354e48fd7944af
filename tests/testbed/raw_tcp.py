"""What plain TCP needs to carry the same bytes: the bound that a round on top of libp2p is compared with."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

CHUNK = 2**18


class Exchange:
    """One host's side of an exchange of all with all: it sends to every other host at once, and receives from all.

    One connection for each direction of each pair, open from `connect` on; more of them are no faster. address: where
    it listens, "host:port".
    """

    def __init__(self, host: str):
        self._server = socket.create_server((host, 0), backlog=64)
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self._outgoing: list[socket.socket] = []
        self._incoming: list[socket.socket] = []

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all others of these hosts, and take their connections; all of them do so at the same time."""
        others = [address.split(":") for address in addresses if address != self.address]
        self._outgoing = [socket.create_connection((host, int(port))) for host, port in others]
        self._incoming = [self._server.accept()[0] for _ in others]

    def run(self, size: int) -> float:
        """Send so many bytes to each other host and receive as many from it; all of them do. Returns seconds."""
        started = time.monotonic()
        work = [threading.Thread(target=_send, args=(one, size)) for one in self._outgoing]
        work += [threading.Thread(target=_receive, args=(one, size)) for one in self._incoming]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        return time.monotonic() - started


def _send(connection: socket.socket, size: int) -> None:
    data = memoryview(bytes(CHUNK))
    for start in range(0, size, CHUNK):
        connection.sendall(data[: size - start])


def _receive(connection: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(CHUNK))
    while size > 0:
        received = connection.recv_into(buffer[:size])
        if not received:
            raise ConnectionError("a connection of the raw TCP exchange ended")
        size -= received
