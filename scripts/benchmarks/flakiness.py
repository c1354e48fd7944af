"""Measure how often tests fail that pass on a calm machine: the whole suite, again and again, beside a busy loop.

What `scripts/test` runs, step by step, while a loop keeps a core busy. With --stop all that a test started stands
still for up to so long every few seconds, as on a host that is shared. The keys:

- `flaky_runs`: how often all steps ran; `flaky_tests`: tests that ran in one of them;
- `flaky_failures`: failures of all runs together; `failures`: the tests that failed, how often, and the last reason.

Reports (JUnit) stay in the folder of --reports; what is in it is not done again.

Examples:
  scripts/bench flakiness --reports flaky               # ten times, some five hours on two cores
  scripts/bench flakiness --runs 1 --only swarm --stop 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.benchmarks.harness import ROOT, progress
from tt_cli.supervisor.processes import family_of

RUNS = 10
QUICK = "one folder of unit tests, once"
STEPS = ("schedules", "units", "swarm", "processes")
BETWEEN_STOPS = 5.0  # seconds, in the mean


@contextmanager
def busy_loop() -> Iterator[None]:
    """A process that computes all the time."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def run_tests(arguments: Sequence[str], report: Path, stop: float) -> None:
    """Run some tests, and write their report. stop: seconds for which they stand still at most, at a time."""
    chance = random.Random(report.stem)
    command = ["scripts/test", *arguments, "-q", f"--junitxml={report}"]
    with report.with_suffix(".log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as it:
        while it.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                it.wait(chance.expovariate(1 / BETWEEN_STOPS))
                break
            if stop:
                stand_still(family_of(it.pid) - {it.pid}, chance.uniform(0.0, stop))
    if not report.exists():
        sys.exit(f"scripts/bench flakiness: no report; see {report.with_suffix('.log')}")


def stand_still(pids: Iterable[int], seconds: float) -> None:
    """Stop these processes, and let them go on; but for those that a test has stopped."""
    running = [pid for pid in pids if not stopped(pid)]
    for pid in running:
        send(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        for pid in running:
            send(pid, signal.SIGCONT)


def stopped(pid: int) -> bool:
    """True for a process that stands still."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def failed_in(report: Path) -> tuple[int, dict[str, str]]:
    """How many tests ran, and why each of those failed that did."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    found = {}
    for case in cases:
        for problem in (*case.findall("failure"), *case.findall("error")):
            reason = (problem.get("message") or "").strip().splitlines() or [""]
            found[f"{case.get('classname')}::{case.get('name')}"] = reason[0][:100]
    return len(cases), found


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument("--runs", type=int, help=f"default {RUNS}; quick: 1")
    parser.add_argument("--only", choices=STEPS, nargs="+", help="these steps of the suite")
    parser.add_argument("--stop", type=float, default=0.0, metavar="SECONDS", help="let the tests stand still, too")
    parser.add_argument("--reports", type=Path, help="folder for what each step told")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs."""
    folder = (args.reports or Path(tempfile.mkdtemp(prefix="bench-flakiness-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    steps = {"quick": ["tests/run"]} if args.quick else {step: ["--step", step] for step in args.only or STEPS}
    runs, tests, failures = args.runs or (1 if args.quick else RUNS), 0, dict[str, tuple[int, str]]()
    with busy_loop():
        for run in range(1, runs + 1):
            tests = 0
            for step, arguments in steps.items():
                report = folder / f"{run}-{step}.xml"
                if not report.exists():
                    run_tests(arguments, report, args.stop)
                count, found = failed_in(report)
                tests += count
                for name, reason in found.items():
                    failures[name] = failures.get(name, (0, ""))[0] + 1, reason
                progress(f"run {run}, {step}", {"tests": count, "failed": found})
    return {
        "flaky_runs": runs,
        "flaky_tests": tests,
        "flaky_failures": sum(times for times, _ in failures.values()),
        "failures": [{"test": name, "times": times, "reason": why} for name, (times, why) in sorted(failures.items())],
    }
