"""Measure how many rounds commit at once while members die: the real all-reduce and commit on a virtual clock.

- 64 members on equal lines reduce one average. A line carries one part after the other, each way, so fast that a round
  in which nobody dies lasts 107 s. Messages are under way for 50 ms on the mean. A member lives for two hours on the
  mean, then it is killed, whatever it does: it sends, averages, settles or stands in for another one.
- A round commits if all who live at its end step with the same average. Rounds in which nobody dies (e^-0.95 of all)
  are run once; of the others --rounds are drawn, and weighed as often as they come.
- commit_rate_64: the share of rounds that commit. without_backups: the same where what a dead reducer left is lost, of
  every sixth of these. _by_deaths: deaths in a round → rounds drawn, and those that committed. _longer_s: seconds by
  which those lasted longer than a round without deaths, the middle one. Each reducer has four parts, so four backups.
"""

from __future__ import annotations

import argparse
from typing import Any

from scripts.benchmarks.harness import printed_by

ROUNDS, QUICK_ROUNDS = 60, 2
QUICK = f"{QUICK_ROUNDS} rounds with deaths"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help=f"in which somebody dies; {ROUNDS}, or {QUICK_ROUNDS} with --quick")


def measure(args: Any) -> dict[str, Any]:
    return printed_by("simulation.deaths", args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS))
