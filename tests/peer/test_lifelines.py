"""A peer whose daemon, averager or address is gone says so, and which."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tt_cli.peer.health.lifelines import Lifelines
from tt_cli.run import load_run
from tt_cli.supervisor.processes import alive
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm.network.dht_node import DHT, daemon_pid, start_dht, stop_dht


@pytest.fixture(scope="module")
def dht() -> Iterator[DHT]:
    node = start_dht(load_run("emoji"), None, initial_peers=[], host="127.0.0.1")
    yield node
    stop_dht(node)


@pytest.fixture
def averager(dht: DHT) -> Iterator[Any]:
    """A process in the averager's place, beside a node with its daemon."""
    process: Any = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    process.start()
    process.dht = dht
    yield process
    process.kill()
    process.join()


def test_a_peer_with_all_of_them_goes_on(averager: Any) -> None:
    Lifelines(averager).check()


def test_without_its_averager(averager: Any) -> None:
    lifelines = Lifelines(averager)
    averager.kill()
    averager.join()
    with pytest.raises(WorkerBroken, match="averager"):
        lifelines.check()


def test_where_the_machine_has_other_addresses(averager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lifelines = Lifelines(averager)
    monkeypatch.setattr(averager.dht, "listening", ["/ip4/203.0.113.7/tcp/4242"])  # of no machine
    with pytest.raises(WorkerBroken, match="other addresses"):
        lifelines.check()


def test_without_its_daemon(averager: Any) -> None:
    lifelines, daemon = Lifelines(averager), daemon_pid(averager.dht)
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    while alive(daemon):
        os.sched_yield()
    with pytest.raises(WorkerBroken, match="p2p daemon"):
        lifelines.check()
