"""Somebody at a TCP port who says what a libp2p node says first, or something else, to who connects."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tt_cli.identity.multiaddr import HELLO

SOMEBODY = "QmSY4bsZLR2qXhvXRG9hyVZaPEzvsSMBhLPWE6ruGyb7Q8"


@contextmanager
def listening(says: bytes = HELLO) -> Iterator[str]:
    """Its multiaddr. It says no more, and hangs up when the other does."""

    class Greeter(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(says)
            self.request.recv(1)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greeter) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"/ip4/127.0.0.1/tcp/{server.server_address[1]}/p2p/{SOMEBODY}"
        finally:
            server.shutdown()
            thread.join()
