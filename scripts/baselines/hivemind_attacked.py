#!/usr/bin/env python
"""One peer of stock `hivemind.Optimizer` on the emoji run's small model, honest or an attacker, and a swarm of them.

The peer is that of scripts/baselines/hivemind_optimizer.py, with real gradients: the model and the data of the rows of
scripts/bench_attacks.py, one micro-batch a second. An attacker changes hivemind's own classes in its own process, from
its start on; what is wrong with its gradients, from step 3 on. It prints the lines that the other baseline prints. An
honest peer whose parameters are not finite any more is at its end: no step would mend them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hivemind import DHT
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import TensorPartReducer
from hivemind.compression import serialize_torch_tensor
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2

from scripts.baselines.hivemind_optimizer import Messages, make_optimizer
from scripts.lab.attacked import Size, attacked_run, held_out_loss
from scripts.lab.launched import Commands, Launched, tell
from tt_cli.data import ExampleStream, load_tokenizer
from tt_cli.model import Dalle, DalleConfig
from tt_cli.run import RunConfig
from tt_cli.supervisor.worker import die_with_parent, raise_file_limit

MODULE = "scripts.baselines.hivemind_attacked"
WAIT, LIMIT = 300.0, 600.0
STUCK_SECONDS = 150.0  # without a step of anybody: hivemind gives a round up after 60
FIRST_STEP = 3
MICRO_BATCH_SECONDS = 1.0
ENDLESS = 10**5
NOISE = 10.0
Change = Callable[[averaging_pb2.AveragingData, torch.Size], None]


def weighs(weight: float) -> Change:
    """Claims so many samples."""

    def change(message: averaging_pb2.AveragingData, shape: torch.Size) -> None:
        message.weight = weight

    return change


def filled(value: float, weight: float | None = None) -> Change:
    """Every number is this one."""

    def change(message: averaging_pb2.AveragingData, shape: torch.Size) -> None:
        message.tensor_part.CopyFrom(serialize_torch_tensor(torch.full(shape, value)))
        if weight is not None:
            message.weight = weight

    return change


def shaped(shape_of: Callable[[torch.Size], list[int]]) -> Change:
    """A tensor of another shape."""

    def change(message: averaging_pb2.AveragingData, shape: torch.Size) -> None:
        message.tensor_part.CopyFrom(serialize_torch_tensor(torch.ones(shape_of(shape))))

    return change


def declared_huge(message: averaging_pb2.AveragingData, shape: torch.Size) -> None:
    """2^40 elements in a few bytes."""
    del message.tensor_part.size[:]
    message.tensor_part.size.extend([2**20, 2**20])


CHANGES: dict[str, Change] = {
    "weight 1e9": weighs(1e9),
    "weight negative": weighs(-1e3),
    "weight NaN": weighs(math.nan),
    "NaN part": filled(math.nan),
    "Inf part": filled(math.inf),
    "NaN at weight 0": filled(math.nan, weight=0.0),
    "1e30": filled(1e30),
    "half part": shaped(lambda shape: [shape.numel() // 2]),
    "shape [1]": shaped(lambda shape: [1]),
    "huge declared size": declared_huge,
}
FACTORS = {"sign flip x1": -1.0, "sign flip x100": -100.0}
LIES: dict[str, dict[str, Any]] = {
    "epoch 10^9": {"epoch": 10**9},
    "samples 10^12": {"samples_accumulated": 10**12},
    "speed inf": {"samples_per_second": math.inf},
}
STREAMS = ("endless stream", "slow-loris peer")
STRANGER = "stranger downloads state"
ROWS = (*CHANGES, *FACTORS, "random noise", *LIES, *STREAMS, "lying reducer", STRANGER)


def spoil(attack: str) -> None:
    """Change hivemind in this process, before its averagers are forked."""
    honest = AllReduceRunner._generate_input_for_peer

    async def generate(runner: AllReduceRunner, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        parts = runner.tensor_part_container._input_parts_by_peer[peer_index]
        shapes = [part.shape for part, _ in parts]
        message, place = None, 0
        async for message in honest(runner, peer_index):
            if attack in CHANGES:
                CHANGES[attack](message, shapes[place])
            place += 1
            yield message
            if attack == "slow-loris peer":
                await asyncio.sleep(0.8 * (runner.sender_timeout or 8.0))
        for _ in range(ENDLESS if attack == "endless stream" else 0):
            yield message

    async def lie(reducer: TensorPartReducer, *args: Any, **kwargs: Any) -> torch.Tensor:
        return -(await accumulate(reducer, *args, **kwargs))

    accumulate = TensorPartReducer.accumulate_part
    if attack in (*CHANGES, *STREAMS):
        AllReduceRunner._generate_input_for_peer = generate
    elif attack == "lying reducer":
        TensorPartReducer.accumulate_part = lie
    elif attack in LIES:
        LocalTrainingProgress.dict = lambda progress, **_: {**progress.__dict__, **LIES[attack]}


def train(args: argparse.Namespace, run: RunConfig, dht: DHT, commands: Commands) -> None:
    """Micro-batches until told to leave."""
    import logging

    for name in ("optim.optimizer", "optim.state_averager", "averaging.averager", "averaging.partition"):
        logging.getLogger(f"hivemind.{name}").addHandler(Messages())
    model = Dalle(DalleConfig.from_run(run))
    model.initialise(run.run.seed)
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(args, run, dht, parameters)
    random = torch.Generator().manual_seed(args.seed)
    tell("ready")
    commands.go.wait()
    epoch, stream = 0, ExampleStream(run, load_tokenizer(run), args.seed)
    for batch in stream.batches(args.micro_batch):
        due = time.monotonic() + MICRO_BATCH_SECONDS
        factor = FACTORS.get(args.attack, 1.0) if epoch + 1 >= FIRST_STEP else 1.0
        (factor * model.loss(batch.text, batch.image).total).backward()
        if args.attack == "random noise" and epoch + 1 >= FIRST_STEP:
            for parameter in parameters.values():
                spread = NOISE * float(parameter.grad.square().mean().sqrt())
                parameter.grad.add_(torch.randn(parameter.shape, generator=random), alpha=spread)
        commands.ended.wait(max(0.0, due - time.monotonic()))
        if commands.ended.is_set():
            return
        optimizer.step(batch_size=args.micro_batch)
        lost = False
        if optimizer.local_epoch != epoch:
            epoch = optimizer.local_epoch
            tell("step", epoch=epoch)
            lost = not all(bool(torch.isfinite(tensor).all()) for tensor in parameters.values())
        if epoch >= args.steps or (lost and not args.attack):
            optimizer.state_averager.step(wait_for_delayed_updates=True)
            np.savez(args.parameters, **{name: tensor.detach().numpy() for name, tensor in parameters.items()})
            tell("done", epoch=epoch)
            commands.ended.wait()
            return


async def download(peer: str) -> int:
    """Bytes of its state that a peer hands to one whom it does not know. peer: its multiaddr."""
    p2p = await P2P.create(initial_peers=[peer], host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="client")
    received = 0
    try:
        peer_id = PeerID.from_base58(peer.rpartition("/p2p/")[2])
        stub = TrainingStateAverager.get_stub(p2p, peer_id, namespace="attacked_state_averager")
        async with asyncio.timeout(30.0):
            async for message in await stub.rpc_download_state(averaging_pb2.DownloadRequest()):
                received += message.ByteSize()
    finally:
        await p2p.shutdown()
    return received


def run_attacked_baseline(size: Size, row: str, folder: Path) -> dict[str, Any]:
    """As `scripts.lab.attacked.run_attacked`, with hivemind.Optimizer."""
    attackers = size.attackers if row in ROWS and row != STRANGER else 0
    run, strangers = attacked_run(size, attackers), {}
    given: list[object] = ["--honest", size.honest, "--attackers", attackers, "--steps", size.steps]
    with contextlib.ExitStack() as closing:
        peers: list[Launched] = []
        for number in range(size.honest + attackers):
            bad = number >= size.honest
            arguments = [*given, "--seed", number - size.honest + 100 if bad else number]
            arguments += ["--parameters", folder / f"{number}.npz"]
            arguments += ["--attack", row] if bad else []
            arguments += ["--initial-peer", peers[0].of("listening")[0]["addresses"][0]] if peers else []
            peer = Launched(f"peer-{number}", MODULE, arguments, folder / f"{number}.log")
            peers.append(closing.enter_context(peer))
            if number == 0:
                peer.wait_for(partial(peer.of, "listening"), WAIT, "its address")
        for peer in peers:
            peer.wait_for(partial(peer.of, "ready"), WAIT, "its start")
        for peer in peers:
            peer.go()
        honest = peers[: size.honest]
        if row == STRANGER:
            honest[0].wait_for(lambda: len(honest[0].of("step")) >= FIRST_STEP, LIMIT, "its first steps")
            got = asyncio.run(download(honest[0].of("listening")[0]["addresses"][0]))
            strangers = {"state": {"tries": 1, "refused": int(not got), "words": "", "got": f"{got} bytes"}}
        finished = finishers(honest)
        return {**facts(run, honest, finished, folder, peers), "strangers": strangers, "noticed": {}}


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


def facts(
    run: RunConfig, honest: list[Launched], finished: list[Launched], folder: Path, peers: list[Launched]
) -> dict[str, Any]:
    """What came of it."""
    times: dict[int, float] = {}
    for peer in honest:
        for line in peer.of("step"):
            times[line["epoch"]] = min(line["at"], times.get(line["epoch"], math.inf))
    gaps = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    if not finished or not gaps:
        return {"problem": f"{len(finished)} of {len(honest)} finished; step {max(times, default=0)} was the last"}
    with np.load(folder / f"{peers.index(finished[0])}.npz") as saved:
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


def main() -> None:
    """Run one peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, required=True)
    parser.add_argument("--attackers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parameters", required=True, help="file that receives the parameters after --steps")
    parser.add_argument("--attack", default="", choices=("", *ROWS))
    parser.add_argument("--initial-peer", action="append", default=[])
    args = parser.parse_args()
    size = Size(args.honest, args.attackers, args.steps)
    run = attacked_run(size, args.attackers)
    args.run_id, args.micro_batch, args.target_batch_size = "attacked", size.micro_batch, run.swarm.target_batch_size
    args.matchmaking_time, args.averaging_timeout, args.allreduce_timeout = 5.0, 60.0, 30.0
    args.next_chunk_timeout, args.codec, args.state_codec = 8.0, "blockwise8", None
    args.wait_for_gradients, args.client_mode = True, False

    die_with_parent()
    raise_file_limit()
    torch.set_num_threads(1)
    commands = Commands()
    if args.attack:
        spoil(args.attack)
    dht = DHT(initial_peers=args.initial_peer or None, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    tell("listening", peer_id=str(dht.peer_id), addresses=[str(address) for address in dht.get_visible_maddrs()])
    code = 0
    try:
        train(args, run, dht, commands)
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)  # its shutdown may wait half a minute; what it forked ends with it


if __name__ == "__main__":
    sys.exit(main())
