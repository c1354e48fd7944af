"""Training peers with simulated devices, of ours and of stock hivemind.Optimizer, on hosts or on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from testbed.launched import Launched
from testbed.namespaces import Host

MODULES = {"ours": "testbed.simulated_peer", "baseline": "scripts.benchmarks.baselines.hivemind_optimizer"}
START_SECONDS = 900.0


def start(
    kind: str, name: str, folder: Path, arguments: Sequence[object], seed: int, first: Launched | None = None
) -> Launched:
    """One peer that waits for `go`; it joins the first one."""
    home = ["--home", folder / name] if kind == "ours" else []
    joined = ["--initial-peer", address_of(first)] if first else []
    given = [*arguments, *home, *joined, "--seed", seed, "--wait-for-go"]
    return Launched(name, MODULES[kind], given, folder / f"{name}.log")


def address_of(peer: Launched) -> str:
    """Where others reach it, once it listens."""
    peer.wait_for(partial(peer.of, "listening"), START_SECONDS, "its address")
    addresses: list[str] = peer.of("listening")[0]["addresses"]
    return next((address for address in addresses if "/ip4/127." not in address), addresses[0])


@contextmanager
def started(
    kind: str, hosts: Sequence[Host], folder: Path, arguments: Sequence[Sequence[object]]
) -> Iterator[list[Launched]]:
    """Peers that train together, one on each host."""
    peers: list[Launched] = []
    with contextlib.ExitStack() as closing:
        for number, (host, own) in enumerate(zip(hosts, arguments, strict=True)):
            with host.entered():
                given = [*own, "--host", host.address]
                peer = start(kind, f"{kind}-{number}", folder, given, number, peers[0] if peers else None)
            peers.append(closing.enter_context(peer))
        ready(peers)
        for peer in peers:
            peer.go()
        yield peers


def ready(peers: Iterable[Launched]) -> None:
    """Wait until they could train."""
    for peer in peers:
        peer.wait_for(partial(peer.of, "ready"), START_SECONDS, "its start")
