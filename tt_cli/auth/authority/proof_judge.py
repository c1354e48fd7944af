"""Judges a proof that a reducer made a wrong average, in a process of its own: torch, and a stranger's bytes.

The authority itself needs neither torch nor hivemind. It starts `python -m tt_cli.auth.authority.proof_judge`, which
reads one line, the run file as a JSON text, and then the proof (an Accusation), and prints one JSON object:
{"guilty": peer id} or {"reason": why it proves nothing}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import BinaryIO

from tt_cli.errors import TTError
from tt_cli.run import RunConfig

MOST_PROOF = 2**25  # bytes
JUDGE_SECONDS = 120.0
NEEDED = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")  # of the environment: no token, no database's password
WORDS = 300  # of a reason


class NoProof(Exception):
    """It proves nothing; the text says why."""


def judged(run: RunConfig, proof: bytes) -> str:
    """The guilty peer's id. Raises NoProof, TTError where the judge itself fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tt_cli.auth.authority.proof_judge"],
            input=json.dumps(run.to_toml()).encode() + b"\n" + proof,
            env={name: os.environ[name] for name in NEEDED if name in os.environ} | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=JUDGE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TTError(f"no proof can be judged here within {JUDGE_SECONDS:.0f} s") from None
    except OSError as error:
        raise TTError(f"no proof can be judged here: {error.strerror or error}") from error
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        if "guilty" in found:
            return str(found["guilty"])
        words = str(found["reason"])
    except (IndexError, ValueError, LookupError, TypeError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise TTError(f"no proof can be judged here: {last[0][:WORDS]}") from None
    raise NoProof(words)


def main(stream: BinaryIO) -> dict[str, str]:
    """Judge what comes in."""
    from tt_cli.swarm.allreduce.messages import Accusation, NotProven, RoundRules, verify
    from tt_cli.task import task_of

    run = RunConfig.from_toml(json.loads(stream.readline()), "the run file")
    rules = RoundRules.of(run, task_of(run).shapes())
    try:
        return {"guilty": verify(Accusation.read(stream.read(MOST_PROOF)), rules)}
    except NotProven as error:
        return {"reason": str(error)[:WORDS]}


if __name__ == "__main__":
    print(json.dumps(main(sys.stdin.buffer)))
