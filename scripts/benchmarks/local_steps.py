"""Measure local steps beside averaged gradients: losses by samples and by bytes, on the emoji-demo run.

- `averaging`: four members with equal parts of the target batch, and the steps of `scripts/bench convergence`: each
  one's gradient encoded, averaged and stepped with by the code that peers run, in one process.
- `dense`: four members that make H inner steps each between two rounds, with the run file's defaults for local steps
  but for `sparse`, which is 0; the pseudo-gradients go through the same round.
- `sparse`: the same with fewer inner steps, and messages of the largest elements alone, with error feedback.
- Both see the same examples in the same orders from the same first weights, 14,080 in all. A seed sets both.
- The loss is that of the shared parameters on all 256 examples, taken every 640 samples or after every round, what is
  longer. The samples to a loss are counted with a fraction, by a straight line between the logarithms of two of them.
- Bytes are those of today's round among four: a member sends its message and its averages to three others. Those of
  `sparse` are a member's that reduces nothing, as on a slow line; round_bytes has a round's of one that does.
- up_bytes_per_parameter and down_bytes_per_parameter: of one round of 32 members that send 64 of each 4,096 elements,
  of the same run: what one of them sends that reduces nothing, and what it receives.

- uneven: members of which two compute eight times as much as the other two, beside four equal ones. `batches`: all make
  as many inner steps, with batches by their speeds. `steps`, as `tt` does it: equal batches, and as many inner steps as
  their speeds give. Ratios are of losses at equal samples, the geometric mean over all looks; the first seed, dense.
- delayed: sparse members that make the inner steps of a round while the one before is under way, for all of its time,
  beside those that wait; of fewer samples, the first seed. delayed_ratio is of losses at equal samples, as above.
- bits_differing: of members in 100 outer rounds, dense ones and sparse ones, one of which accepts no connections, one
  is killed and returns, and one comes later; the product's rounds, local steps and hand-over on a virtual network.
- --frontier: a run for each number of inner steps and of elements kept, and the defaults of `dense` and `sparse`; some
  of them with Muon inside too, some in four bits an element (baselines/four_bits.py), some with outer momentum as
  DiLoCo has it (Nesterov's 0.9, outer rate 0.7); these two are the bench's own. 0 keeps all. best: no other one has a
  lower loss with no more bytes.

Two processes of one thread each.

    scripts/bench local_steps
    scripts/bench local_steps --uneven
    scripts/bench local_steps --delayed
    scripts/bench local_steps --frontier

JSON keys: samples_to_loss_dense and samples_to_loss_sparse (to loss 1.0, over those of `averaging`, mean over the
seeds), _min and _max; bytes_to_loss_dense and bytes_to_loss_sparse (the same of bytes); final_loss_dense,
final_loss_sparse and final_loss_averaging (means); bytes_ratio_dense and bytes_ratio_sparse (over averaging, whole
run); up_bytes_per_parameter, down_bytes_per_parameter, and up_bytes_125m and down_bytes_125m by the same count for the
paper's model; round_1b_s, seconds of a line of 20 Mbit/s down and 5 up for a round of a billion parameters with the
bytes of these, up and then down, and round_1b_equal_lines_s, where all have such lines and each reduces; uneven_ratio
(that of `steps`), uneven_ratios by way; delayed_ratio; bits_differing; inner_steps, sparse_inner_steps, sparse_kept;
runs and sparse_runs, a row a seed; losses of the first seed by samples; frontier, a row a run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import accumulate, pairwise, product
from multiprocessing import get_context
from typing import Any

import torch

from scripts.benchmarks.baselines.four_bits import FourBits
from scripts.benchmarks.convergence import ARMS, BUDGET, Training, run_of
from scripts.benchmarks.harness import printed_by
from tt_cli.data.examples import Batch
from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.tokenizer import load_tokenizer
from tt_cli.memory.trainer_account import round_bytes
from tt_cli.model.dalle import Dalle
from tt_cli.model.dalle_config import DalleConfig
from tt_cli.optim.kernels import warm_up
from tt_cli.peer.local_steps import LocalSteps
from tt_cli.run import RunConfig, load_run
from tt_cli.swarm.compression.codec import GradientCodec
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer
from tt_cli.swarm.shared_state import LockedState

QUICK = "one seed and the first samples"
MEMBERS, BATCH, EXAMPLES = 4, 128, 256
SAMPLES, FEW_SAMPLES = 14_080, 1_280
EVERY = 640  # samples between two looks at the loss
LOSS, FEW_LOSS = 1.0, 6.2
INNER_STEPS, INNER_BATCH = 10, 16
FRONTIER_STEPS, FRONTIER_KEPT = (2, 10, 50), (0, 32, 128, 512)
MOMENTUM, MOMENTUM_LR = 0.9, 0.7
DELAYED_SAMPLES = 6_400
ROUNDS, FEW_ROUNDS = 100, 10  # of which bits are compared
UNEVEN = 1, 1, 8, 8  # speeds of members, over that of the slowest
SPARSE_STEPS, SPARSE = 5, 256  # inner steps, and elements of each 4,096
SPARSE_TENSOR = 1024  # elements from which a tensor is sparse: a fifth of the run's are in tensors of less than 2^16
MANY, KEPT = 32, 64  # members, and elements of each 4,096
PEAK_LR = 8e-3  # of inner steps
HOME_DOWN, HOME_UP = 20, 5  # Mbit/s


def local_run(
    seed: int, inner_steps: int, samples: int, optimizer: dict[str, Any], peak_lr: float, members: int = MEMBERS
) -> RunConfig:
    """The run with local steps that takes so many samples of its members in all."""
    changes: dict[str, Any] = {"optimizer": {"name": "local", **optimizer}, "schedule.peak_lr": peak_lr}
    if optimizer.get("sparse"):
        changes["swarm.large_tensor"] = SPARSE_TENSOR
    run = run_of(BATCH, seed).replaced(changes)
    assert run.optimizer.name == "local"
    target = members * inner_steps * run.optimizer.inner_batch
    return run.replaced({"swarm.target_batch_size": target, "schedule.total_steps": max(1, round(samples / target))})


class LocalTraining(Training):
    """All members of a run with local steps in one process: each has its own model, the shared state is one.

    sizes: examples of each member's inner steps. inner_steps: each member's in a round. momentum: of outer steps.
    four_bits: of the elements of sparse messages, instead of two.
    """

    def __init__(
        self,
        run: RunConfig,
        sizes: Sequence[int],
        inner_steps: Sequence[int],
        momentum: float = 0.0,
        four_bits: bool = False,
    ):
        members = len(sizes)
        self._momentum, self._velocity = momentum, dict[str, torch.Tensor]()
        super().__init__(run, True, True, sizes=list(sizes), order=list(range(members)))
        if four_bits:
            codec = GradientCodec(FourBits(run.sparse), self._buffers[0].codec.averages)
            self._buffers = [GradientBuffer(buffer.layout, codec) for buffer in self._buffers]
        self._inner_steps, self._state = inner_steps, LockedState(self.shared)
        self._models = [Dalle(DalleConfig.from_run(run)) for _ in self.sizes]
        self.travelled = (0.0, 0.0)  # bytes for each parameter: a member's message, and the average
        self._members = [
            LocalSteps(run.replaced({"optimizer.inner_batch": size}), model, self.shared, lambda event: None)
            for size, model in zip(sizes, self._models, strict=True)
        ]

    def steps(self) -> Iterator[tuple[float, str]]:
        """After each outer step: the mean loss of its inner steps, and the digest."""
        average: GradientBuffer | None = None
        while True:
            losses, samples = 0.0, sum(self.weights)
            for model, member, stream, buffer, steps in zip(
                self._models, self._members, self._streams, self._buffers, self._inner_steps, strict=True
            ):
                self.model, model.activation_budget = model, BUDGET
                member.renew(self._state)
                for _ in range(steps):
                    gradients, loss, figures = self._gradients(batch := next(stream))
                    assert member.add(gradients, len(batch), loss, figures)
                    losses += float(loss) * len(batch) / samples
                if not self.run.optimizer.delayed:
                    member.hold(buffer)
            if self.run.optimizer.delayed:
                if average is not None:  # of the round that was under way
                    self._step(average)
                for member, buffer in zip(self._members, self._buffers, strict=True):
                    member.renew(self._state)
                    member.hold(buffer)
            average = self.average(self._buffers)
            self.travelled = travelling(self._buffers[0]), travelling(average)
            if not self.run.optimizer.delayed:
                self._step(average)
            yield losses, self.shared.digest

    def _step(self, average: GradientBuffer) -> None:
        """The outer step, with Nesterov's momentum where it has any."""
        ways: Mapping[str, torch.Tensor] = DecodedGradients(average)
        if self._momentum:
            for name, way in ways.items():
                self._velocity[name] = way + self._momentum * self._velocity.get(name, 0.0)
            ways = {name: way + self._momentum * self._velocity[name] for name, way in ways.items()}
        self._state.step(ways)
        for member in self._members:
            member.release()

    @property
    def weights(self) -> list[int]:
        return [steps * size for steps, size in zip(self._inner_steps, self.sizes, strict=True)]


def shared_out(whole: int, speeds: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `whole`, as the speeds are."""
    ends = [round(whole * before / sum(speeds)) for before in accumulate(speeds, initial=0)]
    return [stop - start for start, stop in pairwise(ends)]


def ways(inner_steps: int, inner_batch: int, members: int = MEMBERS) -> dict[str, tuple[list[int], list[int]]]:
    """Sizes of inner batches, and inner steps of a round: of equal members, and by UNEVEN speeds in either."""
    sizes, steps = [inner_batch] * members, [inner_steps] * members
    batches, numbers = (shared_out(members * each, UNEVEN[:members]) for each in (inner_batch, inner_steps))
    return {"equal": (sizes, steps), "batches": (batches, steps), "steps": (sizes, numbers)}


def travelling(buffer: GradientBuffer) -> float:
    """Bytes of all parts, for each parameter."""
    boundary, size = buffer.layout.boundary, buffer.layout.size
    parameters = sum(shape.numel() for shape in buffer.layout.shapes.values())
    return (len(buffer.read(0, boundary)) + len(buffer.read(boundary, size))) / parameters


def of_many(seed: int) -> tuple[float, float]:
    """Bytes for each parameter that a member sends which reduces nothing, and receives: in the second round of MANY."""
    torch.set_num_threads(1)
    inner_steps = SPARSE_STEPS
    run = local_run(seed, inner_steps, SAMPLES, {"sparse": KEPT}, PEAK_LR, MANY)
    training = LocalTraining(run, [INNER_BATCH] * MANY, [inner_steps] * MANY)
    for _ in zip(range(2), training.steps(), strict=False):
        pass
    return training.travelled


@torch.no_grad()
def loss_of(training: Training, model: Dalle, examples: Batch) -> float:
    """The mean loss of the shared parameters on these examples."""
    training.shared.copy_into(model)
    pieces = [examples[start : start + 64] for start in range(0, len(examples), 64)]
    return statistics.fmean(float(model.loss(**piece.tensors).total) for piece in pieces)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One run: losses by samples, and the bytes that a member sends in a round for each parameter, which is `up`.

    job: seed, samples, and for local steps inner_steps, optimizer, peak_lr, momentum and four_bits.
    """
    torch.set_num_threads(1)
    warm_up()
    seed, samples, inner_steps = job["seed"], job["samples"], job.get("inner_steps", 0)
    training: Training
    if inner_steps:
        run = local_run(seed, inner_steps, samples, job["optimizer"], job.get("peak_lr", PEAK_LR))
        way = ways(inner_steps, INNER_BATCH)[job.get("way", "equal")]
        training = LocalTraining(run, *way, job.get("momentum", 0.0), job.get("four_bits", False))
    else:
        run = run_of(BATCH, seed)
        training = Training(run, *ARMS["swarm"], sizes=[BATCH // MEMBERS] * MEMBERS, order=list(range(MEMBERS)))
    target = run.swarm.target_batch_size
    examples = next(iter(ExampleStream(run, load_tokenizer(run), 0).batches(EXAMPLES)))
    model = Dalle(DalleConfig.from_run(run))
    losses = {0: loss_of(training, model, examples)}
    rounds = max(1, round(samples / target))
    for made, _ in zip(range(1, rounds + 1), training.steps(), strict=False):
        if made * target // EVERY > (made - 1) * target // EVERY or made == rounds:
            losses[made * target] = loss_of(training, model, examples)
    message = average = travelling(training._buffers[0])
    if isinstance(training, LocalTraining):
        message, average = training.travelled
    whole = (MEMBERS - 1) / MEMBERS * (message + average)
    return {"losses": losses, "rounds": rounds, "up": whole if message == average else message, "whole": whole}


def samples_to(losses: dict[int, float], goal: float) -> float | None:
    """Samples until the loss is down at `goal`, with a fraction; None: never."""
    before = 0
    for samples, loss in losses.items():
        if loss <= goal:
            part = math.log(losses[before] / goal) / math.log(losses[before] / loss) if samples else 0.0
            return before + part * (samples - before)
        before = samples
    return None


def compared(local: dict[str, Any], averaging: dict[str, Any], goal: float) -> dict[str, Any]:
    """A row of figures of one run beside averaged gradients with the same seed."""
    own, theirs = samples_to(local["losses"], goal), samples_to(averaging["losses"], goal)
    ratio = local["rounds"] * local["up"] / averaging["rounds"] / averaging["up"]
    return {
        "rounds": local["rounds"],
        "up_bytes": round(local["rounds"] * local["up"], 2),
        "bytes_ratio": round(ratio, 4),
        "samples_to_loss": round(own / theirs, 3) if own and theirs else None,
        "bytes_to_loss": round(ratio * own / theirs, 4) if own and theirs else None,
        "final_loss": round(list(local["losses"].values())[-1], 4),
    }


def summed_up(arm: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures over the seeds: None where one of them never came to the loss."""
    found = {}
    for key in ("samples_to_loss", "bytes_to_loss"):
        values = [row[key] for row in rows]
        found[f"{key}_{arm}"] = None if None in values else round(statistics.fmean(values), 4)
    ratios = [row["samples_to_loss"] for row in rows if row["samples_to_loss"] is not None]
    return {
        **found,
        f"samples_to_loss_{arm}_min": min(ratios, default=None),
        f"samples_to_loss_{arm}_max": max(ratios, default=None),
        f"final_loss_{arm}": round(statistics.fmean(row["final_loss"] for row in rows), 4),
        f"bytes_ratio_{arm}": rows[0]["bytes_ratio"],
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--seeds", type=int, help="instead of 3, or of 1 with --quick")
    parser.add_argument("--peak-lr", type=float, default=PEAK_LR, help=f"of inner steps (default {PEAK_LR})")
    parser.add_argument("--sparse-steps", type=int, default=SPARSE_STEPS, help=f"inner ones (default {SPARSE_STEPS})")
    parser.add_argument("--kept", type=int, default=SPARSE, help=f"elements of each 4,096 (default {SPARSE})")
    parser.add_argument("--frontier", action="store_true", help="the frontier alone")
    parser.add_argument("--uneven", action="store_true", help="unlike peers alone")
    parser.add_argument("--delayed", action="store_true", help="sparse steps beside rounds alone")


def frontier_jobs(quick: bool) -> dict[str, dict[str, Any]]:
    """The runs of the frontier by what each is."""
    defaults = [(INNER_STEPS, 0), (SPARSE_STEPS, SPARSE)]
    pairs = list(product((2, 5), (0, 64)) if quick else product(FRONTIER_STEPS, FRONTIER_KEPT))
    middle = [pair for pair in pairs if pair[0] == FRONTIER_STEPS[1] and pair[1]]
    ways = [
        ("adamw", "", [*pairs, *defaults]),
        ("muon", "", [*defaults, (INNER_STEPS, 128)]),
        ("adamw", "four bits", [*middle, defaults[1]]),
        ("adamw", "momentum", [*defaults, (pairs[-1][0], 0)]),
    ]
    jobs = {}
    for inner, way, points in ways:
        for number, kept in points:
            optimizer = {"inner": inner, "sparse": kept, **({"outer_lr": MOMENTUM_LR} if way == "momentum" else {})}
            job = {"seed": 0, "inner_steps": number, "optimizer": optimizer, "four_bits": way == "four bits"}
            name = f"{inner}, {kept or 'all'}, H {number}{', ' if way else ''}{way}"
            jobs[name] = {**job, "momentum": MOMENTUM if way == "momentum" else 0.0}
    return jobs


def frontier(pool: Executor, quick: bool) -> dict[str, Any]:
    """A row for each run: its bytes and where it ends."""
    jobs, samples, rows = frontier_jobs(quick), EVERY if quick else SAMPLES, list[dict[str, Any]]()
    found = pool.map(train, [{**job, "samples": samples} for job in jobs.values()])
    for (name, job), run in zip(jobs.items(), found, strict=True):
        settings = job["optimizer"]
        own = {"run": name, "inner": settings["inner"], "kept": settings["sparse"], "inner_steps": job["inner_steps"]}
        own |= {key: job[key] for key in ("four_bits", "momentum")}
        loss, rounds = round(list(run["losses"].values())[-1], 4), run["rounds"]
        rows.append({**own, "rounds": rounds, "up_bytes": round(rounds * run["up"], 3), "final_loss": loss})
    for row in rows:
        row["best"] = not any(
            other["final_loss"] < row["final_loss"] and other["up_bytes"] <= row["up_bytes"] for other in rows
        )
    return {"samples": samples, "frontier": rows}


def uneven(equal: dict[int, float], by_way: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Figures of unlike members' losses by samples, beside those of equal ones."""
    ratios = {
        way: round(statistics.geometric_mean(loss / equal[at] for at, loss in losses.items() if at), 4)
        for way, losses in by_way.items()
    }
    shown = {way: {at: round(loss, 4) for at, loss in losses.items()} for way, losses in by_way.items()}
    return {"uneven_ratio": ratios["steps"], "uneven_ratios": ratios, "uneven_losses": shown}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs, two at a time."""
    started = time.monotonic()
    samples, goal = (FEW_SAMPLES, FEW_LOSS) if args.quick else (SAMPLES, LOSS)
    seeds = range(args.seeds or (1 if args.quick else 3))
    averaging = [{"seed": seed, "samples": samples} for seed in seeds]
    whole = {"inner_steps": INNER_STEPS, "optimizer": {"sparse": 0}, "peak_lr": args.peak_lr}
    dense = [{**job, **whole} for job in averaging]
    unlike = {way: {**dense[0], "way": way} for way in ("batches", "steps")}
    own = {"inner_steps": args.sparse_steps, "optimizer": {"sparse": args.kept}, "peak_lr": args.peak_lr}
    sparse = [{**job, **own} for job in averaging]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        if args.frontier:
            return {**frontier(pool, args.quick), "seconds": round(time.monotonic() - started, 1)}
        if args.delayed:
            few = {**own, "seed": 0, "samples": FEW_SAMPLES if args.quick else DELAYED_SAMPLES}
            beside = {**few, "optimizer": {**few["optimizer"], "delayed": True}}
            waiting, delayed = (run["losses"] for run in pool.map(train, [few, beside]))
            ratios = [loss / waiting[at] for at, loss in delayed.items() if at]
            shown = {
                arm: {at: round(loss, 4) for at, loss in losses.items()}
                for arm, losses in (("waiting", waiting), ("delayed", delayed))
            }
            figures = {"delayed_ratio": round(statistics.geometric_mean(ratios), 4), "losses": shown}
            return {**figures, "samples": few["samples"], "seconds": round(time.monotonic() - started, 1)}
        if args.uneven:
            equal, *others = (run["losses"] for run in pool.map(train, [dense[0], *unlike.values()]))
            figures = uneven(equal, dict(zip(unlike, others, strict=True)))
            shown = {at: round(loss, 4) for at, loss in equal.items()}
            return {**figures, "equal_losses": shown, "seconds": round(time.monotonic() - started, 1)}
        many = pool.submit(of_many, 0)
        found = list(pool.map(train, [*averaging, *dense, *sparse, *unlike.values()]))
    plain, *arms = (found[start : start + len(seeds)] for start in range(0, 3 * len(seeds), len(seeds)))
    rows, sparse_rows = (
        [compared(mine, theirs, goal) for mine, theirs in zip(arm, plain, strict=True)] for arm in arms
    )
    up, down = many.result()
    changes = {"optimizer": {"name": "local", "sparse": KEPT}, "swarm.large_tensor": SPARSE_TENSOR}
    paper = load_run("dalle").replaced(changes)
    sizes = DalleConfig.from_run(paper).tensor_sizes
    up_125m, down_125m = (count / sum(sizes) for count in round_bytes(paper, sizes, MANY))
    one_way = (MANY - 1) / MANY * (up_125m + down_125m)  # of each parameter, by who reduces as much as all others
    others = (run["losses"] for run in found[3 * len(seeds) :])
    figures = {
        **uneven(found[len(seeds)]["losses"], dict(zip(unlike, others, strict=True))),
        **printed_by("simulation.local_steps", FEW_ROUNDS if args.quick else ROUNDS),
        **summed_up("dense", rows),
        **summed_up("sparse", sparse_rows),
        "final_loss_averaging": round(statistics.fmean(list(run["losses"].values())[-1] for run in plain), 4),
        "up_bytes_per_parameter": round(up, 4),
        "down_bytes_per_parameter": round(down, 4),
        "up_bytes_125m": round(up_125m, 4),
        "down_bytes_125m": round(down_125m, 4),
        "round_1b_s": round(8e3 * (up_125m / HOME_UP + down_125m / HOME_DOWN)),
        "round_1b_equal_lines_s": round(8e3 * one_way / HOME_UP),
        "round_bytes": {
            arm: round(run["whole"], 4)
            for arm, run in zip(("averaging", "dense", "sparse"), found[:: len(seeds)], strict=False)
        },
        "inner_steps": INNER_STEPS,
        "sparse_inner_steps": args.sparse_steps,
        "sparse_kept": args.kept,
        "peak_lr": args.peak_lr,
        "loss": goal,
        "samples": samples,
        "runs": rows,
        "sparse_runs": sparse_rows,
        "losses": {
            arm: {at: round(loss, 4) for at, loss in run["losses"].items()}
            for arm, run in zip(("averaging", "dense", "sparse"), found[:: len(seeds)], strict=False)
        },
    }
    return {**figures, "seconds": round(time.monotonic() - started, 1)}
