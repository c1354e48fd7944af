"""TCP connections of a process as the kernel sees them (Linux): what arrived, and whether anything comes back.

A sender's own counts include what still lies in its buffers, and those of an interface what others send on it. The
kernel tells of each connection what was acknowledged, over a netlink socket (sock_diag, as `ss -i` reads it).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tt_cli.supervisor.processes import family_of

SOCK_DIAG, BY_FAMILY, DUMP = 4, 20, 0x301  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP
INFO, ESTABLISHED = 2, 1  # INET_DIAG_INFO, TCP_ESTABLISHED
HEADER, REQUEST, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBxI48x"), struct.Struct("=HH")
MESSAGE = struct.Struct("=6xH16x16s28xI")  # inet_diag_msg: port (big-endian) and address of the other end, inode
TCP_INFO = struct.Struct("=2xB53xI60xQ")  # tcpi_retransmits, tcpi_last_ack_recv, tcpi_bytes_acked
ERROR, DONE = 2, 3


class TCPConnection(NamedTuple):
    """One that stands. remote: address and port of its other end. acknowledged: bytes that arrived there.

    resent: how often the kernel has sent again, since the last acknowledgement, what was not acknowledged. heard:
    seconds since anything came from there.
    """

    inode: int
    remote: tuple[str, int]
    acknowledged: int
    resent: int
    heard: float


def connections_of(process: int) -> list[TCPConnection]:
    """Those of this process and its children. Empty where the system does not tell."""
    with suppress(OSError, AttributeError, struct.error):
        own = set(_sockets_of(family_of(process)))
        families = socket.AF_INET, socket.AF_INET6
        return [one for family in families for one in _connections(family) if one.inode in own]
    return []


def acknowledged_bytes(process: int) -> dict[int, int]:
    """Connection (inode of its socket) → bytes that arrived, of this process and its children."""
    return {one.inode: one.acknowledged for one in connections_of(process)}


def _sockets_of(processes: set[int]) -> Iterator[int]:
    for process in processes:
        with suppress(OSError):
            for opened in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError, ValueError):
                    inode = os.readlink(opened).removeprefix("socket:[").removesuffix("]")
                    yield int(inode)


def _connections(family: int) -> Iterator[TCPConnection]:
    """All of this machine that stand."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as asking:
        request = REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INFO - 1), 1 << ESTABLISHED)
        asking.settimeout(1.0)
        asking.send(HEADER.pack(HEADER.size + len(request), BY_FAMILY, DUMP, 1, 0) + request)
        while True:
            answer = asking.recv(2**16)
            while answer:
                length, kind, *_ = HEADER.unpack_from(answer)
                if kind in (ERROR, DONE):
                    return
                port, address, inode = MESSAGE.unpack_from(answer, HEADER.size)
                host = socket.inet_ntop(family, address[: 4 if family == socket.AF_INET else 16])
                place = HEADER.size + MESSAGE.size
                while place < length:
                    size, what = ATTRIBUTE.unpack_from(answer, place)
                    if what == INFO:
                        resent, heard, arrived = TCP_INFO.unpack_from(answer, place + ATTRIBUTE.size)
                        yield TCPConnection(inode, (host, socket.ntohs(port)), arrived, resent, heard / 1000)
                    place += size + 3 & ~3
                answer = answer[length + 3 & ~3 :]
