"""Connections that lead nowhere any more: closed, so that the next call dials anew.

A router that starts anew, or gets another address, forgets the connections through it, and whatever still comes over
them is lost. TCP sends it again for many minutes, libp2p notices after about forty seconds, and until then all calls
to those peers hang: for the others, too, who wait for this one in every round.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection

from hivemind.p2p import P2P, PeerID
from hivemind.utils import get_logger

from tt_cli.identity.multiaddr import dial
from tt_cli.swarm.network.tcp_counters import TCPConnection, connections_of

logger = get_logger(__name__)

Remote = tuple[str, int]  # the other end of a connection: address and port

LOOK_SECONDS = 2.0
RESENT = 2  # times in vain: a packet that is late, as on a full line, is sent again once


def silent_among(connections: Collection[TCPConnection], seconds: float) -> set[Remote]:
    """The other ends of those over which nothing has come for so long, though something was sent.

    Of all, where nothing came over any of them: then those that are idle are lost as well.
    """
    silent = {one.remote for one in connections if one.resent >= RESENT and one.heard >= seconds}
    if silent and all(one.heard >= seconds for one in connections):
        return {one.remote for one in connections}
    return silent


async def hang_up(p2p: P2P, silent: Collection[Remote], living: Collection[Remote] = ()) -> set[str]:
    """Close the connections to those peers of which one is silent, all of each, as soon as another one can stand.

    That is where one does, or a libp2p node answers at the other end of the silent one: while a line is down nothing is
    gained, and libp2p waits longer after each dial in vain. living: the others. Returns the ids of the peers.
    """
    ends = defaultdict[PeerID, set[str]](set)
    for peer in await p2p.list_peers() if silent else ():
        ends[peer.peer_id].update(map(str, peer.addrs))
    lost = {peer for peer, addresses in ends.items() if any(_remote(one) in silent for one in addresses)}
    back = {peer for peer in lost if any(_remote(one) in living for one in ends[peer])}
    tried = {f"{one}/p2p/{peer}": peer for peer in lost - back for one in ends[peer] if _remote(one) in silent}
    back |= {tried[address] for address, trouble in (await dial(list(tried))).items() if not trouble}
    for peer in back:
        await p2p._client.disconnect(peer)
    return set(map(str, back))


def _remote(multiaddr: str) -> Remote:
    """Address and port in /ip4/ADDRESS/tcp/PORT; ("", 0) in any other."""
    match multiaddr.split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port]:
            return host, int(port)
    return "", 0


async def hang_up_on_silent(p2p: P2P, process: int, seconds: float) -> None:
    """Look for ever; process: of the node, whose child holds its connections. seconds: see `silent_among`."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            connections = await asyncio.to_thread(connections_of, process)
            living = {one.remote for one in connections if one.heard < seconds}
            for peer in await hang_up(p2p, silent_among(connections, seconds), living):
                logger.info(f"nothing has come from {peer} for {seconds:.0f} s: the connection is closed, to dial anew")
        except Exception as error:  # the daemon may be ending: whoever calls it hears of that
            logger.debug(f"silent connections are not looked for: {error!r}")
