"""Several hosts on one Linux machine: network namespaces, a bridge between them, and links of a chosen rate.

Needs root and iproute2. Each host has one link to the bridge, limited to so many Mbit/s each way by `tc … tbf`: what it
sends on its own end, what it receives on the bridge's. There is no added delay and no loss but that of full queues.

    from testbed.namespaces import Network            # from tests: testbed.namespaces

    with Network(hosts=4, mbit=100) as network:   # everything in it is ended and removed at the end
        first, *others = network.hosts
        server = first.start([sys.executable, "-m", "http.server"])          # a Popen in the namespace
        before = network.traffic()
        others[0].start(["curl", "-s", f"http://{first.address}:8000/"]).wait()
        print(network.traffic()[0].sent - before[0].sent)                     # bytes that the first host sent
        network.limit(20)                                                     # other rates; None: as fast as it goes
        network.split(others)                                                 # they reach each other, not the first
        network.split()                                                       # all reach all again
        with others[1].entered():                 # this thread makes its sockets and children there
            swarm.start_trainer("anna")

A run that is killed leaves namespaces behind; their names carry its process id, and the next Network removes them and
ends what still runs in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tt_cli.errors import TTError

PREFIX = "tt-lab"
SUBNET = "10.79.0"
NAMES = Path("/run/netns")
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x4000_0000, 1
BURST_SECONDS, BURST_BYTES = (
    0.002,
    2**17,
)  # two full TCP segments after offloading, else tbf takes them apart one by one
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetwork(TTError):
    """Namespaces cannot be made here."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of Ethernet frames that a host sent and received since its link was made.

    Counted on the bridge's end, which nobody inside can write. Frames that the kernel hands over as one
    (segmentation offload) count with one header, so TCP's headers hardly show: 1,448 of 1,514 bytes on a real wire.
    """

    sent: int
    received: int

    def since(self, earlier: Traffic) -> Traffic:
        """What came after `earlier`."""
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


class Host:
    """One namespace. address: IPv4, reachable by the other hosts of its network. Made by `Network`."""

    def __init__(self, namespace: str, address: str, port: str):
        self.namespace, self.address, self.port = namespace, address, port
        self.started: list[subprocess.Popen[Any]] = []

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is in the namespace: sockets and processes it makes belong there. Its other sockets stay."""
        with open(f"/proc/self/task/{threading.get_native_id()}/ns/net") as home:
            with open(NAMES / self.namespace) as there:
                _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(home.fileno())

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process in the namespace; it dies with the thread that started it. options: for subprocess.Popen."""
        with self.entered():
            process = subprocess.Popen(command, preexec_fn=_die_with_parent, **options)  # noqa: PLW1509 - calls one C function
        self.started.append(process)
        return process

    def run(self, command: Sequence[str]) -> str:
        """What a command in the namespace prints. Raises NoNetwork when it fails."""
        with self.entered():
            return _run(command)


class Network:
    """A context manager: `hosts` hosts that reach each other through one bridge.

    mbit: 10^6 bits a second each way for each host, None for no limit. queue_seconds: what waits for a link at most,
    as in a home router. congestion: TCP's congestion control in all hosts, of net.ipv4.tcp_allowed_congestion_control
    on the machine; None for the machine's own.
    """

    def __init__(
        self, hosts: int, mbit: float | None = None, *, queue_seconds: float = 0.05, congestion: str | None = None
    ):
        self.queue_seconds, self.congestion = queue_seconds, congestion
        self._hub = f"{PREFIX}-{os.getpid()}-hub"
        self._count, self._mbit = hosts, mbit
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        need_namespaces()
        remove_leftovers()
        if (NAMES / self._hub).exists():
            raise NoNetwork("this process has a network already: leave it before making another")
        room_for_neighbours(self._count)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def limit(self, mbit: float | None, *hosts: Host) -> None:
        """Limit these links (default: all) to so many Mbit/s each way, from now on; what waits in queues is dropped."""
        for host in hosts or self.hosts:
            for namespace, device in ((host.namespace, "eth0"), (self._hub, host.port)):
                qdisc = ["tc", "-n", namespace, "qdisc"]
                if mbit is None:
                    if "tbf" in _run([*qdisc, "show", "dev", device]):
                        _run([*qdisc, "del", "dev", device, "root"])
                    continue
                bytes_a_second = mbit * 1e6 / 8
                burst = max(BURST_BYTES, round(bytes_a_second * BURST_SECONDS))
                limit = burst + round(bytes_a_second * self.queue_seconds)
                shape = ["tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "limit", str(limit)]
                _run([*qdisc, "replace", "dev", device, "root", *shape])

    def split(self, *groups: Sequence[Host]) -> None:
        """Cut the network: the hosts of a group reach each other alone, and so do those of none. No group: mend it."""
        bridges = {host.port: f"bridge{number}" for number, group in enumerate(groups, 1) for host in group}
        for bridge in sorted(set(bridges.values())):
            if bridge not in _run(["ip", "-n", self._hub, "-br", "link", "show", "type", "bridge"]):
                _run(["ip", "-n", self._hub, "link", "add", "name", bridge, "type", "bridge"])
                _run(["ip", "-n", self._hub, "link", "set", bridge, "up"])
        for host in self.hosts:
            _run(["ip", "-n", self._hub, "link", "set", host.port, "master", bridges.get(host.port, "bridge0")])

    def traffic(self) -> list[Traffic]:
        """What each host sent and received so far."""
        links = {link["ifname"]: link for link in json.loads(_run(["ip", "-n", self._hub, "-s", "-j", "link"]))}
        counted = [links[host.port]["stats64"] for host in self.hosts]
        return [Traffic(sent=port["rx"]["bytes"], received=port["tx"]["bytes"]) for port in counted]

    def close(self) -> None:
        """End every process in the namespaces and remove them. Can be called twice."""
        for name in (*(host.namespace for host in self.hosts), self._hub):
            _remove(name)
        for host in self.hosts:
            for process in host.started:
                process.wait()
        self.hosts = []

    def _make(self) -> None:
        _run(["ip", "netns", "add", self._hub])
        _run(["ip", "-n", self._hub, "link", "add", "name", "bridge0", "type", "bridge"])
        _run(["ip", "-n", self._hub, "link", "set", "bridge0", "up"])
        for number in range(1, self._count + 1):
            host = Host(f"{PREFIX}-{os.getpid()}-{number}", f"{SUBNET}.{number}", f"host{number}")
            self.hosts.append(host)
            inside, hub = ["ip", "-n", host.namespace], ["ip", "-n", self._hub]
            _run(["ip", "netns", "add", host.namespace])
            peer = ["peer", "name", "eth0", "netns", host.namespace]
            _run([*hub, "link", "add", "name", host.port, "type", "veth", *peer])
            _run([*hub, "link", "set", host.port, "master", "bridge0", "up"])
            _run([*inside, "address", "add", f"{host.address}/24", "dev", "eth0"])
            _run([*inside, "link", "set", "lo", "up"])
            _run([*inside, "link", "set", "eth0", "up"])
            if self.congestion is not None:
                host.run(["sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={self.congestion}"])
        self.limit(self._mbit)


def need_namespaces() -> None:
    """Raise NoNetwork, in one line, where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise NoNetwork("network namespaces need root: run this as root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NoNetwork(f"{' and '.join(missing)} not found: install iproute2")


def remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed, and end what still runs in them."""
    if not NAMES.is_dir():
        return
    for name in os.listdir(NAMES):
        owner = name.removeprefix(f"{PREFIX}-").partition("-")[0]
        if name.startswith(f"{PREFIX}-") and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(name)


def room_for_neighbours(hosts: int) -> None:
    """Let so many hosts know each other: all namespaces share one table of neighbours, of 1,024 as a rule."""
    for name in ("gc_thresh3", "gc_thresh2", "gc_thresh1"):  # none may be above the next
        path = Path("/proc/sys/net/ipv4/neigh/default", name)
        path.write_text(str(max(int(path.read_text()), 2 * hosts**2)))


def _remove(namespace: str) -> None:
    if not (NAMES / namespace).exists():
        return
    while pids := [int(pid) for pid in _run(["ip", "netns", "pids", namespace]).split() if _living(int(pid))]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                _await_end(pid)
    _run(["ip", "netns", "delete", namespace])


def _living(pid: int) -> bool:
    """Neither ended nor this process, one of whose threads may have entered."""
    if pid == os.getpid():
        raise NoNetwork("a thread of this process is still in a namespace that is to be removed")
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _await_end(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [], 10.0)
    finally:
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise NoNetwork(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoNetwork(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise NoNetwork(f"{' '.join(command)}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout
