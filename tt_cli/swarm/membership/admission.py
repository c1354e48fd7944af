"""Who is a member: passes and the notice of bans, as every process of a peer checks them at its doors.

Both are files beside the peer's key, which the supervisor keeps fresh: `<stem>.pass` of this peer and `notice` of the
run. They are read again when they change, and looked at once a second at most, so that processes that forked from one
another see the same without telling each other. A notice that others passed on through the DHT lies in
`<stem>.notice`; of the two the one with the higher number counts.

libp2p proves the peer id of whoever calls (`context.remote_id`), and a pass names the peer id that it was issued to. So
a pass that somebody copied, or a request that somebody recorded, is of no use to another peer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

import msgpack
from hivemind.utils import get_logger

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.errors import TTError
from tt_cli.identity.passes import CLOCK_LEEWAY, MAX_NOTICE, MAX_PASS, InvalidPass, Notice, Pass
from tt_cli.identity.passes import read_notice as verified_notice
from tt_cli.identity.passes import read_pass as verified_pass
from tt_cli.run import RunConfig

logger = get_logger(__name__)

LOOK_SECONDS = 1.0
VERIFIED_SECONDS = 60.0  # then a pass is verified again: the authority's old key may have run out
MOST_PASSES = 4096  # remembered as verified


class NotAdmitted(Exception):
    """A peer that may not take part; the words are for it."""


class NoPass(TTError):
    """This peer itself has no pass that counts."""


class Admission(Protocol):
    """What the doors of a peer ask. For any process that forked from the one that made it."""

    @property
    def closed(self) -> bool:
        """Whether a pass is needed at all."""

    def mine(self) -> str:
        """This peer's pass, to be shown to others; "" without one."""

    def admit(self, text: str, peer_id: str, now: float | None = None) -> str:
        """The user to whom the pass `text` was issued; "" where none is needed.

        peer_id: who shows it, as libp2p proved it. now: Unix seconds, the present without. Raises NotAdmitted.
        """

    def vouched(self, text: str, peer_id: str, at: float) -> str:
        """As `admit` at the time `at`, whoever was banned since: what one peer accepts another does too."""

    def is_banned(self, peer_id: str) -> bool:
        """Whether the newest notice bans this peer, or the user whose pass it last showed."""

    def notice(self) -> Notice | None:
        """The newest notice that this peer has seen, for the screens and for whoever follows its orders."""

    def notice_text(self) -> str:
        """The same, signed, as others may have it; "" without one."""

    def hear(self, text: str) -> bool:
        """A notice from the swarm. True when it is signed, and newer than what was known; else nothing happens."""


class Open:
    """Anybody may take part, but for the peers that the organiser bans; without an authority there are no bans.

    folder, stem: where the files lie; "" keeps what the swarm says in this process alone.
    """

    closed = False

    def __init__(self, run: RunConfig, folder: Path | None = None, stem: str = ""):
        self._run, self._key = run.identity, run.membership.authority_key or ""
        names = ["notice", f"{stem}.notice"] if stem else ["notice"]
        self._files = [_File(folder / name, MAX_NOTICE) for name in names if folder is not None and self._key]
        self._heard = folder / f"{stem}.notice" if folder is not None and stem else None
        self._looked = -LOOK_SECONDS
        self._notice: Notice | None = None
        self._text = ""

    def mine(self) -> str:
        """See Membership."""
        return ""

    def admit(self, text: str, peer_id: str, now: float | None = None) -> str:
        """See Membership."""
        self._check_peer(peer_id)
        return ""

    def vouched(self, text: str, peer_id: str, at: float) -> str:
        """See Membership."""
        return ""

    def is_banned(self, peer_id: str) -> bool:
        """See Membership."""
        self._look()
        return self._notice is not None and peer_id in self._notice.banned_peers

    def notice(self) -> Notice | None:
        """See Membership."""
        self._look()
        return self._notice

    def notice_text(self) -> str:
        """See Membership."""
        self._look()
        return self._text

    def hear(self, text: str) -> bool:
        """See Membership."""
        self._look()
        if not self._key or text == self._text or not self._take(text):
            return False
        if self._heard is not None:
            with contextlib.suppress(OSError):  # a full disk: the other processes of this peer do without
                atomic_write(self._heard, text.encode(), mode=PRIVATE)
        return True

    def _check_peer(self, peer_id: str) -> None:
        if self.is_banned(peer_id):
            raise NotAdmitted(f"peer {peer_id} is banned from this run")

    def _look(self) -> None:
        """Read what changed."""
        now = time.monotonic()
        if now < self._looked + LOOK_SECONDS:
            return
        self._looked = now
        for file in self._files:
            if (text := file.changed()) is not None:
                self._take(text)

    def _take(self, text: str) -> bool:
        """Make this the notice, if it is signed and newer."""
        try:
            read = verified_notice(text, self._key, self._run, time.time())
        except InvalidPass:
            return False
        if self._notice is not None and read.number <= self._notice.number:
            return False
        self._notice, self._text = read, text
        return True


class Closed(Open):
    """Only those with a pass may take part, as long as it counts and nobody banned them."""

    closed = True

    def __init__(self, run: RunConfig, folder: Path | None = None, stem: str = ""):
        super().__init__(run, folder, stem)
        self._pass_file = _File(folder / f"{stem}.pass", MAX_PASS) if folder is not None and stem else None
        self._mine = ""
        self._looked_mine = -LOOK_SECONDS
        self._verified: OrderedDict[str, tuple[Pass, float]] = OrderedDict()  # with the time of it (monotonic)
        self._users: OrderedDict[str, str] = OrderedDict()  # peer id → user, in lower case
        self._banned_users: frozenset[str] = frozenset()

    def mine(self) -> str:
        """See Membership."""
        now = time.monotonic()
        if self._pass_file is not None and now >= self._looked_mine + LOOK_SECONDS:
            self._looked_mine = now
            if (text := self._pass_file.changed()) is not None:
                self._mine = text
        return self._mine

    def admit(self, text: str, peer_id: str, now: float | None = None) -> str:
        """See Membership."""
        self._check_peer(peer_id)
        user = self.vouched(text, peer_id, time.time() if now is None else now)
        self._users[peer_id] = user.lower()
        self._users.move_to_end(peer_id)
        while len(self._users) > MOST_PASSES:
            self._users.popitem(last=False)
        if self.is_banned(peer_id):
            raise NotAdmitted(f"user {user} is banned from this run")
        return user

    def vouched(self, text: str, peer_id: str, at: float) -> str:
        """See Membership."""
        found = self._read(text, at)
        if found.peer_id != peer_id:
            raise NotAdmitted("the pass was issued to another peer")
        if found.expires + CLOCK_LEEWAY <= at:
            raise NotAdmitted(f"the pass expired {at - found.expires:.0f} s ago")
        if found.issued > at + CLOCK_LEEWAY:
            raise NotAdmitted(f"the pass begins in {found.issued - at:.0f} s")
        return found.user

    def is_banned(self, peer_id: str) -> bool:
        """See Membership."""
        return super().is_banned(peer_id) or self._users.get(peer_id) in self._banned_users

    def _read(self, text: str, at: float) -> Pass:
        """A verified pass, from memory where it can be."""
        found, verified = self._verified.get(text, (None, 0.0))
        if found is not None and time.monotonic() < verified + VERIFIED_SECONDS:
            return found
        try:
            if not text:
                raise InvalidPass("no pass was shown: this run takes members only")
            found = verified_pass(text, self._key, self._run, at)
        except InvalidPass as error:
            raise NotAdmitted(str(error)) from None
        self._verified[text] = found, time.monotonic()
        self._verified.move_to_end(text)
        while len(self._verified) > MOST_PASSES:
            self._verified.popitem(last=False)
        return found

    def _take(self, text: str) -> bool:
        if not super()._take(text):
            return False
        assert self._notice is not None
        self._banned_users = frozenset(user.lower() for user in self._notice.banned_users)
        return True


def membership_of(run: RunConfig, key_file: Path | None) -> Open:
    """What the doors of this peer ask. key_file: its key, beside which passes and notices lie; None without any."""
    kind = Closed if run.membership.closed else Open
    return kind(run) if key_file is None else kind(run, key_file.parent, key_file.stem)


def admits(membership: Admission, text: str, peer_id: str) -> bool:
    """Whether this pass, shown by this peer, counts now."""
    try:
        membership.admit(text, peer_id)
    except NotAdmitted as error:
        logger.info(f"{peer_id} is not admitted: {error}")
        return False
    return True


def shown_in(request: bytes) -> str:
    """The pass in a request that is a msgpack map; "" without one, and where the request cannot be read."""
    try:
        match msgpack.unpackb(request, max_map_len=3, max_ext_len=0, max_bin_len=0, max_str_len=MAX_PASS):
            case {"pass": str(text)}:
                return text
    except (ValueError, msgpack.UnpackException):
        pass
    return ""


def membership_at(dht: Any) -> Admission:
    """What the doors of the peer with this DHT node ask: `start_dht` put it there, before anything forked."""
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


class _File:
    """A text that another process replaces now and then."""

    def __init__(self, path: Path, limit: int):
        self._path, self._limit = path, limit
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> str | None:
        """Its text if it is another file than the last time; None otherwise, and when there is none."""
        try:
            stat = os.stat(self._path)
            mark = stat.st_mtime_ns, stat.st_ino, stat.st_size
            if mark == self._seen:
                return None
            self._seen = mark
            with self._path.open(encoding="ascii") as file:
                return file.read(self._limit + 1).strip()
        except (OSError, ValueError):  # gone, or no text
            return None
