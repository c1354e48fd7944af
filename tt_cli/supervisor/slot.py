"""A supervisor's place in a run's folder: its lock, its control socket, its status file, its worker's log.

The first `tt join` of a run has peer.lock, peer.sock, peer.json and peer.log; a second one at the same time has
peer-2.lock and so on. An aux peer, of which there is one, has aux-peer.lock ….
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tt_cli.errors import TTError
from tt_cli.supervisor.control_socket import NoAnswer, NotRunning, ask
from tt_cli.supervisor.peer_state import PeerState, read_status

MOST = 64
TRAINER, AUX = "peer", "aux-peer"


@dataclass(frozen=True)
class Slot:
    """Files of one supervisor. lock: held while the process lives; None for one that only looks."""

    folder: Path
    name: str
    lock: IO[str] | None = None

    @property
    def status(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def socket(self) -> Path:
        return self.folder / f"{self.name}.sock"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"


def claim_slot(folder: Path, kind: str) -> Slot:
    """The first slot of `kind` (TRAINER or AUX) in a run's folder that no living process holds. Raises TTError."""
    return Slot(folder, *claim_name(folder, kind))


def claim_name(folder: Path, kind: str) -> tuple[str, IO[str]]:
    """The first of the names "kind", "kind-2" … that no living process holds, and its lock.

    Raises TTError where all are held: of an auxiliary peer there is one.
    """
    aux = kind.startswith("aux")
    for name in [kind, *(f"{kind}-{number}" for number in range(2, 1 if aux else MOST + 1))]:
        if (lock := try_lock(folder / f"{name}.lock")) is not None:
            return name, lock
    if aux:
        held = folder / f"{kind}.lock"
        raise TTError(f"an auxiliary peer of this run already works on this machine (it holds {held}): stop it first")
    raise TTError(f"{MOST} peers of this run already work on this machine: stop one first")


def try_lock(path: Path) -> IO[str] | None:
    """Hold a lock file for as long as the returned file is open; None where a living process does. Raises TTError."""
    try:
        lock = path.open("w")
        os.chmod(path, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:  # also of a file system, as clusters have, without locks
        raise TTError(f"cannot write {path}: {error.strerror}: free space or set TT_HOME to another folder") from error
    return lock


def identity_name(slot: Slot) -> str:
    """The name of the key of the peer that works in this slot: "trainer", "trainer-2" …, "aux"."""
    return "aux" if slot.name == AUX else f"trainer{slot.name.removeprefix(TRAINER)}"


@dataclass(frozen=True)
class SeenSlot:
    """A slot as another process sees it. running: somebody supervises. answers: and says so."""

    slot: Slot
    status: PeerState
    running: bool
    answers: bool


def look_at(slot: Slot) -> SeenSlot | None:
    """Ask the supervisor of a slot, or read what was last known. None where nothing is known."""
    try:
        return SeenSlot(slot, PeerState.model_validate(ask(slot.socket, {"command": "status"})["status"]), True, True)
    except NotRunning:
        running = False
    except (NoAnswer, ValueError, LookupError):  # also of another version
        running = True
    status = read_status(slot.status)
    return None if status is None else SeenSlot(slot, status, running, answers=False)


def slots_in(home: Path) -> Iterator[Slot]:
    """Those that have left a status in any run's folder below `home` (folders.home())."""
    for file in sorted(home.glob("runs/*/*.json")):
        if file.stem in {AUX, TRAINER} or file.stem.removeprefix(f"{TRAINER}-").isdigit():
            yield Slot(file.parent, file.stem)
