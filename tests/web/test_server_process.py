"""The web page as a process of its own: live updates to real clients, killed, started again."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from history.test_store import made
from told import MOST, Told
from uvicorn.protocols.websockets import auto

from tt_cli.auxiliary import web_process
from tt_cli.auxiliary.parts import WEB_PAGE
from tt_cli.auxiliary.web_process import WebOptions
from tt_cli.errors import TTError
from tt_cli.history.writer import DATABASE, HistoryWriter, database_url
from tt_cli.run import folders, load_run
from tt_cli.supervisor import side_process as room
from tt_cli.supervisor.http_server import HttpOptions, HttpServer
from tt_cli.supervisor.reporter import Orders
from tt_cli.web import live_updates

pytestmark = pytest.mark.slow

RUN = load_run("emoji")


def port_in(line: str) -> int:
    return int(line.rpartition(":")[2].rstrip("/"))


class Events:
    """One client of the live updates."""

    def __init__(self, port: int, coding: str):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        self._connection.request("GET", "/api/events", headers={"Accept-Encoding": coding})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        assert self._answer.headers["Content-Type"].startswith("text/event-stream")
        assert (self._answer.headers["Content-Encoding"] == "gzip") == ("gzip" in coding)
        self._unpack = zlib.decompressobj(zlib.MAX_WBITS | 16) if "gzip" in coding else None
        self._text = ""

    def next(self, kind: str) -> Any:
        """The data of the next event of this kind."""
        while True:
            while "\n\n" not in self._text:
                data = self._answer.read1()
                assert data, "the stream has ended"
                self._text += (self._unpack.decompress(data) if self._unpack else data).decode()
            event, _, self._text = self._text.partition("\n\n")
            if event.startswith(f"event: {kind}\ndata: "):
                return json.loads(event.partition("data: ")[2])

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def snapshot(at: float) -> str:
    return json.dumps({"time": at, "epoch": 1, "peers": [], "words": "grün <b>"})


def test_it_tells_all_what_is_new_and_comes_back_when_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AGAIN_SECONDS", (0.05,))
    store, told = HistoryWriter(database_url(folders.run_folder(RUN)), RUN.identity), Told()
    store.record_step(made(1), [], 100)
    store.put("snapshot", snapshot(1.0), time.time())
    options = WebOptions(RUN.to_toml(), "emoji", "127.0.0.1", 0)
    with WEB_PAGE.watched(vars(options), tmp_path / "web.log", told) as part:
        port = port_in(told.wait("web page is at"))
        clients = [Events(port, coding) for coding in ("gzip", "identity", "gzip, br")]
        for client in clients:
            assert client.next("snapshot")["words"] == "grün <b>" and client.next("step")["step"] == 1
        store.record_step(made(2), [], 100)
        store.put("snapshot", snapshot(2.0), time.time())
        for client in clients:
            assert client.next("step") == {
                **{"step": 2, "time": 1002.0, "loss": 2.5},
                **{"peers": 2, "samples_per_second": 40.0, "era": ""},
            }
            assert client.next("snapshot")["time"] == 2.0
        assert b"tt_live_clients 3.0" in get(port, "/metrics")[1]
        for client in clients:
            client.close()
        while b"tt_live_clients 0.0" not in get(port, "/metrics")[1]:
            time.sleep(0.05)
        assert get(port, "/health")[0] == 200
        assert part._worker is not None
        os.kill(part._worker.pid, signal.SIGKILL)
        told.wait("the web page ended (exit code -9); starting it again")
        port = port_in(told.wait("web page is at", 2))
        assert json.loads(get(port, "/api/history")[1])["step"] == [1, 2]
    store.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()


def test_a_port_in_use_is_one_line_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AGAIN_SECONDS", (0.05,))
    told = Told()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        part = WEB_PAGE.watched(vars(WebOptions(RUN.to_toml(), "emoji", "127.0.0.1", port)), tmp_path / "web.log", told)
        with part:
            told.wait("the web page does not start: cannot listen on 127.0.0.1 port")
            worker = part._worker
            taken.close()
            assert port_in(told.wait("web page is at")) == port
            assert part._worker is not worker
    assert len(told.lines) == 2, told.lines
    assert told.lines[0].endswith(
        "Address already in use; choose another --web-port; the rest goes on, and it is tried again"
    )


def test_a_second_page_on_one_machine_takes_the_next_free_port() -> None:
    app = FastAPI()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = HttpServer(app, HttpOptions("127.0.0.1", port, "--web-port", more_ports=20))
        assert port < second.port <= port + 20
        with pytest.raises(TTError, match=f"port {port}: Address already in use"):
            HttpServer(app, HttpOptions("127.0.0.1", port, "--web-port"))
        second.stop()
        second.run()


def test_one_visitor_leaves_places_to_others_with_a_proxy_before_the_page_or_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_process, "MOST_OF_ADDRESS", 4)
    monkeypatch.setattr(live_updates, "MOST_OF_ADDRESS", 2)
    HistoryWriter(database_url(folders.run_folder(RUN)), RUN.identity).close()
    monkeypatch.setenv(DATABASE, "")
    told, orders = Told(), Orders()
    options = WebOptions(RUN.to_toml(), "emoji", "127.0.0.1", 0, trusted_proxy="127.0.0.2")
    thread = threading.Thread(target=web_process.main, args=(vars(options), told, orders), daemon=True)
    thread.start()
    port = port_in(told.wait("web page is at"))
    with ExitStack() as open_here:

        def answered(source: str, visitor: str) -> bytes:
            one = socket.create_connection(("127.0.0.1", port), MOST, (source, 0))
            open_here.enter_context(one)
            with suppress(ConnectionError):
                one.sendall(f"GET /api/events HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: {visitor}\r\n\r\n".encode())
                return one.recv(12)
            return b""

        codes = [answered("127.0.0.1", str(number)) for number in range(6)]
        assert codes == 2 * [b"HTTP/1.1 200"] + 2 * [b"HTTP/1.1 503"] + 2 * [b""], "whatever it writes itself"
        codes = [answered("127.0.0.2", f"203.0.113.{number // 4}") for number in range(8)]
        assert codes == 2 * (2 * [b"HTTP/1.1 200"] + 2 * [b"HTTP/1.1 503"])
        assert answered("127.0.0.3", "") == b"HTTP/1.1 200"
    orders.leave.set()
    thread.join()


class Taken(asyncio.Protocol):
    """What uvicorn hands a connection to that asks for a WebSocket, where a package for them is installed."""

    def __init__(self, **server: Any):
        super().__init__()

    def data_received(self, data: bytes) -> None:
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport


def test_who_asks_for_a_websocket_takes_nobodys_place_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "AutoWebSocketsProtocol", Taken)
    server = HttpServer(FastAPI(), HttpOptions("127.0.0.1", 0, "--web-port", each=3))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for _ in range(6):
            with socket.create_connection(("127.0.0.1", server.port)) as one:
                one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n")
                assert b"".join(iter(lambda one=one: one.recv(1 << 16), b"")).startswith(b"HTTP/1.1 404 ")
    finally:
        server.stop()
        thread.join()
