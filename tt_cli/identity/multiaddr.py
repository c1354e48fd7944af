"""The addresses peers dial: libp2p multiaddrs such as /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Sequence

HELLO = b"\x13/multistream/1.0.0\n"  # what a libp2p node says first on every TCP connection
DIAL_SECONDS = 5.0  # until the first node has said it
MORE_SECONDS = 2.0  # for the others, from then on
SILENT, OTHER, UNTRIED = "nothing comes from there", "who answers there is no peer", "not tried: no plain TCP"
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{8,}")  # base58, as libp2p writes peer ids
_EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"


def check_multiaddr(address: str) -> str:
    """Return `address` when a peer can dial it.

    Raises ValueError with one line that says what is wrong; whether anyone answers there is not asked.
    """
    parts = address.split("/")
    if parts[0] != "" or len(parts) < 7 or "" in parts[1:]:
        raise ValueError(f"is no multiaddr; it looks like {_EXAMPLE}")
    protocol, host, transport, port = parts[1:5]
    if protocol in ("ip4", "ip6"):
        try:
            version = ipaddress.ip_address(host).version
        except ValueError:
            version = None
        if version != int(protocol[-1]):
            raise ValueError(f"'{host}' is no IPv{protocol[-1]} address; a multiaddr looks like {_EXAMPLE}")
    elif protocol not in ("dns", "dns4", "dns6"):
        raise ValueError(f"must start with /ip4/, /ip6/ or /dns4/, not /{protocol}/; it looks like {_EXAMPLE}")
    if transport not in ("tcp", "udp"):
        raise ValueError(f"needs /tcp/ or /udp/ after the host, not /{transport}/; it looks like {_EXAMPLE}")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"port '{port}' must be a number from 1 to 65535")
    if "p2p" not in parts[5:]:
        raise ValueError(f"must end in /p2p/ and the peer's id; it looks like {_EXAMPLE}")
    if parts[-2] != "p2p" or not _PEER_ID.fullmatch(parts[-1]):
        raise ValueError(f"must end in /p2p/ and a peer id, not '{parts[-1]}'; it looks like {_EXAMPLE}")
    return address


def is_multiaddr(address: object) -> bool:
    """Tell whether it is one of plain TCP, which `dial` tries; who says so may want that no daemon starts with it."""
    with contextlib.suppress(ValueError):
        return isinstance(address, str) and check_multiaddr(address).split("/")[3::2] == ["tcp", "p2p"]
    return False


async def dial(addresses: Sequence[str]) -> dict[str, str]:
    """Dial these multiaddrs: of each why no libp2p node answers there, "" where one does.

    All are dialled at once: libp2p's daemon dials its initial peers in turn, and does not start where six of them are
    behind firewalls that drop what comes, each for five seconds.
    """

    async def trouble_at(address: str) -> str:
        _, protocol, host, transport, port, *rest = address.split("/")
        if transport != "tcp" or rest[:1] != ["p2p"]:
            return UNTRIED
        family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(protocol, socket.AF_UNSPEC)
        try:
            reader, writer = await asyncio.open_connection(host, int(port), family=family)
            try:
                return "" if await reader.readexactly(len(HELLO)) == HELLO else OTHER
            finally:
                writer.close()
        except EOFError:
            return OTHER
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or 0
            return os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)

    dialled = [asyncio.create_task(trouble_at(address)) for address in addresses]
    clock = asyncio.get_running_loop().time
    until, waiting = clock() + DIAL_SECONDS, set(dialled)
    while waiting and clock() < until:
        done, waiting = await asyncio.wait(waiting, timeout=until - clock(), return_when=asyncio.FIRST_COMPLETED)
        if "" in {task.result() for task in done}:
            until = min(until, clock() + MORE_SECONDS)
    for task in waiting:
        task.cancel()
    return {
        address: SILENT if task in waiting else task.result() for address, task in zip(addresses, dialled, strict=True)
    }
