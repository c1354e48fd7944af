"""Questions of an authority to the Hugging Face Hub, anonymously wherever that is possible.

A user's token passes through `user_of_token` and `login_granted` only, as an argument: it is neither kept nor logged.
What the Hub says is checked for its form and its size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from tt_cli.auth.account import AccountName, User
from tt_cli.auth.authority_requests import PROOF_REPOSITORY
from tt_cli.hub.hub_files import PLAIN, HubUnreachable, TooLong, plain_body

TIMEOUT = 10.0  # seconds for one answer of the Hub
MOST_AT_ONCE = 16  # requests that ask; more, or waiting ones, would leave no thread for those who need none
MOST_PAGES = 200  # of an organisation's members
MAX_ANSWER = 2**20  # bytes of one answer
MAX_PROOF = 4096  # bytes of a proof file
FRESH_SECONDS = 60.0  # a members list counts so long; somebody not on it has it looked up again sooner
AGAIN_SECONDS = 5.0
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
SCOPES = "openid profile"  # the name and the organisations; no right to read or write anything
LOGIN_FAILURES = {"access_denied": "it was denied", "expired_token": "its code has expired"}


class IdentityNotProven(Exception):
    """A proof that does not prove who somebody is; the text says why."""


@dataclass(frozen=True)
class Account:
    """A user of the Hub, and the organisations that are known from the same answer."""

    name: str
    organisations: frozenset[str]  # in lower case


class DeviceLogin(BaseModel):
    """A device login that waits for its user (RFC 8628). Times in seconds."""

    device_code: Annotated[str, Field(min_length=1, max_length=500)]
    user_code: Annotated[str, Field(min_length=1, max_length=100)]
    page: Annotated[str, Field(alias="verification_uri", pattern=r"^https?://\S{1,500}$")]
    interval: float = Field(5.0, ge=0, le=600)
    expires_in: float = Field(900.0, gt=0, le=86400)


class _Grant(BaseModel):
    error: str | None = None
    access_token: str | None = None


class _Organisation(BaseModel):
    preferred_username: AccountName  # its handle; `name` is what it likes to be shown as, and may be anything


class _UserInfo(BaseModel):
    preferred_username: AccountName
    orgs: list[_Organisation] = Field(default_factory=list, max_length=10_000)


class _WhoAmI(User):
    type: str


class _Repository(BaseModel):
    id: str
    sha: str | None = None
    private: bool = False


class _Listed(BaseModel):
    user: str


Answer = TypeVar("Answer")


def _read(form: type[Answer], data: bytes) -> Answer:
    try:
        return TypeAdapter(form).validate_json(data)
    except ValidationError:  # without its cause: that would quote the answer
        raise HubUnreachable("the Hub's answer makes no sense; try again later") from None


class HubClient:
    """The questions. Each raises HubUnreachable without an answer, IdentityNotProven where it does not suffice."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[float, frozenset[str]]] = {}
        self._slots = threading.BoundedSemaphore(MOST_AT_ONCE)

    def proof(self, user: str, path: str) -> tuple[str, dict[str, Any]]:
        """The user's name as the Hub writes it, and the proof file that lies in their public repository now.

        Only what is on the repository's main branch counts: anyone can have the Hub serve a commit of a pull request.
        """
        from huggingface_hub import hf_hub_url

        repository = f"{user}/{PROOF_REPOSITORY}"
        about = f"{repository} on the Hub"
        with self._slot():
            repo = self._json(_Repository, "GET", f"/api/models/{quote(user)}/{PROOF_REPOSITORY}/revision/main", about)
            if repo.id.casefold() != repository.casefold():  # the Hub follows renamed accounts
                raise IdentityNotProven(f"{repository} now belongs to somebody else")
            if repo.sha is None or repo.private:
                raise IdentityNotProven(f"{repository} is not to be read by everyone")
            address = hf_hub_url(repo.id, path, revision=repo.sha)
            data, _ = self._ask("GET", address, f"{path} in {about}", limit=MAX_PROOF)
        try:
            return repo.id.partition("/")[0], _read(dict[str, Any], data)
        except HubUnreachable:
            raise IdentityNotProven(f"{path} in {about} is no proof") from None

    def is_member(self, organisation: str, user: str) -> bool:
        """Tell whether the Hub lists `user` among the organisation's members."""
        key = organisation.casefold()
        at, names = self._members.get(key, (-float("inf"), frozenset()))
        age = time.monotonic() - at
        if age > FRESH_SECONDS or (user.casefold() not in names and age > AGAIN_SECONDS):
            with self._slot():
                names = frozenset(self._listed(organisation))
            self._members[key] = (time.monotonic(), names)
        return user.casefold() in names

    def begin_login(self, client_id: str) -> DeviceLogin:
        """Begin OAuth's device flow (RFC 8628)."""
        form = {"client_id": client_id, "scope": SCOPES}
        with self._slot():
            return self._json(DeviceLogin, "POST", "/oauth/device", "its login", data=form)

    def login_granted(self, client_id: str, device_code: str) -> Account | None:
        """The user who logged in; None while nobody did. The token that proves it is used once, here, and dropped."""
        form = {"grant_type": DEVICE_GRANT, "device_code": device_code, "client_id": client_id}
        with self._slot():  # for both questions
            grant = self._json(_Grant, "POST", "/oauth/token", "its login", data=form, accept=(400,))
            if grant.error in ("authorization_pending", "slow_down"):
                return None
            if grant.error is not None or grant.access_token is None:
                reason = LOGIN_FAILURES.get(grant.error or "", "the Hub refuses it")
                raise IdentityNotProven(f"the login did not come about: {reason}")
            for left in (2, 1, 0):  # the code is spent: without an answer now, its user would have to type another one
                try:
                    info = self._json(_UserInfo, "GET", "/oauth/userinfo", "the user", token=grant.access_token)
                    break
                except HubUnreachable:
                    if not left:
                        raise
                    time.sleep(0.2)
        return Account(info.preferred_username, frozenset(org.preferred_username.casefold() for org in info.orgs))

    def user_of_token(self, token: str) -> Account:
        """Whose access token that is. Raises IdentityNotProven too for a token that may do more than read."""
        with self._slot():
            answer = self._json(_WhoAmI, "GET", "/api/whoami-v2", "the user", token=token)
        if answer.type != "user":
            raise IdentityNotProven("the token belongs to no user")
        if (answer.token_kind, answer.token_role) != ("access_token", "read"):
            raise IdentityNotProven(
                'only an access token of the type "read" is taken: this one could do more than prove a name'
            )
        return Account(answer.name, frozenset(org.name.casefold() for org in answer.organisations))

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """The place of a request that asks. Raises HubUnreachable where all are taken."""
        if not self._slots.acquire(blocking=False):
            raise HubUnreachable("too many questions to the Hub are under way; try again later")
        try:
            yield
        finally:
            self._slots.release()

    def _listed(self, organisation: str) -> Iterator[str]:
        from huggingface_hub.constants import ENDPOINT

        address: str | None = f"{ENDPOINT}/api/organizations/{quote(organisation)}/members"
        for _ in range(MOST_PAGES):
            if address is None or not address.startswith(f"{ENDPOINT}/"):
                return
            data, address = self._ask("GET", address, f"the organisation {organisation}")
            yield from (member.user.casefold() for member in _read(list[_Listed], data))

    def _json(self, form: type[Answer], method: str, path: str, missing: str, **request: Any) -> Answer:
        from huggingface_hub.constants import ENDPOINT

        return _read(form, self._ask(method, f"{ENDPOINT}{path}", missing, **request)[0])

    def _ask(
        self,
        method: str,
        address: str,
        missing: str,
        *,
        data: dict[str, str] | None = None,
        token: str | None = None,
        accept: tuple[int, ...] = (),
        limit: int = MAX_ANSWER,
    ) -> tuple[bytes, str | None]:
        """The body of one answer, and the address of the next page. missing: what is not there when the Hub says 404.

        data: a form to send. accept: statuses beside 200. limit: bytes of the body.
        """
        from huggingface_hub import get_session
        from huggingface_hub.utils import httpx  # type: ignore[attr-defined] # see tt_cli.hub.hub_files

        headers = PLAIN | ({"Authorization": f"Bearer {token}"} if token else {})
        request: dict[str, Any] = {"headers": headers, "data": data, "timeout": TIMEOUT}
        stream = get_session().stream(method, address, follow_redirects=token is None, **request)
        try:
            with stream as answer:
                body = plain_body(answer, limit)
        except TooLong:
            raise IdentityNotProven(f"{missing} is longer than {limit} bytes") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:  # in words that quote none of the request
            raise HubUnreachable(f"the Hugging Face Hub cannot be reached ({type(error).__name__})") from None
        if answer.status_code == 200 or answer.status_code in accept:
            return body, answer.links.get("next", {}).get("url")
        if answer.status_code in (401, 403, 404):
            refused = "the Hub refuses the token" if token else f"the Hub does not show {missing} to everyone"
            raise IdentityNotProven(f"{refused} ({answer.status_code})")
        raise HubUnreachable(f"the Hub answered {answer.status_code}; try again later")
