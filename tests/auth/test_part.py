"""The authority beside an auxiliary peer: a process of its own, watched."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from pathlib import Path

import httpx2
import pytest
from auth.peers import closed_run

from tt_cli.auth.authority import authority_server
from tt_cli.auth.authority.authority_server import ServeOptions
from tt_cli.auxiliary.parts import AUTHORITY
from tt_cli.errors import TTError
from tt_cli.supervisor import side_process as room
from tt_cli.supervisor.events import Event, Log


class Shown:
    """What is told, to be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()

    def __call__(self, event: Event) -> None:
        assert isinstance(event, Log)
        with self._news:
            self.lines.append(event.message)
            self._news.notify_all()

    def wait(self, words: str, count: int = 1) -> str:
        with self._news:
            assert self._news.wait_for(lambda: len(self._found(words)) >= count, 60), self.lines
            return self._found(words)[-1]

    def _found(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]


def port_in(line: str) -> int:
    found = re.search(r"listens on port (\d+)", line)
    assert found is not None
    return int(found[1])


def test_it_serves_and_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AGAIN_SECONDS", (0.05,))
    run, shown = closed_run(), Shown()
    authority_server.found(run)
    options = ServeOptions(run.to_toml(), "127.0.0.1", 0)
    with AUTHORITY.watched(vars(options), tmp_path / "authority.log", shown) as part:
        first = port_in(shown.wait("the authority listens on port"))
        with httpx2.Client(trust_env=False) as http:
            assert http.get(f"http://127.0.0.1:{first}/v1/facts").json()["run"] == run.identity
            assert part._worker is not None
            os.kill(part._worker.pid, signal.SIGKILL)
            shown.wait("the authority ended (exit code -9); starting it again")
            second = port_in(shown.wait("the authority listens on port", 2))
            assert http.get(f"http://127.0.0.1:{second}/v1/notice").status_code == 200
        last = part._worker
    assert last is not None and last.wait(240) is not None
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", second), timeout=1).close()


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    run = closed_run()
    authority_server.found(run)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(run.to_toml(), "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(TTError, match="the authority does not start: cannot listen on 127.0.0.1 port") as caught:
            AUTHORITY.watched(vars(options), tmp_path / "authority.log", Shown()).__enter__()
    assert "\n" not in str(caught.value)
