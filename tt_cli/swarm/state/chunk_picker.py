"""Which chunk is asked of which donor: the rarest first, as in BitTorrent; at the end what is owed, once more."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain

import numpy as np

from tt_cli.swarm.shared_state import Tree

MOST_ASKED = 64  # chunks, of one donor


class DonorRefused(Exception):
    """A donor sent what no honest one sends: it is not asked again."""


class Holdings:
    """What one donor holds of a state of so many chunks, gave to somebody, and owes this taker.

    requests: the chunks of each that are still to come, in their order. again: when it may be asked for more.
    """

    def __init__(self, chunks: int):
        self.held, self.given = np.zeros(chunks, bool), np.zeros(chunks, bool)
        self.requests = deque[deque[int]]()
        self.again = -math.inf

    @property
    def owed(self) -> list[int]:
        """Chunks that are to come, in their order."""
        return list(chain.from_iterable(self.requests))

    def hear(self, held: bytes, given: bytes) -> deque[int]:
        """Note what it says after a request. Returns the chunks of that which it does not send.

        Raises DonorRefused where it is nothing of this state.
        """
        if {len(held), len(given)} != {-(-len(self.held) // 8)}:
            raise DonorRefused("it sent something else than what it holds")
        self.held, self.given = (
            np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self.held), bitorder="little").astype(bool)
            for bits in (held, given)
        )
        return self.requests.popleft()


class ChunkPicker:
    """The state that is being taken: which chunks are missing, their bytes, and who was asked for what.

    here: (chunks,) bool, those in the buffer. chunk: bytes of the largest. sources: donors that give it now.
    """

    def __init__(self, tree: Tree, needed: list[int], kept: Iterable[int]):
        self.tree, self.needed = tree, needed
        self.missing = set(needed).difference(kept)
        self.bytes_missing = sum(tree.place(index)[1] for index in self.missing)
        self.chunk = max((tree.place(index)[1] for index in needed), default=1)
        self.sources: dict[str, Holdings] = {}
        self.here, self._unasked = np.zeros(len(tree), bool), np.zeros(len(tree), bool)
        self.here[list(set(needed) - self.missing)] = self._unasked[list(self.missing)] = True
        self._order = np.arange(len(tree)) / max(1, len(tree))  # below 1

    def shuffle(self, seed: str) -> None:
        """Ask for chunks that are equally rare in an order that follows from this seed, not in their own."""
        self._order = np.random.default_rng(list(seed.encode())).random(len(self.tree))

    @property
    def begun(self) -> bool:
        """True when chunks of it are there."""
        return len(self.missing) < len(self.needed)

    def received(self, index: int) -> None:
        """A verified chunk lies in the buffer; it may have been there already."""
        if index in self.missing:
            self.missing.remove(index)
            self.bytes_missing -= self.tree.place(index)[1]
            self.here[index] = True

    def next_for(self, source: Holdings, ahead: float) -> list[int]:
        """Chunks to ask this donor for now, so that it owes some `ahead` bytes; in rising order."""
        owed, run = source.owed, list[int]()
        size = sum(self.tree.place(index)[1] for index in owed)
        if size < ahead and len(free := np.flatnonzero(self._unasked & source.held)):
            copies = np.sum([known for one in self.sources.values() for known in (one.held, one.given)], axis=0)
            for index in free[np.argsort(copies[free] + self._order[free])[:MOST_ASKED]].tolist():
                if size >= ahead or len(owed) + len(run) >= MOST_ASKED:
                    break
                run.append(index)
                size += self.tree.place(index)[1]
        self._unasked[run] = False
        return sorted(run if run or owed or self._unasked.any() else self._owed_last(source))

    def give_back(self, owed: Iterable[int]) -> None:
        """What a donor owed and does not send is asked of others."""
        elsewhere = set(chain.from_iterable(source.owed for source in self.sources.values()))
        self._unasked[[index for index in owed if index in self.missing and index not in elsewhere]] = True

    def _owed_last(self, source: Holdings) -> list[int]:
        """The chunk for which, as things stand, the taker would wait longest; none if two were asked for each."""
        queues = [other.owed for other in self.sources.values()]
        places = {i: place for owed in queues for place, i in enumerate(owed) if i in self.missing and source.held[i]}
        times = Counter(chain.from_iterable(queues))
        once = [index for index in places if times[index] < 2]
        return [max(once, key=lambda index: places[index])] if once else []
