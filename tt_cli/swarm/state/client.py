"""Takes a state over from other peers: several donors at once, every chunk verified as it arrives.

A manifest is believed only when members signed its root; then the chunks that the taker does not hold itself are
shared out among donors of this one state, a few ahead of what each has sent, so that a faster one gives more. In the
end chunks that one donor still owes are asked of another too: who is slow, or dead, does not hold up the last ones.
What came is kept whatever happens to its donor.

Donors name others who take the same state. Those are asked for what they have of it, in an order of one's own, and have
what is here. Of each is asked first what the fewest are known to have, or were given (rarest first, as in BitTorrent):
so those who hold all need give each chunk about once, however many come.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from hivemind.p2p import P2P, PeerID
from hivemind.proto import runtime_pb2

from tt_cli.errors import TTError
from tt_cli.swarm import wire
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.network.failures import printable
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import Tree, TreeReader
from tt_cli.swarm.state.chunk_picker import ChunkPicker, DonorRefused, Holdings
from tt_cli.swarm.state.server import StateCopy, StateServer
from tt_cli.swarm.state.trusted_digests import TrustedDigests

ATTEMPTS, PAUSE_SECONDS, LONGEST_PAUSE = 3, 0.5, 5.0
RESUME_SECONDS = 60.0  # what has come is not given up before nothing more came for so long
HEAD_SECONDS = 30.0  # more than between chunks: the donor may be making a step, and then copies its state
STREAMS = 4  # donors at once
PASSING, MOST_KNOWN = 8, 64  # of those who take the state too: at once, and names that are kept
NEWS_SECONDS = 1.0  # before somebody is asked again what it has
SHARE = 16  # chunks: for less another donor is not worth the copy of the state that it would make
HEDGE_SECONDS = 1.0  # without news: one more donor is asked
RETRY_SECONDS = 10.0  # before a donor that failed is asked again; without news: one more than at once
SETTLE_SECONDS = 5.0  # to learn whether others hold what most hold, before another state is aimed at
AHEAD_SECONDS, LEAST_AHEAD, MOST_AHEAD = 0.5, 2, 16  # asked of a donor: chunks of the largest size
LOOK_AGAIN_SECONDS = 0.05
NAMES = 8
# next_chunk_timeouts to wait for a chunk of a state: it has four times a part's bytes, and other donors go on meanwhile
PATIENCE = 3


Phase = Literal["asked", "waiting", "giving"]
"""Of a donor: its manifest has not come; it offers another state than the one that most hold; it sends chunks."""


class DonorRefuses(ValueError):
    """A donor hands over nothing, or no more. others: who takes the state too."""

    def __init__(self, words: str, others: tuple[str, ...]):
        super().__init__(f"it refuses: {words}")
        self.others = others


class DonorStream:
    """Requests to one donor, and its answers.

    hivemind's own stubs wait for the last request to be sent before they say that the other side hung up.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def ask(self, request: bytes) -> None:
        """Send one request."""
        with suppress(ConnectionError):  # what it sent before can be read still; then `answer` says that it hung up
            await P2P.send_protobuf(runtime_pb2.ExpertInfo(serialized_info=request), self._writer)

    async def answer(self) -> wire.Answer | None:
        """Its next answer; None when it hung up, or its connection broke. Raises DonorRefuses for a refusal."""
        try:
            message, error = await P2P.receive_protobuf(runtime_pb2.ExpertInfo, self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if message is None:
            raise ValueError(f"it failed: {error.message}")
        try:
            answer = wire.STATE_ANSWER.read(message)
        except wire.MalformedMessage as malformed:
            raise DonorRefused(f"it sent {malformed}") from None
        if answer[0] == "refused":
            raise DonorRefuses(answer[1], answer[2])
        return answer


@asynccontextmanager
async def stream_to(p2p: P2P, namespace: str, donor: str) -> AsyncIterator[DonorStream]:
    """A stream to a donor, by its peer id, through this libp2p node. namespace: the run's identity."""
    handler = StateServer._get_handle_name(namespace, StateServer.rpc_state_chunks.__name__)
    async with asyncio.timeout(HEAD_SECONDS):
        _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(donor), handler)
    with closing(writer):
        yield DonorStream(reader, writer)


def request_of(digest: str, chunks: Sequence[int], hands_on: bool = False) -> bytes:
    """Ask for the state with this digest, and these of its chunks (in rising order), as runs [first, last + 1, …].

    hands_on: who asks gives others what it takes.
    """
    runs: list[int] = []
    for index in chunks:
        if runs and runs[-1] == index:
            runs[-1] = index + 1
        else:
            runs += [index, index + 1]
    return wire.STATE_REQUEST.pack((digest, tuple(runs), hands_on))


class NoState(TTError):
    """No peer handed over a state that can be used: one line that says of each donor why.

    asked: there was one. refused: who sent what must be refused.
    """

    def __init__(self, message: str, *, asked: bool = True, refused: Iterable[str] = ()):
        super().__init__(message)
        self.asked, self.refused = asked, frozenset(refused)


class Chunks(dict[int, memoryview]):
    """Verified chunks by their numbers, in a buffer for the whole state. A context manager that frees the memory."""

    def __init__(self, tree: Tree, indexes: Iterable[int], buffer: StateBuffer):
        self.tree, self.buffer = tree, buffer
        self._view = view = buffer.view(tree.nbytes)
        places = ((index, *tree.place(index)) for index in indexes)
        super().__init__((index, view[offset : offset + size]) for index, offset, size in places)

    def whole(self) -> memoryview:
        """The buffer as memory: every chunk at its place, zeros where one was not taken."""
        return self._view

    def __enter__(self) -> Chunks:
        return self

    def __exit__(self, *error: object) -> None:
        self._view = memoryview(b"")  # unmapped when the last slice of it is gone
        self.clear()
        self.buffer.close()


@dataclass(frozen=True)
class ReceivedState:
    """A state that members signed, as far as the taker did not hold it.

    donors: who gave chunks, or the manifest; who gave most first. received: bytes of chunks that came, useless ones
    too. refused: peer id → why what it sent was refused. lost: donors that gave some of it → why they gave no more.
    """

    tree: Any
    chunks: Chunks
    donors: tuple[str, ...]
    received: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def names(self, at_most: int = NAMES) -> list[str]:
        """Tensors and numbers of the chunks; none when there are more than `at_most`."""
        return [self.tree.name_of(index) for index in self.chunks] if len(self.chunks) <= at_most else []


@dataclass(frozen=True)
class WantedState:
    """The state that is to be taken, and the manner."""

    read_tree: TreeReader
    timeout: float  # seconds to wait for each chunk
    own: Tree | None = None  # of what the taker holds itself: chunks that it holds alike are not asked for
    select: Callable[[Any], Iterable[int]] | None = None  # the chunks of a tree that are wanted; None: all
    on_bytes: Callable[[int, int], None] = lambda received, total: None  # bytes that came, and will have in the end
    at_once: int = STREAMS  # donors at most, while they give
    hold: Callable[[], bool] = lambda: False  # while it is True, nothing more is asked for
    lend: Callable[[StateCopy], None] | None = None  # told of what others may have of it; None: this peer only takes


class StateClient:
    """Takes one state. Make one for each. buffer: where the chunks go, each at its place in the tree.

    donors: who gave it, with their bytes. refused: who sent what must be refused, and why. problems: why others gave
    nothing, or no more.
    """

    def __init__(self, p2p: P2P, namespace: str, signatures: TrustedDigests, buffer: StateBuffer, wanted: WantedState):
        self._connect, self._signatures = partial(stream_to, p2p, namespace), signatures
        self._own_id = str(p2p.peer_id)
        self._buffer, self._wanted = buffer, wanted
        self._target: ChunkPicker | None = None
        self._tried: dict[str, float] = {}  # donor → when it ended, infinite until then
        self._phases: dict[str, Phase] = {}  # of the donors under way
        self._others: dict[str, float] = {}  # who takes this state too → its place in this peer's own order
        self._settled = True  # while other donors may hold what was begun, it is not given up for another state
        self._news = loop_time()
        self._unsigned, self.donors = Counter[str](), Counter[str]()
        self.refused: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        self.received = 0

    async def take(self) -> ReceivedState:
        """A state that members signed, with all chunks that are needed. Raises NoState when no donor is left."""
        looking = asyncio.create_task(self._signatures.keep_looking())
        attempt = 0
        try:
            while attempt < ATTEMPTS or self._may_resume():
                if attempt:
                    await asyncio.sleep(min(LONGEST_PAUSE, PAUSE_SECONDS * 2 ** (attempt - 1)))
                await self._signatures.look()
                before = self.received
                self._settled = attempt == 0
                await self._ask_donors()
                if self._complete():
                    return self._received_state()
                if not self.problems and not self.refused:
                    break
                attempt = 1 if self.received > before else attempt + 1
        finally:
            looking.cancel()
        problems = "; ".join(f"{donor}: {problem}" for donor, problem in (self.problems | self.refused).items())
        if not problems:
            raise NoState(f"none of {len(self._signatures.view.records)} peers can hand over a state", asked=False)
        raise NoState(f"no peer handed over a state that can be used ({problems})", refused=self.refused)

    def _received_state(self) -> ReceivedState:
        assert self._target is not None
        chunks = Chunks(self._target.tree, self._target.needed, self._buffer)
        lost = {donor: problem for donor, problem in self.problems.items() if self.donors[donor]}
        donors = tuple(donor for donor, _ in self.donors.most_common())
        return ReceivedState(chunks.tree, chunks, donors, self.received, self.refused, lost)

    def count(self, phase: Phase) -> int:
        """Donors in this phase now."""
        return list(self._phases.values()).count(phase)

    def _complete(self) -> bool:
        return self._target is not None and not self._target.missing

    def _may_resume(self) -> bool:
        begun = self._target is not None and self._target.begun and bool(self.problems)
        return begun and loop_time() < self._news + RESUME_SECONDS

    async def _ask_donors(self) -> None:
        """Take what the donors give, a few of them at a time, until nothing is missing or no donor is left."""
        running: set[asyncio.Task[None]] = set()
        self._tried, self._phases = {}, {}
        started = loop_time()
        try:
            while not self._complete():
                if donor := self._next_donor(loop_time() - max(self._news, started)):
                    self._tried[donor], self._phases[donor] = math.inf, "asked"
                    running.add(asyncio.create_task(self._try(donor), name=donor))
                elif running and not self._waits_in_vain():
                    done, running = await asyncio.wait(
                        running, timeout=LOOK_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    self._tried |= {task.get_name(): loop_time() for task in done}
                else:
                    break
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _next_donor(self, quiet: float) -> str:
        """A donor to ask now, or else one who takes the state too; "": nobody. quiet: see `_donors_wanted`."""
        donors = self._signatures.donors(self._target.tree if self._target else None)
        others = sorted(self._others.keys() - donors, key=self._others.__getitem__)
        passing = len(self._phases.keys() & others)
        if len(self._phases) - passing < self._donors_wanted(quiet) and (untried := self._untried(donors)):
            return untried[0]
        return next(iter(self._untried(others)), "") if passing < PASSING else ""

    def _waits_in_vain(self) -> bool:
        """True where nothing came for long, though all answer: others who take the state may wait for this one."""
        return {*self._phases.values()} == {"giving"} and loop_time() > self._news + 1.5 * self._wanted.timeout

    def _untried(self, donors: Iterable[str]) -> list[str]:
        """Those to ask now: nobody twice, but for those whose connection broke a while ago, while others go on."""
        again = loop_time() - RETRY_SECONDS if self.count("giving") else -math.inf
        return [donor for donor in donors if self._tried.get(donor, -math.inf) <= again and donor not in self.refused]

    def _meet(self, others: Iterable[str]) -> None:
        """Note who takes the state too. In a crowd each asks in an order of its own."""
        alone = not self._others
        for other in others:
            if other not in (self._own_id, *self._others) and len(self._others) < MOST_KNOWN:
                self._others[other] = self._signatures.place_of(other)
        if alone and self._others and self._target is not None:
            self._target.shuffle(self._own_id)

    def _donors_wanted(self, quiet: float) -> int:
        """Count of donors to ask at once. quiet: seconds since something came."""
        share, most, target = 0, self._wanted.at_once, self._target
        if target is not None and self.count("giving"):
            share, most = target.bytes_missing // (SHARE * target.chunk), most + int(quiet / RETRY_SECONDS)
        return min(most, 1 + share + self.count("waiting") + int(quiet / HEDGE_SECONDS))

    async def _try(self, donor: str) -> None:
        """Take what one donor gives, and remember why it gave no more."""
        try:
            await self._take_from(donor)
        except DonorRefused as error:
            self.refused[donor] = printable(str(error))
        except Exception as error:  # a donor may fail in any way; the others go on
            if isinstance(error, DonorRefuses):
                self._meet(error.others)
            if self.donors[donor] or donor not in self._others:  # of whom a donor named it is no news
                self.problems[donor] = printable(str(error)) or type(error).__name__
        finally:
            self._phases.pop(donor, None)

    async def _take_from(self, donor: str) -> None:
        wanted = self._target.tree.digest if self._target is not None else self._signatures.view.digest
        foremost = donor in self._signatures.view.donors()  # who only takes a state may be offering an older one
        async with self._connect(donor) as stream:
            async with asyncio.timeout(HEAD_SECONDS):
                await stream.ask(request_of(wanted, [], self._wanted.lend is not None))
                head = await stream.answer()
            tree = await self._manifest_in(head)
            if not await self._signatures.look_for(tree):
                self._unsigned[donor] += foremost and not self._signatures.signed_by(donor, tree)
                if self._unsigned[donor] == ATTEMPTS:  # not one that stepped just before: its record follows
                    raise DonorRefused("it offers states that it does not sign itself")
                raise ValueError(f"no member signed the state of step {tree.step} that it offers")
            self._phases[donor] = "waiting"
            target = await self._agree_on(tree)
            self._phases[donor] = "giving"
            self.donors[donor] += 0
            self._news = loop_time()
            source = target.sources[donor] = Holdings(len(tree))
            source.requests.extend([deque()] if wanted == tree.digest else [])
            try:
                await self._read_chunks(donor, stream, target)
            finally:
                target.give_back(target.sources.pop(donor).owed)

    async def _manifest_in(self, head: wire.Answer | None) -> Tree:
        match head:
            case None:
                raise ValueError("it did not answer")
            case ("manifest", manifest):
                try:
                    tree: Tree = await asyncio.to_thread(self._wanted.read_tree, manifest)
                except ValueError as error:
                    raise DonorRefused(f"it sent {error}") from error
                return tree
        raise DonorRefused("it sent a chunk before the manifest")

    async def _agree_on(self, tree: Tree) -> ChunkPicker:
        """All donors give one state: the one that is being taken, else the one that most hold.

        A donor that offers another one waits for what those say that were asked too; theirs is taken if it is that.
        """
        deadline = loop_time() + SETTLE_SECONDS
        while (target := self._target) is None or target.tree.digest != tree.digest:
            if target is not None and (self.count("giving") or (target.begun and self._settled)):
                raise ValueError("it holds another state by now")
            most = target is None and tree.digest == self._signatures.view.digest
            donors = self._signatures.donors(target.tree if target else None)
            if most or loop_time() >= deadline or not (self.count("asked") or self._untried(donors)):
                return self._aim_at(tree)
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        return target

    def _aim_at(self, tree: Tree) -> ChunkPicker:
        """Take this state from now on; chunks that have come already and are alike in it are kept."""
        before = self._target
        needed = tree.differing(self._wanted.own) if self._wanted.own is not None else list(range(len(tree)))
        if self._wanted.select is not None:
            chosen = set(self._wanted.select(tree))
            needed = [index for index in needed if index in chosen]
        kept = set(before.needed) - before.missing - set(tree.differing(before.tree)) if before is not None else set()
        target = self._target = ChunkPicker(tree, needed, kept)
        if self._others:
            target.shuffle(self._own_id)
        if before is not None:
            before.here[:] = False  # its place is taken: nobody may have it from here
        if self._wanted.lend is not None:
            self._wanted.lend(StateCopy(tree, self._buffer, target.here))
        return target

    async def _read_chunks(self, donor: str, stream: DonorStream, target: ChunkPicker) -> None:
        """Ask for chunks, a little ahead of those that come, until nothing is missing."""
        seconds_per_byte, came, asked = AHEAD_SECONDS / LEAST_AHEAD / target.chunk, loop_time(), -math.inf
        source, most = target.sources[donor], MOST_AHEAD * target.chunk
        while target.missing:
            ahead = min(most, max(LEAST_AHEAD * target.chunk, AHEAD_SECONDS / seconds_per_byte))
            declined = loop_time() < source.again
            due = not source.requests and loop_time() >= asked + NEWS_SECONDS
            if self._wanted.hold():
                self._news = loop_time()  # nobody is slow
            elif (run := [] if declined else target.next_for(source, ahead)) or due:
                source.requests.append(deque(run))
                asked = loop_time()
                await stream.ask(request_of(target.tree.digest, run, self._wanted.lend is not None))
            if not source.requests:
                await asyncio.sleep(NEWS_SECONDS / 4)  # for what others owe
                came = came if declined else loop_time()
                continue
            async with asyncio.timeout_at(came + self._wanted.timeout):
                answer = await stream.answer()
            match answer:
                case None:
                    raise ValueError(f"it left off with {len(target.missing)} chunks to go")
                case ("held", held, given, others):
                    if unsent := source.hear(held, given):
                        source.again = loop_time() + NEWS_SECONDS
                        target.give_back(unsent)
                    self._meet(others)
                case ("chunk", index, data) if index in tuple(source.requests[0])[:1]:
                    before, came = came, loop_time()
                    await self._keep(donor, index, data, target)
                    seconds_per_byte = 0.8 * seconds_per_byte + 0.2 * (came - before) / max(1, len(data))
                case _:
                    raise DonorRefused("it sent something else than the chunks that were asked for")

    async def _keep(self, donor: str, index: int, data: bytes, target: ChunkPicker) -> None:
        """Verify a chunk, the first of those that this donor owes, and put it into the buffer."""
        if not await asyncio.to_thread(target.tree.holds, index, data):
            raise DonorRefused(f"its chunk {target.tree.name_of(index)} is not what members signed")
        self._buffer.write(target.tree.place(index)[0], data)  # no thread does: it could outlive the buffer
        target.sources[donor].requests[0].popleft()
        target.received(index)
        self.received += len(data)
        self.donors[donor] += len(data)
        self._news = loop_time()
        self._wanted.on_bytes(self.received, self.received + target.bytes_missing)
