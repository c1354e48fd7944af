"""The benchmarks' hosts: they reach each other at the rate that was asked for, and nothing of them stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from testbed import namespaces
from testbed.namespaces import NAMES, PREFIX, Network, NoNetwork

from tt_cli.supervisor.processes import alive

ROOT = Path(__file__).resolve().parents[2]
PORT, SIZE = 9000, 2_000_000
RECEIVE = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(2**20):
    pass
connection.sendall(b"done")
"""
LEFT_BEHIND = """
import sys
from testbed.namespaces import Network
network = Network(hosts=1)
network.__enter__()
network.hosts[0].start(["sh", "-c", "sleep 600 & echo $!; wait"])  # sleep is not told when this process ends
sys.stdin.read()
"""


def ours(pid: int) -> list[str]:
    return [name for name in os.listdir(NAMES) if name.startswith(f"{PREFIX}-{pid}-")]


@pytest.mark.netns
def test_a_link_has_the_rate_and_counts_what_passes() -> None:
    with Network(hosts=2, mbit=20) as network:
        first, second = network.hosts
        receiver = first.start([sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
        assert receiver.stdout is not None and receiver.stdout.readline() == b"ready\n"
        before, started = network.traffic(), time.monotonic()
        with second.entered():
            connection = socket.create_connection((first.address, PORT))
        with connection:
            connection.sendall(bytes(SIZE))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(4) == b"done"
        seconds = time.monotonic() - started
        first_traffic, second_traffic = (now.since(then) for now, then in zip(network.traffic(), before, strict=True))
        # 2 MB at 20 Mbit/s are 0.8 s; up to 128 KiB go at once, and twice that wait in no queue.
        assert seconds > 0.9 * (SIZE - 2**18) * 8 / 20e6
        assert SIZE <= second_traffic.sent < 1.1 * SIZE
        assert SIZE <= first_traffic.received < 1.1 * SIZE
        assert first_traffic.sent < 0.1 * SIZE
    assert not ours(os.getpid())


@pytest.mark.netns
def test_a_host_is_alone_with_its_network_and_ends_with_it() -> None:
    with Network(hosts=1) as network:
        sleeper = network.hosts[0].start(["sleep", "600"])
        links = network.hosts[0].run(["ip", "-brief", "link"])
        assert {line.split()[0].partition("@")[0] for line in links.splitlines()} == {"lo", "eth0"}
        with pytest.raises(NoNetwork, match="already"):
            Network(hosts=1).__enter__()
    assert sleeper.returncode == -signal.SIGKILL
    assert not ours(os.getpid())


@pytest.mark.netns
def test_what_a_killed_run_left_behind_is_removed() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", LEFT_BEHIND], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    sleeper = int(run.stdout.readline())
    assert alive(sleeper)
    run.kill()
    run.wait()
    run.stdout.close()
    assert ours(run.pid)
    namespaces.remove_leftovers()
    assert not ours(run.pid) and not alive(sleeper)


def test_without_root_or_iproute2_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoNetwork, match="^network namespaces need root: run this as root$"):
        Network(hosts=2).__enter__()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoNetwork, match="^ip and tc not found: install iproute2$"):
        Network(hosts=2).__enter__()


@pytest.mark.netns
def test_a_divided_network_can_be_mended() -> None:
    with Network(hosts=3) as network:
        first, second, third = network.hosts

        def reaches(other: str) -> bool:
            with second.entered():
                try:
                    socket.create_connection((other, PORT), timeout=0.5).close()
                except ConnectionRefusedError:  # its kernel answers, nobody listens
                    return True
                except OSError:
                    return False
            return True

        assert reaches(first.address) and reaches(third.address)
        network.split([first], [second, third])
        assert reaches(third.address) and not reaches(first.address)
        network.split([second])
        assert not reaches(third.address) and not reaches(first.address)
        network.split()
        assert reaches(first.address) and reaches(third.address)
