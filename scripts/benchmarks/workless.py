"""Measure audits of work: members that send zeros, a copy or noise, and how many rounds pass until they are named.

- A swarm's arithmetic in one process, as in bench_clipping and bench_local_steps: ten members train the emoji-demo run,
  with `gradients` averaged (shares of 3 to 22 % of the batch), with `dense` and with `sparse` local steps.
- Three of them compute nothing: one sends zeros, one what the member before it sent, one noise: the numbers that its
  own message would have had, in other places of each tensor. They count as many examples as they otherwise would.
- Each member is a reducer, and judges by its own tenth of the parameters alone. named_rounds: rounds until more than
  half of the honest seven have named the last of the three; named_by: how many of them have, in the end, for each.
  named_as: the words. false: honest members that one of them has named in any round.
- `calm`: all ten work: nobody may be named. `alone`: the seven work, the three are not there. loss_ratio: the mean
  loss of the last rounds over that of `calm`; honest_ratio: over that of `alone`.
- compute: seconds that all the audits took over those of all gradients, in percent.

Two processes of one thread each.

    scripts/bench workless --json

JSON keys: workless_named_rounds, workless_false (the sum), workless_compute and workless_loss_ratio (the largest of
the three ways), workless_honest_ratio; and all of these for each way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from scripts.benchmarks.clipping import SIZES
from scripts.benchmarks.convergence import Training, run_of
from scripts.benchmarks.local_steps import PEAK_LR, SPARSE, LocalTraining, local_run
from tt_cli.optim.kernels import warm_up
from tt_cli.swarm.allreduce.reducer import Reducer
from tt_cli.swarm.audit.work import WorkAudits
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer

QUICK = "seven rounds of averaged gradients, attacked and calm"
ZEROS, COPY, NOISE = 2, 5, 8  # members
WORKLESS = (ZEROS, COPY, NOISE)
WAYS = {"gradients": 30, "dense": 12, "sparse": 14}  # rounds
ARMS = ("attacked", "calm", "alone")
INNER_STEPS, INNER_BATCH = 4, 8
LAST = 5  # rounds
MAJORITY = (len(SIZES) - len(WORKLESS)) // 2 + 1


class Audited(Training):
    """With the audits of all members after each round. said: reducer → member → the round when it named it, and how."""

    arm = "attacked"

    def begin(self, arm: str) -> None:
        """Set up what the arm needs."""
        self.arm, self.round, self.audit_seconds = arm, 0, 0.0
        self.audits = {str(member): WorkAudits() for member in self.order}
        self.said: dict[str, dict[str, tuple[int, str]]] = {reducer: {} for reducer in self.audits}
        if arm == "alone":
            self.order = [member for member in self.order if member not in WORKLESS]

    def average(self, buffers: list[GradientBuffer]) -> GradientBuffer:
        self.round += 1
        if self.arm == "attacked":
            self._spoil(buffers)
        return super().average(buffers)

    def _spoil(self, buffers: list[GradientBuffer]) -> None:
        draws = torch.Generator().manual_seed(self.round)
        for name, gradient in DecodedGradients(buffers[NOISE]).items():
            places = torch.randperm(gradient.numel(), generator=draws)
            buffers[NOISE].encode(name, gradient.reshape(-1)[places].reshape(gradient.shape))
            buffers[ZEROS].encode(name, torch.zeros(gradient.shape))
        buffers[COPY].load(buffers[COPY - 1].dump())

    def reduced(self, reducer: Reducer) -> None:
        before = time.perf_counter()
        named = self.audits[reducer.me].look(reducer)
        self.audit_seconds += time.perf_counter() - before
        for member, words in named.items():
            self.said[reducer.me].setdefault(member, (self.round, words))


class AuditedLocal(Audited, LocalTraining):
    """The same with local steps."""


def training_of(way: str, arm: str) -> Audited:
    """The members of a run, before the first round."""
    training: Audited
    if way == "gradients":
        training = Audited(run_of(sum(SIZES), seed=0), True, True, SIZES, list(range(len(SIZES))))
    else:
        optimizer = {"inner_batch": INNER_BATCH, "sparse": SPARSE if way == "sparse" else 0}
        samples = WAYS[way] * len(SIZES) * INNER_STEPS * INNER_BATCH
        run = local_run(0, INNER_STEPS, samples, optimizer, PEAK_LR, len(SIZES))
        training = AuditedLocal(run, [INNER_BATCH] * len(SIZES), [INNER_STEPS] * len(SIZES))
    training.begin(arm)
    return training


def train(way: str, arm: str, rounds: int) -> dict[str, Any]:
    """Losses, who was named by whom, and seconds."""
    torch.set_num_threads(1)
    warm_up()
    training = training_of(way, arm)
    before = time.perf_counter()
    losses = [loss for (loss, _), _ in zip(training.steps(), range(rounds), strict=False)]
    seconds = time.perf_counter() - before - training.audit_seconds
    return {"losses": losses, "said": training.said, "compute": 100 * training.audit_seconds / seconds}


def named(said: dict[str, dict[str, tuple[int, str]]], attacked: bool) -> dict[str, Any]:
    """Who was named by the honest members, and when."""
    bad = {str(member) for member in WORKLESS} if attacked else set()
    honest = [names for reducer, names in said.items() if reducer not in bad]
    false = {member for names in honest for member in names} - bad
    figures: dict[str, Any] = {"false": len(false)}
    if attacked:
        told = {member: sorted(names[member] for names in honest if member in names) for member in sorted(bad)}
        known = all(len(names) >= MAJORITY for names in told.values())
        figures["named_rounds"] = max(names[MAJORITY - 1][0] for names in told.values()) if known else None
        figures["named_by"] = {member: len(names) for member, names in told.items()}
        figures["named_as"] = {
            member: statistics.mode(words for _, words in told[member]) for member in told if told[member]
        }
    return figures


def jobs(quick: bool, way: str | None, rounds: int | None) -> Iterator[tuple[str, str, int]]:
    """Way, arm and rounds of each run."""
    for each in (way,) if way else ("gradients",) if quick else WAYS:
        for arm in ARMS[:2] if quick else ARMS:
            yield each, arm, rounds or (7 if quick else WAYS[each])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--way", choices=list(WAYS), help="only this one")
    parser.add_argument("--rounds", type=int, help="of each run, instead of " + ", ".join(map(str, WAYS.values())))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs, two at a time."""
    asked = list(jobs(args.quick, args.way, args.rounds))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = dict(
            zip(((way, arm) for way, arm, _ in asked), pool.map(train, *zip(*asked, strict=True)), strict=True)
        )
    figures: dict[str, Any] = {}
    for way in dict.fromkeys(way for way, _, _ in asked):
        runs = {arm: found[way, arm] for arm in ARMS if (way, arm) in found}
        last = {arm: statistics.fmean(run["losses"][-LAST:]) for arm, run in runs.items()}
        row = named(runs["attacked"]["said"], True)
        row["false"] += sum(named(run["said"], False)["false"] for arm, run in runs.items() if arm != "attacked")
        row["compute"] = round(max(run["compute"] for run in runs.values()), 4)
        row["loss_ratio"] = round(last["attacked"] / last["calm"], 4)
        if "alone" in last:
            row["honest_ratio"] = round(last["attacked"] / last["alone"], 4)
        figures[way] = {
            "rounds": len(runs["calm"]["losses"]),
            **row,
            "loss": {arm: round(x, 4) for arm, x in last.items()},
        }
    rows = list(figures.values())
    rounds = [row["named_rounds"] for row in rows]
    figures["workless_named_rounds"] = None if None in rounds else max(rounds)
    figures["workless_false"] = sum(row["false"] for row in rows)
    for key in ("compute", "loss_ratio", "honest_ratio"):
        if key in rows[0]:
            figures[f"workless_{key}"] = max(row[key] for row in rows)
    return figures
