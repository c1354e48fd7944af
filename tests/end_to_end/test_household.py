"""`tt join` in a home: held while a GPU is hot, asked from another terminal to pause, resume and finish."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, last_step, tiny_run, wait_for_step
from testbed.process_watch import ProcessWatch

from tt_cli.run import RunConfig
from tt_cli.supervisor.events import (
    Contribution,
    Event,
    Finished,
    Log,
    Phase,
    Progress,
    Round,
    Step,
    Synchronised,
    from_json,
)
from tt_cli.supervisor.local_swarm import EventType, LocalSwarm
from tt_cli.supervisor.processes import children_of, family_of

StartSwarm = Callable[[RunConfig], LocalSwarm]
Tt = Callable[..., subprocess.CompletedProcess[str]]


class Join:
    """`tt join --json` as a process. programs: a folder before all others in its PATH."""

    def __init__(self, swarm: LocalSwarm, run: Path, home: Path, programs: Path):
        self.events: list[Event] = []
        self._news = threading.Condition()
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "TT_HOME": str(home), "OMP_NUM_THREADS": "1", "PATH": path}
        limits = "--host 127.0.0.1 --threads 1 --batch-size 4 --max-gpu-temp 80 --name Anna"
        command = [sys.executable, "-m", "tt_cli.cli.main", "join", str(run), "--json", "--peer", swarm.addresses[0]]
        self.process = subprocess.Popen(
            [*command, *limits.split()],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.events.append(from_json(line))
                self._news.notify_all()

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        with self._news:
            if not self._news.wait_for(condition, WAIT):
                pytest.fail(f"{what} did not come\n" + "\n".join(event.to_json()[:300] for event in self.events[-30:]))

    def wait_for_phase(self, phase: str, times: int = 1) -> None:
        self.wait_for(phase, lambda: self.phases().count(phase) >= times)

    def of(self, kind: type[EventType]) -> list[EventType]:
        return [event for event in self.events if isinstance(event, kind)]

    def phases(self) -> list[str]:
        return [event.phase for event in self.events if isinstance(event, Phase)]

    def steps(self) -> list[int]:
        return [event.epoch for event in self.events if isinstance(event, (Step, Synchronised))]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The home of the one who joins; what is left there when the test fails is ended."""
    folder = tmp_path / "anna"
    yield folder
    for file in folder.glob("runs/*/peer.json"):
        pid = json.loads(file.read_text())["pid"]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.promise(
    "While the GPU is hot, a peer computes nothing and stays in the rounds", also="tests/supervisor/test_limits.py"
)
@pytest.mark.promise(
    "`tt pause` leaves no process but the supervisor; `tt resume` catches up", also="tests/supervisor/test_control.py"
)
@pytest.mark.promise(
    "A trainer whose p2p daemon is killed starts again from its backup", also="tests/peer/test_lifelines.py"
)
@pytest.mark.promise("`tt finish` ends a peer after its next step", also="tests/supervisor/test_control.py")
@pytest.mark.promise("`tt status` tells what a peer does, and that it has ended", also="tests/cli/test_status.py")
def test_a_peer_in_a_home(start_swarm: StartSwarm, tt: Tt, home: Path, tmp_path: Path) -> None:
    """One swarm for all of it: hold, pause, resume, what status says, a killed daemon, finish."""
    run = tiny_run()
    file = tmp_path / "tiny.toml"
    file.write_text(run.to_toml())
    swarm = start_swarm(run)
    ben = swarm.start_trainer("ben", batch_size=4, seed=1)
    degrees = tmp_path / "degrees"
    degrees.write_text("90")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat {degrees}\n")
    smi.chmod(0o755)
    anna = Join(swarm, file, home, tmp_path)

    # With a hot GPU it takes part in the rounds and computes nothing.
    anna.wait_for("a step", lambda: len(anna.of(Step)) >= 2)
    assert anna.phases()[-1] in ("waiting", "averaging") and "training" not in anna.phases()
    assert {event.my_samples for event in anna.of(Progress)} <= {0}
    assert {len(event.members) for event in anna.of(Round) if event.outcome == "committed"} == {2}
    assert swarm.wait(lambda: any("made with ~Anna, " in event.words for event in ben.of(Round)), WAIT)
    degrees.write_text("60")
    anna.wait_for_phase("training")
    anna.wait_for("samples", lambda: bool(anna.of(Contribution)))

    # Paused, it has left the swarm and has no process but the supervisor; the others go on.
    (worker,) = children_of(anna.process.pid)
    watch = ProcessWatch(family_of(worker))
    assert tt("pause", str(file), env=anna.env).returncode == 0
    anna.wait_for_phase("paused")
    assert watch.left_after(WAIT) == set()
    assert children_of(anna.process.pid) == []
    assert not anna.of(Finished)
    wait_for_step(swarm, last_step(ben) + 1, "ben")
    status = tt("status", "--json", env=anna.env)
    (peer,) = json.loads(status.stdout)["peers"]
    assert status.returncode == 0
    assert (peer["state"], peer["reason"]) == ("paused", "until `tt resume`")
    assert peer["saved_step"] >= peer["step"] - 1  # a round may end while the backup is written

    # Back, it takes over what the others have made meanwhile.
    paused_at, made = max(anna.steps()), len(anna.of(Step))
    assert tt("resume", env=anna.env).stdout == f"{file}: starts again\n"
    anna.wait_for("a step", lambda: len(anna.of(Step)) > made)
    assert [event for event in anna.of(Synchronised) if event.epoch > paused_at]

    # Its p2p daemon is killed: it starts again by itself, from its backup.
    (daemon,) = [pid for pid in family_of(anna.process.pid) if Path(f"/proc/{pid}/comm").read_text() == "p2pd\n"]
    os.kill(daemon, signal.SIGKILL)
    words = "the p2p daemon of this peer was ended by something else; starting it again from its backup"
    anna.wait_for("a warning", lambda: any(words in event.message for event in anna.of(Log)))
    (again,) = [number for number, event in enumerate(anna.events) if isinstance(event, Log) and words in event.message]
    anna.wait_for("a step", lambda: any(isinstance(event, Step) for event in anna.events[again:]))
    assert anna.steps()[-1] > max(event.epoch for event in anna.events[:again] if isinstance(event, Step))

    # Asked to finish, it ends with a step in which it took part, and the others go on.
    answer = tt("finish", env=anna.env).stdout
    assert answer.startswith(f"{file}: ends after step ")
    assert anna.process.wait(WAIT) == 0
    last = anna.of(Step)[-1].epoch
    assert last >= int(answer.split()[-1])
    wait_for_step(swarm, last + 1, "ben")
    status = tt("status", env=anna.env)
    assert (status.returncode, " · ended " in status.stdout) == (3, True)
