"""Acknowledged bytes of TCP connections, as the kernel counts them (Linux).

A sender's own counts include what still lies in its buffers, and those of an interface what others send on it. The
kernel tells of each connection what arrived, over a netlink socket (sock_diag, as `ss -i` reads it).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tt_cli.supervisor.processes import family_of

SOCK_DIAG, BY_FAMILY, DUMP = 4, 20, 0x301  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP
INFO, ESTABLISHED = 2, 1  # INET_DIAG_INFO, TCP_ESTABLISHED
HEADER, REQUEST, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBxI48x"), struct.Struct("=HH")
MESSAGE, INODE = 72, 68  # bytes of inet_diag_msg, and where in it idiag_inode is
ACKNOWLEDGED = 120  # where in tcp_info tcpi_bytes_acked is
ERROR, DONE = 2, 3


def acknowledged_bytes(process: int) -> dict[int, int]:
    """Connection (inode of its socket) → bytes that arrived, of this process and its children.

    Empty where the system does not tell.
    """
    with suppress(OSError, AttributeError, struct.error):
        own = set(_sockets_of(family_of(process)))
        families = socket.AF_INET, socket.AF_INET6
        return {inode: count for family in families for inode, count in _connections(family) if inode in own}
    return {}


def _sockets_of(processes: set[int]) -> Iterator[int]:
    for process in processes:
        with suppress(OSError):
            for opened in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError, ValueError):
                    inode = os.readlink(opened).removeprefix("socket:[").removesuffix("]")
                    yield int(inode)


def _connections(family: int) -> Iterator[tuple[int, int]]:
    """Inode and acknowledged bytes of each connection of this machine that stands."""
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
                (inode,) = struct.unpack_from("=I", answer, HEADER.size + INODE)
                place = HEADER.size + MESSAGE
                while place < length:
                    size, what = ATTRIBUTE.unpack_from(answer, place)
                    if what == INFO:
                        yield inode, struct.unpack_from("=Q", answer, place + ATTRIBUTE.size + ACKNOWLEDGED)[0]
                    place += size + 3 & ~3
                answer = answer[length + 3 & ~3 :]
