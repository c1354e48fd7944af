"""The command line of the simulator: `scripts/simulate`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from simulation.mutants import MUTANTS, caught
from simulation.report import table
from simulation.scenarios import SCENARIOS
from simulation.schedule import Schedule, run, shrunk

EXAMPLES = """examples:
  scripts/simulate --scenario partition --seeds 200000
  scripts/simulate --scenario partition --seed 17          the same again, with its messages
  scripts/simulate --members 5 --seeds 100 --json
  scripts/simulate --mutants
"""


def main() -> int:
    """Exit code 1 where an invariant was broken, or a mutant was not caught."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("scripts/simulate", description=__doc__, epilog=EXAMPLES, formatter_class=form)
    words = "only this one, or those; all without"
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help=words)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="schedules of each scenario")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--seed", type=int, metavar="N", help="one schedule, with its messages")
    parser.add_argument("--members", type=int, metavar="N", help="so many, not as many as the seed draws")
    parser.add_argument("--json", action="store_true", help="one JSON object of figures")
    parser.add_argument("--mutants", action="store_true", help="how soon bugs are found that are put in on purpose")
    args = parser.parse_args()
    if args.mutants:
        return _mutants(args.seeds)
    if args.seed is not None:
        result = run(Schedule.drawn(args.seed, (args.scenario or ["everything"])[0], args.members), log=True)
        print(table(result, most=10**6))
        return bool(result.violation)
    names = args.scenario or list(SCENARIOS)
    return _search(
        [Schedule.drawn(args.first + n, name, args.members) for n in range(args.seeds) for name in names], args
    )


def _search(schedules: list[Schedule], args: argparse.Namespace) -> int:
    began, broken, figures = time.process_time(), list[str](), Counter[str]()
    try:
        for schedule in schedules:
            result = run(schedule)
            figures.update(schedules=1, steps=result.steps, messages=result.messages, overruled=result.overruled)
            if result.violation:
                broken.append(f"{schedule.scenario} {schedule.seed}: {result.violation}")
                if not args.json and len(broken) == 1:
                    print("\r" + table(shrunk(schedule)))
            if sys.stderr.isatty():
                done = figures["schedules"] / len(schedules)
                bar = "#" * round(30 * done)
                print(f"\r[{bar:30}] {done:5.1%}, {len(broken)} broken", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        pass
    seconds = time.process_time() - began
    summary = {**figures, "violations": len(broken), "cpu_seconds": round(seconds, 1)}
    summary["schedules_per_cpu_minute"] = round(60 * figures["schedules"] / max(seconds, 1e-9))
    print(
        json.dumps({**summary, "broken": broken[:20]}) if args.json else "\n" + "\n".join([*broken[:20], str(summary)])
    )
    return bool(broken)


def _mutants(most: int) -> int:
    missed = 0
    for name in MUTANTS:
        found = caught(name, most)
        missed += not found
        print(f"{name:40} {found or 'NOT CAUGHT'}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} are caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
