"""Reader of a data set's good rows, shuffled, wherever its shards lie: what the process that reads ahead runs.

    reader = RowReader(plan, on_trouble)
    for block in reader.blocks(): …

Notable:
- the next shard is on its way while one is read;
- a shard that does not come is put off and another one is taken, with words; the pauses grow while nothing comes, and
  a server that asks for a pause gets it. Only a reader that never got anything gives up;
- no row is lost because of a bad one: what can be read of a damaged shard is read, the rest is counted; however many
  bad ones come after a good one, the next good one is sought.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
from pydantic import TypeAdapter

from tt_cli.data.codes import CODE_DTYPE
from tt_cli.data.columns import Row
from tt_cli.data.examples import RowFilter, missing_columns
from tt_cli.data.shard_format import DamagedShard, read_batches
from tt_cli.data.stream.plan import ReadPlan
from tt_cli.data.stream.shard_order import Position, Walk, block_rows, drawn_order
from tt_cli.data.stream.shard_source import ShardSource
from tt_cli.data.stream.transfer import ShardProblem
from tt_cli.errors import TTError, UsageError

GIVE_UP = 5  # failures on end, of a reader that never got anything
HELD_AT_ONCE = 5  # times that a block's codes may be in memory: three are, while it is shuffled, beside all else
QUICKLY = 3  # shards on end that are not there, before there are pauses
ROWS = 256  # of a message
LONGEST_PAUSE = 60.0  # seconds between two tries, where nobody asked for more


@dataclass
class Block:
    """Good rows in a random order."""

    captions: list[str]
    codes: np.ndarray  # (k, n) int16; ids (k, length + 1) int32 of text
    state: dict[str, Any]  # for a plan, to go on with at the first of them; JSON
    counts: dict[str, int]  # of the rows left out since the last block

    def packed(self) -> dict[str, Any]:
        """Plain data for another process."""
        return {**vars(self), "codes": (self.codes.tobytes(), self.codes.shape, self.codes.dtype.str)}

    @classmethod
    def unpacked(cls, content: dict[str, Any]) -> Block:
        """The block that was packed."""
        codes, shape, dtype = content["codes"]
        return cls(**{**content, "codes": np.frombuffer(codes, dtype).reshape(shape)})

    @property
    def epoch(self) -> int:
        """Passes over the data before this one."""
        return int(self.state["position"]["epoch"])

    def state_after(self, count: int) -> dict[str, Any]:
        """The state to go on with after the first `count` rows."""
        position = self.state["position"]
        return {**self.state, "position": {**position, "taken": position["taken"] + count}}

    def parts(self, size: int) -> Iterator[Block]:
        """Its rows in order, up to `size` at a time; all counts come with the first."""
        counts = self.counts
        for start in range(0, max(1, len(self.captions)), size):
            rows = slice(start, start + size)
            yield Block(self.captions[rows], self.codes[rows], self.state_after(start), counts)
            counts = {}


@dataclass
class _Piece:
    """Good rows of one shard, in order."""

    captions: list[str]
    codes: np.ndarray
    rows: np.ndarray  # their numbers (k,)
    after: Position  # where all that was read up to here is read
    last: bool = False  # of the epoch

    def split(self, count: int) -> tuple[_Piece, _Piece]:
        """The first `count` rows, and the others."""
        between = replace(self.after, row=int(self.rows[count - 1]) + 1) if count < len(self.rows) else self.after
        return (
            _Piece(self.captions[:count], self.codes[:count], self.rows[:count], between),
            _Piece(self.captions[count:], self.codes[count:], self.rows[count:], self.after, self.last),
        )


def packed_blocks(plan: bytes, on_trouble: Callable[[str, str], None]) -> Iterator[dict[str, Any]]:
    """Examples of a plan, as the process sends them."""
    for block in RowReader(TypeAdapter(ReadPlan).validate_json(plan), on_trouble).blocks():
        yield from (part.packed() for part in block.parts(ROWS))


class RowReader:
    """Reads by a plan, without end. on_trouble: hears a trouble and a remedy. wait: sleeps.

    Raises UsageError for what will not work, TTError where nobody answers.
    """

    def __init__(
        self, plan: ReadPlan, on_trouble: Callable[[str, str], None], wait: Callable[[float], None] = time.sleep
    ) -> None:
        self.plan, self._on_trouble, self._wait = plan, on_trouble, wait
        fitting = plan.memory // HELD_AT_ONCE // (plan.rules.codes * CODE_DTYPE.itemsize)
        self._block_rows = min(plan.shuffle_buffer, fitting)
        self.filter = RowFilter(plan.rules)
        self._failures = 0  # on end
        self._came = False  # whether a good row ever came
        self._problem, self._missing = "", ""
        self._reported = Counter[str]()
        self._note = lambda trouble: on_trouble(trouble, "")
        self.source = ShardSource(plan, self._note)
        while not self.source.shards:
            try:
                self.source.find()
            except ShardProblem as problem:
                self._failed(problem, "")
        self.shards = self.source.shards
        facts = [[shard.name for shard in self.shards], plan.split, plan.shuffle_buffer, asdict(plan.rules)]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]  # of what a position refers to
        self.seed, self._start = self._resumed()
        self._skip = {shard: row for shard, _, row in self._start.again}  # of shards that were put off
        if self._start != Position():  # an earlier reader had good rows
            self.filter = RowFilter(plan.rules, math.inf)

    def blocks(self) -> Iterator[Block]:
        """Blocks without end, from where the plan's state says. Raises TTError when nothing can be used."""
        at, self._taken = replace(self._start, taken=0), self._start.taken
        held: list[_Piece] = []
        for piece in self._pieces(self._start):
            if not (piece.last or len(piece.rows) or any(len(part.rows) for part in held)):
                at = replace(piece.after, block=at.block)  # the block begins here
            rest, unfinished = piece, True
            while unfinished:
                room = block_rows(self._block_rows, at.block) - sum(len(part.rows) for part in held)
                part, rest = rest.split(min(room, len(rest.rows)))
                held.append(part)
                if len(part.rows) < room and not piece.last:
                    break
                yield self._block(held, at)
                self.source.may_look_ahead = True  # the first block has the line for itself
                at, held, self._taken = replace(part.after, block=at.block + 1), [], 0
                unfinished = len(rest.rows) > 0

    def close(self) -> None:
        """Fetch nothing more."""
        self.source.close()

    # ------------------------------------------------------------ rows

    def _block(self, held: list[_Piece], at: Position) -> Block:
        captions = [caption for piece in held for caption in piece.captions]
        codes = np.concatenate([piece.codes for piece in held])
        order = drawn_order(len(captions), self.seed, at.epoch, at.block)[self._taken :]
        problems = self.filter.counts.problems()
        counts, self._reported = dict(problems - self._reported), problems
        position = asdict(replace(at, taken=self._taken))
        state = {"version": 1, "data": self.fingerprint, "seed": self.seed, "position": position}
        return Block([captions[i] for i in order], codes[order], state, counts)

    def _pieces(self, start: Position) -> Iterator[_Piece]:
        """The good rows of shard after shard, and an empty last piece at the end of each epoch."""
        walk = Walk(self.seed, len(self.shards), start)
        shard, skip = start.shard, start.row
        while True:
            if shard is None:
                shard = walk.take()
                skip = 0 if shard is None else self._skip.pop(shard, 0)
            if shard is None:
                if not self._came:
                    raise self._nothing()
                walk.end_epoch()
                self._skip = {}
                yield self._empty(walk.at, last=True)
                continue
            try:
                with self.source.take(shard) as file:
                    yield from self._rows_of(shard, file, skip, walk)
            except ShardProblem as problem:
                if self.plan.strict:
                    self._problem = f"{self.shards[shard].name}: {problem}"
                    raise self._nothing() from problem
                self._skip[shard] = skip
                if not problem.lasting:  # the block comes to others, of which nobody had any yet
                    self._taken = 0
                again = not (problem.lasting and self.source.local) and walk.put_off(shard, skip)
                self._failed(problem, self.shards[shard].name, again)
            yield self._empty(walk.at)
            shard = None

    def _empty(self, after: Position, last: bool = False) -> _Piece:
        codes = np.zeros((0, self.plan.rules.codes), dtype=np.int16)
        return _Piece([], codes, np.zeros(0, dtype=np.int64), after, last)

    def _rows_of(self, number: int, file: BinaryIO, row: int, walk: Walk) -> Iterator[_Piece]:
        """From row number `row` on. Raises ShardProblem where nothing of it can be read."""
        name, nothing, lost, damage = self.shards[number].name, True, 0, ""
        further: int | None = row
        while further is not None:
            row, further = further, None
            try:
                for batch in read_batches(file, name, row):
                    nothing = False
                    yield self._good(number, batch, row, walk)
                    row += len(batch)
                    self.source.look_ahead(walk.upcoming())
            except DamagedShard as error:
                damage = damage or str(error)
                further = _next_group(file, name, row)
                lost += further - row if further else 0
        if damage and nothing:
            self.source.forget(number)
            raise ShardProblem(damage, lasting=True)
        if damage:
            self.filter.counts["damaged"] += lost
            self._note(f"{damage}: {f'{lost} rows' if lost else f'what comes after row {row}'} left out")
        self._failures = 0

    def _good(self, number: int, batch: Sequence[Row], row: int, walk: Walk) -> _Piece:
        if not self._missing and not self._came and batch[0] and (missing := missing_columns(batch[0])):
            self._missing = f"no column {' and '.join(missing)}; it has {', '.join(sorted(batch[0]))}"
        try:
            captions, codes, places = self.filter.sift(batch)
        except TTError as error:
            raise self._nothing() from error
        self._came = self._came or bool(captions)
        return _Piece(captions, codes, row + places, replace(walk.at, shard=number, row=row + len(batch)))

    # ------------------------------------------------------------ troubles

    def _failed(self, problem: ShardProblem, name: str, again: bool = True) -> None:
        """Say so and pause, longer every time. Raises TTError where nothing ever came."""
        self._failures += 1
        self._problem = f"{name}: {problem}" if name else str(problem)
        tried_all = name and self._failures >= 3 * len(self.shards)
        if not self._came and (self._failures >= GIVE_UP or tried_all):
            raise self._nothing()
        grown = 0.0 if problem.lasting and self._failures <= QUICKLY else 2.0 ** min(self._failures - 1, 10)
        pause = max(min(grown, LONGEST_PAUSE), problem.wait or 0.0)  # a server may ask for none, or too late
        when = f"in {pause:.0f} s" if pause else "now"
        trouble, remedy = f"cannot list the shards of {self.plan.rules.name}: {problem}", f"asks again {when}"
        if name:
            trouble, remedy = f"cannot fetch the shard {name}: {problem}", f"takes another one {when}"
            remedy += "" if again else "; this one is left out of this epoch"
        self._on_trouble(trouble, remedy)
        self._wait(pause)

    def _nothing(self) -> TTError:
        """The error to raise when nothing of the data set can be used."""
        name, counts = self.plan.rules.name, self.filter.counts
        if not self._came and self._missing:
            return UsageError(f"the data set {name} has {self._missing}")
        if counts.total() or not self._problem:
            return self.filter.unusable()
        advice = "check the network, the login (`tt login`) and [data] in the run file"
        return TTError(f"cannot read the data set {name}: {self._problem}; {advice}")

    def _resumed(self) -> tuple[int, Position]:
        """The seed and the place of the plan's state, where it is about these data; else a beginning."""
        state = self.plan.state
        if isinstance(state, dict) and state.get("version") == 1 and state.get("data") == self.fingerprint:
            position, seed = Position.of_json(state.get("position"), len(self.shards)), state.get("seed")
            if position is not None and type(seed) is int and seed >= 0:
                return seed, position
        return self.plan.seed, Position()


def _next_group(file: BinaryIO, name: str, row: int) -> int | None:
    """The first row of the row group after that of `row`; None where there is none, or groups are not known."""
    import pyarrow
    import pyarrow.parquet

    if not name.endswith(".parquet"):
        return None
    try:
        file.seek(0)
        metadata = pyarrow.parquet.read_metadata(file)
    except (pyarrow.ArrowException, OSError):
        return None
    ends = accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return next((end for end in ends if end > row), None)
