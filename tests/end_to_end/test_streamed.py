"""Peers whose examples lie at a web server: they train, and a killed one goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from data.shard_server import ShardServer
from end_to_end.conftest import WAIT, assert_agreed, last_step, tiny_run, wait_for_step

from tt_cli.data import builtin
from tt_cli.data.build.journal import SHARDS, SUMS, sums_of
from tt_cli.data.codes import to_column
from tt_cli.data.shard_format import write_shard
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Contribution, Trouble
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm

StartSwarm = Callable[[RunConfig], LocalSwarm]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    """Some of the built-in examples as `tt data encode` leaves them: shards in both code columns, and checksums."""
    folder = tmp_path / "served"
    (folder / SHARDS).mkdir(parents=True)
    facts = []
    for shard, column in enumerate(("code", "code13", "code")):
        examples = builtin.examples("emoji")[shard * 200 : shard * 200 + 200]
        rows = [
            {"caption": one.caption, column: to_column(column, one.codes[None].astype(int), 1024)[0]}
            for one in examples
        ]
        facts.append(write_shard(folder / SHARDS / f"train-000-{shard:05d}.parquet", rows))
    (folder / SUMS).write_text(sums_of(facts))
    with ShardServer(folder) as server:
        yield server


@pytest.mark.promise("Peers train on shards streamed from a web server", also="tests/data/test_stream_http.py")
@pytest.mark.promise(
    "A killed peer goes on with the shards on its disk when their server is away", also="tests/data/test_shard_cache.py"
)
def test_peers_train_on_what_they_stream_and_need_no_server_to_go_on(
    start_swarm: StartSwarm, server: ShardServer
) -> None:
    run = tiny_run(data={"source": "files", "location": server.url})
    swarm = start_swarm(run)
    trainers = [swarm.start_trainer(name, batch_size=4, seed=seed) for seed, name in enumerate(("anna", "ben"))]

    def has_all(trainer: LocalPeer) -> bool:
        return bool(trainer.of(Contribution)) and len(list(trainer.home.rglob("*.shard"))) == 3

    assert swarm.wait(lambda: all(map(has_all, trainers)), WAIT)
    assert_agreed(trainers)
    asked = server.fetched()
    assert {entry.split()[0] for entry in asked} == {f"{SHARDS}/train-000-{shard:05d}.parquet" for shard in range(3)}

    trainers[0].worker.kill()
    trainers[0].worker.wait(WAIT)
    server.faults = {"": [(503, {"Retry-After": "3600"})] * 1000}
    again = swarm.start_trainer("anna", batch_size=4, seed=0)
    assert swarm.wait(lambda: bool(again.of(Contribution)), WAIT), again.worker.log.read_text()[-1500:]
    wait_for_step(swarm, last_step(again), "ben")
    assert server.fetched() == asked, "what it read before lies on its disk"
    told = swarm.wait(lambda: any(event.what == "data stream" for event in again.of(Trouble)), WAIT)
    assert told, "it says that nobody answers"
