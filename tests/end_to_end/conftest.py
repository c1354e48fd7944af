"""A tiny run and a swarm of real processes on loopback, ended with the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from testbed.fork_server import fork_server
from testbed.namespaces import Network

from tt_cli.run import DalleRun, RunConfig, load_run
from tt_cli.supervisor.events import Listening, Phase, Round, Step, Synchronised
from tt_cli.supervisor.local_swarm import AUX_MODULE, LocalPeer, LocalSwarm
from tt_cli.supervisor.worker_process import SHARING

WAIT = 150.0  # seconds; an upper bound for a busy machine, never a measurement
TEST_PEER = "testbed.peer"
PACE = 0.1  # seconds of a micro-batch, as if each peer had a device: a busy machine keeps this too

PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
NOBODY = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER_ID}"  # the discard port: nothing listens there


def tiny_run(**changes: dict[str, object]) -> RunConfig:
    """The built-in run with a model of some thousand parameters and short rounds; changes: part → its keys."""
    data = load_run("emoji").model_dump(mode="json")
    data["run"]["name"] = "tiny"
    data["model"].update(dim=32, depth=1, heads=2, dim_head=16)
    data["optimizer"].update(min_8bit_size=4096)
    data["schedule"].update(total_steps=1000, peak_lr=5e-3)
    data["swarm"].update(
        target_batch_size=32,
        large_tensor=4096,
        matchmaking_time=2.0,
        averaging_timeout=30.0,
        next_chunk_timeout=8.0,
        statistics_expiration=8.0,
    )
    for part, values in changes.items():
        data[part].update(values)
    return DalleRun.model_validate_json(json.dumps(data))


class PacedSwarm(LocalSwarm):
    """A swarm whose trainers compute at a pace, and wait for the others when they have a whole step's samples."""

    def start_trainer(self, name: str, **options: Any) -> LocalPeer:
        return super().start_trainer(name, **{"pace": PACE, "patient": True, **options})


def local_swarm(run: RunConfig, folder: Path) -> LocalSwarm:
    """A swarm of forks of trainers that leave each other the machine, as tests/testbed/peer.py says."""
    return PacedSwarm(run.to_toml(), folder, trainer_module=TEST_PEER, launch=fork_server().launch)


@pytest.fixture
def tt(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As tests/conftest.py's, in forks that need not import what they use."""

    def run(*arguments: str, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tt_cli.cli.main", *arguments]
        options = {"env": {**SHARING, **os.environ, **env}, "cwd": tmp_path, "start_new_session": True, "pass_fds": ()}
        with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
            launched = fork_server().launch(command, stdin=subprocess.PIPE, stdout=output, stderr=errors, **options)
            launched.stdin.close()
            code = launched.wait(2 * WAIT)
            told = [file.seek(0) or file.read() for file in (output, errors)]
        return subprocess.CompletedProcess(command, code, *told)

    return run


@pytest.fixture
def start_swarm(tmp_path: Path) -> Iterator[Callable[[RunConfig], LocalSwarm]]:
    """start_swarm(run): a swarm with an auxiliary peer already up."""
    swarms: list[LocalSwarm] = []

    def start(run: RunConfig) -> LocalSwarm:
        swarm = local_swarm(run, tmp_path / f"swarm-{len(swarms)}")
        swarms.append(swarm)
        swarm.start_aux()
        return swarm

    yield start
    for swarm in swarms:
        swarm.__exit__(None, None, None)


def start_together(swarm: LocalSwarm, trainers: Mapping[str, dict[str, Any]]) -> list[LocalPeer]:
    """Trainers by name, with options. None computes before all are there, so that all are in the first steps."""
    gate = swarm.folder / "gate"
    members = [swarm.start_trainer(name, gate=str(gate), **options) for name, options in trainers.items()]
    there = swarm.wait(lambda: all(any(e.phase == "training" for e in m.of(Phase)) for m in members), WAIT)
    assert there, {member.name: member.of(Phase)[-1:] for member in members}
    gate.touch()
    return members


def joined_late_and_killed(swarm: LocalSwarm, batch_size: int) -> LocalPeer:
    """The first of three trainers who agree, after the third joined late and the second was killed."""
    options = {"batch_size": batch_size}
    anna, ben = (swarm.start_trainer(name, seed=seed, **options) for seed, name in enumerate(("anna", "ben")))
    wait_for_step(swarm, 2, "anna", "ben")
    late = swarm.start_trainer("cleo", seed=2, **options)
    assert swarm.wait(lambda: any(len(event.members) == 3 for event in committed(late)), WAIT), late.of(Round)
    assert late.of(Synchronised)[0].source not in ("", "seed")

    os.kill(ben.worker.pid, signal.SIGKILL)
    wait_for_step(swarm, last_step(anna) + 2, "anna", "cleo")
    assert_agreed([anna, ben, late, swarm.members["aux"]])
    return anna


def start_on_hosts(network: Network, swarm: LocalSwarm, *names: str) -> list[LocalPeer]:
    """Trainers on hosts of their own, joined through an aux peer beside the first, when they made a step together."""
    first = network.hosts[0]
    with first.entered():
        aux = swarm.start("aux", AUX_MODULE, {"port": 0, "initial_peers": [], "host": first.address})
    assert swarm.wait(lambda: bool(aux.of(Listening)), WAIT), aux.worker.log.read_text()
    swarm.addresses = [address for address in aux.of(Listening)[0].addresses if first.address in address]
    for seed, (name, host) in enumerate(zip(names, network.hosts, strict=True)):
        with host.entered():
            swarm.start_trainer(name, host=host.address, batch_size=4, seed=seed)
    trainers = [swarm.members[name] for name in names]
    together = swarm.wait(lambda: all(any(len(e.members) == len(names) for e in committed(m)) for m in trainers), WAIT)
    assert together, {member.name: member.of(Round) for member in trainers}
    return trainers


def last_step(member: LocalPeer) -> int:
    """The newest step that a member has made or taken over."""
    return max((event.epoch for event in (*member.of(Step), *member.of(Synchronised))), default=0)


def wait_for_step(swarm: LocalSwarm, step: int, *names: str) -> None:
    """Wait until each of these members has made `step`; fail with their logs when they do not."""
    members = [swarm.members[name] for name in names]
    if swarm.wait(lambda: all(last_step(member) >= step for member in members), WAIT):
        return
    phases = {m.name: m.of(Phase)[-5:] for m in swarm.members.values()}
    tails = "\n".join(f"--- {m.name} at {last_step(m)}\n{m.worker.log.read_text()[-1500:]}" for m in members)
    pytest.fail(f"step {step} was not made within {WAIT:.0f} s\n{tails}\n{phases}")


def digests(members: list[LocalPeer]) -> dict[int, set[str]]:
    """Step → the different digests that these members had after it."""
    found: dict[int, set[str]] = {}
    for member in members:
        for event in (*member.of(Step), *member.of(Synchronised)):
            found.setdefault(event.epoch, set()).add(event.digest)
    return found


def assert_agreed(members: list[LocalPeer], first: int = 0) -> None:
    """All members that had made or taken over a step, from the `first` on, had the same state after it."""
    unlike = {step: found for step, found in digests(members).items() if len(found) > 1 and step >= first}
    stories = "\n".join(f"{m.name}: {[(r.epoch, r.outcome, r.words) for r in m.of(Round)]}" for m in members)
    assert not unlike, f"{unlike}\n{stories}"


def committed(member: LocalPeer) -> list[Round]:
    """A member's rounds that ended with a common step."""
    return [event for event in member.of(Round) if event.outcome == "committed"]


def one_line(answer: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line that a command said on stderr as it ended with `code`."""
    assert "Traceback" not in answer.stdout + answer.stderr
    assert answer.stderr.startswith("tt: ") and answer.stderr.count("\n") == 1, answer.stderr
    assert answer.returncode == code, answer.stderr
    return answer.stderr


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
