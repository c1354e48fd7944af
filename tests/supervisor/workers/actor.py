"""A worker that acts as its options say: `python -m workers.actor`. It loads nothing heavy.

act: "tell" (three events, then a normal end), "wait" (until told to leave), "late" (the same, and trains on for a
moment), "stubborn" (never leaves),
"chatty" (never leaves, and tells so without a pause), "family" (forks one child, executes another, tells
their ids, waits), "error", "usage", "broken", "bug", "die" (SIGKILL), "step" (one global step, then SIGKILL),
"serve" (one look at the swarm, then SIGKILL), "obey" (tells what it is asked for; makes a step to finish).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from tt_cli.errors import TTError, UsageError
from tt_cli.supervisor.events import Emit, Finished, Log, Phase, Saved, Snapshot, Step
from tt_cli.supervisor.reporter import Orders, WorkerBroken


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    print("a library's words")
    act = options["act"]
    if act == "tell":
        for event in (Phase("starting"), Log("second\nline, ß and \u2028"), Step(1, 2.5, 0.1, 3.0, "ab")):
            emit(event)
    elif act in ("wait", "late"):
        emit(Phase("training"))
        orders.leave.wait()
        if act == "late":
            emit(Phase("training", "a round has ended meanwhile"))
        emit(Finished("left"))
    elif act == "obey":
        obey(emit, orders)
    elif act == "stubborn":
        emit(Phase("training"))
        threading.Event().wait()
    elif act == "chatty":
        emit(Phase("training"))
        while True:
            emit(Log("still here"))
    elif act == "family":
        executed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        forked = os.fork()
        if not forked:
            threading.Event().wait()
        emit(Log(json.dumps({"forked": forked, "executed": executed.pid})))
        orders.leave.wait()
    elif act == "error":
        raise TTError("the disk is full: free some space")
    elif act == "usage":
        raise UsageError("run 'x' is unknown")
    elif act == "broken":
        raise WorkerBroken("the daemon was ended")
    elif act == "bug":
        raise RuntimeError("two plus two")
    elif act == "step":
        emit(Step(1, 2.5, 0.1, 3.0, "ab"))
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "serve":
        emit(Snapshot({}))
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise AssertionError(act)


def obey(emit: Emit, orders: Orders) -> None:
    emit(Phase("training", "towards step 5"))
    held = ""
    while not orders.leave.wait(0.01):
        if held != orders.hold:
            held = orders.hold
            emit(Log(f"hold: {held}"))
            emit(Phase("training", "towards step 6"))
        if orders.finish.is_set():
            emit(Step(5, 2.5, 0.1, 3.0, "ab"))
            break
    emit(Phase("leaving", "writing a backup"))
    emit(Saved(5, "/somewhere"))
    emit(Finished("left"))
