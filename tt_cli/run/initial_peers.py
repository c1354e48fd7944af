"""Initial peers: the addresses through which a swarm is found."""

from __future__ import annotations

from tt_cli.errors import UsageError
from tt_cli.identity.multiaddr import check_multiaddr
from tt_cli.run import folders
from tt_cli.run.run_config import RunConfig


def initial_peers(config: RunConfig, flags: list[str]) -> list[str]:
    """Addresses from --peer, else from the run file, else of an auxiliary peer on this machine."""
    return checked_peers(flags) or list(config.peers.initial) or peers_here(config)


def peers_to_ask(config: RunConfig, flags: list[str], name: str) -> list[str]:
    """The initial peers of the run that was named `name`. Raises UsageError where none is known."""
    known = initial_peers(config, flags)
    if not known:
        raise UsageError(
            f"no peer of run {name} is known to ask: give one with --peer MULTIADDR (the screen of "
            f"`tt aux-peer {name}` shows it), or name it in the run file under [peers] initial"
        )
    return known


def checked_peers(flags: list[str]) -> list[str]:
    """The addresses given with --peer. Raises UsageError for one that is no peer's multiaddr."""
    for address in flags:
        try:
            check_multiaddr(address)
        except ValueError as error:
            raise UsageError(f"--peer {address}: {error}") from None
    return flags


def peers_here(config: RunConfig) -> list[str]:
    """Addresses that an auxiliary peer on this machine left in its file; nothing where that is damaged."""
    try:
        words = (folders.run_folder(config) / "address").read_text(encoding="utf-8").split()
        return [check_multiaddr(word) for word in words]
    except (OSError, ValueError):  # of a full disk or a killed process; the one line says what else to do
        return []
