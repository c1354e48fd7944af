"""Connections over which nothing comes any more are seen by the kernel's counts, and closed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from testbed.namespaces import Network
from testbed.stopping import stop

from tt_cli.run import load_run
from tt_cli.swarm.membership.rsa_identity import claim_identity
from tt_cli.swarm.network.dht_node import addresses_of, daemon_pid, start_dht, stop_dht
from tt_cli.swarm.network.silent_connections import RESENT, hang_up, silent_among
from tt_cli.swarm.network.tcp_counters import TCPConnection, connections_of

SECONDS = 0.5
ECHO = """
import socket
with socket.create_server(("", 31337)) as server:
    print("ready", flush=True)
    while True:
        one, _ = server.accept()
        while piece := one.recv(1000):
            one.sendall(piece)
"""


def connection(remote: int, resent: int = 0, heard: float = 0.1) -> TCPConnection:
    return TCPConnection(remote, ("10.0.0.1", remote), 1000, resent, heard)


@pytest.mark.parametrize(
    ("connections", "silent"),
    [
        ([], set()),
        ([connection(1), connection(2, heard=99.0)], set()),
        ([connection(1), connection(2, RESENT, SECONDS)], {2}),
        ([connection(1), connection(2, RESENT - 1, 99.0)], set()),
        ([connection(1), connection(2, 9, SECONDS / 2)], set()),
        ([connection(1, heard=99.0), connection(2, RESENT, 99.0)], {1, 2}),
        ([connection(1, heard=99.0), connection(2, heard=99.0)], set()),
    ],
    ids=["none", "idle", "in vain", "late once", "heard lately", "nothing over any", "all idle"],
)
def test_silent_is_what_is_sent_in_vain_and_all_where_nothing_comes(
    connections: list[TCPConnection], silent: set[int]
) -> None:
    assert {port for _, port in silent_among(connections, SECONDS)} == silent


@pytest.mark.netns
def test_a_connection_is_silent_while_what_is_sent_is_lost() -> None:
    """As the kernel tells it: not while it is idle, and no longer than until something comes."""
    with Network(hosts=2) as network:
        here, there = network.hosts
        echo = there.start([sys.executable, "-c", ECHO], stdout=-1)
        assert echo.stdout is not None and echo.stdout.readline() == b"ready\n"
        place = there.address, 31337

        def silent() -> set[tuple[str, int]]:
            return silent_among([one for one in connections_of(os.getpid()) if one.remote == place], SECONDS)

        with here.entered(), socket.create_connection(place) as talking:
            talking.sendall(b"a")
            assert talking.recv(1) == b"a"
            (known,) = (one for one in connections_of(os.getpid()) if one.remote == place)
            assert known.acknowledged >= 1 and not known.resent
            network.split([there])
            while next(one for one in connections_of(os.getpid()) if one.remote == place).heard < 2 * SECONDS:
                assert not silent(), "nothing was sent"
            talking.sendall(b"b")
            while not silent():
                pass
            network.split()
            assert talking.recv(1) == b"b"
            assert not silent()


async def closed(dht: Any, node: Any, **ends: set[tuple[str, int]]) -> tuple[set[str], list[str]]:
    """In the DHT's process: whom hanging up met, and to whom there are connections then."""
    p2p = node.protocol.p2p
    met = await hang_up(p2p, **ends)
    return met, [str(peer.peer_id) for peer in await p2p.list_peers()]


async def called(dht: Any, node: Any) -> bool:
    """In the DHT's process: whether the one that it joined through answers."""
    (peer,) = node.protocol.routing_table.peer_id_to_uid
    return await node.protocol.call_ping(peer) is not None


def test_who_is_hung_up_on_is_dialled_anew(tmp_path: Path) -> None:
    run = load_run("emoji")
    with contextlib.ExitStack() as stack:
        nodes: list[Any] = []
        for name in ("anna", "ben"):
            (tmp_path / name).mkdir()
            identity = claim_identity(tmp_path / name, "trainer")
            joined = addresses_of(nodes[0])[:1] if nodes else []
            nodes.append(start_dht(run, identity, initial_peers=joined, host="127.0.0.1"))
            stack.callback(stop_dht, nodes[-1])
        anna, ben = nodes
        assert ben.run_coroutine(called)
        known, remotes = [str(anna.peer_id)], {one.remote for one in connections_of(ben.pid)}
        assert ben.run_coroutine(partial(closed, silent={("127.0.0.1", 1)})) == (set(), known)
        daemon = daemon_pid(anna)
        assert daemon is not None
        stop(daemon)
        assert ben.run_coroutine(partial(closed, silent=remotes)) == (set(), known), "nobody answers there"
        os.kill(daemon, signal.SIGCONT)
        assert ben.run_coroutine(partial(closed, silent=remotes)) == ({*known}, [])
        assert ben.run_coroutine(called)
        remotes = {one.remote for one in connections_of(ben.pid)}
        stop(daemon)
        assert ben.run_coroutine(partial(closed, silent=remotes, living=remotes)) == ({*known}, [])
        os.kill(daemon, signal.SIGCONT)
