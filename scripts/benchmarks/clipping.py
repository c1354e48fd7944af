"""Measure CenteredClip: what it changes among honest members, what attackers do to it, and what it costs.

- A swarm's arithmetic in one process, as bench_convergence does it: ten members with shares of 3 to 22 % of the batch
  train the emoji-demo run, with the same examples in every arm. `mean`: all honest, the plain mean. `clip`: all honest,
  CenteredClip. `without`: the first, third and fifth member (44 % of the samples) are not there.
- In the others these three attack. `flip`, `flip100`, `noise`: they send their gradient times -1, times -100, or noise
  ten times as large. They know all gradients: `bias` is the honest members' mean and a fixed direction, together just
  within the radius, `hidden_bias` its own gradient and that, `weak_bias` a third of it, where it shows least; `drift`
  grows to it in 20 steps; `alie` is "a little is enough" (Baruch et al. 2019), `ipm` the inner-product manipulation
  (Xie et al. 2020). `mean_flip100` and `mean_bias` are what two of these do to the plain mean.
- loss_ratio: the mean loss of the last five steps over that of `mean`; honest_ratio: over that of `without`. clipped:
  the share of honest members' parts that were clipped, and of the attackers'. Honest, nobody should be.
- cost: CPU seconds of one reducer's share of a round of 32 million parameters and some members, one thread; of the
  plain mean, of CenteredClip with honest members, and with one that is clipped. audit: of what signing costs a peer in
  that round (hashing what it sends and what it gets, signatures), and of computing one part again. look: of comparing
  one part of each other reducer with this peer's gradient, which it does once a round to choose what to audit.

    scripts/bench clipping --cost
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.utils.crypto import RSAPrivateKey
from testbed.attacks.gradients import COLLUSIONS, Seen

from scripts.benchmarks.convergence import Training, swarm_average
from scripts.benchmarks.harness import cpu_time
from tt_cli.optim.kernels import warm_up
from tt_cli.run import load_run
from tt_cli.swarm.allreduce.clipping.centered_clip import ReceivedPart, average_part
from tt_cli.swarm.allreduce.messages import Opening, RoundName, Signer, input_hash
from tt_cli.swarm.allreduce.reducer import Reducer
from tt_cli.swarm.audit.sampling import unlike
from tt_cli.swarm.compression.codec import GradientCodec, codec_of
from tt_cli.swarm.compression.gradient_buffer import PART_ELEMENTS, DecodedGradients, GradientBuffer

SIZES = [28, 20, 12, 4, 16, 16, 8, 8, 12, 4]  # samples of each member in a step
ATTACKERS = (0, 2, 4)
ARMS = {
    "mean": ("mean", ""),
    "clip": ("centered_clip", ""),
    "flip": ("centered_clip", "flip"),
    "flip100": ("centered_clip", "flip100"),
    "noise": ("centered_clip", "noise"),
    "mean_flip100": ("mean", "flip100"),
    "mean_bias": ("mean", "bias"),
    "without": ("centered_clip", "without"),
    **{name: ("centered_clip", name) for name in COLLUSIONS},
}
LAST = 5  # steps
QUICK = "ten steps of two arms"
PARAMETERS = 32_000_000


class Attacked(Training):
    """With an attack on every average. clipped: member → parts."""

    def __init__(self, arm: str):
        aggregation, self.attack = ARMS[arm]
        run = load_run("emoji-demo").replaced({"swarm.aggregation": aggregation, "run.name": "bench-clipping"})
        super().__init__(run, True, True, SIZES, list(range(len(SIZES))))
        self.clipped: Counter[str] = Counter()
        self.averages = 0

    def average(self, buffers: list[GradientBuffer]) -> GradientBuffer:
        self.averages += 1
        order = [member for member in self.order if member not in ATTACKERS or self.attack != "without"]
        if self.attack in COLLUSIONS:
            self._collude(buffers)
        elif self.attack and self.attack != "without":
            for member in ATTACKERS:
                self._spoil(buffers[member], member)
        return swarm_average(buffers, self.sizes, order, self.run.swarm.aggregation, self.reduced)

    def reduced(self, reducer: Reducer) -> None:
        self.clipped.update(reducer.clipped)

    def _collude(self, buffers: list[GradientBuffer]) -> None:
        honest = [member for member in self.order if member not in ATTACKERS]
        weights = torch.tensor([float(self.sizes[member]) for member in honest])
        gradients = [DecodedGradients(buffer) for buffer in buffers]
        for name in self.shared.shapes():
            rows = torch.stack([gradients[member][name].clone() for member in honest])
            mean = torch.tensordot(weights / weights.sum(), rows, dims=1)
            one = (torch.tensordot(weights, (rows - mean).square(), dims=1) / (len(honest) - 1)).sqrt()
            for member in ATTACKERS:
                seen = Seen(gradients[member][name].clone(), mean, one / math.sqrt(self.sizes[member]), self.averages)
                buffers[member].encode(name, COLLUSIONS[self.attack](seen).clamp_(-6e4, 6e4))

    def _spoil(self, buffer: GradientBuffer, member: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.averages + member)
        for name, gradient in DecodedGradients(buffer).items():
            sent = gradient * (-1.0 if self.attack == "flip" else -100.0)
            if self.attack == "noise":
                scale = 10 * float(gradient.norm()) / math.sqrt(gradient.numel())
                sent = torch.randn(gradient.shape, generator=generator).mul_(scale)
            buffer.encode(name, sent.clamp_(-6e4, 6e4))


def train(arm: str, steps: int) -> dict[str, Any]:
    """The losses, and shares of clipped parts."""
    torch.set_num_threads(1)
    warm_up()
    training = Attacked(arm)
    losses = [loss for (loss, _), _ in zip(training.steps(), range(steps), strict=False)]
    parts = len(training._buffers[0].layout.parts((1,) * len(SIZES))) * training.averages
    bad = [str(member) for member in ATTACKERS] if training.attack else []
    good = [str(member) for member in range(len(SIZES)) if str(member) not in bad]
    shares = {
        "honest": statistics.fmean(training.clipped[member] / parts for member in good),
        "attackers": statistics.fmean(training.clipped[member] / parts for member in bad) if bad else None,
    }
    return {"loss": statistics.fmean(losses[-LAST:]), "losses": losses, "clipped": shares}


def measure_arms(steps: int, arms: list[str]) -> dict[str, Any]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = dict(zip(arms, pool.map(train, arms, [steps] * len(arms)), strict=True))
    table: dict[str, Any] = {"steps": steps}
    for arm, result in found.items():
        table[f"{arm}_loss"] = round(result["loss"], 4)
        table[f"{arm}_loss_ratio"] = round(result["loss"] / found["mean"]["loss"], 4)
        if "without" in found and ARMS[arm][1]:
            table[f"{arm}_honest_ratio"] = round(result["loss"] / found["without"]["loss"], 4)
        table[f"{arm}_clipped"] = result["clipped"]
    return table


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """CPU seconds of one run of it, the median."""
    work()
    return statistics.median(cpu_time(work) for _ in range(times))


def averaged(codec: GradientCodec, encoded: list[bytes]) -> Any:
    """What `unlike` needs of a round: parts of PART_ELEMENTS, one of each of the other reducers, and their averages."""
    part = SimpleNamespace(elements=PART_ELEMENTS, large=True)
    return SimpleNamespace(
        weight=20.0,
        codec=codec,
        parts=[part] * len(encoded),
        parts_of=lambda reducer: [int(reducer.rpartition(" ")[2])],
        store=SimpleNamespace(get=encoded.__getitem__, codec=codec.averages),
        encoded=encoded.__getitem__,
    )


def cost(members: int) -> dict[str, float]:
    """Of a reducer, which has 1 / members of the parameters, from each of the members."""
    torch.set_num_threads(1)
    codec = codec_of(load_run("emoji"))
    draws = torch.Generator().manual_seed(1)
    values = [torch.randn(PART_ELEMENTS, generator=draws).mul_(1e-3) for _ in range(members)]
    encoded = [codec.of(True).encode(value) for value in values]
    honest = [ReceivedPart(str(i), each, 20.0, 1e-3) for i, each in enumerate(encoded)]
    spoiled = codec.of(True).encode(values[0] * 4)
    clipped = [ReceivedPart("0", spoiled, 20.0, 4e-3), *honest[1:]]
    rounds = PARAMETERS / PART_ELEMENTS / members  # parts of a reducer
    found = {
        "mean": rounds * seconds(lambda: average_part(codec, "mean", honest, PART_ELEMENTS, True)),
        "clip": rounds * seconds(lambda: average_part(codec, "centered_clip", honest, PART_ELEMENTS, True)),
        "clip_attacked": rounds * seconds(lambda: average_part(codec, "centered_clip", clipped, PART_ELEMENTS, True)),
    }
    signer, name = Signer(RSAPrivateKey()), RoundName("bench-12345678", "1_abc", b"group")
    opening = Opening(name, signer.peer_id, signer.peer_id, 20.0, 1e-3, tuple(map(input_hash, encoded)))
    envelope = opening.sign(signer)
    hashing = 2 * PARAMETERS / PART_ELEMENTS * seconds(lambda: input_hash(encoded[0]))
    signing = members * (seconds(lambda: opening.sign(signer)) + seconds(lambda: Opening.read(envelope)))
    found["sign"] = hashing + signing
    found["audit_of_a_part"] = found["clip"] / rounds + members * seconds(lambda: input_hash(encoded[0]))
    reducers = [f"reducer {number}" for number in range(members - 1)]
    found["look"] = seconds(lambda: unlike(averaged(codec, encoded), reducers))  # type: ignore[arg-type]
    return {f"{key}_cpu_s_{members}": round(value, 4) for key, value in found.items()}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--steps", type=int, help="instead of 30")
    parser.add_argument("--cost", action="store_true", help="only what it costs")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Cost, and what it changes."""
    figures: dict[str, Any] = cost(4) | cost(10)
    if not args.cost:
        steps = args.steps or (10 if args.quick else 30)
        figures |= measure_arms(steps, ["mean", "clip"] if args.quick else list(ARMS))
    return figures
