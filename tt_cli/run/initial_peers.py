"""Initial peers: the addresses through which a swarm is found."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Sequence
from pathlib import Path

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.errors import UsageError
from tt_cli.identity.multiaddr import check_multiaddr
from tt_cli.run import folders
from tt_cli.run.run_config import RunConfig

MET = "met-peers"


def initial_peers(config: RunConfig, flags: list[str]) -> list[str]:
    """Addresses from --peer, else from the run file, else of an auxiliary peer on this machine."""
    return checked_peers(flags) or list(config.peers.initial) or peers_here(config)


def peers_to_ask(config: RunConfig, flags: list[str], name: str) -> list[str]:
    """Peers of the run that was named `name`: with no flags, those that a peer of this machine met, too.

    Raises UsageError where none is known.
    """
    known = initial_peers(config, flags)
    if not known:
        raise UsageError(
            f"no peer of run {name} is known to ask: give one with --peer MULTIADDR (the screen of "
            f"`tt aux-peer {name}` shows it), or name it in the run file under [peers] initial"
        )
    return known if flags else [*known, *peers_met(folders.run_folder(config))]


def checked_peers(flags: list[str]) -> list[str]:
    """The addresses given with --peer. Raises UsageError for one that is no peer's multiaddr."""
    for address in flags:
        try:
            check_multiaddr(address)
        except ValueError as error:
            raise UsageError(f"--peer {address}: {error}") from None
    return flags


def peers_here(config: RunConfig) -> list[str]:
    """Addresses that an auxiliary peer on this machine wrote down; nothing of one that was killed, or damaged ones."""
    folder = folders.run_folder(config)
    with contextlib.suppress(OSError), (folder / "aux-peer.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return []  # nobody holds it any more
    return _read(folder / "address")


def peers_met(folder: Path) -> list[str]:
    """Addresses of members that a peer of this machine reached last, or the authority named. folder: the run's."""
    return _read(folder / MET)


def remember_met(folder: Path, addresses: Sequence[str]) -> None:
    """Keep them: peers of this machine join through them, too; a full disk keeps none."""
    with contextlib.suppress(OSError):
        atomic_write(folder / MET, "".join(f"{address}\n" for address in addresses), mode=PRIVATE, durable=False)


def _read(file: Path) -> list[str]:
    """Nothing of a full disk or a killed process; the one line says what else to do."""
    try:
        return [check_multiaddr(word) for word in file.read_text(encoding="utf-8").split()]
    except (OSError, ValueError):
        return []
