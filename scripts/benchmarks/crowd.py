"""Time a hundred newcomers that take the state at once, against one alone, in the simulator.

Four members make steps, everybody's line carries 20 Mbit/s each way, and the newcomers come within five seconds. The
members' rounds and the way of the state (docs/protocol.md) run the product's code on a virtual clock; chunks and parts
are small, and stand on the lines for 1 MiB each of a state that is six times as large as an average. The members
compute a step for twice as long as a round needs their lines (`--computing`): with less, less is left to states.

    scripts/bench crowd                      # some minutes
    scripts/bench crowd --quick --json       # 24 newcomers and a smaller state: under a minute
    scripts/bench crowd --apart              # nobody hands on what it takes, as until protocol 6

JSON keys: crowd_over_one (seconds until the last of the crowd has the state, to those of one alone), steps_slower and
rounds_slower (mean seconds of a step, and of a round's transfer, meanwhile, to those without newcomers),
crowd_seconds, one_seconds, copies (of the state that the four members sent to the whole crowd).
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from simulation.crowd import Setting, taken

from scripts.benchmarks.harness import progress

QUICK = "24 newcomers, a state of 64 chunks"
TAKERS, CHUNKS = 100, 256


def arguments(parser: argparse.ArgumentParser) -> None:
    """How many, of how much, and what they do."""
    parser.add_argument("--takers", type=int, metavar="N", help=f"newcomers; default {TAKERS}")
    parser.add_argument("--chunks", type=int, metavar="N", help=f"of the state; default {CHUNKS}")
    parser.add_argument(
        "--computing", type=float, default=2.0, metavar="ROUNDS", help="of a step, in rounds; default 2"
    )
    parser.add_argument("--apart", action="store_true", help="nobody hands on what it takes")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Nobody, one, and all of them."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    takers = args.takers or (24 if args.quick else TAKERS)
    chunks = args.chunks or (64 if args.quick else CHUNKS)
    results = {}
    for count in (0, 1, takers):
        results[count] = taken(Setting(count, chunks, hand_on=not args.apart, computing=args.computing))
        last = max(results[count].seconds, default=0.0)
        progress(f"{count} newcomers", {"seconds": round(last, 1), "step": round(results[count].step_seconds, 1)})
    nobody, one, crowd = results.values()
    return {
        "crowd_over_one": max(crowd.seconds) / max(one.seconds),
        "steps_slower": crowd.step_seconds / nobody.step_seconds,
        "rounds_slower": crowd.round_seconds / nobody.round_seconds,
        "crowd_seconds": max(crowd.seconds),
        "one_seconds": max(one.seconds),
        "copies": crowd.copies,
    }
