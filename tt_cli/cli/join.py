"""`tt join RUN`: train with the swarm on this machine."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

EXAMPLES = """\
tt join emoji --peer /ip4/203.0.113.7/tcp/31337/p2p/Qm…
tt join emoji
tt join org/run --device cuda:1 --hours 23:00-07:00 --max-upload 8
tt join my-run.toml --client-mode --batch-size 8 --memory 8GB
tt join emoji --log-to tensorboard:curves

From another terminal, or cron: tt status, tt pause, tt resume, tt finish.
Flags may stand in ~/.config/tt/config.toml (or $XDG_CONFIG_HOME/tt/config.toml); a flag given here counts more:
  [join]
  hours = "mon-fri 22:00-07:00,sat-sun"
  max_upload = 8"""


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
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--client-mode", action=switch, help="open no port: for machines that cannot be reached")
    parser.add_argument("--seed", type=int, help="order of this peer's examples; default: its own, new each time")
    parser.add_argument(
        "--log-to",
        type=sink,
        metavar="SINK",
        help="write curves of every step to tensorboard[:DIR], wandb[:PROJECT] or trackio[:PROJECT]; default: nowhere",
    )
    parser.add_argument(
        "--send-token",
        action="store_true",
        help="prove who you are by sending your Hugging Face token to the run's authority, which could then read with "
        "it what you can read; never one that may write. Without this flag no token leaves this machine",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--hours", type=hours, metavar="RANGES", help="work only then, e.g. 23:00-07:00 (or: always)")
    limits.add_argument("--max-gpu-temp", type=degrees, metavar="C", help="wait while the GPU is as hot as that")
    limits.add_argument("--idle-only", action=switch, help="work only while nobody uses the desktop")
    limits.add_argument("--max-upload", type=mbit, metavar="MBIT", help="send at most so many Mbit/s")
    limits.add_argument("--max-download", type=mbit, metavar="MBIT", help="receive at most so many Mbit/s")
    limits.add_argument("--memory", type=size, metavar="SIZE", help="use at most so much, e.g. 8GB")
    add_screen_arguments(parser)
    parser.set_defaults(host=None, port=None)  # the settings file comes before the defaults


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


def mbit(text: str) -> float:
    """Mbit/s above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def degrees(text: str) -> float:
    """A temperature in °C that a GPU may have."""
    number = float(text)
    if not 40 <= number <= 110:
        raise argparse.ArgumentTypeError(f"{text}: must be 40 to 110 °C")
    return number


def hours(text: str) -> str:
    """Ranges of hours, or "always"."""
    return _checked_by("hours", text)


def size(text: str) -> str:
    """An amount of memory."""
    return _checked_by("size", text)


def sink(text: str) -> str:
    """Where curves go."""
    return _checked_by("sink", text)


def ipv4(text: str) -> str:
    """An IPv4 address of this machine, 0.0.0.0 for all."""
    return _checked_by("ipv4", text)


def announced(text: str) -> str:
    """A multiaddr without a peer id."""
    return _checked_by("announced", text)


def _checked_by(name: str, text: str) -> str:
    """As the settings file's values are checked."""
    from tt_cli.peer import join_settings

    try:
        return str(getattr(join_settings, f"check_{name}")(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}" if name == "ipv4" else str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Supervise a peer process until the run is done or the user leaves."""
    from tt_cli import __version__
    from tt_cli.auth.peer_admission import Admission
    from tt_cli.errors import UsageError
    from tt_cli.memory import parse_size
    from tt_cli.peer.join_settings import JoinSettings, read_settings, settings_file
    from tt_cli.peer.sinks import Logged, open_sink
    from tt_cli.run import folders, load_run
    from tt_cli.supervisor.control import Control
    from tt_cli.supervisor.events import Log
    from tt_cli.supervisor.household.limits import HouseholdLimits
    from tt_cli.supervisor.peer_state import LimitInForce, new_status
    from tt_cli.supervisor.slot import TRAINER, claim_slot, identity_name
    from tt_cli.supervisor.supervise import supervise
    from tt_cli.supervisor.worker_process import Worker
    from tt_cli.terminal.worker_screen import Screen

    config = load_run(args.run)
    flags = {name: getattr(args, name) for name in JoinSettings.model_fields}
    mine = read_settings(flags, {args.run, config.run.name, config.identity}, settings_file())
    peers = initial_peers(config, mine.get("peer", []))
    if not peers and not args.new_swarm:
        raise UsageError(
            f"no peer of run {args.run} is known to join: give one with --peer MULTIADDR (the screen of "
            f"`tt aux-peer {args.run}` shows it), or begin a swarm of your own with --new-swarm"
        )
    limits = HouseholdLimits(mine.household())
    curves = open_sink(mine.get("log_to"), config) if mine.get("log_to") else None
    slot = claim_slot(folders.run_folder(config), TRAINER)
    status = new_status(args.run, config.identity, "trainer", config.schedule.total_steps, __version__)
    status.log = str(slot.log)
    status.limits = [LimitInForce(name=one.name, value=one.value, source=one.source) for one in mine.origins()]
    options: dict[str, Any] = {
        "run": config.to_toml(),
        "initial_peers": peers,
        "host": mine.get("host", "0.0.0.0"),
        "port": mine.get("port", 0),
        "announce": mine.get("announce", []),
        "client_mode": mine.get("client_mode", False),
        "device": mine.get("device"),
        "batch_size": mine.get("batch_size"),
        "threads": mine.get("threads"),
        "memory": parse_size(mine.get("memory")) if mine.get("memory") else None,
        "max_upload": _bits(mine.get("max_upload")),
        "max_download": _bits(mine.get("max_download")),
        "seed": args.seed,
        "identity": identity_name(slot),
    }

    def tell(line: str, level: str) -> None:
        screen.show(Log(line, level))

    def start() -> Worker:
        admitted.check()
        options["user"] = admitted.user
        # looked up anew: an aux peer on this machine may have another address by the time that a pause ends
        options["initial_peers"] = initial_peers(config, mine.get("peer", [])) or options["initial_peers"]
        worker = Worker("tt_cli.peer", options, slot.log)
        admitted.attach(worker)
        return worker

    title = f"tt join {args.run}"
    with (
        Control(slot, status, limits, by_hand=sys.stdin.isatty()) as control,
        Screen(title, config.identity, config.schedule.total_steps, plain=args.plain, json=args.json) as screen,
        Admission(config, identity_name(slot), tell, send_token=args.send_token) as admitted,
        nullcontext(screen) if curves is None else Logged(screen, curves) as shown,
    ):
        supervise(start, shown, control, limits)
        admitted.check()
    return 0


def _bits(mbits: float | None) -> float | None:
    return None if mbits is None else mbits * 1e6


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
