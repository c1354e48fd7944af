"""The organiser's work on the authority's host: bans, orders, lists. Each writes its line into the audit trail."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tt_cli.auth.authority.authority_folder import AuthorityFolder, AuthoritySettings
from tt_cli.auth.authority.authority_server import open_store
from tt_cli.auth.authority.member_store import MemberStore
from tt_cli.errors import UsageError
from tt_cli.identity.peer_key import PEER_ID
from tt_cli.run import RunConfig
from tt_cli.run.sections import HUB_PLACE

WHO = "organiser"
MOST_BANS = 8000  # of names of up to 128 characters, within the length of a notice


class Organiser:
    """For the authority in this run's folder. Use `at_work` to get one. store: lists of members, bans and the trail."""

    def __init__(self, folder: AuthorityFolder, store: MemberStore):
        self._folder, self.store = folder, store

    @classmethod
    @contextmanager
    def at_work(cls, run: RunConfig) -> Iterator[Organiser]:
        """Raises UsageError where none is here, or another than the run file's, TTError when its database is lost."""
        folder = AuthorityFolder(run)
        folder.checked()
        with closing(open_store(folder)) as store:
            yield cls(folder, store)

    def ban(self, kind: str, name: str, reason: str) -> None:
        """Ban a "user" (in all their peers) or a "peer". Raises UsageError for what cannot be a name."""
        if kind == "peer" and not re.fullmatch(PEER_ID, name):
            raise UsageError(f"'{name[:60]}' is no peer's whole id: `tt authority members RUN` lists them")
        if not re.fullmatch(r"[\w.-]{1,128}", name):
            raise UsageError(f"'{name[:60]}' is no {kind}'s name")
        if len(self.store.bans()) >= MOST_BANS:
            raise UsageError(f"there are {MOST_BANS} bans: take some back first, the list of a peer holds no more")
        self.store.ban(kind, _name(kind, name), reason[:500], time.time())
        self._note("ban", f"{kind} {name} {reason}".strip(), name if kind == "peer" else "")

    def unban(self, kind: str, name: str) -> bool:
        """Take it back; False for a peer that members have a proof against. Raises UsageError for no such ban."""
        if not self.store.unban(kind, _name(kind, name), time.time()):
            raise UsageError(f"{kind} {name} is not banned; `tt authority bans` lists those who are")
        self._note("unban", f"{kind} {name}", name if kind == "peer" else "")
        return kind == "user" or not self._folder.proof_against(name).exists()

    def pause(self, reason: str) -> None:
        """Have the swarm wait. Raises UsageError without a reason."""
        if not reason.strip():
            raise UsageError("say why: every screen shows it")
        self.store.pause(" ".join(reason.split())[:500], time.time())
        self._note("pause", reason)

    def resume(self) -> None:
        """Have it go on."""
        self.store.pause("", time.time())
        self._note("resume")

    def roll_back(self, step: int, digest: str, source: str) -> int:
        """Have the swarm go back to a checkpoint. source: where it lies beside members' own disks; may be "".

        Returns the order's number. Raises UsageError.
        """
        if not 0 <= step < 10**15 or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise UsageError("name a checkpoint by its step and its digest, 64 hex digits")
        file = Path(source).is_absolute() and source.isprintable()
        if source and (len(source) > 500 or not (file or HUB_PLACE.fullmatch(source))):
            where = "OWNER/REPOSITORY[@REVISION] on the Hub, or a file's whole path on members' machines"
            raise UsageError(f"no member finds a checkpoint at {source[:60]!r}: name {where}")
        order = self.store.roll_back(step, digest, source, time.time())
        self._note("rollback", f"order {order}: step {step}, {digest}, {source}")
        return order

    def rotate(self, until: str | None) -> AuthoritySettings:
        """Make the next key. Raises UsageError."""
        settings = self._folder.rotate(time.time(), until)
        self._note("rotate", f"old key until {until or 'now'}")
        return settings

    def _note(self, what: str, detail: str = "", peer_id: str = "") -> None:
        self.store.write_down(time.time(), WHO, what, peer_id, detail)


def _name(kind: str, name: str) -> str:
    return name.lower() if kind == "user" else name  # the Hub's names ignore case
