"""`tt monitor` in a real terminal (tmux), over a real aux peer's page and over a real DHT."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end.conftest import local_swarm, tiny_run
from history.test_store import seen
from monitor.made import EVIL, snapshot, trainer

from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter, MadeStep, database_url
from tt_cli.run import load_run
from tt_cli.supervisor.http_server import HttpOptions, HttpServer
from tt_cli.web.queries import Answers
from tt_cli.web.web_app import make_app

pytestmark = pytest.mark.debian
WAIT = 60.0  # seconds; an upper bound for a busy machine
RUN = load_run("emoji")
STEPS = 60


class Terminal:
    """A tmux server of its own with one window, in which a shell runs `tt`; what it shows is text."""

    def __init__(self, folder: Path, arguments: list[str], size: tuple[int, int], **environment: str) -> None:
        self._socket = str(folder / "tmux")
        tt = shlex.join([sys.executable, "-m", "tt_cli.cli.main", *arguments])
        known = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "COLUMNS": "80", "LINES": "24", **environment}
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in known.items())
        width, height = map(str, size)
        shell = f"cd {Path(__file__).parents[2]}; echo before; env {variables} {tt}; echo rc=$?; exec cat"
        self._tmux("-u", "-f", "/dev/null", "new-session", "-d", "-x", width, "-y", height, shell)

    def _tmux(self, *arguments: str) -> str:
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        command = ["tmux", "-S", self._socket, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=WAIT).stdout

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait(self, *words: str) -> str:
        """The screen as soon as it shows all of these words."""
        give_up = time.monotonic() + WAIT
        while not all(word in (shown := self.screen()) for word in words):
            assert time.monotonic() < give_up, f"{words} are not all on the screen:\n{shown}"
            time.sleep(0.05)
        return shown

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # it has ended by itself
            self._tmux("kill-server")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    """The address of a real page of the built-in run: 60 steps, ada and bob, and somebody hostile."""
    url = database_url(tmp_path)
    store, now = HistoryWriter(url, RUN.identity), time.time()
    for step in range(1, STEPS + 1):
        at = now - 120.0 * (STEPS + 1 - step)
        store.record_step(
            MadeStep(step, 0, at, 3.0 + 60.0 / (step + 10), 2, 25.0, f"step {step} made with bob"),
            [
                seen("peer-a", 500 * step, "ada"),
                seen("peer-b", 12 * step, EVIL),
            ],
            512,
        )
        store.record_activity(at, step, 2 + step // 20, 25.0, [], 512)
    peers = [trainer(user="ada", epoch=STEPS), trainer(user=EVIL, peer_id="peer-b", epoch=STEPS, clipped_by=2)]
    last = snapshot(run="emoji", identity=RUN.identity, epoch=STEPS, total_steps=600, trainers=2, peers=peers, time=now)
    store.put("snapshot", json.dumps(last.to_json()), now)
    store.close()
    reader = HistoryReader(url)
    server = HttpServer(make_app(Answers(reader, RUN, "emoji"), tmp_path), HttpOptions("127.0.0.1", 0, "--web-port"))
    serving = threading.Thread(target=server.run)
    serving.start()
    yield f"http://127.0.0.1:{server.port}"
    server.stop()
    serving.join()
    reader.close()


@pytest.mark.promise(
    "Every view of `tt monitor` fits a terminal of 40, 80 and 200 columns", also="tests/monitor/test_app.py"
)
def test_every_view_on_a_small_and_a_large_terminal(page: str, tmp_path: Path, tt_home: Path) -> None:
    terminal = Terminal(tmp_path, ["monitor", "emoji", "--from", page], (80, 24), TT_HOME=str(tt_home))
    try:
        small = terminal.wait("trainers, last", "lowest 3.857", "GFLOP/s", "q quit", "? help")
        for words in ("60 of 600 · 10 %", "2 trainers · 16.2 samples/s", "1 overview", "8 ┤", "most 5 · now 2"):
            assert words in small
        assert "samples/s, last" not in small
        terminal.resize(200, 60)
        large = terminal.wait("samples/s, last")
        assert len(large.splitlines()) == 60 and large.splitlines()[0].endswith(RUN.identity)
        terminal.keys("2")
        peers = terminal.wait("last round", "NVIDIA H200", "in step", "clipped, say 2 peers")
        assert "\x1b" not in peers and "?[2J?1m owned" in peers
        terminal.keys("3")
        board = terminal.wait("compute time", f"ever, as {page} recorded it")
        assert "30,000" in board and "98 %" in board
        terminal.keys("d")
        terminal.wait(f"today, as {page} recorded it")
        terminal.keys("5")
        log = terminal.wait("watching 2 trainers at step 60", "step 60 made with bob", "step 20 made with bob")
        assert log.index("step 60 made") < log.index("step 20 made")
        terminal.resize(40, 12)
        terminal.keys("1")
        terminal.wait("1 overview", "60 of 600", "ends in")
        terminal.keys("q")
        left = terminal.wait("rc=0").replace("\n", "")
        assert left.startswith(f"before{RUN.identity}: step 60, loss 3.214, 2 trainers; watched for")
    finally:
        terminal.close()


@pytest.mark.promise(
    "`tt monitor` finds an aux peer over the DHT, and draws in plain ASCII", also="tests/monitor/test_ascii.py"
)
def test_a_real_aux_peer_is_found_over_the_dht(tmp_path: Path, tt_home: Path) -> None:
    run, file = tiny_run(), tmp_path / "run.toml"
    file.write_text(run.to_toml())
    with local_swarm(run, tmp_path / "swarm") as swarm:
        swarm.start_aux()
        arguments = ["monitor", str(file), "--peer", swarm.addresses[0]]
        terminal = Terminal(tmp_path, arguments, (80, 24), TT_HOME=str(tt_home), LC_ALL="C", NO_COLOR="1")
        try:
            shown = terminal.wait("0 trainers, 1 aux peer", "0 of 1,000 - 0 %")
            assert shown.replace("\n", "").isascii()
            terminal.keys("C-c")
            assert "before" in terminal.wait("rc=0", f"{run.identity}: step 0, 0 trainers; watched for")
        finally:
            terminal.close()
