"""A swarm of stock `hivemind.Optimizer` peers under one attack, beside tests/testbed/attacked.py.

hivemind has no passes: in the rows of strangers, a peer that nobody knows asks once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hivemind import DHT
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time
from testbed.attacked import Size, attacked_run, held_out_loss
from testbed.attacks.member import FALSE_DONOR
from testbed.attacks.table import OVERWRITTEN
from testbed.launched import Launched

from scripts.benchmarks.baselines import hivemind_attacked
from scripts.benchmarks.baselines.hivemind_attacked import FIRST_STEP
from scripts.benchmarks.baselines.hivemind_optimizer import RUN_ID
from tt_cli.run import RunConfig

WAIT, LIMIT = 300.0, 600.0
STUCK_SECONDS = 150.0  # without a step of anybody: hivemind gives a round up after 60
STATES = f"{RUN_ID}_state_averager"
DOWNLOADS, JOINS = "stranger downloads state", "stranger joins averaging"
BY_STRANGERS = (DOWNLOADS, JOINS, OVERWRITTEN)
ROWS = (*hivemind_attacked.ATTACKS, *BY_STRANGERS)


async def download(peer: str) -> int:
    """Bytes of its state that a peer hands to one whom it does not know. peer: its multiaddr."""
    p2p = await P2P.create(initial_peers=[peer], host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="client")
    received = 0
    try:
        peer_id = PeerID.from_base58(peer.rpartition("/p2p/")[2])
        stub = TrainingStateAverager.get_stub(p2p, peer_id, namespace=STATES)
        async with asyncio.timeout(30.0):
            async for message in await stub.rpc_download_state(averaging_pb2.DownloadRequest()):
                received += message.ByteSize()
    finally:
        await p2p.shutdown()
    return received


def overwrite(peers: list[Launched]) -> int:
    """On the DHT, say in each peer's place that it has no state to give, for longer than it says itself.

    Returns how many of these records were kept.
    """
    said = [peer.of("listening")[0] for peer in peers]
    dht = DHT(initial_peers=said[0]["addresses"], client_mode=True, start=True)
    try:
        return sum(
            dht.store(
                f"{STATES}.all_averagers",
                subkey=PeerID.from_base58(line["peer_id"]).to_bytes(),
                value=None,
                expiration_time=get_dht_time() + 2 * LIMIT,
            )
            for line in said
        )
    finally:
        dht.shutdown()


def joined(stranger: Launched) -> str:
    """Wait for a round of a peer that nobody knows, and return what hivemind said of it; "" if there was none."""

    def rounds() -> list[str]:
        return [line["words"] for line in stranger.of("message") if line["words"].startswith("Averaged gradients")]

    with contextlib.suppress(SystemExit):
        stranger.wait_for(rounds, STUCK_SECONDS, "a round")
    return next(iter(rounds()), "")


def run_attacked_baseline(size: Size, row: str, folder: Path) -> dict[str, Any]:
    """As `testbed.attacked.run_attacked`, with hivemind.Optimizer."""
    attackers = size.attackers if row in hivemind_attacked.ATTACKS else 0
    run = attacked_run(size, attackers)
    given = ["--honest", size.honest, "--attackers", attackers, "--steps", size.steps]
    with contextlib.ExitStack() as closing:
        peers: list[Launched] = []

        def start(seed: int, *more: object) -> Launched:
            name = f"peer-{len(peers)}"
            arguments = [*given, "--seed", seed, "--parameters", folder / f"{name}.npz", *more]
            arguments += ["--initial-peer", peers[0].of("listening")[0]["addresses"][0]] if peers else []
            peer = Launched(name, hivemind_attacked.__name__, arguments, folder / f"{name}.log")
            peers.append(closing.enter_context(peer))
            if len(peers) == 1:
                peer.wait_for(partial(peer.of, "listening"), WAIT, "its address")
            return peer

        honest = [start(number) for number in range(size.honest)]
        for number in range(attackers):
            start(100 + number, "--attack", row)
        for peer in peers:
            peer.wait_for(partial(peer.of, "ready"), WAIT, "its start")
        for peer in peers:
            peer.go()
        found: dict[str, Any] = {"strangers": {}, "noticed": {}}
        if row in BY_STRANGERS:
            come_to(FIRST_STEP, honest[0])
        if row == DOWNLOADS:
            got = asyncio.run(download(honest[0].of("listening")[0]["addresses"][0]))
            found["strangers"] = tried("state", 1, int(got > 0), f"{got} bytes")
        elif row == JOINS:
            stranger = start(100)
            stranger.go()
            words = joined(stranger)
            found["strangers"] = tried("round", 1, int(bool(words)), words)
        elif row == OVERWRITTEN:
            kept = overwrite(honest)
            found["strangers"] = tried("store", len(honest), kept, f"{kept} records were kept")
        late = []
        if row in (FALSE_DONOR, OVERWRITTEN):
            come_to(size.steps // 3, honest[0])
            late = [start(50)]
            late[0].go()
        found |= facts(run, honest, finishers(honest), folder)
        for newcomer in late:
            loads = newcomer.of("loaded")
            found["newcomer"] = {"taken": len(loads), "false": sum(line["false"] for line in loads)}
        return found


def come_to(step: int, peer: Launched) -> None:
    """Wait for it."""
    peer.wait_for(lambda: any(line["epoch"] >= step for line in peer.of("step")), LIMIT, f"step {step}")


def tried(door: str, tries: int, got: int, words: str) -> dict[str, Any]:
    """As `testbed.attacked.tries` tells it. got: how often it came in."""
    return {door: {"tries": tries, "refused": tries - got, "words": "", "got": words if got else ""}}


def finishers(honest: list[Launched]) -> list[Launched]:
    """Who comes to the last step in time, and while anybody makes steps. Who does not is a result too."""
    deadline = time.monotonic() + LIMIT
    made, since = 0, time.monotonic()

    def over(peer: Launched) -> bool:
        nonlocal made, since
        if (now := sum(len(one.of("step")) for one in honest)) > made:
            made, since = now, time.monotonic()
        return bool(peer.of("done")) or time.monotonic() > since + STUCK_SECONDS

    for peer in honest:
        with contextlib.suppress(SystemExit):
            peer.wait_for(partial(over, peer), max(1.0, deadline - time.monotonic()), "the last step")
    return [peer for peer in honest if peer.of("done")]


def facts(run: RunConfig, honest: list[Launched], finished: list[Launched], folder: Path) -> dict[str, Any]:
    """What came of it."""
    times: dict[int, float] = {}
    for peer in honest:
        for line in peer.of("step"):
            times[line["epoch"]] = min(line["at"], times.get(line["epoch"], math.inf))
    gaps = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    if not finished or not gaps:
        return {"problem": f"{len(finished)} of {len(honest)} finished; step {max(times, default=0)} was the last"}
    with np.load(folder / f"{finished[0].name}.npz") as saved:
        loss = held_out_loss(run, {name: torch.from_numpy(saved[name]) for name in saved.files})
    words = [line["words"] for peer in honest for line in peer.of("message")]
    return {
        "loss": loss if math.isfinite(loss) else None,
        "finished": len(finished),
        "last_step": max(times),
        "rounds_lost": max(
            sum("failed" in line["words"] or "local gradients" in line["words"] for line in peer.of("message"))
            for peer in honest
        ),
        "incomplete_rounds": sum("received" in line for line in words),
        "seconds_per_step": statistics.median(gaps.values()),
        "longest_step_s": max(gaps.values()),
        "longest_step": max(gaps, key=lambda step: gaps[step]),
        "seconds": max(times.values()) - min(times.values()),
    }
