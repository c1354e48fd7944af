"""Requests of a person to a running peer, from another terminal or from cron, and the state that answers them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

from tt_cli import __version__
from tt_cli.errors import TTError, UsageError
from tt_cli.supervisor.control_socket import answering
from tt_cli.supervisor.events import Event, Phase
from tt_cli.supervisor.household.limits import GO_ON, HouseholdLimits, Verdict, until_words
from tt_cli.supervisor.peer_state import PeerState, read_status
from tt_cli.supervisor.slot import Slot

WRITE_SECONDS = 10.0
LONGEST_PAUSE = 366 * 86400.0


class Control:
    """The supervisor's side of `tt status`, `pause`, `resume` and `finish`; a context manager.

    What is asked is kept in the slot's status file, so it outlives the supervisor. by_hand: a person has just started
    this peer, which takes back what was asked of it before; otherwise (systemd, Docker, cron) that still counts.
    news, resumed: set when something was asked, by `tt resume`; who waits for it clears it.
    """

    def __init__(self, slot: Slot, status: PeerState, limits: HouseholdLimits, *, by_hand: bool):
        self.slot, self.status, self.limits = slot, status, limits
        self.news, self.resumed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._written = 0.0
        status.log, status.version = str(slot.log), __version__
        before = read_status(slot.status)
        if before is not None:
            status.step, status.saved_step = before.step, before.saved_step
            if not by_hand:
                status.paused, status.paused_until, status.finish = before.paused, before.paused_until, before.finish
        self._socket = answering(slot.socket, self.answer)

    def __enter__(self) -> Control:
        self._write()
        self._socket.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            if self.status.state != "ended":
                left = "left" if isinstance(error, KeyboardInterrupt) else "failed"
                why = "" if error is None else f"{left}: {str(error) or 'Ctrl-C'}"
                self.status.enter("ended", why, time.time())
            self._write()
        self._socket.__exit__(None, None, None)

    # ---------------------------------------------------------------- for the supervisor

    def apply(self, event: Event) -> None:
        """Take one event into what is known."""
        with self._lock:
            self.status.apply(event)
            if isinstance(event, Phase) or time.monotonic() > self._written + WRITE_SECONDS:
                self._write()

    def end(self, *, done: bool = False) -> None:
        """The peer has ended. done: by itself, so that a wish to finish is fulfilled."""
        with self._lock:
            self.status.enter("ended", self.status.reason, time.time())
            self.status.finish = self.status.finish and not done
            self._write()

    def paused(self) -> Verdict:
        """The pause that a person has asked for, while it lasts."""
        with self._lock:
            now, until = time.time(), self.status.paused_until
            if self.status.paused and until is not None and now >= until:
                self.status.paused, self.status.paused_until = False, None
                self._write()
            if not self.status.paused:
                return GO_ON
            words = "until `tt resume`" if until is None else f"{until_words(until, now)} (`tt pause`)"
            return Verdict("pause", words, until)

    # ---------------------------------------------------------------- for the socket

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry a request out; say what happens now. Raises TTError for what cannot be done."""
        with self._lock:
            match request.get("command"):
                case "status":
                    return {"ok": True, "status": json.loads(self.status.model_dump_json())}
                case "pause":
                    words = self._pause(request.get("seconds"))
                case "resume":
                    words = self._resume()
                case "finish":
                    words = self._finish()
                case other:
                    what = f"{str(other)[:40]!r}"
                    raise UsageError(f"this peer does not know the command {what}; it runs another version")
            self._write()
        self.news.set()
        return {"ok": True, "words": words}

    def _pause(self, seconds: Any) -> str:
        if self.status.role == "aux":
            raise TTError("an aux peer cannot be paused: others need it; `tt finish` ends it")
        if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds <= LONGEST_PAUSE):
            raise UsageError(f"cannot pause for {str(seconds)[:40]} seconds")
        now, before = time.time(), self.status.state
        until = None if seconds is None else now + seconds
        self.status.paused, self.status.paused_until, self.status.finish = True, until, False
        lasts = until_words(until, now) or "until `tt resume`"
        if before == "paused":
            return f"stays paused {lasts}"
        return f"writes a backup, leaves the swarm and is paused {lasts}"

    def _resume(self) -> str:
        asked = self.status.paused or self.status.finish
        stopped = self.status.state == "paused"
        self.status.paused, self.status.paused_until, self.status.finish = False, None, False
        self.resumed.set()
        verdict = self.limits.verdict
        if verdict.action == "pause":
            return f"stays paused: {verdict.reason}"
        if stopped:
            return "starts again"
        return "goes on" if asked else "was not paused"

    def _finish(self) -> str:
        self.status.finish, self.status.paused, self.status.paused_until = True, False, None
        if self.status.role == "aux":
            return "ends now"
        if self.status.state == "paused":
            return "ends now, for it is paused"
        if self.status.state in ("starting", "syncing") or self.status.step is None:
            return "ends after its first step"
        return f"ends after step {self.status.step + 1}"

    def _write(self) -> None:
        self._written = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk; the socket still answers
            self.status.write(self.slot.status)
