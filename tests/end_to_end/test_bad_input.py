"""What people and machines get wrong, through the commands as a person runs them: one line, an exit code, no loss."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from end_to_end.conftest import NOBODY, WAIT, contents, last_step, one_line, tiny_run, wait_for_step
from testbed.process_watch import ProcessWatch

from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Finished, Log, Saved, Synchronised
from tt_cli.supervisor.local_swarm import LocalSwarm
from tt_cli.supervisor.processes import family_of

Tt = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "Running"]

LOOPBACK = ("--host", "127.0.0.1")


class Running:
    """A `tt` command that goes on until it is told to end; its plain lines are read one by one."""

    def __init__(self, arguments: tuple[str, ...]):
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tt_cli.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self, *words: str) -> str:
        """The next line with these words after its time. Fails when the command ends before."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if tuple(line.split()[1 : 1 + len(words)]) == words:
                return line
        pytest.fail(f"no line with {words}:\n{''.join(self.lines)}{self.process.stderr.read()}")

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C; returns the exit code and what stood on stderr. Fails when any process is left."""
        watch = ProcessWatch(family_of(self.process.pid))
        self.process.send_signal(signal.SIGINT)
        output, errors = self.process.communicate(timeout=WAIT)
        self.lines += output.splitlines(keepends=True)
        assert watch.left_after(WAIT) == set()
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Start]:
    """start("aux-peer", …): a `tt` command that is ended with the test."""
    running: list[Running] = []

    def begin(*arguments: str) -> Running:
        running.append(Running(arguments))
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()  # its workers are killed by the kernel with it
        one.process.communicate()


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path], None]]:
    """small_disk(folder): a file system of 4 MB there."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder)], check=True)
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Take all the space that is left on its disk."""
    with pytest.raises(OSError, match="No space left"), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def recorded(home: Path) -> list[int]:
    """The steps in the history of an auxiliary peer, which is whole."""
    (history,) = home.rglob("history.db")
    with contextlib.closing(sqlite3.connect(history)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [step for (step,) in database.execute("SELECT step FROM steps WHERE undone = 0")]


# ------------------------------------------------------------------------------------- files, addresses and ports


@pytest.mark.promise(
    "A mistake ends a command with exit code 2 and one line, before anything starts", also="tests/cli/test_bad_input.py"
)
def test_a_wrong_run_file(tt: Tt, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tiny_run().to_toml().replace("\nbeta1 = 0.9\n", "\nbeta_1 = 0.9\n"))
    before = contents(tmp_path)
    line = one_line(tt("join", "run.toml"), 2)
    assert f"{file.name}" in line and "optimizer.beta_1: no such key; did you mean 'beta1'?" in line
    assert contents(tmp_path) == before


@pytest.mark.promise("Initial peers that do not answer are one line with what to do, in `join` and in `monitor`")
@pytest.mark.parametrize("arguments", [["join", "emoji", "--plain"], ["monitor", "emoji", "--json"]])
def test_peers_that_do_not_answer(arguments: list[str], tt: Tt) -> None:
    answer = tt(*arguments, "--peer", NOBODY)
    line = one_line(answer, 1)
    assert f"answered at {NOBODY}: check the address" in line
    assert arguments[0] == "join" or answer.stdout == ""


@pytest.mark.promise(
    "A failure of a peer's process is one line of its supervisor: a port that is taken",
    also="tests/supervisor/test_process.py",
)
def test_a_port_that_is_taken(tt: Tt) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line(tt("aux-peer", "emoji", *LOOPBACK, "--port", str(port), "--no-web", "--plain"), 1)
    assert f"port {port}: Address already in use: end the program that uses it or choose another" in line


@pytest.mark.promise("A machine runs one aux peer of a run: the second is refused, the first goes on")
@pytest.mark.promise("`tt monitor --json` prints one snapshot from the run's DHT")
def test_a_second_aux_peer_of_a_run_is_refused_and_the_first_goes_on(tt: Tt, start: Start, tt_home: Path) -> None:
    arguments = ("aux-peer", "emoji", *LOOPBACK, "--port", "0", "--no-web", "--plain")
    first = start(*arguments)
    first.line("phase", "waiting:")
    address = next(tt_home.rglob("address")).read_text()
    line = one_line(tt(*arguments), 1)
    assert "an auxiliary peer of this run already works on this machine" in line
    snapshot = tt("monitor", "emoji", "--json")
    assert snapshot.returncode == 0, snapshot.stderr
    (peer,) = json.loads(snapshot.stdout)["peers"]
    assert peer["role"] == "aux" and peer["peer_id"] in address
    assert first.interrupt() == (0, "")


# -------------------------------------------------------------------------------------------------- folders and disks


@pytest.mark.promise(
    "A full disk stops neither aux peer nor trainer, and harms no file that is there", also="tests/peer/test_backup.py"
)
@pytest.mark.netns
def test_a_full_disk_stops_neither_the_aux_peer_nor_a_trainer(
    start_swarm: Callable[[RunConfig], LocalSwarm], small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    homes = [tmp_path / "swarm-0" / name for name in ("aux", "anna")]
    for home in homes:
        small_disk(home)
    swarm = start_swarm(tiny_run())
    aux, anna = swarm.members["aux"], swarm.start_trainer("anna", batch_size=4, seed=0)
    assert swarm.wait(lambda: bool(aux.of(Saved)) and bool(recorded(homes[0])), WAIT)
    earliest = recorded(homes[0])
    for home in homes:
        fill(home)
    before = {path: data for home in homes for path, data in contents(home).items()}
    assert any(path.suffix == ".safetensors" for path in before)

    def refused(words: str) -> list[Log]:
        members = (aux, anna)
        said = [event for member in members for event in member.of(Log) if event.message.startswith(words)]
        return [event for event in said if "No space left on device" in event.message and event.level == "error"]

    assert swarm.wait(lambda: bool(refused("the state is kept in memory only")), WAIT)
    reached = last_step(anna)
    wait_for_step(swarm, reached + 2, "anna")
    assert swarm.wait(lambda: any(event.epoch > reached for event in aux.of(Synchronised)), WAIT)
    earlier = len(refused("no backup was written"))  # on a slow machine one was due before this peer leaves
    swarm.leave("anna")
    assert anna.worker.exit_code == 0 and anna.of(Finished)
    told = [event.message for event in refused("no backup was written")]
    assert len(told) > earlier
    assert "earlier checkpoints are untouched; free some space" in told[-1]
    assert aux.running
    swarm.leave("aux")
    after = {path: data for home in homes for path, data in contents(home).items()}
    for path, data in before.items():
        if not path.name.startswith(("address", "lease", "history.db")):  # these go with the aux peer, or go on
            assert after[path] == data, path
    (homes[0] / "filler").unlink()
    steps = recorded(homes[0])
    assert set(steps) >= set(earliest) and len(set(steps)) == len(steps)


# --------------------------------------------------------------------------------------------------- ends of processes


@pytest.mark.promise("Ctrl-C ends `tt demo` and every process of its swarm")
def test_a_demo_that_is_interrupted_leaves_no_process(start: Start, tmp_path: Path) -> None:
    demo = start("demo", "--plain", "--out", str(tmp_path / "demo"))
    demo.line("anna", "phase", "starting:")
    assert len(family_of(demo.process.pid)) >= 5, "the demo, its aux peer with DHT and daemon, and two trainers"
    assert demo.interrupt() == (130, "")
    assert "Traceback" not in "".join(demo.lines)
