"""Which addresses count as a peer's multiaddr."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from testbed.greeter import listening

from tt_cli.identity import multiaddr as room
from tt_cli.identity.multiaddr import HELLO, OTHER, SILENT, UNTRIED, dial
from tt_cli.run import check_multiaddr

PEER = "12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"


@pytest.mark.parametrize(
    "address",
    [
        f"/ip4/127.0.0.1/tcp/31337/p2p/{PEER}",
        f"/ip6/::1/tcp/1/p2p/{PEER}",
        f"/dns4/aux.example.org/tcp/65535/p2p/{PEER}",
        f"/ip4/203.0.113.7/udp/31337/quic/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}/p2p-circuit/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
def test_dialable_addresses_pass_unchanged(address: str) -> None:
    assert check_multiaddr(address) == address


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "is no multiaddr"),
        ("203.0.113.7:31337", "is no multiaddr"),
        (f"ip4/127.0.0.1/tcp/1/p2p/{PEER}", "is no multiaddr"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}/", "is no multiaddr"),
        ("/ip4/127.0.0.1/tcp/31337", "is no multiaddr"),
        (f"/ip4/300.0.0.1/tcp/1/p2p/{PEER}", "no IPv4 address"),
        (f"/ip4/::1/tcp/1/p2p/{PEER}", "no IPv4 address"),
        (f"/onion/x/tcp/1/p2p/{PEER}", "must start with /ip4/"),
        (f"/ip4/127.0.0.1/sctp/1/p2p/{PEER}", "needs /tcp/ or /udp/"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}", "port '0'"),
        (f"/ip4/127.0.0.1/tcp/65536/p2p/{PEER}", "port '65536'"),
        (f"/ip4/127.0.0.1/tcp/x/p2p/{PEER}", "port 'x'"),
        ("/ip4/127.0.0.1/tcp/1/quic/x", "must end in /p2p/"),
        ("/ip4/127.0.0.1/tcp/1/p2p/not-base58!", "a peer id"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}/p2p-circuit", "a peer id"),
    ],
)
def test_others_are_refused_with_a_reason(address: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_multiaddr(address)


def troubles(*says: bytes, more: tuple[str, ...] = (), named: bool = False) -> list[str]:
    """Why these who say this are no nodes, "" where they are, and `more`. named: by the names of their hosts, too."""

    with contextlib.ExitStack() as stack:
        addresses = [*(stack.enter_context(listening(one)) for one in says), *more]
        addresses += [one.replace("/ip4/127.0.0.1/", "/dns4/localhost/") for one in addresses if named]
        return list(asyncio.run(dial(addresses)).values())


def test_a_peer_is_told_from_who_else_answers_and_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MORE_SECONDS", 0.2)
    with listening() as refusing:
        pass
    others = b"HTTP/1.1 400 Bad Request", b"SSH-2.0-OpenSSH_9.2p1\r\n"
    assert troubles(b"", HELLO, *others, HELLO, more=(refusing,)) == [
        SILENT,
        "",
        OTHER,
        OTHER,
        "",
        "Connection refused",
    ]
    assert troubles(HELLO, named=True) == ["", ""]
    assert all(troubles(more=(f"/dns4/no..host/tcp/1/p2p/{PEER}", f"/dns4/nobody.invalid/tcp/1/p2p/{PEER}")))


def test_nobody_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "DIAL_SECONDS", 0.1)
    assert troubles(b"", HELLO[:-1]) == [SILENT, SILENT]
    relayed, quic = f"/ip4/203.0.113.7/tcp/1/ws/p2p/{PEER}", f"/ip4/203.0.113.7/udp/1/quic/p2p/{PEER}"
    assert troubles(b"", more=(relayed, quic)) == [SILENT, UNTRIED, UNTRIED]
    monkeypatch.setattr(room, "DIAL_SECONDS", 600.0)
    monkeypatch.setattr(room, "MORE_SECONDS", 0.1)
    assert troubles(b"", HELLO) == [SILENT, ""], "somebody answers: the others have some time more"
