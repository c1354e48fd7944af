"""Can others connect to this peer? They dial back and say.

A peer asks a few members. Each dials the address from which it sees the asking peer, at the ports that the peer names,
with a libp2p node of its own for that, so that no open connection hides the answer. It dials nobody else's address,
one peer at a time and not again at once: nobody can use it to look for open ports of others, or to flood them.

Who cannot be reached goes on in client mode, in which it calls others and nobody calls it, and is told what would
change it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hivemind.dht import DHT, DHTNode
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger
from hivemind.utils.multiaddr import Multiaddr

from tt_cli.identity.rate_limit import Crowded, Places, RateLimit
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Choice, Emit, Log
from tt_cli.swarm import wire
from tt_cli.swarm.membership.rsa_identity import Identity
from tt_cli.swarm.network.addresses import announceable, default_gateway, steps_to_be_reached, tcp_addresses
from tt_cli.swarm.network.dht_node import addresses_of, start_dht, stop_dht
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import read_records

logger = get_logger(__name__)

MOST_PORTS, MOST_ASKED, LEAST_ANSWERS = 3, 3, 2
DIAL_SECONDS, PROBE_SECONDS = 4.0, 10.0
ANSWER_SECONDS = 30.0  # dials, and others before this peer
AGAIN_SECONDS, MOST_WAITING, REMEMBERED = 5.0, 4, 1024
MAPPING_SECONDS = 6.0  # a router takes to open a port when it is asked to


class DialBack(ServicerBase):
    """The libp2p service. One probe runs at a time, and a peer is probed again after some seconds."""

    def __init__(self) -> None:
        self._probing, self._waiting = asyncio.Lock(), Places(1, MOST_WAITING)
        self._probes = RateLimit(1, 1 / AGAIN_SECONDS, REMEMBERED)
        self._p2p: P2P | None = None

    async def add_p2p_handlers(self, p2p: P2P, *args: Any, **kwargs: Any) -> None:
        """As hivemind's; it also needs the node to see where its callers are."""
        self._p2p = p2p
        await super().add_p2p_handlers(p2p, *args, **kwargs)

    async def rpc_dial_back(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """The address where this peer sees the caller, and those of the ports asked for at which it could dial it."""
        peer = context.remote_id
        assert self._p2p is not None
        try:
            ports = wire.DIAL_REQUEST.read(request)
            with self._waiting.one(str(peer)):
                self._probes.charge(str(peer))
                seen = seen_at([str(a) for p in await self._p2p.list_peers() if p.peer_id == peer for a in p.addrs])
                async with self._probing:
                    reached = await reached_at(peer, seen, ports)
        except Crowded:
            return wire.DIAL_ANSWER.message(("", (), "it dials others now"))
        except ValueError as error:
            return wire.DIAL_ANSWER.message(("", (), str(error)))
        return wire.DIAL_ANSWER.message((seen, tuple(reached), ""))


def seen_at(addresses: Sequence[str]) -> str:
    """A peer's address, by those of its connections. Raises ValueError when they do not tell."""
    seen = [ip for ip, _ in tcp_addresses(addresses)]
    if not seen:
        raise ValueError("it is connected through a relay alone")
    if seen[0] == default_gateway():
        raise ValueError("it sees its own router in the place of this peer")
    return seen[0]


async def reached_at(peer: PeerID, address: str, ports: Sequence[int]) -> list[int]:
    """The first of these ports at which a fresh libp2p node finds this very peer, in a list; empty without one."""
    probe = await P2P.create(
        dht_mode="client",
        no_listen=True,
        host_maddrs=None,
        use_relay=False,
        auto_nat=False,
        nat_port_map=False,
        startup_timeout=PROBE_SECONDS,
    )
    try:
        for port in ports:
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    await probe._client.connect(peer, [Multiaddr(f"/ip4/{address}/tcp/{port}")])
                    return [port]  # it would find the way to others by itself now
            except Exception as error:  # refused, no answer, another peer there: it is not reached
                logger.debug(f"{peer} is not at {address}, port {port}: {error!r}")
    finally:
        await probe.shutdown()
    return []


Answer = tuple[str, tuple[int, ...], str]  # of `wire.DIAL_ANSWER`


@dataclass(frozen=True)
class Reachability:
    """Answers of the members. answered: how many dialled. times: how many came through at the best place.

    places: addresses and ports where somebody came through, the best one first. seen: the address from which most see
    this peer, "" when nobody said.
    """

    answered: int = 0
    times: int = 0
    places: tuple[tuple[str, int], ...] = ()
    seen: str = ""

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Reachability:
        """From what members answered; who is on this machine is left out: it speaks for none."""
        reached: Counter[tuple[str, int]] = Counter()
        seen: Counter[str] = Counter()
        for address, ports, _ in answers:
            if tcp_addresses([f"/ip4/{address}/tcp/1"]) and not address.startswith("127."):
                seen[address] += 1
                reached.update((address, port) for port in set(ports))
        places = tuple(place for place, _ in reached.most_common())
        most_see = max(seen, key=lambda address: seen[address], default="")
        return cls(seen.total(), max(reached.values(), default=0), places, most_see)

    @property
    def place(self) -> tuple[str, int] | None:
        """The best one."""
        return self.places[0] if self.places else None

    @property
    def reachable(self) -> bool | None:
        """True when more than half of those who dialled came through at one address; None when nobody dialled."""
        return None if not self.answered else 2 * self.times > self.answered


async def _ask(_: DHT, node: DHTNode, peers: Sequence[str], namespace: str, ports: Sequence[int]) -> list[Answer]:
    """In the DHT's process: the answers of those who answer."""
    request = wire.DIAL_REQUEST.message(tuple(ports))

    async def ask(peer: str) -> Answer:
        stub = DialBack.get_stub(node.protocol.p2p, PeerID.from_base58(peer), namespace=namespace)
        return wire.DIAL_ANSWER.read(await stub.rpc_dial_back(request, timeout=ANSWER_SECONDS))

    answers = await asyncio.gather(*(ask(peer) for peer in peers), return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def dialled_back(
    run: RunConfig, dht: DHT, ports: Iterable[int], records: Iterable[PeerRecord] | None = None
) -> Reachability:
    """Ask members of the run to dial this peer at these ports of the address from which they see it.

    records: of those of whom some are drawn by chance; without, all are looked up, and aux peers asked first.
    """
    own, ports = str(dht.peer_id), list(dict.fromkeys(ports))[:MOST_PORTS]
    found = read_records(dht, run) if records is None else records
    able = [r for r in found if not (r.left or r.client_mode or r.peer_id == own)]
    random.shuffle(able)  # nobody's turn comes more often than others'
    if records is None:
        able.sort(key=lambda record: record.role != "aux")
    asked = [record.peer_id for record in able[:MOST_ASKED]]
    if not asked or not ports:
        return Reachability()
    ask = partial(_ask, peers=asked, namespace=run.identity, ports=ports)
    try:
        return Reachability.of(dht.run_coroutine(ask, return_future=True).result(timeout=ANSWER_SECONDS + 5.0))
    except concurrent.futures.TimeoutError:
        return Reachability()


@dataclass(frozen=True)
class Astray:
    """Addresses at which others look for a peer in vain: words, and advice to a person, "" where a start anew helps."""

    words: str
    advice: str = ""


def astray(run: RunConfig, dht: DHT, announce: Sequence[str], records: Iterable[PeerRecord]) -> Astray | None:
    """Have members dial this peer again, as at its start: a router gets another address, or forwards no more.

    announce: what a person has others told. None where some find it there, or fewer than two say. Raises WorkerBroken
    where the daemon does not answer.
    """
    own = tcp_addresses([*announce, *addresses_of(dht)])
    found = dialled_back(run, dht, (port for _, port in own), records)
    if found.answered < LEAST_ANSWERS or set(found.places) & set(own):
        return None
    place = "/ip4/{}/tcp/{}".format(*(found.place or (found.seen, own[0][1])))
    told = ", ".join(f"/ip4/{ip}/tcp/{port}" for ip, port in own[:MOST_PORTS])
    words = f"{found.answered} members cannot dial this peer, which they see at {place}, and others are told {told}"
    if found.place:
        words = f"{found.times} members can dial this peer at {place}, and others are told {told}"
    fixed = announce and found.seen not in dict(tcp_addresses(announce))
    return Astray(words, f"start it again with --announce {place}, or without --announce" if fixed else "")


@dataclass(frozen=True)
class ListenOptions:
    """The address at which a peer accepts connections, and what it tells others of it."""

    host: str = "0.0.0.0"
    port: int = 0  # any free one
    announce: Sequence[str] = ()  # multiaddrs that others are told, beside those that it finds out
    client_mode: bool = False  # it calls the others, and nobody calls it


def start_reachable_dht(
    run: RunConfig,
    identity: Identity,
    emit: Emit,
    *,
    initial_peers: Sequence[str],
    listen: ListenOptions,
    wait: Callable[[float], object] = time.sleep,
    node: Callable[..., DHT] = start_dht,
) -> tuple[DHT, bool]:
    """A DHT node as `start_dht` makes it, that others can reach; else one in client mode. Returns it, and whether.

    Says which and why, and what a person can do about it. Call it before there are other threads.
    """
    start = partial(node, run, identity, initial_peers=initial_peers, host=listen.host)
    if listen.client_mode:
        emit(Choice("reachable", "no", "--client-mode: this peer calls the others, and nobody calls it"))
        return start(client_mode=True), True
    dht = start(port=listen.port, announce=listen.announce)
    try:
        return _reached_or_client(run, dht, start, emit, listen, wait)
    except BaseException:
        stop_dht(dht)
        raise


def _reached_or_client(
    run: RunConfig,
    dht: DHT,
    start: Callable[..., DHT],
    emit: Emit,
    listen: ListenOptions,
    wait: Callable[[float], object],
) -> tuple[DHT, bool]:
    announced = dict(tcp_addresses(listen.announce))

    def ask() -> tuple[list[tuple[str, int]], Reachability]:
        own = tcp_addresses([*listen.announce, *addresses_of(dht)])
        return own, dialled_back(run, dht, (port for _, port in own))

    if listen.host.startswith("127."):
        emit(Choice("reachable", "from this machine", f"it listens on {listen.host} alone"))
        return dht, False
    own, found = ask()
    if found.reachable is False:
        wait(MAPPING_SECONDS)  # the router may be opening a port
        own, again = ask()
        found = again if again.answered else found
    if found.reachable is None or (listen.announce and not found.reachable and found.seen not in announced):
        why = "nobody on another machine is there yet who could dial back"
        why = f"others see {found.seen}, not what --announce says" if found.seen else why
        emit(Choice("reachable", "not checked", why))
        return dht, False
    port = own[0][1]
    if found.reachable:
        assert found.place is not None
        place = "/ip4/{}/tcp/{}".format(*found.place)
        emit(Choice("reachable", "yes", f"{found.times} of {found.answered} members could dial {place}"))
        if found.place not in own and not listen.announce:
            stop_dht(dht)  # behind a router that forwards the port: only the others could tell
            dht = start(port=port, announce=[place, *(f"/ip4/{ip}/tcp/{port}" for ip in announceable())])
        return dht, False
    inside = next((ip for ip, _ in own if not ip.startswith("127.")), own[0][0])
    words = f"none of {found.answered} members could dial" if not found.times else "most members could not dial"
    emit(Choice("reachable", "no", f"{words} /ip4/{found.seen}/tcp/{port}: goes on in client mode, calling them"))
    for step in steps_to_be_reached(port, inside, found.seen):
        emit(Log(f"to be reached by others: {step}", "warning"))
    stop_dht(dht)
    return start(client_mode=True), True
