"""Admission: passes and the notice of bans, as every process of a peer checks them.

Both are files beside the peer's key, which the supervisor keeps fresh: `<stem>.pass` of this peer and `notice` of the
run. They are read again when they change, and looked at once a second at most, so that processes that forked from one
another see the same without telling each other. A notice that others passed on through the DHT lies in
`<stem>.notice`; of the two the one with the higher number counts.

libp2p proves the peer id of whoever calls (`context.remote_id`), and a pass names the peer id that it was issued to. So
a pass that somebody copied, or a request that somebody recorded, is of no use to another peer. A pass that was shown
once is remembered by the peer id, until it expires, its holder is banned or another one is shown.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from hivemind.utils import get_logger

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.errors import TTError
from tt_cli.identity.passes import CLOCK_LEEWAY, InvalidPass, Notice, Pass, read_notice, read_pass
from tt_cli.run import RunConfig

logger = get_logger(__name__)

LOOK_SECONDS = 1.0
VERIFIED_SECONDS = 60.0  # then a pass is verified again: the authority's old key may have run out
MOST_PASSES = 4096  # remembered


class NotAdmitted(Exception):
    """A peer that may not take part; the words are for it."""


class NoPass(TTError):
    """This peer itself has no pass that counts."""


class Admission:
    """The rules of one run: in a closed one a pass is needed that counts; in any, whom the organiser bans is out.

    For any process that forked from the one that made it. closed: whether a pass is needed at all. key_file: this
    peer's key, beside which passes and notices lie; without one, what the swarm says is kept in this process alone.
    Without an authority there are no bans.
    """

    def __init__(self, run: RunConfig, key_file: Path | None = None):
        self._run, self._key = run.identity, run.membership.authority_key or ""
        self.closed = run.membership.closed
        self._heard = key_file.with_suffix(".notice") if key_file is not None else None
        notices = [key_file.with_name("notice"), key_file.with_suffix(".notice")] if key_file and self._key else []
        self._notices = [_WatchedFile(path) for path in notices]
        self._pass = _WatchedFile(key_file.with_suffix(".pass")) if key_file and self.closed else None
        self._notice: Notice | None = None
        self._banned_users: frozenset[str] = frozenset()
        self._text = self._mine = ""
        self._passes: OrderedDict[str, tuple[str, Pass, float]] = OrderedDict()  # by peer id, with the time of checking

    def mine(self) -> str:
        """This peer's pass, to be shown to others; "" without one, and in an open run."""
        if self._pass is not None and (text := self._pass.changed()) is not None:
            self._mine = text
        return self._mine

    def admit(self, text: str, peer_id: str, now: float | None = None) -> str:
        """The user to whom the pass `text` was issued; "" where none is needed.

        peer_id: who shows it, as libp2p proved it. now: Unix seconds, the present without. Raises NotAdmitted.
        """
        if (notice := self.notice()) is not None and peer_id in notice.banned_peers:
            raise NotAdmitted(f"peer {peer_id} is banned from this run")
        if not self.closed:
            return ""
        user = self.vouched(text, peer_id, time.time() if now is None else now)
        if self.is_banned(peer_id):
            raise NotAdmitted(f"user {user} is banned from this run")
        return user

    def admit_again(self, peer_id: str) -> str:
        """As `admit` with the pass that this peer showed before. Raises NotAdmitted where none is remembered."""
        known = self._passes.get(peer_id)
        return self.admit("" if known is None else known[0], peer_id)

    def vouched(self, text: str, peer_id: str, at: float) -> str:
        """As `admit` at the time `at`, whoever was banned since: what one peer accepts another does too."""
        if not self.closed:
            return ""
        shown = self._verified(text, peer_id, at)
        if shown.expires + CLOCK_LEEWAY <= at:
            raise NotAdmitted(f"the pass expired {at - shown.expires:.0f} s ago")
        if shown.issued > at + CLOCK_LEEWAY:
            raise NotAdmitted(f"the pass begins in {shown.issued - at:.0f} s")
        return shown.user

    def is_banned(self, peer_id: str) -> bool:
        """Tell whether the newest notice bans this peer, or the user whose pass it last showed."""
        notice, known = self.notice(), self._passes.get(peer_id)
        by_user = known is not None and known[1].user.lower() in self._banned_users
        return by_user or (notice is not None and peer_id in notice.banned_peers)

    def notice(self) -> Notice | None:
        """The newest notice that this peer has seen, for the screens and for whoever follows its orders."""
        self._look()
        return self._notice

    def notice_text(self) -> str:
        """The same, signed, as others may have it; "" without one."""
        self._look()
        return self._text

    def hear(self, text: str) -> bool:
        """A notice from the swarm. True when it is signed, and newer than what was known; else nothing happens."""
        self._look()
        if text == self._text or not self._take(text):
            return False
        if self._heard is not None:
            with contextlib.suppress(OSError):  # a full disk: the other processes of this peer do without
                atomic_write(self._heard, text.encode(), mode=PRIVATE)
        return True

    def _verified(self, text: str, peer_id: str, at: float) -> Pass:
        """The pass in `text`, which was issued to this peer; from memory where it can be."""
        known = self._passes.get(peer_id)
        if known is not None and known[0] == text and time.monotonic() < known[2] + VERIFIED_SECONDS:
            return known[1]
        try:
            if not text:
                raise InvalidPass("no pass was shown: this run takes members only")
            shown = read_pass(text, self._key, self._run, at)
        except InvalidPass as error:
            raise NotAdmitted(str(error)) from None
        if shown.peer_id != peer_id:
            raise NotAdmitted("the pass was issued to another peer")
        if known is None or known[1].expires <= shown.expires:  # a record may show an older one
            self._passes[peer_id] = text, shown, time.monotonic()
        while len(self._passes) > MOST_PASSES:
            self._passes.popitem(last=False)
        return shown

    def _look(self) -> None:
        """Read what changed."""
        for file in self._notices:
            if (text := file.changed()) is not None:
                self._take(text)

    def _take(self, text: str) -> bool:
        """Make this the notice, if it is signed and newer."""
        try:
            newer = read_notice(text, self._key, self._run, time.time())
        except InvalidPass:
            return False
        if self._notice is not None and newer.number <= self._notice.number:
            return False
        self._notice, self._text = newer, text
        self._banned_users = frozenset(user.lower() for user in newer.banned_users)  # the Hub's names ignore case
        return True


def admits(membership: Admission, text: str | None, peer_id: str) -> bool:
    """Tell whether this pass, shown by this peer, counts now. None: the one that it showed before."""
    try:
        membership.admit_again(peer_id) if text is None else membership.admit(text, peer_id)
    except NotAdmitted as error:
        logger.info(f"{peer_id} is not admitted: {error}")
        return False
    return True


def membership_at(dht: Any) -> Admission:
    """The admission of the peer with this DHT node: `start_dht` put it there, before anything forked."""
    membership: Admission = dht.membership
    return membership


def check_own_pass(membership: Admission, peer_id: str, run: RunConfig) -> None:
    """Raise NoPass where this peer would be refused at every door."""
    try:
        membership.admit(membership.mine(), peer_id)
    except NotAdmitted as error:
        raise NoPass(
            f"run {run.identity} admits members only, and this peer has no pass that counts ({error}): join with "
            "`tt join`, which asks the run's authority for one, or ask the organiser"
        ) from None


class _WatchedFile:
    """A text that another process replaces now and then."""

    def __init__(self, path: Path):
        self._path = path
        self._looked_at = -math.inf
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> str | None:
        """Its text if it is another file than the last time; None otherwise, and when there is none."""
        if time.monotonic() < self._looked_at + LOOK_SECONDS:
            return None
        self._looked_at = time.monotonic()
        try:
            stat = os.stat(self._path)
            if (there := (stat.st_mtime_ns, stat.st_ino, stat.st_size)) == self._seen:
                return None
            with self._path.open(encoding="ascii") as file:
                text, self._seen = file.read().strip(), there
                return text
        except (OSError, ValueError):  # gone, or no text
            return None
