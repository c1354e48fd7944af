"""Measure what 8 bits cost in steps: the emoji-demo run to a fixed loss, by a swarm's arithmetic and in fp32.

- `swarm`: four members with 44 %, 31 %, 19 % and 6 % of the target batch. Each one's mean gradient is encoded with the
  run's codec and sent to the reducers, which average by samples, encode the average once and send it to all; what that
  decodes to goes through 8-bit LAMB. It is all done by the code that peers run, in one process and without a network.
- `fp32`: the same members' gradients averaged by samples in fp32, and LAMB with fp32 moments.
- Both see the same examples in the same order from the same first weights. A seed sets both.
- The loss of a step is the mean of its examples' before the step; it is smoothed by the mean of the last five steps.
  The steps to reach a loss are counted with a fraction, by a straight line between the two steps around it.
- `--parts` also runs `codec` (8-bit averages, fp32 moments) and `lamb` (fp32 averages, 8-bit moments).
- `--swarm` also has the first members as real peers, in processes of their own, take some steps of one micro-batch
  each, and computes the same steps here: digests of parameters and optimizer state tell whether both came to the same
  bytes. `swarm_samples` has the samples of the committed rounds: a step that some made without the others, which needs
  more than half of the peers, is not what is computed here.

Two processes of one thread each.

    scripts/bench convergence --parts --seeds 5
    scripts/bench convergence --quick --swarm --peers 4

JSON keys: convergence_steps_ratio (steps of `swarm` over those of `fp32`, the mean over the seeds), _min and _max;
steps and ratios by arm and seed; ratios_on_the_way at higher losses; with --swarm swarm_digests_equal and others.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from testbed.disturbance import need

from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.optim.kernels import warm_up
from tt_cli.peer.device import Device
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import RunConfig, load_run
from tt_cli.supervisor.events import Listening, Round, Step
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm
from tt_cli.swarm.allreduce.average_buffer import AverageBuffer
from tt_cli.swarm.allreduce.clipping.centered_clip import Aggregation, spread
from tt_cli.swarm.allreduce.reducer import Reducer
from tt_cli.swarm.compression.accumulator import Accumulator
from tt_cli.swarm.compression.codec import codec_of
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer, Partition

ARMS = {"fp32": (False, False), "swarm": (True, True), "codec": (True, False), "lamb": (False, True)}
SHARES = (28, 20, 12, 4)  # of 64
SMOOTHED = 5  # steps
ALL_FP32 = 2**62
CPU = Device(torch.device("cpu"), "CPU", None)
BUDGET = 2**30  # bytes of activations that are kept: all
NAMES = ("anna", "ben", "cleo", "dora")


@dataclass(frozen=True)
class Size:
    """What is run: examples of a step, the fixed loss, losses on the way, seeds, and the steps with real peers."""

    batch: int
    loss: float
    way: tuple[float, ...]
    seeds: int
    swarm_steps: int


FULL = Size(batch=128, loss=2.0, way=(5.0, 4.0, 3.0), seeds=3, swarm_steps=20)
QUICK = "one seed and the first steps"
SMALL = Size(batch=64, loss=6.0, way=(6.4,), seeds=1, swarm_steps=5)


def run_of(batch: int, seed: int) -> RunConfig:
    """The emoji-demo run with so many examples for a step, and first weights of this seed."""
    run = load_run("emoji-demo")
    return run.model_copy(
        update={
            "run": run.run.model_copy(update={"seed": seed, "name": "bench-convergence"}),
            "swarm": run.swarm.model_copy(update={"target_batch_size": batch}),
        }
    )


def members_of(batch: int) -> list[int]:
    """Samples of each member in a step."""
    return [batch * share // sum(SHARES) for share in SHARES]


class Training:
    """All members of a run in one process: they hold the same parameters, so one copy does.

    sizes: samples of each member in a step. order: the members, in the order in which the swarm would have them.
    device: where gradients are computed.
    """

    def __init__(
        self,
        run: RunConfig,
        eight_bit_averages: bool,
        eight_bit_moments: bool,
        sizes: list[int],
        order: list[int],
        device: Device = CPU,
    ):
        if not eight_bit_moments:
            optimizer = run.optimizer.model_copy(update={"min_8bit_size": ALL_FP32})
            run = run.model_copy(update={"optimizer": optimizer})
        self.run, self.sizes, self.order, self.device = run, sizes, order, device
        tokenizer = load_tokenizer(run)
        seeds = [stream_seed(run, member) for member in range(len(self.sizes))]
        self._streams = [
            iter(ExampleStream(run, tokenizer, seed).batches(size))
            for seed, size in zip(seeds, self.sizes, strict=True)
        ]
        self.model = Dalle(DalleConfig.from_run(run))
        self.model.initialise(run.run.seed)
        self.model.activation_budget = BUDGET
        self.shared = TrainedState(run, self.model, None)
        self.model.to(device.torch_device)
        self._names = list(self.shared.shapes())
        self._buffers: list[GradientBuffer] = []
        if eight_bit_averages:
            codec = codec_of(run)
            layout = Partition(self.shared.shapes(), run.swarm.large_tensor, codec.block)
            self._buffers = [GradientBuffer(layout, codec) for _ in sizes]

    def steps(self) -> Iterator[tuple[float, str]]:
        """After each global step: the mean loss before it, and the digest."""
        while True:
            losses, plain = 0.0, {name: torch.zeros(shape) for name, shape in self.shared.shapes().items()}
            self.shared.copy_into(self.model)
            for member, (size, stream) in enumerate(zip(self.sizes, self._streams, strict=True)):
                gradients, loss, figures = self._gradients(next(stream))
                losses += float(loss) * size
                if self._buffers:  # as a peer does it
                    accumulator = Accumulator(self._names)
                    accumulator.add(gradients, size, loss, figures)
                    accumulator.hold(self._buffers[member])
                else:
                    for name, gradient in gradients.items():
                        plain[name].add_(gradient, alpha=size / sum(self.sizes))
            if self._buffers:
                average = self.average(self._buffers)
                self.shared.step(DecodedGradients(average))
            else:
                self.shared.step(plain)
            yield losses / sum(self.sizes), self.shared.digest

    def average(self, buffers: list[GradientBuffer]) -> GradientBuffer:
        """What the members average to."""
        return swarm_average(buffers, self.weights, self.order, self.run.swarm.aggregation, self.reduced)

    @property
    def weights(self) -> list[int]:
        """Examples behind what each member gives to a round."""
        return self.sizes

    def reduced(self, reducer: Reducer) -> None:
        """One member has reduced its share of a round."""

    def _gradients(self, batch: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
        """A member's mean gradient, its loss and its figures."""
        for parameter in self.model.parameters():
            parameter.grad = None
        with self.device.precision():
            losses = self.model.loss(**batch.to(self.device.torch_device).tensors)
        losses.total.backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return gradients, losses.total.detach(), losses.figures()


def stream_seed(run: RunConfig, member: int) -> int:
    """Every member sees the examples in an order of its own."""
    return run.run.seed * len(SHARES) + member


def swarm_average(
    buffers: list[GradientBuffer],
    sizes: list[int],
    order: list[int],
    aggregation: Aggregation,
    reduced: Callable[[Reducer], None] = lambda reducer: None,
) -> GradientBuffer:
    """What every member of a round ends with: each reduces its share of the members' gradients, as in a swarm.

    reduced: takes each reducer when it has made its averages.
    """
    layout, codec = buffers[0].layout, buffers[0].codec
    senders = [str(member) for member in order]
    store = AverageBuffer(layout, codec)
    store.open((1,) * len(order))

    spreads = {str(member): spread(buffers[member], store.parts) for member in order}

    async def reduce(reducer: int) -> None:
        me = order[reducer]
        mine = [index for index, part in enumerate(store.parts) if part.reducer == reducer]
        parts = [store.parts[index] for index in mine]
        averaging = Reducer(
            codec,
            parts,
            buffers[me],
            sizes[me],
            str(me),
            dict.fromkeys(senders, sum(sizes)),
            lambda position, encoded: store.put(mine[position], encoded, store.hashes),
            aggregation,
        )
        averaging.spreads = spreads

        async def send(member: int) -> None:
            for part in parts:
                encoded = buffers[member].read(part.start, part.stop)
                await averaging.take(str(member), codec.message(encoded, part.elements, part.large), sizes[member])

        await asyncio.gather(averaging.run(), *(send(member) for member in order if member != me))
        reduced(averaging)

    async def all_parts() -> None:
        await asyncio.gather(*(reduce(reducer) for reducer in range(len(order))))

    asyncio.run(all_parts())
    return store.buffer


def smoothed(losses: list[float]) -> list[float]:
    """The mean of each loss and those up to four before it."""
    return [statistics.fmean(losses[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(losses))]


def steps_to(losses: list[float], loss: float) -> float | None:
    """Steps until the smoothed loss is down at `loss`, with a fraction; None: never. losses[i]: after i steps."""
    curve = smoothed(losses)
    for i, here in enumerate(curve):
        if here <= loss:
            return i - 1 + (curve[i - 1] - loss) / (curve[i - 1] - here) if i else 0.0
    return None


def train(arm: str, batch: int, seed: int, loss: float) -> list[float]:
    """The losses of one run until it is down at `loss`, or at the end of its schedule."""
    torch.set_num_threads(1)
    warm_up()
    run = run_of(batch, seed)
    training = Training(run, *ARMS[arm], sizes=members_of(batch), order=list(range(len(SHARES))))
    losses: list[float] = []
    for here, _ in training.steps():
        losses.append(here)
        if smoothed(losses)[-1] <= loss or len(losses) == run.schedule.total_steps:
            return losses
    raise AssertionError("steps() has no end")


def measure_arms(size: Size, seeds: int, arms: list[str]) -> dict[str, Any]:
    """All arms with all seeds."""
    started = time.monotonic()
    jobs = [(arm, size.batch, seed, size.loss) for seed in range(seeds) for arm in arms]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        losses = dict(zip(((job[0], job[2]) for job in jobs), pool.map(train, *zip(*jobs, strict=True)), strict=True))
    steps = {arm: [steps_to(losses[arm, seed], size.loss) for seed in range(seeds)] for arm in arms}
    if any(count is None for counts in steps.values() for count in counts):
        sys.exit(f"convergence: a run ended above loss {size.loss}: {steps}")
    way = {}
    for loss in size.way:
        pairs = [(steps_to(losses["swarm", seed], loss), steps_to(losses["fp32", seed], loss)) for seed in range(seeds)]
        way[str(loss)] = [round(a / b, 4) for a, b in pairs if a and b]
    ratios = {arm: [a / b for a, b in zip(steps[arm], steps["fp32"], strict=True)] for arm in arms if arm != "fp32"}  # type: ignore[operator]
    return {
        "convergence_steps_ratio": round(statistics.fmean(ratios["swarm"]), 4),
        "convergence_steps_ratio_min": round(min(ratios["swarm"]), 4),
        "convergence_steps_ratio_max": round(max(ratios["swarm"]), 4),
        "loss": size.loss,
        "batch": size.batch,
        "steps": {arm: [round(count, 2) for count in counts if count is not None] for arm, counts in steps.items()},
        "ratios": {arm: [round(ratio, 4) for ratio in found] for arm, found in ratios.items()},
        "ratios_on_the_way": way,
        "seconds": round(time.monotonic() - started, 1),
    }


def measure_swarm(size: Size, peers: int) -> dict[str, Any]:
    """The first members as real peers, and the same steps here."""
    sizes = members_of(size.batch)[:peers]
    run = run_of(sum(sizes), seed=0)
    patient = {"matchmaking_time": 20.0, "next_chunk_timeout": 60.0, "averaging_timeout": 120.0}
    run = run.model_copy(update={"swarm": run.swarm.model_copy(update=patient)})  # every round needs all
    with tempfile.TemporaryDirectory(prefix="bench-convergence-") as scratch:
        with LocalSwarm(run.to_toml(), Path(scratch)) as swarm:
            for member, name in enumerate(NAMES[:peers]):
                options = {"batch_size": sizes[member], "seed": stream_seed(run, member)}
                joined = swarm.start_trainer(name, module="testbed.peer", lockstep=True, **options)
                need(swarm, lambda joined=joined: bool(joined.of(Listening)), f"the start of {name}", [joined])
                swarm.addresses = swarm.addresses or joined.of(Listening)[0].addresses
            members = [swarm.members[name] for name in NAMES[:peers]]

            def done() -> bool:
                return all(len(member.of(Step)) >= size.swarm_steps for member in members)

            need(swarm, done, f"step {size.swarm_steps} on all peers", members)
        return compared(run, sizes, members, size.swarm_steps)


def compared(run: RunConfig, sizes: list[int], members: list[LocalPeer], steps: int) -> dict[str, Any]:
    """Digests and losses of the peers' steps beside those that are computed here."""
    from hivemind.p2p import PeerID

    ids = [member.of(Listening)[0].peer_id for member in members]
    order = sorted(range(len(ids)), key=lambda member: PeerID.from_base58(ids[member]).to_bytes())
    torch.set_num_threads(1)
    training = Training(run, *ARMS["swarm"], sizes, order)
    theirs = [{event.epoch: event for event in member.of(Step)} for member in members]
    agree, equal, apart = True, 0, 0.0
    for epoch, (loss, digest) in zip(range(1, steps + 1), training.steps(), strict=False):
        made = [events[epoch] for events in theirs if epoch in events]
        agree &= len(made) == len(members) and len({event.digest for event in made}) == 1
        equal += all(event.digest == digest for event in made)
        apart = max([apart, *(abs((event.loss or 0.0) - loss) for event in made)])
    rounds = [event for event in members[0].of(Round) if event.outcome == "committed" and event.epoch <= steps]
    return {
        "swarm_peers": len(members),
        "swarm_steps": steps,
        "swarm_peers_agree": agree,
        "swarm_digests_equal": equal == steps,
        "swarm_steps_equal": equal,
        "swarm_loss_difference_max": apart,
        "swarm_samples": sorted({event.samples for event in rounds}),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--seeds", type=int, help="instead of 3, or of 1 with --quick")
    parser.add_argument("--parts", action="store_true", help="also the codec and the 8-bit moments by themselves")
    parser.add_argument("--swarm", action="store_true", help="also real peers")
    parser.add_argument("--peers", type=int, choices=(2, 3, 4), default=2, help="how many of them")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The arms, and where asked for real peers."""
    size = SMALL if args.quick else FULL
    figures = measure_arms(size, args.seeds or size.seeds, list(ARMS) if args.parts else ["fp32", "swarm"])
    return figures | (measure_swarm(size, args.peers) if args.swarm else {})
