"""A peer whose daemon, averager or address is gone says so, and which."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tt_cli.peer.health.lifelines import Lifelines
from tt_cli.run import load_run
from tt_cli.supervisor.processes import alive
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm.network.dht_node import daemon_pid, start_dht, stop_dht


@pytest.fixture
def peer() -> Iterator[Any]:
    """A node with its daemon, and a process in the averager's place."""
    dht = start_dht(load_run("emoji"), None, initial_peers=[], host="127.0.0.1")
    averager: Any = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    averager.start()
    averager.dht = dht
    yield SimpleNamespace(averager=averager)
    averager.kill()
    averager.join()
    stop_dht(dht)


def test_a_peer_with_all_of_them_goes_on(peer: Any) -> None:
    Lifelines(peer.averager).check()


def test_without_its_daemon(peer: Any) -> None:
    lifelines, daemon = Lifelines(peer.averager), daemon_pid(peer.averager.dht)
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    while alive(daemon):
        os.sched_yield()
    with pytest.raises(WorkerBroken, match="p2p daemon"):
        lifelines.check()


def test_without_its_averager(peer: Any) -> None:
    lifelines = Lifelines(peer.averager)
    peer.averager.kill()
    peer.averager.join()
    with pytest.raises(WorkerBroken, match="averager"):
        lifelines.check()


def test_where_the_machine_has_other_addresses(peer: Any) -> None:
    lifelines = Lifelines(peer.averager)
    peer.averager.dht.listening = ["/ip4/203.0.113.7/tcp/4242"]  # of no machine
    with pytest.raises(WorkerBroken, match="other addresses"):
        lifelines.check()
