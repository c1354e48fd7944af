"""`tt join RUN`: train with the swarm on this machine."""

from __future__ import annotations

import argparse
import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

EXAMPLES = """\
tt join emoji --peer /ip4/203.0.113.7/tcp/31337/p2p/Qm…
tt join emoji
tt join org/run --device cuda:1
tt join my-run.toml --client-mode --batch-size 8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tt join` takes."""
    parser.add_argument("run", metavar="RUN", help="built-in name, TOML file, or ORGANISATION/REPOSITORY")
    parser.add_argument(
        "--peer",
        metavar="MULTIADDR",
        action="append",
        default=[],
        help="join through this peer (may be given several times); default: the run file's initial peers, else an "
        "aux peer of this run on this machine",
    )
    parser.add_argument(
        "--new-swarm", action="store_true", help="start alone when no peer is known, and let others come"
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; default: the first GPU, else the CPU")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="examples at a time; default: tried out")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads for computing; default: all cores")
    add_network_arguments(parser, default_port=0)
    parser.add_argument("--client-mode", action="store_true", help="open no port: for machines that cannot be reached")
    parser.add_argument("--seed", type=int, help="order of this peer's examples; default: its own, new each time")
    add_screen_arguments(parser)


def add_network_arguments(parser: argparse.ArgumentParser, default_port: int | None) -> None:
    """Where a peer listens, and what it tells others."""
    shown = "any free one" if default_port == 0 else "the run file's"
    parser.add_argument(
        "--host", type=ipv4, default="0.0.0.0", metavar="IP", help="IPv4 address to listen on (default all)"
    )
    parser.add_argument("--port", type=port, default=default_port, metavar="N", help=f"TCP port (default {shown})")
    parser.add_argument(
        "--announce",
        type=announced,
        metavar="MULTIADDR",
        action="append",
        default=[],
        help="tell others this address, e.g. behind NAT",
    )


def add_screen_arguments(parser: argparse.ArgumentParser) -> None:
    """How it is shown."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print every event as a line of JSON")
    form.add_argument("--plain", action="store_true", help="plain lines, as when not on a terminal")


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def port(text: str) -> int:
    """A TCP port, 0 for any."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 to 65535")
    return number


def ipv4(text: str) -> str:
    """An IPv4 address of this machine, 0.0.0.0 for all."""
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be an IPv4 address, such as 0.0.0.0") from None


def announced(text: str) -> str:
    """A multiaddr without a peer id: the daemon adds its own."""
    from tt_cli.run import check_multiaddr

    try:
        check_multiaddr(f"{text}/p2p/{'1' * 8}")
    except ValueError:
        text = ""
    if not text or "/p2p/" in text:
        raise argparse.ArgumentTypeError("must look like /ip4/203.0.113.7/tcp/31337, without /p2p/")
    return text


def run(args: argparse.Namespace) -> int:
    """Supervise a peer process until the run is done or the user leaves."""
    from tt_cli.auth import require_member
    from tt_cli.errors import UsageError
    from tt_cli.peer.screen import Screen
    from tt_cli.run import folders, load_run
    from tt_cli.supervisor.process import Worker
    from tt_cli.supervisor.supervise import supervise

    config = load_run(args.run)
    user = require_member(config)
    peers = initial_peers(config, args.peer)
    if not peers and not args.new_swarm:
        raise UsageError(
            f"no peer of run {args.run} is known to join: give one with --peer MULTIADDR (the screen of "
            f"`tt aux-peer {args.run}` shows it), or begin a swarm of your own with --new-swarm"
        )
    log = folders.run_folder(config) / "peer.log"
    options = {
        "run": config.to_toml(),
        "initial_peers": peers,
        "host": args.host,
        "port": args.port,
        "announce": args.announce,
        "client_mode": args.client_mode,
        "device": args.device,
        "batch_size": args.batch_size,
        "threads": args.threads,
        "user": user or "",
        "seed": args.seed,
    }
    title = f"tt join {args.run}"
    with Screen(title, config.identity, config.schedule.total_steps, plain=args.plain, json=args.json) as screen:
        supervise(lambda: Worker("tt_cli.peer", options, log), screen)
    return 0


def initial_peers(config: RunConfig, flags: list[str]) -> list[str]:
    """Addresses from the flags, else from the run file, else of an auxiliary peer on this machine."""
    return checked_peers(flags) or list(config.peers.initial) or _peers_here(config)


def _peers_here(config: RunConfig) -> list[str]:
    """What an auxiliary peer on this machine left in its address file; nothing where that is damaged."""
    from tt_cli.run import check_multiaddr, folders

    try:
        words = (folders.run_folder(config) / "address").read_text(encoding="utf-8").split()
        return [check_multiaddr(word) for word in words]
    except (OSError, ValueError):  # of a full disk or a killed process; the one line says what else to do
        return []


def checked_peers(flags: list[str]) -> list[str]:
    """The addresses given with --peer. Raises UsageError for one that is no peer's multiaddr."""
    from tt_cli.errors import UsageError
    from tt_cli.run import check_multiaddr

    for address in flags:
        try:
            check_multiaddr(address)
        except ValueError as error:
            raise UsageError(f"--peer {address}: {error}") from None
    return flags
