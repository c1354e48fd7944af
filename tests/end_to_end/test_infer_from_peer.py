"""`tt infer --peer`: draw with the state that a running swarm holds, without being part of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from end_to_end.conftest import WAIT, tiny_run, wait_for_step
from PIL import Image

from tt_cli.checkpoint.checkpoint_files import load
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Saved, Snapshot, Step, Synchronised
from tt_cli.supervisor.local_swarm import LocalSwarm

Tt = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.promise("`tt infer --peer` draws with a running swarm's state, bit for bit the checkpoint's")
@pytest.mark.promise("The aux peer alone hands the state to those who return", also="tests/auxiliary/test_keeper.py")
@pytest.mark.promise(
    "`tt infer --peer` says in one line that no peer has a state, that the run is another one, or that nobody answers"
)
def test_an_aux_peer_hands_its_state_to_who_draws_and_to_who_returns(
    start_swarm: Callable[[RunConfig], LocalSwarm], tt: Tt, tmp_path: Path
) -> None:
    run = tiny_run()
    (tmp_path / "tiny.toml").write_text(run.to_toml())
    swarm = start_swarm(run)
    aux, address = swarm.members["aux"], swarm.addresses[0]
    assert swarm.wait(lambda: any(told.swarm["peers"] for told in aux.of(Snapshot)), WAIT), "its own record is there"

    early = tt("infer", "owl", "--run", "tiny.toml", "--peer", address)
    assert early.returncode == 1
    assert early.stderr.startswith(f"tt: none of 1 peers can hand over a state of run {run.identity}: wait for")
    assert len(early.stderr.splitlines()) == 1

    swarm.start_trainer("anna", batch_size=4, seed=0)
    wait_for_step(swarm, 3, "anna")
    assert swarm.wait(lambda: bool(aux.of(Saved)), WAIT)
    drawn_while_training = tt("infer", "owl", "--run", "tiny.toml", "--peer", address, "--candidates", "1")
    assert drawn_while_training.returncode == 0, drawn_while_training.stderr
    assert "(handed over by the swarm)" in drawn_while_training.stdout
    swarm.leave("anna")

    arguments = ("infer", "owl", "--candidates", "2", "--seed", "5", "--json")
    answer = tt(*arguments, "--run", "tiny.toml", "--peer", address, "--out", "swarm")
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert swarm.wait(lambda: any(event.epoch == told["step"] for event in aux.of(Saved)), WAIT)
    saved = next(event for event in reversed(aux.of(Saved)) if event.epoch == told["step"])
    size = (
        sum(tensor.nbytes for tensor in load(Path(saved.path)).parameters.values()) / 1e6
    )  # the optimizer stays there
    assert f"Taking the state of {run.identity}: {size:.1f} of {size:.1f} MB" in answer.stderr
    assert told["run"] == run.identity == load(Path(saved.path)).identity
    assert told["checkpoint"].startswith("peer ") and address.endswith(told["checkpoint"].removeprefix("peer "))
    from_file = json.loads(tt(*arguments, "--checkpoint", saved.path, "--out", "file").stdout)
    for one, other in zip(told["drawings"], from_file["drawings"], strict=True):
        assert Image.open(tmp_path / one["path"]).tobytes() == Image.open(tmp_path / other["path"]).tobytes()

    other_run = tt("infer", "owl", "--run", "emoji", "--peer", address)
    assert other_run.returncode == 1
    assert "check that the address and --run belong together" in other_run.stderr

    ben = swarm.start_trainer("ben", batch_size=4, seed=1)
    assert swarm.wait(lambda: bool(ben.of(Step)), WAIT)
    assert (ben.of(Synchronised)[0].epoch, ben.of(Step)[0].epoch) == (told["step"], told["step"] + 1)
    swarm.leave("ben")
    aux.worker.kill()
    aux.worker.wait(WAIT)
    gone = tt("infer", "owl", "--run", "tiny.toml", "--peer", address)
    assert gone.returncode == 1
    assert f"no peer of run {run.identity} answered at {address}" in gone.stderr
    for answered in (other_run, gone):
        assert len(answered.stderr.splitlines()) == 1, answered.stderr
