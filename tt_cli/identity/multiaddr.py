"""The addresses peers dial: libp2p multiaddrs such as /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"""

from __future__ import annotations

import ipaddress
import re

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
