"""The order of the shards, where a peer is in it, and that no two peers are in step."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tt_cli.data.stream.plan import session_seed
from tt_cli.data.stream.shard_order import TRIES, Position, Walk, block_rows, drawn_order


def taken(walk: Walk, count: int) -> list[int | None]:
    return [walk.take() for _ in range(count)]


@given(st.integers(0, 2**63 - 1), st.integers(1, 50), st.integers(0, 5))
def test_every_epoch_has_every_shard_once(seed: int, shards: int, epoch: int) -> None:
    order = drawn_order(shards, seed, epoch).tolist()
    assert sorted(order) == list(range(shards))
    assert order == drawn_order(shards, seed, epoch).tolist()


def test_epochs_and_peers_have_orders_of_their_own() -> None:
    orders = {tuple(drawn_order(40, seed, epoch).tolist()) for seed in range(20) for epoch in range(5)}
    assert len(orders) == 100
    assert drawn_order(40, 1, 0, 0).tolist() != drawn_order(40, 1, 0, 1).tolist()


def test_peers_with_the_same_seed_are_not_in_step() -> None:
    seeds = {session_seed(seed, peer) for seed in (0, 1) for peer in ("12D3KooWA", "12D3KooWB")}
    assert len(seeds) == 4
    assert session_seed(5, "") == 5


def test_a_shard_that_is_put_off_comes_again_at_the_end_and_then_no_more() -> None:
    walk = Walk(seed=3, shards=4)
    first, *others = taken(walk, 4)
    assert first is not None
    assert sorted([first, *others]) == [0, 1, 2, 3]  # type: ignore[type-var]
    tries = 0
    while walk.put_off(first):
        tries += 1
        assert walk.take() == first
        assert walk.take() is None
    assert tries == TRIES - 1
    walk.end_epoch()
    assert walk.at == Position(epoch=1)
    assert walk.put_off(first), "a new epoch, new tries"


@given(st.integers(1, 12), st.integers(0, 40), st.lists(st.booleans(), max_size=60))
def test_a_walk_goes_on_where_another_one_was(shards: int, steps: int, failures: list[bool]) -> None:
    def step(walk: Walk, number: int) -> int | None:
        shard = walk.take()
        if shard is None:
            walk.end_epoch()
        elif number < len(failures) and failures[number]:
            walk.put_off(shard)
        return shard

    walk = Walk(7, shards)
    for number in range(steps):
        step(walk, number)
    told = json.loads(json.dumps(asdict(walk.at)))
    position = Position.of_json(told, shards)
    assert position == walk.at
    other = Walk(7, shards, position)
    assert walk.upcoming() == other.upcoming()
    upcoming = walk.upcoming()
    for number in range(steps, steps + 30):
        found = step(walk, number)
        assert found == step(other, number)
        if number == steps:
            assert found == upcoming


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "text",
        {},
        {"epoch": 0},
        {**asdict(Position()), "epoch": -1},
        {**asdict(Position()), "epoch": "0"},
        {**asdict(Position()), "row": 1.5},
        {**asdict(Position()), "row": True},
        {**asdict(Position()), "shard": 9},
        {**asdict(Position()), "shard": "a"},
        {**asdict(Position()), "index": 5},
        {**asdict(Position()), "again": [[0]]},
        {**asdict(Position()), "again": [0, 1]},
        {**asdict(Position()), "again": [[9, 1, 0]]},
        {**asdict(Position()), "again": [["x", 1, 0]]},
        {**asdict(Position()), "again": [[0, 1, -1]]},
        {**asdict(Position()), "again": 3},
        {**asdict(Position()), "more": 3},
    ],
)
def test_what_is_no_position_is_not_taken_for_one(wrong: object) -> None:
    assert Position.of_json(wrong, shards=4) is None


def test_the_first_blocks_are_small_and_then_they_are_whole() -> None:
    assert [block_rows(8192, block) for block in range(5)] == [1024, 2048, 4096, 8192, 8192]
    assert block_rows(8192, 10**9) == 8192
    assert [block_rows(1, block) for block in range(3)] == [1, 1, 1]
    assert [block_rows(10, block) for block in range(5)] == [2, 4, 8, 10, 10]


def test_a_shard_that_failed_before_a_restart_has_as_many_tries_left() -> None:
    walk = Walk(7, 3, Position(index=3, again=((1, TRIES - 1, 0),)))
    assert walk.take() == 1 and not walk.put_off(1)
    assert Position.of_json({"index": 3, "again": [[1, 2]]}, 3) == Position(index=3, again=((1, 2, 0),)), "older"
    assert Position.of_json({"again": [], "shard": 2}, 3) and Position.of_json({"again": [], "shard": 3}, 3) is None
