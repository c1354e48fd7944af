"""Takes a state over from other peers, by chunks that are verified as they arrive.

A manifest is believed only when members signed its root; then the chunks that the taker does not hold itself are
taken, and where a donor fails, another one that holds the same state gives what is still missing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgpack
from hivemind.p2p import P2P, PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor

from tt_cli.errors import TTError
from tt_cli.swarm.board import View
from tt_cli.swarm.buffer import StateBuffer
from tt_cli.swarm.donor import MAX_MANIFEST, MAX_MESSAGE, StateDonor
from tt_cli.swarm.records import PeerRecord
from tt_cli.swarm.shared import Tree, TreeReader

LOOK_SECONDS = 2.0
SIGNATURE_LOOKS, SIGNATURE_SECONDS = 6, 0.5
ATTEMPTS, PAUSE_SECONDS = 3, 0.5
HEAD_SECONDS = 30.0  # more than between chunks: the donor may be making a step, and then copies its state
PREFETCH = 4  # chunks that are verified and written at a time

Ask = Callable[[str, bytes], AsyncGenerator[bytes, None]]
"""(donor's peer id, request) → its answers."""


class NoState(TTError):
    """No peer handed over a state that can be used: one line that says of each donor why. asked: there was one."""

    def __init__(self, message: str, *, asked: bool = True):
        super().__init__(message)
        self.asked = asked


class Refused(Exception):
    """A donor sent what no honest one sends: it is not asked again."""


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


class Signatures:
    """What members signed, as of all looks at their records so far; they may step on while a state is taken.

    read: the newest record of each peer; it may block. own: the peer id that does not count.
    """

    def __init__(self, read: Callable[[], Sequence[PeerRecord]], own: str = ""):
        self._read, self._own = read, own
        self._lock = asyncio.Lock()
        self._signers: dict[tuple[int, str], dict[str, None]] = {}
        self._held: set[tuple[int, str]] = set()
        self.view = View.of(())

    async def look(self) -> None:
        """Read the records once more."""
        async with self._lock:
            read = await asyncio.to_thread(self._read)
        records = [record for record in read if not record.left and record.peer_id != self._own]
        self.view = View.of(records)
        for step in {record.epoch for record in records}:
            view = View.of(record for record in records if record.epoch == step)
            if view.digest:
                self._held.add((view.epoch, view.digest))
                self._signers.setdefault((view.epoch, view.digest), {}).update(dict.fromkeys(view.donors()))

    async def look_for(self, tree: Tree) -> bool:
        """True when most of those who held a state of this step signed this one.

        A donor may have stepped just before it answered: its record follows.
        """
        for _ in range(SIGNATURE_LOOKS):
            if (tree.step, tree.digest) in self._held:
                return True
            await asyncio.sleep(SIGNATURE_SECONDS)
            await self.look()
        return (tree.step, tree.digest) in self._held

    async def keep_looking(self) -> None:
        """Remember what is signed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    def donors(self, tree: Tree | None) -> list[str]:
        """Whom to ask: those who hold the state of `tree` or held it, then those who hold the foremost one."""
        held = self._signers.get((tree.step, tree.digest), {}) if tree is not None else {}
        foremost = dict.fromkeys(self.view.donors() if self.view.digest else [])
        return list(dict.fromkeys(donor for donor in foremost if donor in held) | held | foremost)


def ask_over(p2p: P2P, namespace: str) -> Ask:
    """Ask donors of a run through this libp2p node. namespace: the run's identity."""

    async def ask(donor: str, request: bytes) -> AsyncGenerator[bytes, None]:
        stub = StateDonor.get_stub(p2p, PeerID.from_base58(donor), namespace=namespace)
        async with aclosing(await stub.rpc_state_chunks(runtime_pb2.ExpertInfo(serialized_info=request))) as stream:
            async for message in stream:
                yield message.serialized_info

    return ask


@dataclass
class _Target:
    """The state that is being taken, and what is still missing of it."""

    tree: Tree
    needed: list[int]
    have: set[int] = field(default_factory=set)

    @property
    def missing(self) -> list[int]:
        return [index for index in self.needed if index not in self.have]


class Taker:
    """Takes one state. Make one for each.

    own: the tree of what the taker holds itself. select: which chunks of a tree it wants, all when None.
    timeout: seconds to wait for each chunk. on_bytes: called with the bytes of chunks that came so far, and those that
    will have come when it is done. buffer: where the chunks go, each at its place in the tree.
    """

    def __init__(
        self,
        ask: Ask,
        signatures: Signatures,
        read_tree: TreeReader,
        buffer: StateBuffer,
        *,
        timeout: float,
        own: Tree | None = None,
        select: Callable[[Any], Iterable[int]] | None = None,
        on_bytes: Callable[[int, int], None] = lambda received, total: None,
    ):
        self._ask, self._signatures, self._read_tree, self._buffer = ask, signatures, read_tree, buffer
        self._timeout, self._own, self._select, self._on_bytes = timeout, own, select, on_bytes
        self._target: _Target | None = None
        self._problems: dict[str, str] = {}
        self.donors: dict[str, None] = {}
        self.refused: dict[str, str] = {}
        self.received = 0

    async def take(self) -> tuple[Any, list[int]]:
        """The tree of a state that members signed, and the chunks of it that lie in the buffer now: all needed ones.

        Raises NoState when no donor is left.
        """
        looking = asyncio.create_task(self._signatures.keep_looking())
        try:
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(PAUSE_SECONDS)
                await self._signatures.look()
                donors = self._signatures.donors(self._target.tree if self._target else None)
                for donor in donors:
                    if donor not in self.refused and await self._try(donor, settled=attempt == 0):
                        assert self._target is not None
                        return self._target.tree, self._target.needed
                if not self._problems and not self.refused:
                    break
        finally:
            looking.cancel()
        problems = "; ".join(f"{donor}: {words}" for donor, words in (self._problems | self.refused).items())
        if not problems:
            raise NoState(f"none of {len(self._signatures.view.records)} peers can hand over a state", asked=False)
        raise NoState(f"no peer handed over a state that can be used ({problems})")

    async def _try(self, donor: str, settled: bool) -> bool:
        """Take what one donor gives. True when nothing is missing any more."""
        try:
            return await self._take_from(donor, settled)
        except Refused as error:
            self.refused[donor] = printable(str(error))
        except Exception as error:  # a donor may fail in any way; the next one is asked
            self._problems[donor] = printable(str(error)) or type(error).__name__
        return False

    async def _take_from(self, donor: str, settled: bool) -> bool:
        """settled: while other donors may still hold what was begun, that is not given up for another state."""
        for _ in range(ATTEMPTS):  # it may step between its manifest and its chunks
            target = self._target
            wanted = target.tree.digest if target is not None else self._signatures.view.digest
            missing = target.missing if target is not None else []
            async with aclosing(self._ask(donor, request_of(wanted, missing))) as stream:
                tree = await self._read_manifest(stream)
                if target is None or tree.digest != target.tree.digest:
                    if target is not None and target.have and settled:
                        raise ValueError("it holds another state by now")
                    await self._aim_at(tree)
                    self.donors[donor] = None
                elif await self._read_chunks(donor, stream, target):
                    return True
            if self._target is not None and not self._target.missing:
                return True
        raise ValueError("it went on to another state again and again")

    async def _read_manifest(self, stream: AsyncIterator[bytes]) -> Tree:
        head = await asyncio.wait_for(anext(stream, None), HEAD_SECONDS)
        if head is None:
            raise ValueError("it did not answer")
        answer = answer_in(head)
        if "refused" in answer:
            raise ValueError(f"it refuses: {answer['refused']}")
        if "manifest" not in answer:
            raise Refused("it sent a chunk before the manifest")
        try:
            tree: Tree = await asyncio.to_thread(self._read_tree, answer["manifest"])
        except ValueError as error:
            raise Refused(f"it sent {error}") from error
        return tree

    async def _aim_at(self, tree: Tree) -> None:
        """Take this state from now on; chunks that have come already and are alike in it are kept."""
        if not await self._signatures.look_for(tree):
            raise ValueError(f"no member signed the state of step {tree.step} that it offers")
        before = self._target
        needed = tree.differing(self._own) if self._own is not None else list(range(len(tree)))
        if self._select is not None:
            chosen = set(self._select(tree))
            needed = [index for index in needed if index in chosen]
        kept = before.have.difference(tree.differing(before.tree)) if before is not None else set()
        self._target = _Target(tree, needed, kept.intersection(needed))

    async def _read_chunks(self, donor: str, stream: AsyncIterator[bytes], target: _Target) -> bool:
        missing = target.missing
        left = sum(target.tree.place(index)[1] for index in missing)

        def keep(place: int, message: bytes) -> int:
            """Verify one answer and write it into the buffer; in a thread."""
            answer = answer_in(message)
            if place >= len(missing) or answer.get("chunk") != missing[place]:
                raise Refused("it sent something else than the chunks that were asked for")
            index, data = missing[place], answer["data"]
            if not target.tree.holds(index, data):
                raise Refused(f"its chunk {target.tree.name_of(index)} is not what members signed")
            self._buffer.write(target.tree.place(index)[0], data)
            return index

        answers = self._timed(stream)
        places = _numbers()
        async for index in amap_in_executor(keep, places, answers, max_prefetch=PREFETCH):
            target.have.add(index)
            self.donors[donor] = None
            size = target.tree.place(index)[1]
            self.received, left = self.received + size, left - size
            self._on_bytes(self.received, self.received + left)
        if still := target.missing:
            raise ValueError(f"it left off with {len(still)} of {len(missing)} chunks to go")
        return True

    async def _timed(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for message in aiter_with_timeout(stream, self._timeout):
            yield message


async def _numbers() -> AsyncIterator[int]:
    for number in itertools.count():
        yield number


def request_of(digest: str, chunks: Sequence[int]) -> bytes:
    """Ask for the state with this digest, and these of its chunks (in rising order), as runs [first, last + 1, …]."""
    runs: list[int] = []
    for index in chunks:
        if runs and runs[-1] == index:
            runs[-1] = index + 1
        else:
            runs += [index, index + 1]
    return bytes(msgpack.packb({"digest": digest, "chunks": runs}))


def answer_in(message: bytes) -> dict[str, Any]:
    """One answer of a donor: {"manifest"}, {"chunk", "data"} or {"refused"}. Raises Refused for anything else."""
    if len(message) <= MAX_MESSAGE:
        try:
            answer = msgpack.unpackb(message, max_map_len=2, max_ext_len=0, max_array_len=0, max_str_len=2**10)
        except (ValueError, msgpack.UnpackException) as error:
            raise Refused("it sent an answer that cannot be read") from error
        match answer:
            case {"manifest": bytes(data), **more} if not more and len(data) <= MAX_MANIFEST:
                return answer
            case {"refused": str(), **more} if not more:
                return answer
            case {"chunk": int(), "data": bytes(), **more} if not more:
                return answer
    raise Refused("it sent an answer of another form")


def printable(words: str) -> str:
    """One short line: a donor may have chosen some of these words, and a terminal will show them."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in words).split())[:200]
