"""Addresses of this machine that mean something to others, and what a person does so that they can be reached.

Never announced: loopback (unless that is what the peer listens on), link-local, and those of bridges between this
machine and its own containers, which on any other machine are somebody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

SIOCGIFADDR = 0x8915
BRIDGES = re.compile(r"(lo|docker|br-|veth|virbr|lxcbr|lxdbr|podman|cni|flannel|cali|kube)")
DOCKER = ipaddress.ip_network("172.17.0.0/16")  # of Docker's own bridge, unless somebody changed it
_TCP = re.compile(r"/ip4/([0-9.]+)/tcp/([0-9]{1,5})(?:/p2p/[^/]+)?")


def interface_addresses() -> dict[str, str]:
    """Interface → its (first) IPv4 address."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            with contextlib.suppress(OSError):  # it has none
                addresses[name] = socket.inet_ntoa(fcntl.ioctl(any_socket, SIOCGIFADDR, request)[20:24])
    return addresses


def announceable(addresses: dict[str, str] | None = None, inside: str | None = None) -> list[str]:
    """This machine's IPv4 addresses that others may be told of. inside: as `surroundings` says."""
    in_container = (surroundings() if inside is None else inside) == "container"
    addresses = interface_addresses() if addresses is None else addresses
    own = [address for name, address in addresses.items() if not BRIDGES.match(name) and not _local(address)]
    return [address for address in own if not (in_container and ipaddress.ip_address(address) in DOCKER)]


def _local(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast


def _is_own(address: str) -> bool:
    """True for one that this machine has; of an interface with several only the first is listed."""
    with contextlib.suppress(OSError):
        return bool(free_port(address))
    return False


def free_port(host: str) -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def listen_and_announce(host: str, port: int, wanted: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """(multiaddrs to listen on, multiaddrs to announce: empty for what the daemon finds out by itself).

    On 0.0.0.0 the daemon would announce every address that the machine has; it listens on those that mean something to
    others, so that what it adds to them by itself, such as the router's after port mapping, stays. wanted: multiaddrs
    that a person has others told; those of this machine are listened on, even if they mean nothing elsewhere.
    """
    if host != "0.0.0.0":
        return [f"/ip4/{host}/tcp/{port}"], []
    port = port or free_port(host)
    good = announceable()
    if good:
        good += [ip for ip in dict.fromkeys(ip for ip, _ in tcp_addresses(wanted)) if ip not in good and _is_own(ip)]
        return [f"/ip4/{address}/tcp/{port}" for address in good], []
    return [f"/ip4/0.0.0.0/tcp/{port}"], [f"/ip4/127.0.0.1/tcp/{port}"]


def moved(listening: Iterable[str], addresses: dict[str, str] | None = None) -> bool:
    """True when none of the multiaddrs that a peer listens on is this machine's any more, and it has others."""
    found = interface_addresses() if addresses is None else addresses
    own = {ip for ip, _ in tcp_addresses(listening) if not _local(ip)}
    return bool(own) and not own & set(found.values()) and bool(announceable(found))


def tcp_addresses(multiaddrs: Iterable[str]) -> list[tuple[str, int]]:
    """(IPv4 address, port) of each that is plain TCP, not through a relay."""
    found = [(match[1], int(match[2])) for address in multiaddrs if (match := _TCP.fullmatch(address))]
    return [(ip, port) for ip, port in dict.fromkeys(found) if 0 < port < 2**16]


def surroundings() -> str:
    """What this machine is inside of: "container" (Docker and its like), "WSL" (version 2), else ""."""
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        return "container"
    with contextlib.suppress(OSError):
        if "microsoft" in Path("/proc/sys/kernel/osrelease").read_text().lower():
            return "WSL"
    return ""


def default_gateway() -> str | None:
    """The router of this machine, or the container's host."""
    try:
        lines = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return None
    for fields in map(str.split, lines):
        if len(fields) > 2 and fields[1] == "00000000":
            return socket.inet_ntoa(struct.pack("<L", int(fields[2], 16)))
    return None


def steps_to_be_reached(port: int, own: str, seen: str, inside: str | None = None) -> list[str]:
    """Advice to a person, with their own addresses in it.

    own: of this machine. seen: what others see. inside: as `surroundings` says.
    """
    inside = surroundings() if inside is None else inside
    again = f"then start with --port {port} --announce /ip4/{seen}/tcp/{port}"
    forward = f"forward TCP port {port} of your router to "
    if inside == "container":
        steps = [f"start the container with -p {port}:{port} (or --network host), {again}"]
        return [*steps, f"behind a router, also {forward}the machine that runs the container"]
    if inside == "WSL":
        return [
            "in Windows write networkingMode=mirrored under [wsl2] in %UserProfile%\\.wslconfig and run "
            "wsl --shutdown; or, as administrator: netsh interface portproxy add v4tov4 listenaddress=0.0.0.0 "
            f"listenport={port} connectaddress={own} connectport={port}",
            f"let TCP port {port} through Windows' firewall, {forward}this computer, {again}",
        ]
    if own == seen:
        return [f"let TCP port {port} through this machine's firewall, {again}"]
    return [f"{forward}{own}, {again}"]
