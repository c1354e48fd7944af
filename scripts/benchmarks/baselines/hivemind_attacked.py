#!/usr/bin/env python
"""One peer of stock `hivemind.Optimizer` on the emoji run's small model, honest or an attacker.

The peer is that of baselines/hivemind_optimizer.py, with real gradients: the model and the data of the rows of
scripts/bench attacks, one micro-batch a second. An attacker changes hivemind's own classes in its own process, from
its start on; what is wrong with its gradients and its state, from step 3 on. It prints the lines that the other
baseline prints, and "loaded" (whether the state is a false one) when it takes a state over. An honest peer whose
parameters are not finite any more is at its end: no step would mend them.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import TensorPartReducer
from hivemind.compression import serialize_torch_tensor
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.proto import averaging_pb2
from testbed.attacked import Size, attacked_run
from testbed.attacks.member import FALSE_DONOR
from testbed.launched import Commands, tell

from scripts.benchmarks.baselines.hivemind_optimizer import Messages, make_optimizer, until_the_end
from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.run import RunConfig
from tt_cli.supervisor.reporter import die_with_parent, raise_file_limit

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
ATTACKS = (*CHANGES, *FACTORS, "random noise", *LIES, *STREAMS, "lying reducer", FALSE_DONOR)
FALSE = 1.0  # every parameter of a false state
AHEAD = 10**9  # of a false donor, before all others


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
    elif attack == FALSE_DONOR:
        hand_out_false_states()


def hand_out_false_states() -> None:
    """And be the donor whom all others take first."""
    honest, priority = TrainingStateAverager.get_current_state, DecentralizedAverager.state_sharing_priority

    def state(averager: TrainingStateAverager) -> tuple[Any, list[torch.Tensor], Any]:
        metadata, tensors, infos = honest(averager)
        if averager.local_epoch + 1 >= FIRST_STEP:
            count = len(averager.main_parameters)
            tensors = [torch.full_like(tensor, FALSE) for tensor in tensors[:count]] + tensors[count:]
        return metadata, tensors, infos

    def prefer(averager: DecentralizedAverager, value: float) -> None:
        priority.fset(averager, value + AHEAD if value + 1 >= FIRST_STEP else value)

    TrainingStateAverager.get_current_state = state
    DecentralizedAverager.state_sharing_priority = priority.setter(prefer)


def tell_loads() -> None:
    """Have this peer say when it took a state over."""
    load = TrainingStateAverager.load_state_from_peers

    def loading(averager: TrainingStateAverager, **options: Any) -> None:
        epoch = averager.local_epoch
        load(averager, **options)
        if averager.local_epoch > epoch:
            tell("loaded", false=all(bool((tensor == FALSE).all()) for tensor in averager.main_parameters))

    TrainingStateAverager.load_state_from_peers = loading


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
        (factor * model.loss(**batch.tensors).total).backward()
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


def main() -> None:
    """Run one peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, required=True)
    parser.add_argument("--attackers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--parameters", required=True, help="file that receives the parameters after --steps")
    parser.add_argument("--attack", default="", choices=("", *ATTACKS))
    parser.add_argument("--initial-peer", action="append", default=[])
    args = parser.parse_args()
    size = Size(args.honest, args.attackers, args.steps)
    run = attacked_run(size, args.attackers)
    args.micro_batch, args.target_batch_size = size.micro_batch, run.swarm.target_batch_size
    args.matchmaking_time, args.averaging_timeout, args.allreduce_timeout = 5.0, 60.0, 30.0
    args.next_chunk_timeout, args.wait_for_gradients, args.client_mode = 8.0, True, False

    die_with_parent()
    raise_file_limit()
    torch.set_num_threads(1)
    commands = Commands()
    if args.attack:
        spoil(args.attack)
    tell_loads()
    dht = DHT(initial_peers=args.initial_peer or None, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    tell("listening", peer_id=str(dht.peer_id), addresses=[str(address) for address in dht.get_visible_maddrs()])
    until_the_end(partial(train, args, run, dht, commands))


if __name__ == "__main__":
    main()
