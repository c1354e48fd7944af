"""Blocks of good rows: all of them, in the seed's order, gone on with to the row; and what is said of the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.rows import code, numbered, row, run_on, write
from hypothesis import given
from hypothesis import strategies as st

from tt_cli.data import examples
from tt_cli.data.codes import to_column
from tt_cli.data.shard_format import write_shard
from tt_cli.data.stream.plan import plan_of
from tt_cli.data.stream.row_reader import Block, RowReader
from tt_cli.data.stream.shard_locations import of_split
from tt_cli.data.stream.subset import heldout_examples
from tt_cli.errors import TTError, UsageError


class Told:
    """What a reader said, and how long it paused."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.remedies: list[str] = []
        self.pauses: list[float] = []

    def __call__(self, words: str, remedy: str) -> None:
        self.words.append(words)
        self.remedies.append(remedy)


def reader_of(folder: Path, told: Told | None = None, seed: int = 0, state: Any = None, **data: Any) -> RowReader:
    told = told or Told()
    plan = plan_of(run_on(folder, **data), "train", seed, state=state)
    return RowReader(plan, told, told.pauses.append)


def rows_of(blocks: Iterator[Block], count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        block = next(blocks)
        assert block.codes.shape == (len(block.captions), 4)
        for caption, codes in zip(block.captions, block.codes.tolist(), strict=True):
            number = int(caption.split()[1])
            assert codes == [number % 10, number // 10 % 10, number // 100 % 10, 7], "codes stay with their caption"
        found += block.captions
    return found


def shards(folder: Path, count: int, each: int, container: str = ".parquet") -> list[str]:
    rows = numbered(count * each)
    for shard in range(count):
        part = rows[shard * each : (shard + 1) * each]
        if container == ".parquet":
            write(folder / f"train-{shard}.parquet", part)
        else:
            folder.mkdir(exist_ok=True, parents=True)
            write_shard(folder / f"train-{shard}{container}", part)
    return [one["caption"] for one in rows]


@pytest.mark.parametrize("container", [".parquet", ".tar", ".jsonl.br"])
def test_every_epoch_has_every_row_once(tmp_path: Path, container: str) -> None:
    everything = shards(tmp_path, 4, 25, container)
    found = rows_of(reader_of(tmp_path, shuffle_buffer=16).blocks(), 300)
    epochs = [found[start : start + 100] for start in (0, 100, 200)]
    assert all(Counter(epoch) == Counter(everything) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 20 rows, one in six of them bad."""
    folder = tmp_path_factory.mktemp("many")
    rows = [
        one if number % 6 else {**one, "code": code(1, 2, 3, 10) if number % 12 else b"short"}
        for number, one in enumerate(numbered(60))
    ]
    for shard in range(3):
        write(folder / f"train-{shard}.parquet", rows[shard * 20 : shard * 20 + 20])
    return folder


@given(taken=st.integers(0, 125), buffer=st.integers(1, 65), seed=st.integers(0, 3))
def test_a_reader_goes_on_to_the_row_where_another_was(many: Path, taken: int, buffer: int, seed: int) -> None:
    whole = rows_of(reader_of(many, seed=seed, shuffle_buffer=buffer).blocks(), 165)[:165]
    first, left, state = reader_of(many, seed=seed, shuffle_buffer=buffer), taken, None
    for block in first.blocks():
        if left <= len(block.captions):
            state = block.state_after(left)
            break
        left -= len(block.captions)
    state = json.loads(json.dumps(state))
    second = reader_of(many, seed=99, state=state, shuffle_buffer=buffer)
    assert second.seed == seed
    rest = rows_of(second.blocks(), 165 - taken)
    assert whole[:taken] + rest[: 165 - taken] == whole


def test_a_state_about_other_data_is_a_beginning(tmp_path: Path) -> None:
    shards(tmp_path, 2, 20)
    first = reader_of(tmp_path, seed=5)
    state = next(first.blocks()).state
    shards(tmp_path, 3, 20)
    now = next(reader_of(tmp_path, seed=5).blocks()).state
    assert reader_of(tmp_path, state=now).seed == 5
    for known in (state, {}, {**now, "version": 2}, {**now, "seed": -1}):
        assert reader_of(tmp_path, state=known).seed == 0


def test_no_more_is_shuffled_together_than_there_is_memory_for(tmp_path: Path) -> None:
    """Pictures of 2 MiB: of 102 the three copies that shuffling takes fit, and a first block is an eighth."""
    write(tmp_path / "train.parquet", [{**one, "code": bytes(2 << 20)} for one in numbered(30)])
    plan = plan_of(run_on(tmp_path, shuffle_buffer=10**9), "train", 0)
    reader = RowReader(replace(plan, rules=replace(plan.rules, codes=1 << 20)), Told())
    assert len(next(reader.blocks()).captions) == 13


def test_codes_of_both_columns_are_the_same(tmp_path: Path) -> None:
    rows = numbered(30)
    known = np.array([np.frombuffer(one["code"], dtype="<i2") for one in rows])
    packed = to_column("code13", known, 10)
    dense = [{**one, "code13": codes} for one, codes in zip(rows, packed, strict=True)]
    for one in dense:
        del one["code"]
    write_shard(tmp_path / "train.parquet", dense)
    assert len(set(rows_of(reader_of(tmp_path).blocks(), 30))) == 30


@pytest.mark.parametrize(("bad", "reason"), [(code(1), "code width"), (code(1, 2, 3, 10), "code range")])
def test_a_large_data_set_is_given_up_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: bytes, reason: str
) -> None:
    monkeypatch.setattr(examples, "HOPELESS", 600)
    write(tmp_path / "train.parquet", [row(code=bad)] * 2000)
    with pytest.raises(TTError, match=rf"\(1024 rows: {reason} 1024\)"):
        next(reader_of(tmp_path, shuffle_buffer=4).blocks())


def test_rare_good_rows_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "HOPELESS", 600)
    write(tmp_path / "train.parquet", [row(code=code(1) if i % 500 else code(1, 2, 3, 4)) for i in range(4000)])
    blocks = reader_of(tmp_path, shuffle_buffer=1).blocks()
    assert sum(len(block.captions) for block in islice(blocks, 8)) == 8


def test_bad_rows_in_a_row_end_no_reader_that_had_good_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a data set that is of no use, as long as one likes: also where another reader went on before it."""
    monkeypatch.setattr(examples, "HOPELESS", 600)
    bad, rest = [row(code=code(1))] * 4000, [f"row {number}" for number in range(10, 20)]
    write(tmp_path / "train.parquet", [*numbered(10), *bad, *numbered(20)[10:]])
    blocks = reader_of(tmp_path, shuffle_buffer=1).blocks()
    state = [next(blocks) for _ in range(10)][-1].state_after(1)
    assert rows_of(blocks, 10) == rest
    assert rows_of(reader_of(tmp_path, state=state, shuffle_buffer=1).blocks(), 10) == rest
    write(tmp_path / "train.parquet", bad)
    with pytest.raises(TTError, match=r"no example that this run can use \(39\d\d rows: code width 39\d\d\)"):
        next(reader_of(tmp_path, state=state, shuffle_buffer=1).blocks())
    elsewhere = reader_of(tmp_path, state={**state, "data": "other data"}, shuffle_buffer=1)
    with pytest.raises(TTError, match="no example that this run can use"):
        next(elsewhere.blocks())
    assert elsewhere.filter.counts.total() < 2000, "a place in other data says nothing of these"


def test_a_damaged_shard_gives_what_is_good_of_it(tmp_path: Path) -> None:
    """A byte of one row group, of three: the others' rows come, and the shards after it."""
    shards(tmp_path, 3, 40)
    path = tmp_path / "train-1.parquet"
    whole = [{**one, "caption": f"{one['caption']} {'x' * 40}"} for one in numbered(6144)]
    write_shard(path, whole)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(8)
    path.write_bytes(content)
    told = Told()
    reader = reader_of(tmp_path, told)
    blocks, found, counts = reader.blocks(), list[str](), Counter[str]()
    for block in blocks:
        counts.update(block.counts)
        if block.epoch:
            break
        found += block.captions
    assert counts["damaged"] == 2048
    assert len(found) == 4096 + 80 == len(set(found))
    assert len(told.words) == 1
    assert "train-1.parquet" in told.words[0] and "2048 rows left out" in told.words[0]


@pytest.mark.parametrize("container", [".parquet", ".tar", ".jsonl.br"])
def test_a_truncated_shard_costs_no_other(tmp_path: Path, container: str) -> None:
    shards(tmp_path, 3, 40, container)
    path = tmp_path / f"train-1{container}"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    told = Told()
    blocks = reader_of(tmp_path, told).blocks()
    found: list[str] = []
    while not (block := next(blocks)).epoch:
        found += block.captions
    others = {f"row {number}" for number in (*range(40), *range(80, 120))}
    assert others <= set(found)
    assert len(found) == len(set(found))
    assert any(f"train-1{container}" in words for words in told.words)
    assert all("\n" not in words for words in told.words)


def test_captions_that_are_no_text_cost_their_row_alone(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = numbered(20)
    captions = [one["caption"].encode() for one in rows]
    captions[3], captions[7] = b"caf\xe9 noir", b"\xff\xfe"
    table = pyarrow.table(
        {
            "caption": pyarrow.array(captions, pyarrow.binary()).view(pyarrow.string()),
            "code": pyarrow.array([one["code"] for one in rows], pyarrow.binary()),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    blocks = reader_of(tmp_path).blocks()
    counts: Counter[str] = Counter()
    found: list[str] = []
    while len(found) < 18:
        block = next(blocks)
        found += block.captions
        counts.update(block.counts)
    assert len(set(found)) == 18
    assert counts["not_utf8"] == 2


def test_a_shard_that_goes_away_is_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    shards(tmp_path, 4, 20)
    told = Told()
    reader = reader_of(tmp_path, told)
    (tmp_path / "train-2.parquet").unlink()
    found = rows_of(reader.blocks(), 120)
    assert Counter(found) == Counter([f"row {n}" for n in (*range(40), *range(60, 80))] * 2)
    assert len(told.words) == 2
    assert told.words[0] == "cannot fetch the shard train-2.parquet: No such file or directory"
    assert told.remedies[0] == "takes another one now; this one is left out of this epoch"
    assert told.pauses == [0.0, 0.0]


def test_data_that_go_away_are_waited_for_longer_and_longer(tmp_path: Path) -> None:
    """And are read again when they are back."""
    shards(tmp_path, 4, 20)
    aside = tmp_path.with_name("aside")
    told = Told()
    reader = reader_of(tmp_path, told)
    blocks = reader.blocks()
    rows_of(blocks, 80)
    tmp_path.rename(aside)

    def paused(seconds: float) -> None:
        told.pauses.append(seconds)
        if len(told.pauses) == 12:
            aside.rename(tmp_path)

    reader._wait = paused
    rows_of(blocks, 80)
    assert told.pauses == [0, 0, 0, 8, 16, 32, 60, 60, 60, 60, 60, 60]
    assert all(words.startswith("cannot fetch the shard") for words in told.words)


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", [{"text": "red apple", "code": code(1, 2, 3, 4)}])
    with pytest.raises(UsageError, match="has no column caption; it has code$"):
        next(reader_of(tmp_path).blocks())


def test_a_column_of_another_type_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", [{**one, "caption": n} for n, one in enumerate(numbered(5))])
    with pytest.raises(TTError, match=r"cannot read the data set .*its column caption is int64, not text"):
        next(reader_of(tmp_path).blocks())


def test_one_odd_shard_does_not_end_the_training(tmp_path: Path) -> None:
    shards(tmp_path, 3, 20)
    write(tmp_path / "train-a.parquet", [{"text": "red apple"}] * 5)
    write(tmp_path / "train-b.parquet", [{**one, "caption": n} for n, one in enumerate(numbered(5))])
    for seed in range(6):
        told = Told()
        assert len(rows_of(reader_of(tmp_path, told, seed).blocks(), 60)) >= 60


def test_an_empty_folder_and_none_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty, none, nobodys = tmp_path / "empty", tmp_path / "none", Path("~no-such-user/none")
    for place, words in ((empty, "has no shards"), (none, "there is no such folder"), (nobodys, "no such folder")):
        with pytest.raises(UsageError, match=f"cannot read the data set .*{words}") as caught:
            reader_of(place)
        assert "\n" not in str(caught.value)


def test_a_shard_whose_name_has_a_held_out_split_in_it_is_not_trained_on(tmp_path: Path) -> None:
    """Also where "train" comes before it."""
    names = ["train-0", "train_heldout", "train/validation-0", "train-test-split/0", "heldout/train-0"]
    for number, name in enumerate(names):
        write(tmp_path / f"{name}.parquet", numbered(50)[10 * number : 10 * number + 10])
    assert set(rows_of(reader_of(tmp_path).blocks(), 60)) == {f"row {number}" for number in range(10)}
    run, held_out = run_on(tmp_path), {f"row {number}" for number in (*range(10, 20), *range(40, 50))}
    assert {example.caption for example in heldout_examples(run, 50)} == held_out


def test_a_folder_of_both_splits_says_nothing_of_the_shards_in_it() -> None:
    names = ["train-test-split/train/0.parquet", "train-test-split/test/0.parquet", "train-test-split/train-1.parquet"]
    assert of_split(names, "train", "here") == [names[2], names[0]] and of_split(names, "test", "here") == [names[1]]


def test_what_names_no_split_is_trained_on_beside_what_is_held_out() -> None:
    books = ["emma.txt", "persuasion.txt"]
    assert of_split([*books, "validation.txt"], "train", "here") == books
    assert of_split([*books, "train.txt"], "train", "here") == ["train.txt"]
    with pytest.raises(UsageError, match="has no split 'test'; it has validation and train"):
        of_split([*books, "validation.txt"], "test", "here")


def test_empty_shards_are_no_data(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([("caption", pyarrow.string()), ("code", pyarrow.binary())])
    pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "train.parquet")
    with pytest.raises(TTError, match=r"no example that this run can use \(0 rows: none\)"):
        next(reader_of(tmp_path).blocks())
