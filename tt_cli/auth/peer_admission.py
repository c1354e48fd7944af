"""Admission of one peer of this machine to a run, for as long as it takes part: what `tt join` and others enter first.

with Admission(run, "trainer", tell) as admitted:     a closed run: there is a pass, and it stays good
    worker = …; admitted.attach(worker.leave)         told to leave when the pass is taken away
admitted.check()                                      … which is an error then, in one line
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tt_cli.auth.authority.authority_folder import AuthorityFolder
from tt_cli.auth.authority_client import AuthorityClient, Tell
from tt_cli.auth.authority_requests import PassRefused
from tt_cli.auth.eligibility import UNGUARDED, current_user, require_member
from tt_cli.auth.identities import free_identity
from tt_cli.auth.pass_renewer import OnThisHost, PassRenewer
from tt_cli.errors import UsageError
from tt_cli.identity.passes import authority_keys, public_text
from tt_cli.run import RunConfig, folders

OBSERVER = "observer"


@contextmanager
def observing(run: RunConfig, tell: Tell) -> Iterator[None]:
    """Permission for this machine to look at a closed run (tt_cli.swarm.observer): a pass for the observer's key.

    In an open run there is nothing to do. Raises PassRefused, TTError.
    """
    if not run.membership.closed:
        yield
        return
    with PeerAdmission(run, free_identity(run, OBSERVER), tell, here=True):
        yield


class PeerAdmission:
    """name: of the peer's key file in the run's folder, "trainer", "trainer-2", "aux" …. tell: lines for a person.

    here: whether an authority in this machine's own run folder may issue the pass, for the organiser's own peers.
    user: who takes part, "" where nobody is logged in. Entering raises PassRefused, TTError.
    """

    def __init__(self, run: RunConfig, name: str, tell: Tell, *, send_token: bool = False, here: bool = False):
        if send_token and not run.membership.closed:
            raise UsageError("--send-token: this run asks for no pass, so nothing needs to be sent")
        self._run, self._tell = run, tell
        self._send_token, self._here = send_token, here
        self._leave: Callable[[], None] = lambda: None
        self._renewer: PassRenewer | None = None
        self.user = ""
        self.key_file: Path = folders.run_folder(run) / f"{name}.key"

    def __enter__(self) -> Self:
        membership = self._run.membership
        if membership.kind == "organisation" and not membership.closed:
            self._tell(UNGUARDED, "warning")
        here = self._here and is_here(self._run)
        if here:
            self.user = current_user() or "organiser"
        elif self._here and not membership.closed:  # the organiser's own, on a machine where nobody may be logged in
            self.user = current_user() or ""
        elif not (membership.closed and membership.oauth_client_id) or self._send_token:
            member = require_member(self._run)
            self.user = member.name if member is not None else ""
        if membership.authority is not None:
            source: AuthorityClient | OnThisHost
            if here:
                source = OnThisHost(self._run, self.key_file, self.user)
            else:
                source = AuthorityClient(self._run, self.key_file, self._tell, send_token=self._send_token)
            self._renewer = PassRenewer(self._run, self.key_file, source, self._tell, self._refused)
            self._renewer.__enter__()
            self.user = self._renewer.user or self.user
        return self

    def __exit__(self, *exception: object) -> None:
        if self._renewer is not None:
            self._renewer.__exit__(*exception)

    def attach(self, leave: Callable[[], None]) -> None:
        """Have `leave` called, which asks a worker to, when the pass is taken away; twice is possible."""
        self._leave = leave
        if self._renewer is not None and self._renewer.refusal:
            leave()

    def check(self) -> None:
        """Raises PassRefused when the pass has been taken away."""
        if self._renewer is not None and self._renewer.refusal:
            raise PassRefused(self._renewer.refusal)

    def _refused(self) -> None:
        assert self._renewer is not None
        self._tell(self._renewer.refusal, "error")
        self._leave()


def is_here(run: RunConfig) -> bool:
    """Tell whether the authority that the run file names is the one in this machine's folder."""
    folder, line = AuthorityFolder(run), run.membership.authority_key
    if line is None or not folder.exists:
        return False
    named = {public_text(key) for key, _ in authority_keys(line)}
    return any(key.text in named for key in folder.settings().keys)
