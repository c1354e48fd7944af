"""No process asks CUDA anything before it forks, and no forked one ever: either ends in a driver's error or hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testbed.spawned import python

from tt_cli.run import load_run

SMALL = {
    "model.dim": 32,
    "model.depth": 1,
    "model.heads": 1,
    "model.dim_head": 32,
    "schedule.total_steps": 2,
    "swarm.target_batch_size": 16,
}


@pytest.mark.parametrize("compression", ["linear8", "blockwise8"])
def test_cuda_is_asked_after_the_last_fork_and_by_the_trainer_alone(compression: str, tmp_path: Path) -> None:
    """A whole run of one peer: its codec tried, its DHT node and averager forked, and rounds made."""
    run = load_run("emoji-demo").replaced({**SMALL, "swarm.compression": compression})
    answer = python("from testbed.cuda_watch import main; main()", env={"TT_HOME": str(tmp_path)}, stdin=run.to_toml())
    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["ended"] == ["the run is done"]
    whats = [what for _, what, _ in found["asked"]]
    assert whats.count("fork") >= 2 and "is_available" in whats
    last = len(whats) - whats[::-1].index("fork")
    assert [where for _, what, where in found["asked"][:last] if what != "fork"] == []
    assert {process for process, what, _ in found["asked"] if what != "fork"} == {found["process"]}
