"""Takes a state over from other peers: several donors at once, every chunk verified as it arrives.

A manifest is believed only when members signed its root; then the chunks that the taker does not hold itself are
shared out among donors of this one state, a few ahead of what each has sent, so that a faster one gives more. In the
end chunks that one donor still owes are asked of another too: who is slow, or dead, does not hold up the last ones.
What came is kept whatever happens to its donor.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.proto import runtime_pb2

from tt_cli.errors import TTError
from tt_cli.swarm import wire
from tt_cli.swarm.network.failures import printable
from tt_cli.swarm.shared_memory import StateBuffer
from tt_cli.swarm.shared_state import Tree, TreeReader
from tt_cli.swarm.state.server import StateServer
from tt_cli.swarm.state.trusted_digests import TrustedDigests

ATTEMPTS, PAUSE_SECONDS, LONGEST_PAUSE = 3, 0.5, 5.0
RESUME_SECONDS = 60.0  # what has come is not given up before nothing more came for so long
HEAD_SECONDS = 30.0  # more than between chunks: the donor may be making a step, and then copies its state
STREAMS = 4  # donors at once
SHARE_BYTES = 2**24  # for less than this another donor is not worth the copy of the state that it would make
HEDGE_SECONDS = 1.0  # without news: one more donor is asked
RETRY_SECONDS = 10.0
SETTLE_SECONDS = 5.0  # to learn whether others hold what most hold, before another state is aimed at
AHEAD_SECONDS, LEAST_AHEAD, MOST_AHEAD, MOST_ASKED = 0.5, 2**21, 2**24, 64  # asked of a donor: bytes, and chunks
LOOK_AGAIN_SECONDS = 0.05


class DonorRefused(Exception):
    """A donor sent what no honest one sends: it is not asked again."""


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

    async def answer(self) -> bytes | None:
        """Its next answer; None when it hung up, or its connection broke."""
        try:
            message, error = await P2P.receive_protobuf(runtime_pb2.ExpertInfo, self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if message is None:
            raise ValueError(f"it failed: {error.message}")
        data: bytes = message.serialized_info
        return data


Connect = Callable[[str], AbstractAsyncContextManager[DonorStream]]
"""Donor's peer id → a stream to it."""


def connect_over(p2p: P2P, namespace: str) -> Connect:
    """Connect to donors of a run through this libp2p node. namespace: the run's identity."""

    @asynccontextmanager
    async def connect(donor: str) -> AsyncIterator[DonorStream]:
        handler = StateServer._get_handle_name(namespace, StateServer.rpc_state_chunks.__name__)
        _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(donor), handler)
        with closing(writer):
            yield DonorStream(reader, writer)

    return connect


def request_of(digest: str, chunks: Sequence[int]) -> bytes:
    """Ask for the state with this digest, and these of its chunks (in rising order), as runs [first, last + 1, …]."""
    runs: list[int] = []
    for index in chunks:
        if runs and runs[-1] == index:
            runs[-1] = index + 1
        else:
            runs += [index, index + 1]
    return wire.STATE_REQUEST.pack((digest, tuple(runs)))


class NoState(TTError):
    """No peer handed over a state that can be used: one line that says of each donor why. asked: there was one."""

    def __init__(self, message: str, *, asked: bool = True):
        super().__init__(message)
        self.asked = asked


class Chunks(Mapping[int, memoryview]):
    """Verified chunks by their numbers, in a buffer for the whole state. A context manager that frees the memory."""

    def __init__(self, tree: Tree, indexes: Iterable[int], buffer: StateBuffer):
        self._tree, self._indexes = tree, dict.fromkeys(indexes)
        self._view = buffer.view(tree.nbytes)
        self.buffer = buffer

    def __getitem__(self, index: int) -> memoryview:
        if index not in self._indexes:
            raise KeyError(index)
        offset, size = self._tree.place(index)
        return self._view[offset : offset + size]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indexes)

    def __len__(self) -> int:
        return len(self._indexes)

    def whole(self) -> memoryview:
        """The buffer as memory: every chunk at its place, zeros where one was not taken."""
        return self._view

    def __enter__(self) -> Chunks:
        return self

    def __exit__(self, *error: object) -> None:
        self._view = memoryview(b"")  # unmapped when the last slice of it is gone
        self._indexes = {}
        self.buffer.close()


class _Target:
    """The state that is being taken: what has come of it, and who was asked for what.

    left: bytes that are missing. asked: donor → chunks it has yet to send, in their order.
    """

    def __init__(self, tree: Tree, needed: Sequence[int], have: Iterable[int]):
        self.tree, self.needed, self.have = tree, list(needed), set(have)
        missing = [index for index in needed if index not in self.have]
        self.left = sum(tree.place(index)[1] for index in missing)
        self.asked: dict[str, deque[int]] = {}
        self._unasked = deque(missing)

    @property
    def complete(self) -> bool:
        """True when nothing is missing."""
        return len(self.have) == len(self.needed)

    def came(self, index: int) -> bool:
        """A verified chunk lies in the buffer. False when it had come already."""
        if index in self.have:
            return False
        self.have.add(index)
        self.left -= self.tree.place(index)[1]
        return True

    def next_for(self, donor: str, ahead: float) -> list[int]:
        """Chunks to ask this donor for now, so that it owes some `ahead` bytes; in rising order."""
        owed = self.asked.setdefault(donor, deque())
        size = sum(self.tree.place(index)[1] for index in owed)
        run: list[int] = []
        while self._unasked and size < ahead and len(owed) + len(run) < MOST_ASKED:
            run.append(self._unasked.popleft())
            size += self.tree.place(run[-1])[1]
        if not run and not owed:
            run = self._owed_last()
        run.sort()
        owed.extend(run)
        return run

    def give_back(self, donor: str) -> None:
        """This donor sends nothing any more: what it owes is asked of others."""
        owed = self.asked.pop(donor, deque())
        elsewhere = {index for others in self.asked.values() for index in others}
        self._unasked.extendleft(i for i in reversed(owed) if i not in self.have and i not in elsewhere)

    def _owed_last(self) -> list[int]:
        """The chunk for which, as things stand, the taker would wait longest; none if two were asked for each."""
        places = {i: place for owed in self.asked.values() for place, i in enumerate(owed) if i not in self.have}
        times = Counter(index for owed in self.asked.values() for index in owed)
        once = [index for index in places if times[index] < 2]
        return [max(once, key=lambda index: places[index])] if once else []


@dataclass(frozen=True)
class WantedState:
    """The state that is to be taken, and the manner."""

    read_tree: TreeReader
    timeout: float  # seconds to wait for each chunk
    own: Tree | None = None  # of what the taker holds itself: chunks that it holds alike are not asked for
    select: Callable[[Any], Iterable[int]] | None = None  # the chunks of a tree that are wanted; None: all
    on_bytes: Callable[[int, int], None] = lambda received, total: None  # bytes that came, and will have in the end
    at_once: int = STREAMS  # donors at most
    hold: Callable[[], bool] = lambda: False  # while it is True, nothing more is asked for


class StateClient:
    """Takes one state. Make one for each. buffer: where the chunks go, each at its place in the tree.

    donors: who gave it, with their bytes. giving: who does now. refused: who sent what must be refused, and why.
    problems: why others gave nothing, or no more.
    """

    def __init__(self, connect: Connect, signatures: TrustedDigests, buffer: StateBuffer, wanted: WantedState):
        self._connect, self._signatures, self._buffer, self._wanted = connect, signatures, buffer, wanted
        self._target: _Target | None = None
        self.problems: dict[str, str] = {}
        self._asking: set[str] = set()  # whose manifest has not come
        self._waiting: set[str] = set()  # who offer another state than the one that most hold
        self._news = time.monotonic()
        self.giving: set[str] = set()
        self.donors: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.received = 0

    async def take(self) -> tuple[Any, list[int]]:
        """The tree of a state that members signed, and the chunks of it that lie in the buffer now: all needed ones.

        Raises NoState when no donor is left.
        """
        looking = asyncio.create_task(self._signatures.keep_looking())
        attempt = 0
        try:
            while attempt < ATTEMPTS or self._may_resume():
                if attempt:
                    await asyncio.sleep(min(LONGEST_PAUSE, PAUSE_SECONDS * 2 ** (attempt - 1)))
                await self._signatures.look()
                before = self.received
                if await self._ask_donors(settled=attempt == 0):
                    assert self._target is not None
                    return self._target.tree, self._target.needed
                if not self.problems and not self.refused:
                    break
                attempt = 1 if self.received > before else attempt + 1
        finally:
            looking.cancel()
        problems = "; ".join(f"{donor}: {words}" for donor, words in (self.problems | self.refused).items())
        if not problems:
            raise NoState(f"none of {len(self._signatures.view.records)} peers can hand over a state", asked=False)
        raise NoState(f"no peer handed over a state that can be used ({problems})")

    def _may_resume(self) -> bool:
        begun = self._target is not None and bool(self._target.have) and bool(self.problems)
        return begun and time.monotonic() < self._news + RESUME_SECONDS

    async def _ask_donors(self, settled: bool) -> bool:
        """Take what the donors give, a few of them at a time. True when nothing is missing any more."""
        tried: dict[str, float] = {}  # donor → when it ended
        running: set[asyncio.Task[None]] = set()
        for donors in (self._asking, self._waiting, self.giving):
            donors.clear()

        def others_left() -> bool:
            return bool(self._untried(tried))

        self._news = time.monotonic() if settled else self._news
        started = time.monotonic()
        try:
            while not self._complete():
                untried = self._untried(tried)
                quiet = time.monotonic() - max(self._news, started)
                if untried and (not running or len(running) < self._donors_wanted(quiet)):
                    donor, tried[untried[0]] = untried[0], math.inf
                    self._asking.add(donor)
                    running.add(asyncio.create_task(self._try(donor, settled, others_left), name=donor))
                elif not running:
                    break
                else:
                    done, running = await asyncio.wait(
                        running, timeout=LOOK_AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    tried |= {task.get_name(): time.monotonic() for task in done}
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return self._complete()

    def _complete(self) -> bool:
        return self._target is not None and self._target.complete

    def _untried(self, tried: Mapping[str, float]) -> list[str]:
        """Donors to ask now: nobody twice, but for those whose connection broke a while ago, while others go on."""
        donors = self._signatures.donors(self._target.tree if self._target else None)
        again = time.monotonic() - RETRY_SECONDS if self.giving else -math.inf
        return [donor for donor in donors if tried.get(donor, -math.inf) <= again and donor not in self.refused]

    def _donors_wanted(self, quiet: float) -> int:
        """Count of donors to ask at once. quiet: seconds since something came."""
        useful = 1 + self._target.left // SHARE_BYTES if self._target is not None and self.giving else 1
        return min(self._wanted.at_once, useful + len(self._waiting) + int(quiet / HEDGE_SECONDS))

    async def _try(self, donor: str, settled: bool, others_left: Callable[[], bool]) -> None:
        """Take what one donor gives, and remember why it gave no more."""
        try:
            await self._take_from(donor, settled, others_left)
        except DonorRefused as error:
            self.refused[donor] = printable(str(error))
        except Exception as error:  # a donor may fail in any way; the others go on
            self.problems[donor] = printable(str(error)) or type(error).__name__
        finally:
            self._asking.discard(donor)
            self._waiting.discard(donor)
            self.giving.discard(donor)

    async def _take_from(self, donor: str, settled: bool, others_left: Callable[[], bool] = lambda: False) -> None:
        """settled: while other donors may still hold what was begun, that is not given up for another state.

        others_left: whether there are donors that were not asked yet.
        """
        wanted = self._target.tree.digest if self._target is not None else self._signatures.view.digest
        async with AsyncExitStack() as open_until_the_end:
            async with asyncio.timeout(HEAD_SECONDS):
                stream = await open_until_the_end.enter_async_context(self._connect(donor))
                await stream.ask(request_of(wanted, []))
                head = await stream.answer()
            tree = await self._manifest_in(head)
            if not await self._signatures.look_for(tree):
                raise ValueError(f"no member signed the state of step {tree.step} that it offers")
            self._asking.discard(donor)
            target = await self._agree_on(donor, tree, settled, others_left)
            self.donors[donor] += 0
            self._news = time.monotonic()
            try:
                await self._read_chunks(donor, stream, target)
            finally:
                target.give_back(donor)

    async def _manifest_in(self, head: bytes | None) -> Tree:
        if head is None:
            raise ValueError("it did not answer")
        match _answer_in(head):
            case ("refused", words):
                raise ValueError(f"it refuses: {words}")
            case ("manifest", manifest):
                pass
            case _:
                raise DonorRefused("it sent a chunk before the manifest")
        try:
            tree: Tree = await asyncio.to_thread(self._wanted.read_tree, manifest)
        except ValueError as error:
            raise DonorRefused(f"it sent {error}") from error
        return tree

    async def _agree_on(self, donor: str, tree: Tree, settled: bool, others_left: Callable[[], bool]) -> _Target:
        """All donors give one state: the one that is being taken, else the one that most hold.

        A donor that offers another one waits for what those say that were asked too; theirs is taken if it is that.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        self._waiting.add(donor)
        while True:
            target = self._target
            if target is None or target.tree.digest != tree.digest:
                if target is not None and (self.giving or (target.have and settled)):
                    raise ValueError("it holds another state by now")
                most = target is None and tree.digest == self._signatures.view.digest
                if not most and (self._asking or others_left()) and time.monotonic() < deadline:
                    await asyncio.sleep(LOOK_AGAIN_SECONDS)
                    continue
                target = self._aim_at(tree)
            self._waiting.discard(donor)
            self.giving.add(donor)
            return target

    def _aim_at(self, tree: Tree) -> _Target:
        """Take this state from now on; chunks that have come already and are alike in it are kept."""
        before = self._target
        needed = tree.differing(self._wanted.own) if self._wanted.own is not None else list(range(len(tree)))
        if self._wanted.select is not None:
            chosen = set(self._wanted.select(tree))
            needed = [index for index in needed if index in chosen]
        kept = before.have.difference(tree.differing(before.tree)) if before is not None else set()
        self._target = _Target(tree, needed, kept.intersection(needed))
        return self._target

    async def _read_chunks(self, donor: str, stream: DonorStream, target: _Target) -> None:
        """Ask for chunks, a little ahead of those that come, until nothing is missing. One is verified meanwhile."""
        per_byte, came = AHEAD_SECONDS / LEAST_AHEAD, time.monotonic()  # seconds
        verifying: asyncio.Future[None] | None = None
        try:
            while not target.complete:
                if self._wanted.hold():
                    self._news = time.monotonic()  # nobody is slow
                elif run := target.next_for(donor, min(MOST_AHEAD, max(LEAST_AHEAD, AHEAD_SECONDS / per_byte))):
                    await stream.ask(request_of(target.tree.digest, run))
                owed = target.asked.setdefault(donor, deque())
                message = None
                if len(owed) > (verifying is not None):
                    async with asyncio.timeout(self._wanted.timeout):
                        message = await stream.answer()
                    if message is None:
                        raise ValueError(f"it left off with {len(target.needed) - len(target.have)} chunks to go")
                    now = time.monotonic()
                    per_byte, came = 0.8 * per_byte + 0.2 * (now - came) / len(message), now
                if verifying is not None:
                    await verifying
                    verifying = None
                elif message is None:
                    await asyncio.sleep(LOOK_AGAIN_SECONDS)  # for what others owe
                    came = time.monotonic()
                if message is not None:
                    verifying = asyncio.ensure_future(self._keep(donor, message, target))
        finally:
            if verifying is not None:  # it writes into the buffer
                (result,) = await asyncio.gather(verifying, return_exceptions=True)
                if isinstance(result, DonorRefused):
                    raise result

    async def _keep(self, donor: str, message: bytes, target: _Target) -> None:
        """Verify one answer, the first of those that this donor owes, and put it into the buffer."""
        index = target.asked[donor][0]
        size = await asyncio.to_thread(self._verify_and_write, index, message, target)
        target.asked[donor].popleft()
        self.received += size
        self.donors[donor] += size
        self._news = time.monotonic()
        target.came(index)
        self._wanted.on_bytes(self.received, self.received + target.left)

    def _verify_and_write(self, index: int, message: bytes, target: _Target) -> int:
        match _answer_in(message):
            case ("refused", words):
                raise ValueError(f"it refuses: {words}")
            case ("chunk", number, data) if number == index:
                pass
            case _:
                raise DonorRefused("it sent something else than the chunks that were asked for")
        if not target.tree.holds(index, data):
            raise DonorRefused(f"its chunk {target.tree.name_of(index)} is not what members signed")
        self._buffer.write(target.tree.place(index)[0], data)
        return len(data)


def _answer_in(message: bytes) -> wire.Answer:
    try:
        return wire.STATE_ANSWER.read(message)
    except wire.MalformedMessage as error:
        raise DonorRefused(f"it sent {error}") from None
