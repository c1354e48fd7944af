"""The authority beside an auxiliary peer: a process of its own, watched as the page is (web/test_server_process.py)."""

from __future__ import annotations

import re
import socket
from dataclasses import asdict
from pathlib import Path

import httpx2
import pytest
from auth.peers import closed_run
from told import Told

from tt_cli.auth.authority import authority_server
from tt_cli.auth.authority.authority_server import ServeOptions
from tt_cli.auxiliary.parts import AUTHORITY
from tt_cli.errors import TTError


def test_it_serves_until_its_peer_ends(tmp_path: Path) -> None:
    run, told = closed_run(), Told()
    authority_server.found(run)
    options = asdict(ServeOptions(run.to_toml(), "127.0.0.1", 0))
    with AUTHORITY.watched(options, tmp_path / "authority.log", told) as part:
        found = re.search(r"listens on port (\d+)", told.wait("the authority listens on port"))
        assert found is not None
        facts = httpx2.get(f"http://127.0.0.1:{found[1]}/v1/facts", trust_env=False)
        assert facts.json()["run"] == run.identity
        worker = part._worker
    assert worker is not None and worker.wait(240) is not None
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(found[1])), timeout=1).close()


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    run = closed_run()
    authority_server.found(run)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = asdict(ServeOptions(run.to_toml(), "127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(TTError, match="the authority does not start: cannot listen on 127.0.0.1 port") as caught:
            AUTHORITY.watched(options, tmp_path / "authority.log", Told()).__enter__()
    assert str(caught.value).endswith("choose another --authority-port"), "--port is the aux peer's own"
