"""Keeps a peer's pass and the run's notice fresh, in the supervisor's process, as files beside the peer's key.

    trainer.key   the peer's RSA key          trainer.pass   its pass          notice   bans and orders of the run

The processes of the peer read the files (tt_cli.swarm.membership.admission). A file is replaced at once, mode 0600.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.auth.authority_client import AuthorityUnreachable, PassRefused, Rejected, made_key, still_good
from tt_cli.errors import TTError, os_errors
from tt_cli.hub.hub_files import HubUnreachable
from tt_cli.identity import peer_key
from tt_cli.identity.passes import MAX_NOTICE, InvalidPass, Notice, Pass, allowed, read_notice
from tt_cli.run import RunConfig, folders

POLL_SECONDS = 15.0
FIRST_WAITS = (2.0, 4.0, 8.0, 16.0)  # seconds between the tries of a peer that has no pass yet
NEARLY_OVER = 60.0  # seconds: a pass this near to its end does not do for a start
SHORTEST_TURN = 5.0  # seconds between two tries to renew

Tell = Callable[[str, str], None]  # a line for a person, and its level: "info", "warning" or "error"


class PassSource(Protocol):
    """A source of passes and notices: the authority over HTTP (AuthorityClient), or the one on this host."""

    peer_id: str

    def admission(self, held: str) -> str:
        """The next pass; `held` is the one before, or "". Raises Refused, AuthorityUnreachable, TTError."""

    def notice(self, known: int) -> str | None:
        """The signed notice, None when it is the one with this number. Raises TTError."""

    def accuse(self, proof: bytes, held: str) -> str:
        """Hand in a proof against a member; the guilty peer's id. Raises Refused, TTError."""

    def close(self) -> None:
        """Close what is open."""


class PassRenewer:
    """A context manager: on entering it there is a pass (in a closed run), and it stays good until leaving.

    key_file: of the peer. tell: gets lines for a person, from any thread. on_refused: called once when the authority
    takes the pass away; `refusal` then says why.
    """

    def __init__(
        self,
        run: RunConfig,
        key_file: Path,
        source: PassSource,
        tell: Tell,
        on_refused: Callable[[], None] = lambda: None,
    ):
        self._run, self._source, self._tell, self._on_refused = run, source, tell, on_refused
        self._pass_file, self._notice_file = key_file.with_suffix(".pass"), key_file.with_name("notice")
        self._proofs = folders.accusations(run)
        self._held: Pass | None = None
        self._text = ""
        self._notice: Notice | None = None
        self._over = threading.Event()
        self._told: dict[str, str] = {}
        self._refusing = threading.Lock()
        self.refusal = ""
        self._threads: list[threading.Thread] = []

    @property
    def user(self) -> str:
        """This peer's user, as the pass says; "" without one."""
        return self._held.user if self._held is not None else ""

    def __enter__(self) -> Self:
        with contextlib.suppress(TTError):  # said again by the thread
            self._listen()
        if self._run.membership.closed:
            self._begin()
        self._check_ban()
        if self.refusal:
            raise PassRefused(self.refusal)
        closed = (self._keep_renewing, self._keep_accusing) if self._run.membership.closed else ()
        work = [self._keep_listening, *closed]
        for loop in work:
            self._threads.append(threading.Thread(target=loop, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._source.close()

    # ---------------------------------------------------------------- the pass

    def _begin(self) -> None:
        """A pass from the last time, else a new one."""
        self._text = _read(self._pass_file)
        self._held = still_good(self._run, self._text, self._source.peer_id, time.time())
        if self._held is not None and self._held.expires > time.time() + NEARLY_OVER:
            return
        for wait in (*FIRST_WAITS, None):
            try:
                self._take(self._source.admission(self._text))
                return
            except (AuthorityUnreachable, HubUnreachable) as error:
                if wait is None:
                    raise TTError(f"{error}; no pass, no entry: try again later") from error
                self._tell(f"{error}; trying again in {wait:.0f} s", "warning")
                self._over.wait(wait)

    def _take(self, text: str) -> None:
        held = still_good(self._run, text, self._source.peer_id, time.time())
        if held is None:
            raise TTError("the authority answered with a pass that does not count: ask the organiser")
        self._text, self._held = text, held
        self._write(self._pass_file, text)

    def _keep_renewing(self) -> None:
        """At half of a pass's life, and then again and again until there is a new one."""
        while not self._over.wait(self._until_renewal()):
            held = self._held
            assert held is not None
            try:
                self._take(self._source.admission(self._text))
                self._well("pass", "the pass is renewed")
            except PassRefused as error:
                if isinstance(error, Rejected) or self._lapsed(held):
                    self._refuse(str(error))
                    return
                self._worse("pass", f"{error}; {self._lasts(held)}")
            except (TTError, OSError) as error:
                self._worse("pass", f"the pass is not renewed: {error}; {self._lasts(held)}, trying again")

    def _until_renewal(self) -> float:
        held = self._held
        assert held is not None
        left = held.expires - time.time()
        half = (held.issued + held.expires) / 2 - time.time()
        if half > 0:
            return max(half, 0.1)
        return max(0.5, min(POLL_SECONDS, left / 4, SHORTEST_TURN if left < NEARLY_OVER else POLL_SECONDS))

    @staticmethod
    def _lapsed(held: Pass) -> bool:
        return time.time() >= held.expires

    @staticmethod
    def _lasts(held: Pass) -> str:
        left = held.expires - time.time()
        return (
            f"it counts for {left / 60:.0f} min more" if left > 0 else "it has expired, so the swarm refuses this peer"
        )

    # ---------------------------------------------------------------- the notice

    def _keep_listening(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self._listen()
                self._well("notice", "the authority answers again")
            except (TTError, OSError) as error:
                self._worse("notice", f"no news of bans and orders: {error}; trying again")
            self._check_ban()

    def _listen(self) -> None:
        key = self._run.membership.authority_key
        assert key is not None
        for ask in (lambda: _read(self._notice_file), self._ask_notice):  # another peer here may have a newer one
            if not (text := ask()):
                continue
            try:
                found = read_notice(text, key, self._run.identity, time.time())
            except InvalidPass as error:
                if text != _read(self._notice_file):
                    raise TTError(f"the authority's notice does not count ({error})") from None
                continue
            if self._notice is None or found.number > self._notice.number:
                before, self._notice = self._notice, found
                if text != _read(self._notice_file):
                    self._write(self._notice_file, text)
                self._tell_orders(before, found)

    def _ask_notice(self) -> str | None:
        return self._source.notice(self._notice.number if self._notice is not None else -1)

    def _tell_orders(self, before: Notice | None, now: Notice) -> None:
        paused = before.paused if before is not None else ""
        if now.paused and now.paused != paused:
            self._tell(f"the organiser has paused the run: {now.paused}", "warning")
        elif paused and not now.paused:
            self._tell("the organiser lets the run go on", "info")
        if before is not None and now.rollback is not None and now.rollback != before.rollback:
            self._tell(f"the organiser takes the run back to step {now.rollback.step}", "warning")

    # ---------------------------------------------------------------- proofs against others

    def _keep_accusing(self) -> None:
        """Report whoever is proven guilty by this peer's files (tt_cli.swarm.audit), until it is banned."""
        settled: set[str] = set()
        while not self._over.wait(POLL_SECONDS):
            for file in sorted(self._proofs.glob("*.accusation")):
                if file.stem not in settled | self._banned_peers():
                    try:
                        self._accuse(file)
                        settled.add(file.stem)
                    except Rejected as error:
                        self._tell(f"the proof against peer {file.stem} is not taken: {error}", "warning")
                        settled.add(file.stem)
                    except (TTError, OSError) as error:
                        self._worse("proof", f"the proof against a member is not handed in: {error}; trying again")

    def _accuse(self, file: Path) -> None:
        guilty = self._source.accuse(file.read_bytes(), self._text)
        self._well("proof", "the authority takes proofs again")
        self._tell(f"peer {guilty} made a wrong average; the authority has the proof and banned it", "warning")

    def _banned_peers(self) -> frozenset[str]:
        return self._notice.banned_peers if self._notice is not None else frozenset()

    def _check_ban(self) -> None:
        """Leave as soon as a notice says so, not only when the pass is to be renewed."""
        if self._notice is None:
            return
        if self._source.peer_id in self._banned_peers():
            self._refuse(f"peer {self._source.peer_id} is banned from this run: ask its organiser")
        elif self._held is not None:
            try:
                allowed(self._held, self._notice)
            except InvalidPass as error:
                self._refuse(f"{error}: ask its organiser")

    # ---------------------------------------------------------------- what is told

    def _refuse(self, words: str) -> None:
        with self._refusing:
            first, self.refusal = not self.refusal, self.refusal or words
        if first:
            with contextlib.suppress(OSError):
                self._pass_file.unlink(missing_ok=True)
            self._on_refused()

    def _worse(self, what: str, words: str) -> None:
        """Tell it once until it is well again, and once more when there is no pass left."""
        state = "lapsed" if what == "pass" and self._held is not None and self._lapsed(self._held) else "troubled"
        if self._told.get(what) != state:
            self._told[what] = state
            self._tell(words, "warning")

    def _well(self, what: str, words: str) -> None:
        if self._told.pop(what, ""):
            self._tell(words, "info")

    def _write(self, file: Path, text: str) -> None:
        with os_errors(f"cannot write {file}", "free space"):
            atomic_write(file, f"{text}\n".encode(), mode=PRIVATE)


def _read(file: Path) -> str:
    try:
        with file.open(encoding="ascii") as opened:
            return opened.read(MAX_NOTICE + 2).strip()
    except (OSError, ValueError):
        return ""


class OnThisHost:
    """The authority whose folder is here: for the organiser's own auxiliary peer, also while the Hub is away."""

    def __init__(self, run: RunConfig, key_file: Path, user: str):
        from tt_cli.auth.authority.authority_server import open_authority

        self._authority, self._user = open_authority(run), user
        key = peer_key.private_key(made_key(key_file))
        self.peer_id = peer_key.peer_id(peer_key.public_der(key.public_key()))

    def admission(self, held: str) -> str:
        """See Source."""
        from tt_cli.auth.authority.issuer import RequestRefused as No

        try:
            return self._authority.issue_here(self.peer_id, self._user)
        except No as error:
            raise Rejected(str(error)) from None

    def notice(self, known: int) -> str | None:
        """See Source."""
        number, text = self._authority.notice()
        return None if number == known else text

    def accuse(self, proof: bytes, held: str) -> str:
        """See Source."""
        from tt_cli.auth.authority.issuer import RequestRefused as No
        from tt_cli.auth.authority.proof_judge import Busy

        try:
            return self._authority.judge(proof, self._user, self.peer_id)
        except No as error:
            raise Rejected(str(error)) from None
        except Busy:
            raise TTError("another proof is being judged") from None

    def close(self) -> None:
        """See Source."""
        self._authority.store.close()
