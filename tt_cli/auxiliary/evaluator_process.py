"""Pictures along the way beside an auxiliary peer: a process of its own that draws from the run's checkpoints."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tt_cli.auxiliary.lease import LeaseFile
from tt_cli.auxiliary.parts import leave_at_once, run_of
from tt_cli.database import Database, DatabaseDown
from tt_cli.errors import TTError, UsageError
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Log
from tt_cli.supervisor.reporter import Orders, run_worker

NICE = 10
LOOK_SECONDS = 5.0
AGAIN_SECONDS = 60.0  # after what did not work
TOLD_SECONDS = 3.0  # between two changes that are told
ALIVE_SECONDS = 30.0  # between two signs of life
MOST_PROMPTS = 24  # as many as the page shows
LONGEST_PROMPT = 300  # characters that the database holds
# Captions of the built-in data, of things that are told apart at 64 x 64 pixels.
EMOJI_PROMPTS = (
    "red apple",
    "grinning face with smiling eyes",
    "sailboat",
    "blue heart",
    "owl",
    "snow-capped mountain",
)
GENERAL_PROMPTS = (
    "a mountain lake at sunrise",
    "an armchair in the shape of an avocado",
    "a red bicycle leaning against a brick wall",
    "an oil painting of a cat on a window sill",
)


@dataclass(frozen=True)
class SamplesOptions:
    """Options of the process, beside the run (TOML text). every: global steps between two evaluations."""

    run: str
    every: int
    prompts: list[str]


def checked_prompts(run: RunConfig, given: Sequence[str]) -> list[str]:
    """The prompts to draw for, each once; those for the run's data where none is given. Raises UsageError."""
    for prompt in given:
        if not prompt.strip() or not prompt.isprintable():
            raise UsageError('--prompt: must be one line of text, such as --prompt "red apple"')
        if len(prompt) > LONGEST_PROMPT:
            raise UsageError(f"--prompt: {len(prompt)} characters are too many; at most {LONGEST_PROMPT}")
    if len(given) > MOST_PROMPTS:
        raise UsageError(f"--prompt: {len(given)} are too many; at most {MOST_PROMPTS}")
    if not given:
        given = EMOJI_PROMPTS if (run.data.source, run.data.name) == ("builtin", "emoji") else GENERAL_PROMPTS
    return list(dict.fromkeys(given))


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """The worker process: evaluate what is new until it is asked to leave."""
    os.nice(NICE)
    from tt_cli.auxiliary.evaluator import Evaluator, use_one_thread

    use_one_thread()
    opts, (run, database) = SamplesOptions(**options), run_of(options)
    folder = folders.run_folder(run)
    lease = LeaseFile(folder) if Database(database, "the history").file is None else None
    store, reader = HistoryWriter(database, run.identity, mends=False), HistoryReader(database)
    teller = _Teller(emit, store)
    leave_at_once(orders)
    evaluator = Evaluator(run, folder, store, reader, opts.every, opts.prompts, teller.log, teller.part)
    emit(Log(f"measures checkpoints every {opts.every} steps, and draws from them: {', '.join(opts.prompts)}"))
    while True:
        wait = LOOK_SECONDS
        try:
            if lease is not None and (leader := lease.other()):  # who writes into the same history
                teller.part(f"…{leader[-6:]} leads, and draws")
            else:
                evaluator.look()
                teller.part(evaluator.words)
        except TTError as error:  # such as a database that is away for a while, or a full disk
            teller.log(f"checkpoints are not evaluated now: {error}; tried again in {AGAIN_SECONDS:.0f} s", "error")
            wait = AGAIN_SECONDS
        time.sleep(wait)


class _Teller:
    """Tells a person what is new, and others now and then that this part lives."""

    def __init__(self, emit: Emit, store: HistoryWriter):
        self._emit, self._store = emit, store
        self._told, self._told_at = "", -ALIVE_SECONDS
        self._logged: set[str] = set()

    def log(self, words: str, level: str) -> None:
        """Once, however often it is found to be so."""
        if words not in self._logged:
            self._logged.add(words)
            self._emit(Log(words, level))

    def part(self, words: str) -> None:
        """For /health."""
        now = time.monotonic()
        if now >= self._told_at + (ALIVE_SECONDS if words == self._told else TOLD_SECONDS):
            with suppress(DatabaseDown):
                self._store.tell_part("evaluator", words)
            self._told, self._told_at = words, now


if __name__ == "__main__":
    sys.exit(run_worker(main))
