"""Is this peer in touch with the others? By how much is its clock off? And how it finds back to them.

A DHT node forgets who does not answer: after some time without a network its tables are empty, and it asks nobody any
more. The addresses of the others are remembered here, so that it can be joined to them anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hivemind.dht import DHT, DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr

from tt_cli.identity.passes import CLOCK_LEEWAY
from tt_cli.swarm.clock import Clock

PING_SECONDS, DIAL_SECONDS = 6.0, 4.0
SPARE_SECONDS = 15.0  # for the node's own process to say something, on a busy machine
DEAD_AFTER = 3  # rounds of pings, half a minute each
MOST_KNOWN = 32
MOST_MET = 8
RECENT_SECONDS = 3.0
UNSEEN_SECONDS = 120.0  # after that, who answers and shows no record has something else to do: it starts, or ends
CUT_OFF = "cut off: nobody answers of all that this peer knows, and what it stepped alone would not count"
UNSEEN = "for the records of {}: they answer, and are not seen on the DHT"


@dataclass(frozen=True)
class Connectivity:
    """The outcome of a round of pings. asked, answered: peer ids. initial: those that the peer joined through.

    clock: seconds that this machine's clock is ahead of those of most; None when nobody answered. One that half of them
    agree with is not off. unanswered: rounds in a row about which the DHT process of this peer itself said nothing.
    """

    asked: frozenset[str] = frozenset()
    answered: frozenset[str] = frozenset()
    initial: frozenset[str] = frozenset()
    clock: float | None = None
    unanswered: int = 0

    @property
    def alive(self) -> bool:
        """False when the DHT process of this peer has been silent so long that a busy machine does not explain it."""
        return self.unanswered < DEAD_AFTER

    @property
    def cut_off(self) -> bool:
        """Nobody answered who could have."""
        return not self.unanswered and bool(self.asked) and not self.answered

    @property
    def split(self) -> bool:
        """Others answer, and none of those that the peer joined through: others cannot find it there."""
        return bool(self.initial) and bool(self.answered) and not self.answered & self.initial


Pings = tuple[dict[str, float], dict[str, list[str]]]
"""Who answered, with the seconds by which this machine's clock is ahead, and the addresses of who is connected."""


async def _ping(
    _: DHT, node: DHTNode, known: Mapping[str, Sequence[str]], now: Callable[[], float], anew: bool, join: bool
) -> Pings:
    """Ping these peers, in the DHT's process.

    now: this machine's Unix time. anew: over new connections. join: if anybody answers, look for this node's place
    among the others again.
    """

    async def ping(peer_id: str, addresses: Sequence[str]) -> tuple[str, float]:
        peer = PeerID.from_base58(peer_id)
        if anew:  # what is left of a connection from before may take minutes to break
            with contextlib.suppress(Exception):
                async with asyncio.timeout(DIAL_SECONDS):
                    await node.p2p._client.disconnect(peer)
        if addresses:
            with contextlib.suppress(Exception):  # what counts is whether it answers
                async with asyncio.timeout(DIAL_SECONDS):
                    await node.p2p._client.connect(peer, [Multiaddr(address) for address in addresses])
        before = now()
        request = dht_pb2.PingRequest(peer=node.protocol.node_info)
        answer = await node.protocol.get_stub(peer).rpc_ping(request, timeout=PING_SECONDS)
        after = now()
        node.blacklist.register_success(peer)
        if answer.peer.node_id:
            await node.protocol.update_routing_table(DHTID.from_bytes(answer.peer.node_id), peer, responded=True)
        return peer_id, max(min(0.0, after - answer.dht_time), before - answer.dht_time)

    if join:
        node.blacklist.clear()
    answers = await asyncio.gather(*(ping(*item) for item in known.items()), return_exceptions=True)
    ahead = dict(answer for answer in answers if isinstance(answer, tuple))
    if join and ahead:
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(PING_SECONDS):
                await node.find_nearest_nodes([node.node_id])
    connected = {str(info.peer_id): [str(a) for a in info.addrs] for info in await node.p2p.list_peers()}
    return ahead, connected


def places(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Peer id → where it is, of multiaddrs with /p2p/…."""
    found: dict[str, list[str]] = {}
    for address in addresses:
        place, _, peer_id = address.rpartition("/p2p/")
        found.setdefault(peer_id, []).append(place)
    return found


class ConnectivityMonitor:
    """Whom this peer knows, and by which addresses. For any thread.

    initial_peers: multiaddrs that it joined through; none for a first peer. met: of members that it met before that.
    banned: tells whether the organiser bans this peer id.
    """

    def __init__(
        self,
        dht: DHT,
        initial_peers: Sequence[str] = (),
        clock: Clock | None = None,
        met: Sequence[str] = (),
        banned: Callable[[str], bool] = lambda peer_id: False,
    ):
        self._dht, self._clock, self._banned = dht, clock or Clock(), banned
        self._lock = threading.Lock()
        self._initial = places(initial_peers)
        self._known = dict[str, list[str]]()  # beside those; who was met last is last
        self._meet(places(met))
        self._company = set(self._known)  # other trainers, as far as they are not known to be gone
        self._began_at = self._asked_at = -math.inf
        self._unseen_since = math.inf
        self.newest = Connectivity()

    def _meet(self, where: Mapping[str, list[str]]) -> None:
        """Remember these, in place of those met longest ago, who may have left for good."""
        before = {peer: there for peer, there in self._known.items() if peer not in where}
        now = {peer: there for peer, there in where.items() if peer not in self._initial}
        self._known = dict([*(before | now).items()][-MOST_KNOWN:])

    def accompanied(self, peer_ids: Iterable[str]) -> None:
        """These other trainers are there."""
        there = {peer: self._known.get(peer, []) for peer in peer_ids}
        self._company.update(there)
        self._meet(there)
        self._unseen_since = math.inf  # whoever is not seen later is so for the first time

    def why_not_alone(self, seen: Iterable[str] = (), parted: Iterable[str] = ()) -> str:
        """Why a peer that sees no other trainer with its state should not step alone; "" when nothing is against it.

        What it did alone, the others would have to undo, or it would have to undo theirs. So it waits when one with
        which it trained still answers, though the DHT does not show its record, and when it joined others and reaches
        nobody at all. seen: trainers whose records are there: what is to be done about those is known. parted: who
        said goodbye.
        """
        self._company.difference_update(parted)
        # who is banned is not asked, so its silence says nothing of this peer's line
        unseen = {peer for peer in self._company.difference(seen) if not self._banned(peer)}
        if not unseen:
            self._unseen_since = math.inf
            return ""
        recent = self._clock.monotonic() < self._began_at + RECENT_SECONDS
        # Asked twice before anybody counts as gone: the line may have broken when some had answered and others not yet.
        for look in range(0 if recent else 1, 3):
            found = self.ask() if look else self.newest
            self._unseen_since = min(self._unseen_since, self._clock.monotonic())
            there, off = found.answered & unseen, abs(found.clock or 0.0) > CLOCK_LEEWAY  # then it reads no records
            if there and (off or self._clock.monotonic() < self._unseen_since + UNSEEN_SECONDS):
                return UNSEEN.format(f"{len(there)} other trainers" if len(there) > 1 else "another trainer")
            if not found.answered and self._initial:
                return CUT_OFF
        self._company -= unseen
        self._unseen_since = math.inf
        return ""

    def met(self) -> list[str]:
        """Multiaddrs of some who answered last, beside the initial peers: through them, too, one can join the swarm."""
        met = sorted(self.newest.answered - self._initial.keys())[:MOST_MET]
        return [f"{address}/p2p/{peer}" for peer in met for address in self._known.get(peer, ())]

    def ask(self, peers: Iterable[str] = (), *, anew: bool = False) -> Connectivity:
        """Ping the initial peers, `peers` (peer ids that accept connections), and as many as may be of those met last.

        anew: over new connections, and take whoever answers into the node's tables again.
        """
        called = self._clock.monotonic()
        with self._lock:
            if self._asked_at > called and self._began_at > called - RECENT_SECONDS and not anew:
                return self.newest  # another thread was asking
            self._began_at = self._clock.monotonic()
            present = {peer: list[str]() for peer in peers if peer not in self._initial}
            known = self._initial | present | dict(reversed(self._known.items()))
            known.pop(str(self._dht.peer_id), None)
            known = dict(list(known.items())[:MOST_KNOWN])
            ping = partial(_ping, known=known, now=self._clock.dht_time, anew=anew, join=anew or self.newest.cut_off)
            try:
                future = self._dht.run_coroutine(ping, return_future=True)
                ahead, connected = future.result(timeout=2 * (PING_SECONDS + DIAL_SECONDS) + SPARE_SECONDS)
            except Exception:  # it is silent, or whatever its process raised, or the pipe to it
                unanswered = self.newest.unanswered + 1
                self.newest = Connectivity(frozenset(known), initial=frozenset(self._initial), unanswered=unanswered)
            else:
                self._meet({peer: connected[peer] for peer in ahead if peer in connected})
                said = [*ahead.values()]
                clock = min(statistics.median_low(said), statistics.median_high(said), key=abs) if said else None
                self.newest = Connectivity(frozenset(known), frozenset(ahead), frozenset(self._initial), clock)
            self._asked_at = self._clock.monotonic()
            return self.newest
