"""Keeps a peer's pass and the run's notice fresh, in the supervisor's process, as files beside the peer's key.

    trainer.key   the peer's RSA key          trainer.pass   its pass          notice   bans and orders of the run

The processes of the peer read the files (tt_cli.swarm.membership.admission). A file is replaced at once, mode 0600.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.auth.authority_client import AuthorityClient, AuthorityUnreachable, Tell, TooLarge
from tt_cli.auth.authority_requests import ADDRESS, MOST_ADDRESSES, PassRefused, Rejected
from tt_cli.errors import TTError, os_errors
from tt_cli.hub.hub_files import HubUnreachable
from tt_cli.identity import peer_key
from tt_cli.identity.passes import MAX_NOTICE, InvalidPass, Notice, Pass, allowed, read_notice, read_pass
from tt_cli.run import RunConfig, folders
from tt_cli.run.initial_peers import remember_met

POLL_SECONDS = 15.0
FIRST_WAITS = (2.0, 4.0, 8.0, 16.0)  # seconds between the tries of a peer that has no pass yet
NEARLY_OVER = 60.0  # seconds: a pass this near to its end does not do for a start
SHORTEST_TURN = 5.0  # seconds between two tries to renew

Addresses = Callable[[], list[str]]  # multiaddrs


class Admitted:
    """A peer that may take part. user: as whom, "" where nobody is logged in. refusal: why it may not any more."""

    def __init__(self, tell: Tell, user: str = ""):
        self._tell, self.user = tell, user
        self._leave: Callable[[], None] = lambda: None
        self.refusal = ""

    def attach(self, leave: Callable[[], None]) -> None:
        """Have `leave` called, which asks a worker to, when the pass is taken away; twice is possible."""
        self._leave = leave
        if self.refusal:
            leave()

    def check(self) -> None:
        """Raises PassRefused when the pass has been taken away."""
        if self.refusal:
            raise PassRefused(self.refusal)


class PassRenewer(Admitted):
    """A context manager: on entering it there is a pass (in a closed run), and it stays good until leaving.

    key_file: of the peer. tell: gets lines for a person, from any thread. addresses: of the peer now. clock: Unix time.
    """

    def __init__(
        self,
        run: RunConfig,
        key_file: Path,
        source: AuthorityClient | OnThisHost,
        tell: Tell,
        user: str = "",
        addresses: Addresses = list,
        clock: Callable[[], float] = time.time,
    ):
        super().__init__(tell, user)
        self._addresses, self._clock = addresses, clock
        self._run, self._source = run, source
        self._authority_key = run.membership.authority_key or ""
        self._pass_file, self._notice_file = key_file.with_suffix(".pass"), key_file.with_name("notice")
        self._proofs = folders.accusations(run)
        self._held: Pass | None = None
        self._text = ""
        self._notice = Notice(run.identity, -1, 0.0, frozenset(), frozenset(), "", None)  # until there is one
        self._over = threading.Event()
        self._told: dict[str, bool] = {}  # troubles; whether the pass had expired by then
        self._refusing = threading.Lock()

    def __enter__(self) -> Self:
        with contextlib.suppress(TTError):  # said again by the thread
            self._listen()
        if self._run.membership.closed:
            self._begin()
        self._check_ban()
        self.check()
        closed = (self._keep_renewing, self._keep_accusing) if self._run.membership.closed else ()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._keep_listening, *closed)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._source.close()

    def _begin(self) -> None:
        """A pass from the last time, else a new one."""
        self._text = _read(self._pass_file)
        with contextlib.suppress(InvalidPass):
            self._held = self._own(self._text)
            if self._held.expires > self._clock() + NEARLY_OVER:
                return
        for wait in (*FIRST_WAITS, None):
            try:
                self._take(self._source.admission(self._text))
                if self._source.members:  # later the peer itself knows who answers
                    remember_met(self._pass_file.parent, self._source.members)
                return
            except (AuthorityUnreachable, HubUnreachable) as error:
                if wait is None:
                    raise TTError(f"{error}; no pass, no entry: try again later") from error
                self._tell(f"{error}; trying again in {wait:.0f} s", "warning")
                self._over.wait(wait)

    def _own(self, text: str) -> Pass:
        """The pass in `text`. Raises InvalidPass where it does not count for this peer."""
        held = read_pass(text, self._authority_key, self._run.identity, self._clock())
        if held.peer_id != self._source.peer_id:
            raise InvalidPass("it is another peer's")
        self.user = held.user
        return held

    def _take(self, text: str) -> None:
        try:
            held = self._own(text)
        except InvalidPass as error:
            raise TTError(
                f"the authority answered with a pass that does not count ({error}): ask the organiser"
            ) from None
        self._write(self._pass_file, text)
        self._held, self._text = held, text  # what a full disk did not take is asked for again

    def _keep_renewing(self) -> None:
        """At half of a pass's life, and then again and again until there is a new one."""
        while (held := self._held) is not None and self._wait(held):
            try:
                self._take(self._source.admission(self._text, self._where()))
                self._well("pass", "the pass is renewed")
            except PassRefused as error:
                if isinstance(error, Rejected) or self._clock() >= held.expires:
                    self._refuse(str(error))
                    return
                self._worse("pass", f"{error}; {_lasts(held, self._clock())}")
            except (TTError, OSError) as error:
                self._worse("pass", f"the pass is not renewed: {error}; {_lasts(held, self._clock())}, trying again")

    def _wait(self, held: Pass) -> bool:
        """Wait until this pass is to be renewed: when it is time, or the authority lacks where this peer is.

        For that it is a sixteenth of its life old at least. False when it is over.
        """
        due, old = math.inf, held.issued + (held.expires - held.issued) / 16
        while True:
            # Looked at anew each time: no monotonic clock counts the hours in which a laptop sleeps.
            due = min(due, time.monotonic() + _until_renewal(held, self._clock()))
            if self._over.wait(min(max(due - time.monotonic(), 0.0), POLL_SECONDS)):
                return False
            if time.monotonic() >= due or (self._clock() > old and self._source.lacks(self._where())):
                return True

    def _where(self) -> list[str]:
        return [address for address in self._addresses() if re.match(ADDRESS, address)][:MOST_ADDRESSES]

    def _keep_listening(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self._listen()
                self._well("notice", "the authority answers again")
            except (TTError, OSError) as error:
                self._worse("notice", f"no news of bans and orders: {error}; trying again")
            self._check_ban()

    def _listen(self) -> None:
        """Take the newest notice. Raises TTError."""
        self._hear(_read(self._notice_file), stored=True)  # another peer here may have a newer one
        self._hear(self._source.notice(self._notice.number), stored=False)

    def _hear(self, text: str | None, *, stored: bool) -> None:
        if not text:
            return
        try:
            notice = read_notice(text, self._authority_key, self._run.identity, self._clock())
        except InvalidPass as error:
            if stored:
                return
            raise TTError(f"the authority's notice does not count ({error})") from None
        if notice.number > self._notice.number:
            if not stored:
                self._write(self._notice_file, text)
            before, self._notice = self._notice, notice
            self._tell_orders(before, notice)

    def _tell_orders(self, before: Notice, now: Notice) -> None:
        if now.paused and now.paused != before.paused:
            self._tell(f"the organiser has paused the run: {now.paused}", "warning")
        elif before.paused and not now.paused:
            self._tell("the organiser lets the run go on", "info")
        if before.number >= 0 and now.rollback is not None and now.rollback != before.rollback:
            self._tell(f"the organiser takes the run back to step {now.rollback.step}", "warning")

    def _keep_accusing(self) -> None:
        """Report whoever is proven guilty by this peer's files (tt_cli.swarm.audit), until it is banned."""
        settled: set[str] = set()
        while not self._over.wait(POLL_SECONDS):
            for file in sorted(self._proofs.glob("*.accusation")):
                if file.stem in settled | self._notice.banned_peers:
                    continue
                try:
                    guilty = self._source.accuse(file.read_bytes(), self._text)
                except (Rejected, TooLarge) as error:
                    self._tell(f"the proof against peer {file.stem} is not taken: {error}", "warning")
                except (TTError, OSError) as error:
                    self._worse("proof", f"the proof against a member is not handed in: {error}; trying again")
                    continue
                else:
                    self._well("proof", "the authority takes proofs again")
                    news = f"peer {guilty} made a wrong average; the authority has the proof and banned it"
                    self._tell(news, "warning")
                settled.add(file.stem)

    def _check_ban(self) -> None:
        """Leave as soon as a notice says so, not only when the pass is to be renewed."""
        if self._source.peer_id in self._notice.banned_peers:
            self._refuse(f"peer {self._source.peer_id} is banned from this run: ask its organiser")
        elif self._held is not None:
            try:
                allowed(self._held, self._notice)
            except InvalidPass as error:
                self._refuse(f"{error}: ask its organiser")

    def _refuse(self, reason: str) -> None:
        with self._refusing:
            first, self.refusal = not self.refusal, self.refusal or reason
        if first:
            with contextlib.suppress(OSError):
                self._pass_file.unlink(missing_ok=True)
            self._tell(reason, "error")
            self._leave()

    def _worse(self, what: str, line: str) -> None:
        """Tell it once until it is well again, and once more when there is no pass left."""
        lapsed = what == "pass" and self._held is not None and self._clock() >= self._held.expires
        if self._told.get(what) != lapsed:
            self._told[what] = lapsed
            self._tell(line, "warning")

    def _well(self, what: str, line: str) -> None:
        if self._told.pop(what, None) is not None:
            self._tell(line, "info")

    def _write(self, file: Path, text: str) -> None:
        with os_errors(f"cannot write {file}", "free space"):
            atomic_write(file, f"{text}\n", mode=PRIVATE)


def _until_renewal(held: Pass, now: float) -> float:
    left = abs(held.expires - now)  # without a pass for long, it asks no more often than before
    half = (held.issued + held.expires) / 2 - now
    if half > 0:
        return max(half, 0.1)
    return max(0.5, min(left / 4, SHORTEST_TURN if left < NEARLY_OVER else POLL_SECONDS))


def _lasts(held: Pass, now: float) -> str:
    left = held.expires - now
    return f"it counts for {left / 60:.0f} min more" if left > 0 else "it has expired, so the swarm refuses this peer"


def _read(file: Path) -> str:
    try:
        with file.open(encoding="ascii") as opened:
            return opened.read(MAX_NOTICE + 2).strip()
    except (OSError, ValueError):
        return ""


class OnThisHost:
    """The authority whose folder is here: for the organiser's own auxiliary peer, also while the Hub is away.

    It is asked as an AuthorityClient is. Raises Rejected, TTError.
    """

    members = None  # are named to who asks over HTTP

    def __init__(self, run: RunConfig, key_file: Path, user: str):
        from tt_cli.auth.authority.authority_server import open_authority

        self._authority = open_authority(run)
        self._user = user
        self.peer_id = peer_key.id_of(peer_key.made_key(key_file))
        self.close = self._authority.store.close

    def admission(self, held: str, addresses: Sequence[str] = ()) -> str:
        """A pass."""
        return self._authority.issue_here(self.peer_id, self._user)

    def lacks(self, addresses: Sequence[str]) -> bool:
        """It introduces nobody: the run file names the organiser's own peers."""
        return False

    def notice(self, known: int) -> str | None:
        """The signed notice; None when it is the one with this number."""
        number, text = self._authority.notice()
        return None if number == known else text

    def accuse(self, proof: bytes, held: str) -> str:
        """Hand in a proof against a member; the guilty peer's id."""
        return self._authority.judge(proof, self._user, self.peer_id)
