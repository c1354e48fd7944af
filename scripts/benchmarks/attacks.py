"""Measure what attackers can do to a run: honest loss, rounds lost, time lost, and who noticed.

Each row is a swarm of its own: an auxiliary peer, seven honest training peers and three attackers, all real processes
on loopback, on the built-in emoji data with a model of 267,000 parameters. Every honest peer computes one micro-batch
of 8 examples for each of the 30 steps, from a seed of its own, so that the honest gradients are the same in every row
until an attack changes the parameters. Attackers behave until step 3; but for "copied message", where all that they
send is from the first step on the work of one device, under the names of all. The columns:

- `loss_ratio`: the loss of the honest peers' last state on 256 held-out examples, over that of the row "no attack";
- `learned`: what the loss fell from the first weights on, over the same without an attack (1: nothing is lost);
- `rounds_lost`: rounds that the honest peer that saw most of it had to repeat or missed;
- `stall_s`: the longest time between two steps, less the usual one without an attack;
- `noticed`: honest peers that named an attacker, and the words most of them used;
- `refused`: whether every try at a door was refused, for those who are no members.

A newcomer joins in the middle of the rows about donors; `newcomer_false` counts the false states that it took over.

With --baseline, the same attackers on stock hivemind.Optimizer (baselines/hivemind_attacked_swarm.py), where
the row has a meaning there.

Examples:
  scripts/bench attacks --out attacks.jsonl             # about two hours; what is in the file is not done again
  scripts/bench attacks --only "weight 1e9,sign flip x100" --json
  scripts/bench attacks --local --only "lone coordinate,zero work,noise x1"
  scripts/bench attacks --kind causal_lm --honest 3 --attackers 1 --steps 12   # the same with a language model

Needs about 6 GiB of memory with ten trainers (--honest, --attackers: fewer).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from testbed.attacked import Size, attacked_run, first_loss, run_attacked
from testbed.attacks.table import ATTACKS

from scripts.benchmarks.harness import progress

NOBODY = "no attack"
QUICK = "one row, few peers and steps"
QUICK_ROWS = ("weight 1e9",)


def done_before(out: Path | None, size: Size) -> dict[tuple[str, str], dict[str, Any]]:
    """(side, row) → what was measured at this size, by an earlier call."""
    if out is None or not out.exists():
        return {}
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.strip()]
    return {(line["side"], line["row"]): line for line in lines if line["size"] == dataclasses.asdict(size)}


def measure_row(side: str, row: str, size: Size, events: Path | None = None) -> dict[str, Any]:
    """One row. events: a folder for what each of its peers told."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-attacks-") as scratch:
        if side == "ours":
            found = run_attacked(size, ATTACKS.get(row), Path(scratch))
            if events is not None:
                (kept := events / row).mkdir(parents=True, exist_ok=True)
                for told in Path(scratch).glob("*.jsonl"):
                    shutil.copy(told, kept)
        else:
            from scripts.benchmarks.baselines.hivemind_attacked_swarm import run_attacked_baseline

            found = run_attacked_baseline(size, row, Path(scratch))
    took = round(time.monotonic() - began, 1)
    return {"side": side, "row": row, "size": dataclasses.asdict(size), "took_s": took, **found}


def compared(found: dict[str, Any], calm: dict[str, Any], first: float) -> dict[str, Any]:
    """One row of the table: what was measured, beside the same without an attack."""
    row: dict[str, Any] = {"attack": found["row"], "side": found["side"]}
    if "problem" in found:
        return {**row, "loss_ratio": None, "rounds_lost": None, "stall_s": None, "refused": None, **found}
    loss, usual = found["loss"], calm["loss"]
    told, strangers = found.get("noticed") or {}, found.get("strangers") or {}
    refused = all(door["refused"] == door["tries"] for door in strangers.values()) if strangers else None
    open_doors = {door: one["got"] for door, one in strangers.items() if one["got"]}
    newcomer = found.get("newcomer") or {}
    return {
        **row,
        "loss_ratio": None if loss is None else round(loss / usual, 4),
        "learned": None if loss is None else round((first - loss) / (first - usual), 3),
        "rounds_lost": found["rounds_lost"],
        "stall_s": round(max(0.0, found["longest_step_s"] - calm["seconds_per_step"]), 1),
        "noticed": f"{told.get('by', 0)} of {told.get('of', 0)}" + (f": {told['words']}" if told.get("words") else ""),
        "refused": refused,
        "finished": found["finished"],
        "seconds_per_step": round(found["seconds_per_step"], 2),
        **({"open_doors": open_doors} if open_doors else {}),
        **({"newcomer_false": newcomer["false"], "newcomer_taken": newcomer["taken"]} if newcomer else {}),
        "target_met": target_met(found, refused, None if loss is None else loss / usual, calm),
    }


def target_met(found: dict[str, Any], refused: bool | None, ratio: float | None, calm: dict[str, Any]) -> bool:
    """Refused where it should be; the loss within its limit; no stall beyond a round's time limit."""
    attack = ATTACKS.get(found["row"])
    limit = attacked_run(Size(1, 0, 1), 0).swarm.averaging_timeout
    in_time = found["longest_step_s"] - calm["seconds_per_step"] <= limit
    true = not (found.get("newcomer") or {}).get("false")
    low = ratio is not None and ratio <= (attack.target if attack is not None else 1.0)
    return refused is not False and low and in_time and true


def rows_named(words: str) -> list[str]:
    """The rows that --only names."""
    rows = words.split(",")
    if unknown := [row for row in rows if row not in ATTACKS]:
        raise argparse.ArgumentTypeError(f"no row {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--only", metavar="ROW[,ROW]", type=rows_named, help=f"of: {', '.join(ATTACKS)}")
    parser.add_argument("--baseline", action="store_true", help="the same with hivemind.Optimizer beside it")
    parser.add_argument("--kind", choices=("dalle", "causal_lm"), default="dalle", help="what is trained")
    words = "by local steps with sparse messages, instead of averaged gradients"
    parser.add_argument("--local", action="store_true", help=words)
    parser.add_argument("--honest", type=int, help="honest trainers (default 7; quick: 3)")
    parser.add_argument("--attackers", type=int, help="default 3; quick: 1")
    parser.add_argument("--steps", type=int, help="default 30; quick: 4")
    parser.add_argument("--out", type=Path, help="file to which each row is appended; rows in it are not done again")
    parser.add_argument("--events", type=Path, help="folder in which all is kept that each peer told, a file for each")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rows asked for."""
    default = Size(3, 1, 4) if args.quick else Size(7, 3, 30)
    size = Size(args.honest or default.honest, args.attackers or default.attackers, args.steps or default.steps)
    size = dataclasses.replace(size, kind=args.kind, local=args.local)
    wanted = args.only or list(QUICK_ROWS if args.quick else ATTACKS)
    known = done_before(args.out, size)
    first = first_loss(attacked_run(size, 0))
    rows = []
    for side in ("ours", "baseline") if args.baseline else ("ours",):
        if side == "baseline":
            from scripts.benchmarks.baselines.hivemind_attacked_swarm import ROWS

            wanted = [row for row in wanted if row in ROWS]
        calm: dict[str, Any] = {}
        for row in (NOBODY, *wanted):
            result = known.get((side, row))
            if result is None:
                result = measure_row(side, row, size, args.events)
                if args.out is not None:
                    with args.out.open("a") as file:
                        file.write(json.dumps(result) + "\n")
            calm = calm or result
            rows.append(compared(result, calm, first))
            progress(row, rows[-1])
    return {"size": dataclasses.asdict(size), "first_loss": first, "rows": rows}
