"""The Hugging Face account in use: log in, ask who it is, log out. All through huggingface_hub itself.

Tokens are kept where every Hugging Face tool keeps them ($HF_HOME/token, mode 0600), so that a login made
with another tool counts here and the other way round. HF_TOKEN, where it is set, wins over a stored login.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from pydantic import AliasPath, BaseModel, Field, ValidationError

from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import hub_errors, quiet_and_bounded

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

AccountName = Annotated[str, Field(pattern=r"^[\w.-]{1,96}$")]


class Organisation(BaseModel):
    """An organisation on the Hub and the user's role in it (read, contributor, write, admin)."""

    name: AccountName
    role: str | None = Field(None, alias="roleInOrg", max_length=40)


class User(BaseModel):
    """The part of the Hub's answer to "who am I" that matters here."""

    name: AccountName
    full_name: str = Field("", alias="fullname", max_length=200)
    organisations: list[Organisation] = Field(default_factory=list, alias="orgs")
    token_kind: str = Field("", validation_alias=AliasPath("auth", "type"), exclude=True)  # "access_token", "oauth", …
    token_role: str = Field("", validation_alias=AliasPath("auth", "accessToken", "role"), exclude=True)


def token() -> str | None:
    """The token in use, None for nobody. It may renew a login, over the network. Raises TTError."""
    from huggingface_hub import get_token

    with hub_errors("cannot read the stored login"):
        return get_token()


def token_source() -> Literal["environment", "login"] | None:
    """Say where the token in use comes from: "environment", "login" (stored on this machine) or None."""
    if any(os.environ.get(name, "").strip() for name in TOKEN_VARIABLES):
        return "environment"
    return "login" if token() else None


def login(token: str | None = None) -> None:
    """Log this machine in: with `token`, else as huggingface_hub's own login does, which asks the person.

    Without a terminal that is the OAuth device flow: it prints an address and a code, and waits until they
    are used. Raises UsageError for a token that the Hub refuses, TTError when it cannot be asked or the
    login was denied.
    """
    import huggingface_hub
    from huggingface_hub.errors import DeviceCodeError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined] # see tt_cli.hub.hub_files

    action = "cannot log in"
    with hub_errors(action), quiet_and_bounded(), _refused_token(action):
        try:
            huggingface_hub.login(token=token, skip_if_logged_in=False)
        except DeviceCodeError as error:
            if isinstance(error.__cause__, httpx.HTTPError):
                raise error.__cause__ from error
            raise TTError(f"{action}: {str(error).splitlines()[0]}") from error


def logout() -> bool:
    """Forget all stored tokens; return whether there were any.

    A token in the environment stays in use: see `token_source`. Raises TTError when they cannot be removed.
    """
    import huggingface_hub
    from huggingface_hub.constants import HF_STORED_TOKENS_PATH, HF_TOKEN_PATH

    files = (HF_TOKEN_PATH, HF_STORED_TOKENS_PATH)
    stored = any(os.path.exists(file) for file in files)
    with hub_errors("cannot log out"), quiet_and_bounded():
        try:
            huggingface_hub.logout()
        except OSError as error:
            # The library also raises this for HF_TOKEN, or without git, after it has removed the tokens.
            if any(os.path.exists(file) for file in files):
                raise TTError(f"cannot log out: {error.strerror or error}") from error
    return stored


def whoami() -> User:
    """Ask the Hub whose token is in use. Raises TTError: nobody is logged in, or the Hub does not say."""
    import huggingface_hub

    if token_source() is None:
        raise TTError("nobody is logged in here: run `tt login`")
    action = "cannot ask the Hub who you are"
    with hub_errors(action), quiet_and_bounded(), _refused_token(action):
        try:
            return User.model_validate(huggingface_hub.whoami(cache=True))
        except ValidationError as error:
            raise TTError(f"{action}: its answer makes no sense; try again later") from error


@contextmanager
def _refused_token(action: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code == 401:
            by_variable = token_source() == "environment"
            hint = "HF_TOKEN is set: correct or unset it" if by_variable else "run `tt login` with a valid one"
            raise UsageError(f"{action}: the Hub refuses the token; {hint}") from error
        if error.response.status_code == 429:
            raise TTError(f"{action}: the Hub limits how often that is asked; wait a few minutes") from error
        raise
