"""A swarm of real peers on this machine: separate processes on loopback, each with a home folder of its own.

`tt demo`, the swarm benchmarks and the swarm tests run on it.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tt_cli.errors import TTError
from tt_cli.supervisor.events import Event, Failure, Listening
from tt_cli.supervisor.worker_process import Worker

EventType = TypeVar("EventType", bound=Event)
AUX_MODULE, TRAINER_MODULE = "tt_cli.auxiliary.coordinator", "tt_cli.peer.trainer"
START_SECONDS = 120.0
LEAVE_SECONDS = 30.0


class LocalPeer:
    """One peer: its worker process, its home folder, and every event it has sent."""

    def __init__(self, name: str, worker: Worker, home: Path):
        self.name, self.worker, self.home = name, worker, home
        self.events: list[Event] = []

    def of(self, kind: type[EventType]) -> list[EventType]:
        """Its events of one kind, oldest first."""
        return [event for event in list(self.events) if isinstance(event, kind)]

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self.worker.exit_code is None


class LocalSwarm:
    """A context manager; leaving it ends every process that it started, by its own process group.

    run: the run file as TOML. folder: receives a home folder and a log for each member. show: gets every event
    with its member's name. trainer_module: what trainers run. launch: as Worker's. Use it from one thread.
    """

    def __init__(
        self,
        run: str,
        folder: Path,
        show: Callable[[str, Event], None] = lambda name, event: None,
        *,
        trainer_module: str = TRAINER_MODULE,
        launch: Callable[..., Any] = subprocess.Popen,
    ):
        self.run, self.folder, self._show = run, folder, show
        self._trainer_module, self._launch = trainer_module, launch
        self.members: dict[str, LocalPeer] = {}
        self.addresses: list[str] = []
        self._news, self._over = threading.Condition(), False
        self._unread: OSError | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(self, *exception: object) -> None:
        self._over = True
        for member in self.members.values():
            member.worker.kill()
            member.worker.wait(LEAVE_SECONDS)

    def start_aux(self, name: str = "aux", *, module: str = AUX_MODULE) -> LocalPeer:
        """Start an auxiliary peer and wait for its address, which later members join through."""
        member = self.start(name, module, {"port": 0, "initial_peers": self.addresses})
        if not self.wait(lambda: bool(member.of(Listening)) or not member.running, START_SECONDS):
            raise TTError(f"{name} did not start within {START_SECONDS:.0f} s: see {member.worker.log}")
        if not member.of(Listening):
            failures = [failure.message for failure in member.of(Failure)] or [f"see {member.worker.log}"]
            raise TTError(f"{name} did not start: {failures[-1]}")
        self.addresses = self.addresses or member.of(Listening)[0].addresses
        return member

    def start_trainer(
        self, name: str, *, module: str | None = None, run: str | None = None, **options: Any
    ) -> LocalPeer:
        """Start a training peer, again with the home of the one before it of that name. Does not wait."""
        options = {"initial_peers": self.addresses, "user": name, "threads": 1, **options}
        return self.start(name, module or self._trainer_module, options, run)

    def start(self, name: str, module: str, options: dict[str, Any], run: str | None = None) -> LocalPeer:
        """Start any worker on loopback."""
        home = self.folder / name
        home.mkdir(mode=0o700, exist_ok=True)
        threads = str(options.get("threads") or 1)
        worker = Worker(
            module,
            {"run": run or self.run, "host": "127.0.0.1", **options},
            self.folder / f"{name}.log",
            {"TT_HOME": str(home), "OMP_NUM_THREADS": threads},
            self._launch,
        )
        member = LocalPeer(name, worker, home)
        self.members[name] = member
        threading.Thread(target=self._follow, args=(member,), daemon=True).start()
        return member

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until `condition`, seen after every event, is true; False after `timeout` s. Raises what `show` does."""
        deadline = time.monotonic() + timeout
        with self._news:
            while not condition():
                if self._unread is not None:
                    raise self._unread
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._news.wait(timeout=min(left, 1.0))
        return True

    def leave(self, *names: str) -> None:
        """Have these members leave cleanly, and wait for their ends; after LEAVE_SECONDS they are ended."""
        leaving = [self.members[name] for name in names]
        for member in leaving:
            member.worker.leave()
        for member in leaving:
            if member.worker.wait(LEAVE_SECONDS) is None:
                member.worker.kill()
                member.worker.wait(LEAVE_SECONDS)

    def _follow(self, member: LocalPeer) -> None:
        try:
            for event in member.worker.events():
                with self._news:
                    member.events.append(event)
                    self._news.notify_all()
                self._show(member.name, event)
            if (code := member.worker.exit_code or 0) < 0 and not self._over:
                self._show(member.name, Failure(f"ended by {signal.Signals(-code).name}"))
        except OSError as error:
            self._unread = error
        with self._news:
            self._news.notify_all()
