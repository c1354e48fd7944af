"""Admission of one peer of this machine to a run, for as long as it takes part: what `tt join` and others enter first.

with admission(run, "trainer", tell) as admitted:     a closed run: there is a pass, and it stays good
    worker = …; admitted.attach(worker.leave)         told to leave when the pass is taken away
admitted.check()                                      … which is an error then, in one line
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tt_cli.auth.authority.authority_folder import AuthorityFolder
from tt_cli.auth.authority_client import AuthorityClient, Tell
from tt_cli.auth.eligibility import UNGUARDED, current_user, require_member
from tt_cli.auth.identities import free_identity
from tt_cli.auth.pass_renewer import Addresses, Admitted, OnThisHost, PassRenewer
from tt_cli.errors import UsageError
from tt_cli.run import RunConfig, folders

OBSERVER = "observer"


def observing(run: RunConfig, tell: Tell) -> AbstractContextManager[object]:
    """Permission for this machine to look at a closed run (tt_cli.swarm.observer): a pass for the observer's key.

    In an open run there is nothing to do. Raises PassRefused, TTError.
    """
    if not run.membership.closed:
        return nullcontext()
    return admission(run, free_identity(run, OBSERVER), tell, here=True)


@contextmanager
def admission(
    run: RunConfig,
    name: str,
    tell: Tell,
    *,
    send_token: bool = False,
    here: bool = False,
    addresses: Addresses = list,
) -> Iterator[Admitted]:
    """Take part. name: of the peer's key file in the run's folder, "trainer", "trainer-2", "aux" ….

    tell: gets lines for a person. here: whether an authority in this machine's own run folder may issue the pass, for
    the organiser's own peers. addresses: where others reach the peer now, for those who come later.
    Raises UsageError, PassRefused, TTError.
    """
    membership, key_file, user = run.membership, folders.run_folder(run) / f"{name}.key", ""
    if send_token and not membership.closed:
        raise UsageError("--send-token: this run asks for no pass, so nothing needs to be sent")
    if membership.kind == "organisation" and not membership.closed:
        tell(UNGUARDED, "warning")
    issued_here = here and is_here(run)
    if issued_here:
        user = current_user() or "organiser"
    elif here and not membership.closed:  # the organiser's own, on a machine where nobody may be logged in
        user = current_user() or ""
    elif not (membership.closed and membership.oauth_client_id) or send_token:
        member = require_member(run)
        user = member.name if member is not None else ""
    if membership.authority is None:
        yield Admitted(tell, user)
        return
    source: AuthorityClient | OnThisHost
    if issued_here:
        source = OnThisHost(run, key_file, user)
    else:
        source = AuthorityClient(run, key_file, tell, send_token=send_token)
    with PassRenewer(run, key_file, source, tell, user, addresses) as admitted:
        yield admitted


def is_here(run: RunConfig) -> bool:
    """Tell whether the authority that the run file names is the one in this machine's folder."""
    folder = AuthorityFolder(run)
    return folder.exists and folder.named
