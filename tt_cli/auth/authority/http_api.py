"""The authority over HTTP.

    401  the proof, the nonce, the signature or the pass does not hold: join anew
    403  it holds, and the answer is no: not a member, banned, too many peers
    429  too often; Retry-After says when
    503  the Hub or the database does not answer; Retry-After too. The only one that a client tries again by itself

An error is {"detail": "one line for a person"}. Neither answers nor logs repeat what was sent.
"""

# No `from __future__ import annotations`: FastAPI resolves the annotations of the functions inside `make_app`.
import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from tt_cli.auth.account import AccountName
from tt_cli.auth.authority.issuer import Authority, RequestRefused
from tt_cli.auth.authority.member_store import DatabaseDown
from tt_cli.auth.authority.proof_judge import MOST_PROOF, Busy
from tt_cli.auth.authority.request_limits import (
    BodyTooLong,
    BodyTooSlow,
    BoundedBodies,
    bounded_body,
    too_long,
    too_slow,
)
from tt_cli.auth.join_proof import Purpose
from tt_cli.errors import TTError
from tt_cli.hub.hub_files import HubUnreachable
from tt_cli.identity.passes import MAX_PASS, decode
from tt_cli.identity.rate_limit import RateLimit, address_key
from tt_cli.supervisor.http_server import malformed, problem

logger = logging.getLogger(__name__)

PROOFS = "/v1/proofs"
PROOF_SECONDS = 60.0  # for all of a proof
JUDGING_SECONDS = 10.0  # so long the next proof waits
RETRY_SECONDS = 5

PeerId = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{32,128}$")]
PublicKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,1400}$", description="DER, base64url without padding")]
Signature = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,1400}$", description="RSA-PSS, base64url")]
Nonce = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,200}$")]
Sealed = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,4000}$")]


class Body(BaseModel):
    """The base of all requests: nothing unknown is taken."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ChallengeRequest(Body):
    """For which peer and purpose a nonce is wanted."""

    peer_id: PeerId
    purpose: Purpose = "join"


class HubProof(Body):
    """A file in the user's public repository on the Hub."""

    way: Literal["hub"]
    user: AccountName


class OAuthProof(Body):
    """A ticket of POST /v1/login/poll."""

    way: Literal["oauth"]
    ticket: Sealed


class TokenProof(Body):
    """A read token: it is asked who it belongs to, and dropped."""

    way: Literal["token"]
    token: Annotated[SecretStr, Field(min_length=1, max_length=500)]


class JoinRequest(Body):
    """The proof, signed by the peer's key together with the nonce."""

    key: PublicKey
    nonce: Nonce
    signature: Signature
    proof: Annotated[HubProof | OAuthProof | TokenProof, Field(discriminator="way")]


class RenewRequest(Body):
    """The pass before, signed by the peer's key together with the nonce."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    key: PublicKey
    nonce: Nonce
    signature: Signature
    held: Annotated[str, Field(alias="pass", min_length=1, max_length=MAX_PASS)]


class AccuseRequest(Body):
    """That the holder of a pass has a proof against a member: its SHA-256."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    key: PublicKey
    nonce: Nonce
    signature: Signature
    held: Annotated[str, Field(alias="pass", min_length=1, max_length=MAX_PASS)]
    proof: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LoginRequest(Body):
    """For which peer a login begins."""

    key: PublicKey


class PollRequest(Body):
    """The handle of one login."""

    handle: Sealed


class AuthorityFacts(BaseModel):
    """A run's authority, as it describes itself. time: its clock, Unix seconds."""

    run: str
    organisation: str | None
    authority_key: str
    ways: list[str]
    pass_seconds: float
    time: float


class ChallengeAnswer(BaseModel):
    """A challenge for the peer's key to sign. Times are Unix seconds."""

    nonce: str
    key: str
    time: float
    expires: float


class PassAnswer(BaseModel):
    """A pass (see tt_cli.identity.passes)."""

    text: str = Field(serialization_alias="pass")
    time: float


class LoginAnswer(BaseModel):
    """Instructions to the user, and how often to ask whether it is done (seconds)."""

    handle: str
    user_code: str
    page: str
    page_with_code: str
    interval: float
    expires_in: float


class TicketAnswer(BaseModel):
    """With which the proof is handed in."""

    ticket: str


class Conviction(BaseModel):
    """The peer that is banned now."""

    guilty: str


class PollAnswer(BaseModel):
    """ticket: None while the user has not logged in."""

    ticket: str | None


class Problem(BaseModel):
    """Why not, in one line."""

    detail: str


@dataclass
class Limits:
    """Rate limits of requests. A lab behind one address may start its machines at once."""

    asking: RateLimit = field(default_factory=lambda: RateLimit(burst=120, per_second=10.0))  # facts and notice
    proving: RateLimit = field(default_factory=lambda: RateLimit(burst=60, per_second=1.0))  # the rest, by address
    user: RateLimit = field(default_factory=lambda: RateLimit(burst=30, per_second=0.1))  # joins and renewals, by user
    proofs: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time


_WORDS = {
    400: "no JSON",
    401: "bad proof",
    403: "no member, or banned",
    413: "too long",
    422: "malformed",
    429: "too often",
    503: "the Hub or the database does not answer",
}


def make_app(authority: Authority, limits: Limits | None = None) -> FastAPI:
    """The service for one run. It trusts the address that the server gives it: see `serve` for proxies."""
    limits = limits or Limits()
    app = FastAPI(title="tt authority", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(BoundedBodies, but_for=PROOFS)

    def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
        return {code: {"model": Problem, "description": _WORDS[code]} for code in (*codes, 503)}

    def counted(request: Request, limit: RateLimit) -> None:
        wait = limit.wait(address_key(request.client.host if request.client else None))
        if wait:
            raise TooOften(wait)

    def counted_user(name: str) -> None:
        wait = limits.user.wait(name.casefold())
        if wait:
            raise TooOften(wait)

    for error, answer in _ANSWERS.items():
        app.add_exception_handler(error, answer)

    @app.get("/v1/facts", responses=problems(429))
    def facts(request: Request) -> AuthorityFacts:
        """The run, its organisation and the authority's key."""
        counted(request, limits.asking)
        return AuthorityFacts(**authority.facts())

    @app.get(
        "/v1/notice",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The signed notice"},
            304: {"description": "Still the notice that If-None-Match names"},
            **problems(422, 429),
        },
    )
    def notice(
        request: Request, if_none_match: Annotated[str | None, Header(max_length=100, pattern=r"^[\x20-\x7e]*$")] = None
    ) -> Response:
        """Bans and orders, signed (see tt_cli.identity.passes)."""
        counted(request, limits.asking)
        number, text = authority.notice()
        etag = f'"{number}"'
        if if_none_match == etag:
            return Response(status_code=304, headers={"ETag": etag})
        return Response(text, media_type="text/plain", headers={"ETag": etag, "Cache-Control": "no-cache"})

    @app.post("/v1/challenge", responses=problems(400, 413, 422, 429))
    def challenge(request: Request, body: ChallengeRequest) -> ChallengeAnswer:
        """A nonce to sign, good for some minutes and once."""
        counted(request, limits.proving)
        made = authority.challenge(body.peer_id, body.purpose)
        return ChallengeAnswer(nonce=made.nonce, key=made.key, time=made.time, expires=made.expires)

    @app.post("/v1/join", responses=problems(400, 401, 403, 413, 422, 429))
    def join(request: Request, body: JoinRequest) -> PassAnswer:
        """A pass for whoever proves who they are."""
        counted(request, limits.proving)
        match body.proof:
            case HubProof(user=user):
                counted_user(user)
                proof = {"way": "hub", "user": user}
            case OAuthProof(ticket=ticket):
                proof = {"way": "oauth", "ticket": ticket}
            case TokenProof(token=token):
                proof = {"way": "token", "token": token.get_secret_value()}
        key, signature = _bytes(body.key, "key"), _bytes(body.signature, "signature")
        return PassAnswer(text=authority.join(key, body.nonce, signature, proof), time=authority.clock())

    @app.post("/v1/renew", responses=problems(400, 401, 403, 413, 422, 429))
    def renew(request: Request, body: RenewRequest) -> PassAnswer:
        """The next pass for the holder of one."""
        counted(request, limits.proving)
        key, signature = _bytes(body.key, "key"), _bytes(body.signature, "signature")
        return PassAnswer(text=authority.renew(key, body.nonce, signature, body.held), time=authority.clock())

    @app.post("/v1/accuse", responses=problems(400, 401, 403, 413, 422, 429))
    def accuse(request: Request, body: AccuseRequest) -> TicketAnswer:
        """Announce a proof that a member made a wrong average."""
        counted(request, limits.proving)
        key, signature = _bytes(body.key, "key"), _bytes(body.signature, "signature")
        return TicketAnswer(ticket=authority.hear(key, body.nonce, signature, body.held, body.proof))

    @app.post(
        PROOFS,
        responses=problems(401, 403, 413, 422, 429),
        openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}, "required": True}},
    )
    async def hand_in(
        request: Request, tt_ticket: Annotated[str, Header(pattern=r"^[A-Za-z0-9_-]{16,4000}$")]
    ) -> Conviction:
        """Hand in the proof; whoever it proves guilty is banned."""
        counted(request, limits.proving)
        authority.expects(tt_ticket)  # before a byte is read
        if limits.proofs.locked():
            raise TooOften(JUDGING_SECONDS)
        async with limits.proofs:
            body = await bounded_body(request.receive, MOST_PROOF, PROOF_SECONDS)
            try:
                return Conviction(guilty=await asyncio.to_thread(authority.convict, tt_ticket, body))
            except Busy:
                raise TooOften(JUDGING_SECONDS) from None

    @app.post("/v1/login", responses=problems(400, 401, 403, 413, 422, 429))
    def begin_login(request: Request, body: LoginRequest) -> LoginAnswer:
        """Begin a login with a code (OAuth's device flow), where the run names an OAuth app."""
        counted(request, limits.proving)
        return LoginAnswer(**authority.begin_login(_bytes(body.key, "key")))

    @app.post("/v1/login/poll", responses=problems(400, 401, 403, 413, 422, 429))
    def poll_login(request: Request, body: PollRequest) -> PollAnswer:
        """Tell whether the user has logged in."""
        counted(request, limits.asking)
        return PollAnswer(ticket=authority.poll_login(body.handle))

    return app


class TooOften(Exception):
    """wait: seconds until it may be asked again."""

    def __init__(self, wait: float):
        self.wait = wait


def _bytes(text: str, name: str) -> bytes:
    try:
        return decode(text)
    except ValueError as error:
        raise RequestRefused(401, f"the {name} is {error}") from None


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return problem(error.status, str(error))


def _too_often(request: Request, error: Exception) -> Response:
    assert isinstance(error, TooOften)
    return problem(429, f"asked too often: wait {math.ceil(error.wait)} s", error.wait)


def _not_now(request: Request, error: Exception) -> Response:
    return problem(503, str(error), RETRY_SECONDS)


def _broken(request: Request, error: Exception) -> Response:
    """The words name files of this host: they are for its log."""
    logger.error(str(error))
    return problem(503, "the authority cannot do this now; its organiser finds the reason in its log", RETRY_SECONDS)


_ANSWERS: dict[type[Exception], Callable[[Request, Exception], Response]] = {
    RequestRefused: _refused,
    TooOften: _too_often,
    BodyTooLong: too_long,
    BodyTooSlow: too_slow,
    HubUnreachable: _not_now,
    DatabaseDown: _not_now,
    TTError: _broken,
    RequestValidationError: malformed,
}
