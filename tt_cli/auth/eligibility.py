"""Eligibility: a run admits the person at this machine, or not. Open runs ask for nothing."""

from __future__ import annotations

from contextlib import suppress

from tt_cli.auth.account import User, token_source, whoami
from tt_cli.errors import TTError, UsageError
from tt_cli.run import RunConfig

UNGUARDED = (
    "the run file names no authority: whoever knows the address of a peer can take part, member or not; see "
    "`tt authority init`"
)


def require_member(run: RunConfig) -> User | None:
    """Return the user as whom this machine joins `run`; None for an open run, where nobody is asked.

    Raises UsageError when the run wants a member of an organisation and nobody, or somebody else, is logged
    in; TTError when the Hub cannot be asked.
    """
    organisation = run.membership.organisation
    if organisation is None:
        return None
    admits = f"the run {run.run.name} admits members of {organisation} on the Hub only"
    if token_source() is None:
        raise UsageError(f"{admits}, and nobody is logged in here: run `tt login`")
    user = whoami()
    if organisation.casefold() not in {own.name.casefold() for own in user.organisations}:
        raise UsageError(
            f"{admits}, and {user.name} is none: ask the organisation to add you, "
            f"or run `tt login` with another account"
        )
    return user


def current_user() -> str | None:
    """The name of the user logged in here, which is welcome and not needed; None too when the Hub does not tell it."""
    with suppress(TTError):  # nobody, no answer, or a token that has expired
        return whoami().name
    return None
