"""An in-memory network in the places of libp2p and the DHT: delays, losses, duplicates, cuts and crashes from one seed,
and lines of so many bytes a second (lines.py) where they are limited.

Messages of one stream arrive in their order, as over TCP; those of different streams and calls overtake each other.
What is lost breaks its stream, or leaves the other side in silence, by chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
import struct
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils.timed_storage import DHTExpiration, ValueWithExpiration
from simulation.lines import WINDOW, Lines
from simulation.virtual import PROCESS, Answer, Process, wait_on

from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.network.bandwidth import BandwidthLimiter
from tt_cli.swarm.network.connectivity import PING_SECONDS
from tt_cli.swarm.records.peer_record import PeerRecord

SILENCE = 3600.0
HAPPENED = struct.Struct("<dHHd?")  # of a message: when, from, to, seconds, whether it arrives


def address_of(number: int) -> str:
    """Where a machine is, as a multiaddr."""
    return f"/ip4/192.0.2.{number + 1}/tcp/1"


async def _at_once(*_: Any) -> None: ...


class Broken(ConnectionError):
    """A stream or call that ended in the middle."""


@dataclass(frozen=True)
class Cut:
    """Between `group` and the others nothing passes from `start` to `stop`; one_way: only out of the group nothing."""

    group: frozenset[int]
    start: float
    stop: float
    one_way: bool = False

    def parts(self, a: int, b: int, now: float) -> bool:
        if not self.start <= now < self.stop:
            return False
        return (a in self.group) != (b in self.group) and (a in self.group or not self.one_way)


@dataclass(frozen=True)
class Line:
    """The usual line. delay: mean seconds of a message; steady: each takes so long.

    loss, twice: chances of one, from `since` to `until`.
    """

    delay: float = 0.02
    steady: bool = False
    loss: float = 0.0
    twice: float = 0.0
    since: float = 0.0
    until: float = 0.0


USUAL = Line()


class Network:
    """Carries messages between machines (their numbers). slow: factors of the delay by (from, to).

    lines: what the machines' lines carry; None: whatever is sent.
    """

    def __init__(
        self,
        entropy: random.Random,
        line: Line,
        cuts: tuple[Cut, ...],
        slow: dict[tuple[int, int], float],
        lines: Lines | None = None,
    ):
        self.entropy, self.line, self.cuts, self.slow, self.lines = entropy, line, cuts, slow, lines
        self.nodes: dict[PeerID, Node] = {}
        self.files: dict[Path, bytes] = {}  # on all machines' disks
        self.records: dict[str, dict[Any, list[tuple[float, int, Any, DHTExpiration]]]] = defaultdict(dict)
        self.log: list[tuple[float, int, int, str, str]] | None = None
        self.digest = hashlib.sha256()
        self.messages = 0
        self.defect: Exception | None = None
        self.moments: dict[tuple[str, int], tuple[frozenset[int], float]] = {}  # that message → whom it cuts off
        self.deaths: dict[tuple[str, int], Callable[[int], None]] = {}  # that message → what kills its sender
        self._sent = Counter[str]()
        self._loop: Any = asyncio.get_running_loop()

    @property
    def now(self) -> float:
        return float(self._loop.now)

    def fate(self, a: int, b: int, what: str) -> tuple[float, bool]:
        """Seconds until a message arrives, and whether it does."""
        now, entropy = self.now, self.entropy
        delay = (1.0 if self.line.steady else entropy.expovariate(1.0)) * self.usual(a, b)
        arrives = not self.line.since <= now < self.line.until or entropy.random() >= self.line.loss
        for cut in self.cuts:
            if cut.parts(a, b, now + delay):
                held = entropy.random() < 0.5  # TCP sends it again when the cut is over
                delay, arrives = max(delay, cut.stop - now + delay), arrives and held
        self.messages += 1
        self._sent[what] = sent = self._sent[what] + 1
        if moment := self.moments.get((what, sent)):
            self.cuts += (Cut(moment[0], now, min(now + moment[1], self.line.until)),)
        if kill := self.deaths.get((what, sent)):
            self._loop.call_soon(kill, a)
        self.digest.update(HAPPENED.pack(now, a, b, delay, arrives) + what.encode())
        if self.log is not None:
            self.log.append((now, a, b, what, f"after {delay:.3f} s" if arrives else "lost"))
        return delay, arrives

    def usual(self, a: int, b: int) -> float:
        """Mean seconds of a message."""
        faulty = self.line.since <= self.now < self.line.until
        return self.line.delay * (self.slow.get((a, b), 1.0) if faulty else 1.0)

    def broken_after(self) -> float:
        """Seconds until a sender learns of what was lost; or it never does."""
        return self.entropy.choice([self.line.delay * 4, SILENCE])

    def reaches(self, number: int) -> bool:
        """Whether anybody answers it."""
        others = [node for node in self.nodes.values() if not node.process.dead and node.number != number]
        answering = [other.number for other in others if other.dht is not None and not other.dht.hangs()]
        return any(self.passes(number, other) for other in answering)

    def passes(self, a: int, b: int) -> bool:
        """Whether they can talk at all, both ways."""
        return not any(cut.parts(x, y, self.now) for cut in self.cuts for x, y in ((a, b), (b, a)))


class Channel:
    """One direction of a stream. limiter: paces what its source sends, where lines are limited."""

    def __init__(self, network: Network, a: int, b: int, what: str, limiter: BandwidthLimiter | None = None):
        self._network, self._ends, self._what, self._limiter = network, (a, b), what, limiter
        self._queue: deque[Any] = deque()
        self._news, self._read = asyncio.Event(), asyncio.Event()
        self._last, self._over = 0.0, False
        self._unread = 0  # bytes that were sent, where lines are limited

    async def send(self, message: Any) -> None:
        """Send a message, as soon as the stream has room where lines are limited."""
        if self._network.lines is not None:
            with self._limiter.writing() if self._limiter is not None else contextlib.nullcontext():
                if self._limiter is not None:
                    await self._limiter.send(self._network.lines.size(self._what, message))
                await self._room(WINDOW)
        self.put(message)
        if self._network.lines is not None:
            await self._room(2 * WINDOW)  # a message longer than the room is written as it is read

    async def _room(self, most: int) -> None:
        """Wait until less than so many bytes were sent and not read."""
        while self._unread >= most:
            self._read.clear()
            await self._read.wait()

    def put(self, item: Any) -> None:
        """Send a message at once; None ends the stream."""
        if self._over:
            return
        delay, arrives = self._network.fate(*self._ends, self._what)
        if not arrives:
            self._over, item, delay = True, Broken("lost"), delay + self._network.broken_after()
        if (lines := self._network.lines) is None:
            self._on_its_way(item, delay)
        else:
            size = lines.size(self._what, item)
            self._unread += size
            lines.carry(self._ends, size, functools.partial(self._on_its_way, item, delay))

    def _on_its_way(self, item: Any, delay: float) -> None:
        self._last = max(self._last + 1e-6, self._network.now + delay)  # timers of one moment are in no order
        asyncio.get_running_loop().call_at(self._last, self._arrive, item)

    def _arrive(self, item: Any) -> None:
        self._queue.append(item)
        self._news.set()

    def __aiter__(self) -> Channel:
        return self

    async def __anext__(self) -> Any:
        while not self._queue:
            self._news.clear()
            await self._news.wait()
        item = self._queue.popleft()
        if self._network.lines is not None:
            self._unread -= self._network.lines.size(self._what, item)
            self._read.set()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item


Lie = Callable[["Node", PeerID, str, Any], Any]
"""(liar, to whom, method, message) → what it says instead; None: nothing."""


class Node:
    """One machine's libp2p node, as hivemind's servicers and stubs use it. liar: makes of a message what it sends.

    limiter: paces its streams. membership: its pass, and of whom it takes one; without, of everybody.
    """

    def __init__(
        self,
        network: Network,
        number: int,
        peer_id: PeerID,
        process: Process,
        limiter: BandwidthLimiter | None = None,
    ):
        self.network, self.number, self.peer_id, self.process = network, number, peer_id, process
        self.limiter = limiter
        self.liar: Lie | None = None
        self.told: deque[tuple[str, bool, bytes]] = deque(maxlen=512)  # what others said they have: answers, and not
        self.averager: Any = None
        self.membership: Admission | None = None
        self.dht: Any = None  # `Dht`, or a real one: see dht.py
        self._handlers: dict[str, tuple[Any, bool, Process]] = {}  # with the process that answers
        self._client = SimpleNamespace(connect=_at_once, disconnect=_at_once)
        network.nodes[peer_id] = self

    async def add_protobuf_handler(
        self, name: str, handler: Any, kind: Any, *, stream_input: bool, stream_output: bool, balanced: bool = False
    ) -> None:
        self._handlers[name.rpartition(".")[2]] = handler, stream_input, PROCESS.get() or self.process

    async def list_peers(self) -> list[Any]:
        """Those with whom it can talk, with an address of each."""
        others = (node for node in self.network.nodes.values() if node is not self and not node.process.dead)
        there = [node for node in others if self.network.passes(self.number, node.number)]
        return [SimpleNamespace(peer_id=node.peer_id, addrs=[address_of(node.number)]) for node in there]

    def lie(self, peer: PeerID, method: str, message: Any) -> Any:
        """What this node says in place of a message; None: nothing."""
        try:
            return self.liar(self, peer, method, message) if self.liar is not None else message
        except Broken:
            raise
        except Exception as error:
            self.network.defect = error  # of the liar: whom it talks to must not take it for a fault
            raise

    def bans(self, peer: PeerID) -> bool:
        """As a `PassGuard` does before it calls: it knows that this one is banned."""
        return self.membership is not None and self.membership.is_banned(str(peer))

    def _handler_at(self, peer: PeerID, method: str) -> tuple[Node, Any, bool, Process]:
        """As a door of a closed run: with the pass of who calls. Handler, whether it takes a stream, whose it is."""
        there = self.network.nodes[peer]
        if there.process.dead or method not in there._handlers:
            raise Broken("nobody answers")
        if there.membership is not None and self.membership is not None:
            try:
                there.membership.admit(self.membership.mine(), str(self.peer_id))
            except NotAdmitted as error:
                raise Broken(str(error)) from None
        return there, *there._handlers[method]

    async def call_protobuf_handler(self, peer: PeerID, name: str, input: Any, output_type: Any) -> Any:
        """A call with one answer."""
        method = name.rpartition(".")[2]
        if hasattr(input, "__aiter__"):
            async for answer in await self.iterate_protobuf_handler(peer, name, input, output_type):
                return answer
            raise Broken("no answer")
        if self.bans(peer):
            raise Broken("it is banned")
        there = self.network.nodes[peer]
        await self._carry(self, there, method, input)
        there, handler, _, process = self._handler_at(peer, method)
        message, again = self.lie(peer, method, input), self.network.entropy.random() < self.network.line.twice
        if message is None:
            await asyncio.sleep(SILENCE)
        if method == "rpc_settle":
            there.told.append((str(self.peer_id), False, message.serialized_info))
        calls = [process.run(handler(message, P2PContext(name, name, self.peer_id))) for _ in range(1 + again)]
        try:
            await asyncio.wait(calls[:1])
            answer = None if calls[0].cancelled() else calls[0].result()
        except Exception as error:
            await self._carry(there, self, method + "!")
            raise Broken(str(error)) from error
        if answer is None or (answer := there.lie(self.peer_id, method + "!", answer)) is None:
            await asyncio.sleep(self.network.broken_after())
            raise Broken("the other side went away")
        await self._carry(there, self, method + "!", answer)
        if method == "rpc_settle":
            self.told.append((str(peer), True, answer.serialized_info))
        return answer

    async def _carry(self, source: Node, target: Node, what: str, message: Any = None) -> None:
        ends = source.number, target.number
        delay, arrives = self.network.fate(*ends, what)
        if (lines := self.network.lines) is not None:
            carried = asyncio.Event()
            lines.carry(ends, lines.size(what, message), carried.set)
            await carried.wait()
        await asyncio.sleep(delay if arrives else delay + self.network.broken_after())
        if not arrives or target.process.dead:
            raise Broken("lost")

    async def iterate_protobuf_handler(self, peer: PeerID, name: str, input: Any, output_type: Any) -> Any:
        """A call whose answers are a stream."""
        method, network = name.rpartition(".")[2], self.network
        there = network.nodes[peer]
        await self._carry(self, there, method)
        there, handler, many, process = self._handler_at(peer, method)
        out = Channel(network, self.number, there.number, method, self.limiter)
        back = Channel(network, there.number, self.number, method + "!", there.limiter)

        async def feed() -> None:
            async for message in input if many else _once(input):
                if (message := self.lie(peer, method, message)) is not None:
                    await out.send(message)
                await asyncio.sleep(0)
            out.put(None)

        async def serve() -> None:
            try:
                request = out if many else await anext(out)
                answers = handler(request, P2PContext(name, name, self.peer_id))
                if hasattr(answers, "__aiter__"):
                    async for answer in answers:
                        if (answer := there.lie(self.peer_id, method + "!", answer)) is not None:
                            await back.send(answer)
                else:
                    await back.send(await answers)
                back.put(None)
            except asyncio.CancelledError:
                back.put(Broken("the other side went away"))
                raise
            except Exception as error:
                back.put(Broken(str(error)))

        tasks = [asyncio.create_task(feed()), process.run(serve())]

        async def answers() -> AsyncIterator[Any]:
            try:
                async for message in back:
                    yield message
            finally:
                for task in tasks:
                    task.cancel()

        return answers()

    async def call_binary_stream_handler(self, peer: PeerID, name: str) -> tuple[None, asyncio.StreamReader, Any]:
        """As of libp2p; a protobuf that is written on it is one message of the network."""
        asked, told = asyncio.StreamReader(), asyncio.StreamReader()

        async def requests() -> AsyncIterator[Any]:
            with contextlib.suppress(asyncio.IncompleteReadError):
                while True:
                    message, _ = await P2P.receive_protobuf(runtime_pb2.ExpertInfo, asked)
                    yield message

        async def receive(answers: AsyncIterator[Any]) -> None:
            back: Any = Sending(told)
            with contextlib.suppress(ConnectionError), contextlib.closing(back):
                async for answer in answers:
                    await P2P.send_protobuf(answer, back)

        answers = await self.iterate_protobuf_handler(peer, name, requests(), runtime_pb2.ExpertInfo)
        return None, told, Sending(asked, asyncio.create_task(receive(answers)))


class Sending:
    """The writer of a stream of bytes: what is written comes to `reader`. receiving: what comes back."""

    def __init__(self, reader: asyncio.StreamReader, receiving: asyncio.Task[None] | None = None):
        self._reader, self._receiving = reader, receiving
        self.write = reader.feed_data

    async def drain(self) -> None: ...

    def close(self) -> None:
        self._reader.feed_eof()
        if self._receiving is not None:
            self._receiving.cancel()


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message


class Dht:
    """One machine's DHT node: what others store is seen some time later, and not through a cut. process: its own."""

    def __init__(self, node: Node, membership: Any, client_mode: bool, process: Process | None = None):
        self.node, self.membership, self.client_mode, self.peer_id = node, membership, client_mode, node.peer_id
        self._process, node.dht = process or node.process, self
        self._shown = deque[tuple[float, int]](maxlen=64)  # when it stores its own records, their steps

    def is_alive(self) -> bool:
        return True

    def store(self, key: str, subkey: Any, value: Any, expiration_time: float, return_future: bool) -> Answer:
        network, at = self.node.network, self.node.network.now + self.hangs()
        entries = network.records[key].setdefault(subkey, [])
        with contextlib.suppress(ValueError):  # what is none stays what it is, for its readers to refuse
            value = PeerRecord.model_validate(value)  # once, and not by each reader at each of its looks
            if value.peer_id == str(self.peer_id):
                self._shown.append((at, value.epoch))
        entries.append((at, self.node.number, value, expiration_time))
        del entries[:-8]
        return self._later(lambda: True)

    @property
    def shown(self) -> int | None:
        """The step that its newest record says, as far as it is stored."""
        return next((epoch for at, epoch in reversed(self._shown) if at <= self.node.network.now), None)

    def hangs(self) -> float:
        """For so many seconds from now it does nothing."""
        return self._process.awake(self.node.network.now) - self.node.network.now

    def get(self, key: str, latest: bool, return_future: bool) -> Answer:
        return self._later(lambda: self._found(key))

    def _found(self, key: str) -> ValueWithExpiration[Any] | None:
        newest = {subkey: self._newest(entries) for subkey, entries in self.node.network.records[key].items()}
        found = {subkey: seen for subkey, seen in newest.items() if seen is not None}
        return ValueWithExpiration(found, 0.0) if found else None

    def _newest(self, entries: list[tuple[float, int, Any, float]]) -> ValueWithExpiration[Any] | None:
        network, me = self.node.network, self.node.number
        for at, writer, value, expires in reversed(entries):
            if expires < network.now:
                return None
            seen = at + 5 * network.usual(writer, me)
            while cut := next((cut for cut in network.cuts if cut.parts(writer, me, seen)), None):
                seen = cut.stop
            if writer == me or seen <= network.now:
                return ValueWithExpiration(value, expires)
        return None

    def run_coroutine(self, ping: Any, return_future: bool) -> Answer:
        """Only pings are run in the DHT's process: of `ConnectivityMonitor`, and those that keep in touch."""
        network, me = self.node.network, self.node.number
        known = ping.keywords.get("known", {})
        peers = {peer: node for node in network.nodes.values() if (peer := str(node.peer_id)) in known}

        def answers(node: Node) -> bool:
            """One in client mode is not asked, nor one that either side knows to be banned."""
            strange = self.node.bans(node.peer_id) or node.bans(self.peer_id)
            there = not node.process.dead and network.passes(me, node.number) and not strange
            return there and (node.dht is None or not (node.dht.client_mode or node.dht.hangs() >= PING_SECONDS))

        def answered() -> Any:
            return {peer: 0.0 for peer, node in peers.items() if answers(node)}, {}

        longest = max((node.dht.hangs() for node in peers.values() if node.dht is not None), default=0.0)
        return self._later(answered, min(longest, PING_SECONDS))

    def _later(self, found: Callable[[], Any], seconds: float = 0.0) -> Answer:
        """What it finds as soon as it does anything, and so many seconds later than usually."""
        answer, network, loop = Answer(), self.node.network, asyncio.get_running_loop()
        seconds += network.entropy.uniform(1.0, 3.0) * network.line.delay

        def find() -> None:
            loop.call_later(seconds, answer.set_result, found())

        if hangs := self.hangs():
            loop.call_later(hangs, find)
        else:
            find()
        return answer


__all__ = ["Channel", "Cut", "Dht", "Line", "Network", "Node", "wait_on"]
