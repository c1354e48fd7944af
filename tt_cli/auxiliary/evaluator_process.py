"""Evaluation along the way beside an auxiliary peer: a process of its own that measures and draws with checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from tt_cli.auxiliary.lease import LeaseFile
from tt_cli.auxiliary.parts import Heartbeat, run_of
from tt_cli.database import Database
from tt_cli.errors import TTError, UsageError
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Log
from tt_cli.supervisor.reporter import Orders

NICE = 10
LOOK_SECONDS = 5.0
AGAIN_SECONDS = 60.0  # after what did not work
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


@dataclass(frozen=True)
class SamplesOptions:
    """Options of the process, beside the run (TOML text). every: global steps between two evaluations."""

    run: str
    every: int
    prompts: list[str]


def checked_prompts(run: RunConfig, given: Sequence[str]) -> list[str]:
    """The prompts to draw for or write on from, each once; those for the run's data where none is given.

    A kind of run that does neither has none. Raises UsageError.
    """
    if given and not run.prompts:
        raise UsageError(f"--prompt: run {run.run.name} is of kind {run.kind}, from which nothing is drawn")
    for prompt in given:
        if not prompt.strip() or not prompt.isprintable():
            raise UsageError('--prompt: must be one line of text, such as --prompt "red apple"')
        if len(prompt) > LONGEST_PROMPT:
            raise UsageError(f"--prompt: {len(prompt)} characters are too many; at most {LONGEST_PROMPT}")
    if len(given) > MOST_PROMPTS:
        raise UsageError(f"--prompt: {len(given)} are too many; at most {MOST_PROMPTS}")
    if not given:
        given = EMOJI_PROMPTS if (run.data.source, run.data.name) == ("builtin", "emoji") else run.prompts
    return list(dict.fromkeys(given))


def daily(emit: Emit, clock: Callable[[], float] = time.time) -> Callable[[str, str], None]:
    """Make what tells a line, with its level, once a day, however often it is found to be so."""
    tell = cache(lambda line, level, day: emit(Log(line, level)))
    return lambda line, level: tell(line, level, clock() // 86400)


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """The worker process: evaluate what is new until it is asked to leave."""
    os.nice(NICE)
    from tt_cli.auxiliary.evaluator import Evaluator

    opts, (run, database) = SamplesOptions(**options), run_of(options)
    lease = LeaseFile(folders.run_folder(run)) if Database(database, "the history").file is None else None
    store, reader = HistoryWriter(database, run.identity, mends=False), HistoryReader(database)
    heartbeat = Heartbeat(partial(store.tell_part, "evaluator"))
    tell = daily(emit)
    orders.leave_at_once()
    evaluator = Evaluator(run, store, reader, opts.every, opts.prompts, tell, heartbeat)
    draws = f", and makes samples for: {', '.join(opts.prompts)}" if opts.prompts else ""
    emit(Log(f"measures checkpoints every {opts.every} steps{draws}"))
    while True:
        wait = LOOK_SECONDS
        try:
            if lease is not None and (leader := lease.other()) and evaluator.stands_by():  # same history
                heartbeat(f"…{leader[-6:]} leads, and evaluates")
            else:
                evaluator.look()
                heartbeat(evaluator.activity)
        except TTError as error:  # such as a database that is away for a while, or a full disk
            tell(f"checkpoints are not evaluated now: {error}; tried again in {AGAIN_SECONDS:.0f} s", "error")
            wait = AGAIN_SECONDS
        time.sleep(wait)
