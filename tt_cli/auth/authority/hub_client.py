"""Questions of an authority to the Hugging Face Hub, anonymously wherever that is possible.

A user's token passes through `user_of_token` and `login_granted` only, as an argument: it is neither kept nor logged.
What the Hub says is checked for its form and its size.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, Field, ValidationError

from tt_cli.auth.account import AccountName
from tt_cli.auth.join_proof import PROOF_REPOSITORY
from tt_cli.hub.hub_files import HubUnreachable

TIMEOUT = 10.0  # seconds for one answer of the Hub
MOST_AT_ONCE = 8  # questions under way; more would leave no thread for those who need none
MOST_PAGES = 200  # of an organisation's members
MAX_ANSWER = 2**20  # bytes of one answer
MAX_PROOF = 4096  # bytes of a proof file
FRESH_SECONDS = 60.0  # a members list counts so long; somebody not on it has it looked up again sooner
AGAIN_SECONDS = 5.0
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
SCOPES = "openid profile"  # the name and the organisations; no right to read or write anything


class IdentityNotProven(Exception):
    """A proof that does not prove who somebody is; the text says why."""


@dataclass(frozen=True)
class Login:
    """A device login that waits for its user. Times in seconds."""

    device_code: str
    user_code: str
    page: str
    page_with_code: str
    interval: float
    expires_in: float


@dataclass(frozen=True)
class Account:
    """A user of the Hub, and the organisations that are known from the same answer."""

    name: str
    organisations: frozenset[str]  # in lower case


class _Organisation(BaseModel):
    preferred_username: AccountName  # its handle; `name` is what it likes to be shown as, and may be anything


class _UserInfo(BaseModel):
    preferred_username: AccountName
    orgs: list[_Organisation] = Field(default_factory=list, max_length=10_000)


class _Device(BaseModel):
    device_code: Annotated[str, Field(min_length=1, max_length=500)]
    user_code: Annotated[str, Field(min_length=1, max_length=100)]
    verification_uri: Annotated[str, Field(pattern=r"^https?://\S{1,500}$")]
    verification_uri_complete: Annotated[str, Field(pattern=r"^https?://\S{1,800}$")] | None = None
    interval: float = Field(5.0, ge=0, le=600)
    expires_in: float = Field(900.0, gt=0, le=86400)


class _Handle(BaseModel):
    name: AccountName


class _Token(BaseModel):
    role: str = ""


class _Auth(BaseModel):
    type: str = ""
    token: _Token = Field(default_factory=_Token, alias="accessToken")


class _WhoAmI(BaseModel):
    type: str
    name: AccountName
    orgs: list[_Handle] = Field(default_factory=list)
    auth: _Auth = Field(default_factory=_Auth)


Answer = TypeVar("Answer", bound=BaseModel)


def _read(model: type[Answer], answer: dict[str, Any]) -> Answer:
    try:
        return model.model_validate(answer)
    except ValidationError:  # without its cause: that would quote the answer
        raise HubUnreachable("the Hub's answer makes no sense; try again later") from None


class HubClient:
    """The questions. Each raises HubUnreachable where there is no answer, NotProven where it does not suffice."""

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
        found = self._json("GET", f"/api/models/{quote(user)}/{PROOF_REPOSITORY}/revision/main", missing=about)
        name, commit = str(found.get("id", "")), found.get("sha")
        if name.casefold() != repository.casefold():  # the Hub follows renamed accounts
            raise IdentityNotProven(f"{repository} now belongs to somebody else")
        if not isinstance(commit, str) or found.get("private"):
            raise IdentityNotProven(f"{repository} is not to be read by everyone")
        address = hf_hub_url(name, path, revision=commit)
        data = self._ask("GET", address, limit=MAX_PROOF, missing=f"{path} in {about}")
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise IdentityNotProven(f"{path} in {about} is no proof")
        return name.partition("/")[0], content

    def is_member(self, organisation: str, user: str) -> bool:
        """Tell whether the Hub lists `user` among the organisation's members."""
        key = organisation.casefold()
        at, names = self._members.get(key, (-float("inf"), frozenset()))
        age = time.monotonic() - at
        if age > FRESH_SECONDS or (user.casefold() not in names and age > AGAIN_SECONDS):
            names = frozenset(self._listed(organisation))
            self._members[key] = (time.monotonic(), names)
        return user.casefold() in names

    def begin_login(self, client_id: str) -> Login:
        """Begin OAuth's device flow (RFC 8628)."""
        answer = self._json(
            "POST", "/oauth/device", form={"client_id": client_id, "scope": SCOPES}, missing="its login"
        )
        device = _read(_Device, answer)
        return Login(
            device_code=device.device_code,
            user_code=device.user_code,
            page=device.verification_uri,
            page_with_code=device.verification_uri_complete or device.verification_uri,
            interval=device.interval,
            expires_in=device.expires_in,
        )

    def login_granted(self, client_id: str, device_code: str) -> Account | None:
        """The user who logged in; None while nobody did. The token that proves it is used once, here, and dropped."""
        form = {"grant_type": DEVICE_GRANT, "device_code": device_code, "client_id": client_id}
        answer = self._json("POST", "/oauth/token", form=form, missing="its login", accept=(400,))
        error, token = answer.get("error"), answer.get("access_token")
        if error in ("authorization_pending", "slow_down"):
            return None
        if error is not None or not isinstance(token, str):
            words = {"access_denied": "it was denied", "expired_token": "its code has expired"}
            raise IdentityNotProven(f"the login did not come about: {words.get(str(error), 'the Hub refuses it')}")
        for left in (2, 1, 0):  # the code is spent: without an answer now, its user would have to type another one
            try:
                info = _read(_UserInfo, self._json("GET", "/oauth/userinfo", token=token, missing="the user"))
                break
            except HubUnreachable:
                if not left:
                    raise
                time.sleep(0.2)
        return Account(info.preferred_username, frozenset(one.preferred_username.casefold() for one in info.orgs))

    def user_of_token(self, token: str) -> Account:
        """Whose access token that is. Raises NotProven too for a token that could change anything on the Hub."""
        answer = _read(_WhoAmI, self._json("GET", "/api/whoami-v2", token=token, missing="the user"))
        if answer.type != "user":
            raise IdentityNotProven("the token belongs to no user")
        if answer.auth.type != "access_token" or answer.auth.token.role != "read":
            raise IdentityNotProven(
                'only an access token of the type "read" is taken: this one could do more than prove a name'
            )
        return Account(answer.name, frozenset(one.name.casefold() for one in answer.orgs))

    def _listed(self, organisation: str) -> Iterator[str]:
        from huggingface_hub.constants import ENDPOINT

        address: str | None = f"{ENDPOINT}/api/organizations/{quote(organisation)}/members"
        for _ in range(MOST_PAGES):
            if address is None or not address.startswith(f"{ENDPOINT}/"):
                return
            links: dict[str, dict[str, str]] = {}
            data = self._ask("GET", address, missing=f"the organisation {organisation}", links=links)
            try:
                page = json.loads(data)
                names = [str(entry["user"]).casefold() for entry in page]
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise HubUnreachable("the Hub's list of members makes no sense; try again later") from error
            yield from names
            address = links.get("next", {}).get("url")

    def _json(
        self,
        method: str,
        path: str,
        *,
        missing: str,
        form: dict[str, str] | None = None,
        token: str | None = None,
        accept: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        from huggingface_hub.constants import ENDPOINT

        data = self._ask(method, f"{ENDPOINT}{path}", missing=missing, form=form, token=token, accept=accept)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise HubUnreachable("the Hub's answer makes no sense; try again later")
        return answer

    def _ask(
        self,
        method: str,
        address: str,
        *,
        missing: str,
        limit: int = MAX_ANSWER,
        form: dict[str, str] | None = None,
        token: str | None = None,
        accept: tuple[int, ...] = (),
        links: dict[str, dict[str, str]] | None = None,
    ) -> bytes:
        """The body of one answer. missing: what is not there when the Hub says 404."""
        from huggingface_hub import get_session

        headers = {"Authorization": f"Bearer {token}"} if token else {}
        arguments: dict[str, Any] = {"headers": headers, "data": form, "timeout": TIMEOUT}
        with (
            self._turn(),
            _unreachable(),
            get_session().stream(method, address, follow_redirects=token is None, **arguments) as answer,
        ):
            data = b""
            for piece in answer.iter_bytes():
                data += piece
                if len(data) > limit:
                    raise IdentityNotProven(f"{missing} is longer than {limit} bytes")
            status = answer.status_code
            if links is not None:
                links.update({name or "": link for name, link in answer.links.items()})
        if status == 200 or status in accept:
            return data
        if status in (401, 403, 404):
            refused = "the Hub refuses the token" if token else f"the Hub does not show {missing} to everyone"
            raise IdentityNotProven(f"{refused} ({status})")
        raise HubUnreachable(f"the Hub answered {status}; try again later")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._slots.acquire(timeout=TIMEOUT / 2):
            raise HubUnreachable("too many questions to the Hub are under way; try again later")
        try:
            yield
        finally:
            self._slots.release()


@contextmanager
def _unreachable() -> Iterator[None]:
    """No answer, in words that quote none of the request."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined] # see tt_cli.hub.hub_files

    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise HubUnreachable(f"the Hugging Face Hub cannot be reached ({type(error).__name__})") from None
