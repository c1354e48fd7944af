"""Order in which a peer reads the shards of a data set, and its position in that order.

Notable:
- the order of the shards is drawn anew for every epoch (pass over the data) from the peer's seed; nothing of it is
  stored: a position is a few numbers;
- rows are shuffled block by block: a block of `shuffle_buffer` good rows is read, and leaves in an order that is drawn
  from seed, epoch and the block's number. So what was taken is known to the row, and a peer that comes back reads its
  block again and goes on: nothing twice, nothing left out. The first blocks are smaller, not to be waited for;
- a shard that cannot be read is put off to the end of the epoch, and left out of it after TRIES.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

TRIES = 3  # of one shard in one epoch
FIRST_BLOCKS = 8  # parts of a whole block that the first one has; the next ones double


@dataclass(frozen=True)
class Position:
    """A place in the order of the shards: the beginning of a block, and how many of its rows were taken."""

    epoch: int = 0  # passes done
    index: int = 0  # shards of the epoch's order that are done with, or put off
    again: tuple[tuple[int, int, int], ...] = ()  # those put off, with the tries they had and the rows that were read
    shard: int | None = None  # in hand
    row: int = 0  # how many of its rows were read
    block: int = 0  # its number since the first epoch
    taken: int = 0  # rows of that block

    @classmethod
    def of_json(cls, known: Any, shards: int) -> Position | None:
        """The position that `asdict` made a dict, in a data set of so many shards; None for anything else."""
        try:
            again = ((shard, tries, *row, 0)[:3] for shard, tries, *row in known["again"])  # an older tt has no rows
            position = cls(**{**known, "again": tuple(again)})
        except (TypeError, ValueError, KeyError):
            return None
        begun = [shard for shard, *_ in position.again]
        begun += [] if position.shard is None else [position.shard]
        numbers = [value for name, value in vars(position).items() if name not in ("again", "shard")]
        numbers += [*begun, *(number for entry in position.again for number in entry)]
        whole = all(type(number) is int and 0 <= number < 2**62 for number in numbers)
        return position if whole and position.index <= shards and all(shard < shards for shard in begun) else None


class Walk:
    """The way through the shards. at: the position, without a shard in hand."""

    def __init__(self, seed: int, shards: int, at: Position = Position()) -> None:
        self.seed, self.shards = seed, shards
        self.at = replace(at, shard=None, row=0, taken=0)
        self._order = drawn_order(shards, seed, at.epoch)
        self._tries = {shard: tries for shard, tries, _ in at.again}

    def upcoming(self) -> int | None:
        """The next shard, as far as this epoch has one."""
        if self.at.index < self.shards:
            return int(self._order[self.at.index])
        return self.at.again[0][0] if self.at.again else None

    def take(self) -> int | None:
        """The next shard, which is no more among those to come; None at the end of the epoch."""
        shard = self.upcoming()
        if self.at.index < self.shards:
            self.at = replace(self.at, index=self.at.index + 1)
        else:
            self.at = replace(self.at, again=self.at.again[1:])
        return shard

    def put_off(self, shard: int, row: int = 0) -> bool:
        """Have a shard come again at the end of the epoch, from this row on. False where it was tried often enough."""
        tries = self._tries[shard] = self._tries.get(shard, 0) + 1
        if tries >= TRIES:
            return False
        self.at = replace(self.at, again=(*self.at.again, (shard, tries, row)))
        return True

    def end_epoch(self) -> None:
        """Begin the next pass, in another order."""
        self.at = replace(self.at, epoch=self.at.epoch + 1, index=0, again=())
        self._order = drawn_order(self.shards, self.seed, self.at.epoch)
        self._tries = {}


def drawn_order(count: int, *seed: int) -> np.ndarray:
    """A permutation of so many shards (seed: the peer's, epoch) or rows of a block (seed: the peer's, epoch, block)."""
    return np.random.default_rng(np.random.SeedSequence(seed)).permutation(count)


def block_rows(shuffle_buffer: int, block: int) -> int:
    """The number of rows in block number `block`, unless the epoch ends in it."""
    first = -(-shuffle_buffer // FIRST_BLOCKS)
    return min(shuffle_buffer, first << min(block, FIRST_BLOCKS))
