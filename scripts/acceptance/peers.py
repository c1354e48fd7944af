"""Parts of the acceptance that real peers show: a swarm on one GPU, and what goes wrong there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.harness import printed_by
from tt_cli.errors import TTError
from tt_cli.run import load_run
from tt_cli.supervisor.events import Choice, Failure, Log, Round, Saved, Step
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm
from tt_cli.supervisor.processes import family_of

WAIT = 400.0
STEPS = 5
TEST_PEER = "testbed.peer"
LEFT_BY_HOG = 3 << 30  # bytes of the card
HOG = (
    "import sys, torch\n"
    "free = torch.cuda.mem_get_info()[0] - int(sys.argv[1])\n"
    "taken = torch.empty(max(1, free), dtype=torch.uint8, device='cuda')\n"
    "print('taken', flush=True)\n"
    "sys.stdin.read()\n"
)


def _committed(member: LocalPeer) -> int:
    return sum(event.outcome in ("committed", "alone") for event in member.of(Round))


def _need(swarm: LocalSwarm, holds: Any, *members: LocalPeer) -> None:
    """Wait for it. Raises TTError with what the peers said last."""
    if not swarm.wait(lambda: holds() or not all(member.running for member in members), WAIT) or not holds():
        failures = [event.message for member in members for event in member.of(Failure)]
        raise TTError("; ".join(failures) or "\n".join(m.worker.log.read_text()[-1500:] for m in members))


def contexts(pid: int) -> int:
    """Count the processes of a family that have a GPU's device open, as each with a context of CUDA or ROCm has."""

    def opened(process: int) -> bool:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
        except OSError:
            return False
        return any(link.startswith(("/dev/nvidia", "/dev/kfd")) for link in links)

    return sum(opened(process) for process in family_of(pid))


def swarm(device: torch.device) -> dict[str, Any]:
    """Two peers make steps together; their digests, and who of their processes has a context."""
    with tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as scratch:
        run = load_run("emoji-demo").replaced({"swarm.target_batch_size": 64})
        with LocalSwarm(run.to_toml(), Path(scratch)) as together:
            together.start_aux()
            members = [
                together.start_trainer(name, device=str(device), batch_size=16, seed=seed)
                for seed, name in enumerate(("anna", "ben"))
            ]
            _need(together, lambda: min(map(_committed, members)) >= STEPS, *members)
            most = [contexts(member.worker.pid) for member in members]
            together.leave("anna", "ben")
    digests: dict[int, set[str]] = {}
    for member in members:
        for event in member.of(Step):
            digests.setdefault(event.epoch, set()).add(event.digest)
    return {
        "steps": min(map(_committed, members)),
        "unlike_digests": sum(len(found) > 1 for found in digests.values()),
        "contexts_a_peer": max(most) if device.type == "cuda" else None,
        "choices": {event.what: f"{event.value}: {event.reason}" for event in members[0].of(Choice)},
    }


def faults(device: torch.device) -> dict[str, Any]:
    """A neighbour that takes the card's memory, an error of CUDA amid training, a compiler that is not there."""
    found: dict[str, Any] = {}
    gpu = device.type == "cuda"
    run = load_run("emoji-demo").replaced({"swarm.target_batch_size": 64})
    with tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as scratch:
        hog = None
        if gpu:
            command = [sys.executable, "-c", HOG, str(LEFT_BY_HOG)]
            hog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if hog.stdout is None or hog.stdout.readline() != "taken\n":
                raise TTError("the neighbour could not take the card's memory")
        try:
            with LocalSwarm(run.to_toml(), Path(scratch) / "hog") as alone:
                peer = alone.start_trainer("anna", device=str(device), seed=0)
                _need(alone, lambda: _committed(peer) >= 3, peer)
                found["steps_beside_hog"] = _committed(peer)
                found["micro_batch_beside_hog"] = next(e.value for e in peer.of(Choice) if e.what == "micro-batch")
        finally:
            if hog is not None:
                hog.kill()
                hog.wait()
        with LocalSwarm(run.to_toml(), Path(scratch) / "error", trainer_module=TEST_PEER) as alone:
            options = {"device": str(device), "batch_size": 16, "faults": [(3, "device error")], "patient": False}
            peer = alone.start_trainer("anna", seed=0, **options)
            alone.wait(lambda: not peer.running, WAIT)
            found["error_backups"] = len(peer.of(Saved))
            found["error_said"] = [event.message for event in peer.of(Failure)] + [
                event.message for event in peer.of(Log) if event.level == "error"
            ]
    if gpu:
        found |= printed_by("scripts.acceptance.no_compiler", str(device))
    return found
