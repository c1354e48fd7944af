"""A web server of a folder, in a thread, with faults on request."""

from __future__ import annotations

import re
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote


class ShardServer:
    """Serves the files of `folder`, with ranges. log: "PATH" or "PATH RANGE" of every request.

    faults: for a part of a path, what the next requests get: a status with headers; "cut", half of the content;
    "stall", half of it and then nothing while the server lives; "damage", other bytes; "endless", bytes without end and
    without a number; "huge", an announcement of 2 GiB; "packed", the content, said to be gzip.
    tls: serves https with it.
    """

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None) -> None:
        self.folder, self._tls = folder, tls
        self.log: list[str] = []
        self.faults: dict[str, list[Any]] = {}
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def fetched(self) -> list[str]:
        """The shards that were asked for, without indexes."""
        return [entry for entry in self.log if re.search(r"\.(parquet|tar|br)", entry)]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, asked = handler.path.split("?")[0].lstrip("/"), handler.headers.get("Range")
        self.log.append(f"{path} {asked}" if asked else path)
        fault = next((faults.pop(0) for match, faults in self.faults.items() if match in path and faults), None)
        if isinstance(fault, tuple):
            return self._send(handler, fault[0], b"", fault[1])
        file = self.folder / unquote(path)
        if not file.is_file():
            return self._send(handler, 404, b"", {})
        content = file.read_bytes()
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if fault == "damage":
            content = bytes(len(content))
        headers = {"ETag": f'"{hash(content)}"'}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        part = content[start:]
        if fault == "endless":
            handler.send_response(200)
            handler.end_headers()
            handler.close_connection = True
            with suppress(OSError):  # until it is hung up on
                while True:
                    handler.wfile.write(bytes(1 << 20))
        if fault == "huge":
            handler.close_connection = True
            return self._begin(handler, 200, 1 << 31, headers)
        if fault == "packed":
            headers["Content-Encoding"] = "gzip"
        if fault in ("cut", "stall"):
            self._begin(handler, 206 if start else 200, len(part), headers)
            handler.wfile.write(part[: len(part) // 2])
            handler.wfile.flush()
            if fault == "stall":
                self.ended.wait()
            handler.close_connection = True
            return None
        return self._send(handler, 206 if start else 200, part, headers)

    def _begin(self, handler: BaseHTTPRequestHandler, status: int, length: int, headers: dict[str, str]) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            handler.send_header(name, value)
        handler.end_headers()

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._begin(handler, status, len(body), headers)
        handler.wfile.write(body)
