"""The authority over HTTP.

    401  the proof, the nonce, the signature or the pass does not hold: join anew
    403  it holds, and the answer is no: not a member, banned, too many peers
    429  too often; Retry-After says when
    503  the Hub or the database does not answer; Retry-After too. These two a client tries again by itself

An error is {"detail": "one line for a person"}. Neither answers nor logs repeat what was sent.
"""

# No `from __future__ import annotations`: FastAPI resolves the annotations of the functions inside `make_app`.
import asyncio
import logging
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field

from tt_cli.auth import authority_requests as requests
from tt_cli.auth.authority.issuer import (
    AskedTooOften,
    Authority,
    AuthorityFacts,
    Challenge,
    LoginInstructions,
    RequestRefused,
)
from tt_cli.auth.authority.proof_judge import MOST_PROOF
from tt_cli.auth.authority.request_limits import BoundedBodies, bounded_body
from tt_cli.errors import TTError
from tt_cli.hub.hub_files import HubUnreachable
from tt_cli.identity.rate_limit import Crowded, Places, RateLimit, address_key
from tt_cli.supervisor.http_server import malformed, problem, problems

logger = logging.getLogger(__name__)

PROOFS = "/v1/proofs"
PROOF_SECONDS = 60.0  # for all of a proof
JUDGING_SECONDS = 10.0  # after which to ask again where there is no place
MOST_PROOFS = 4  # at once, each in memory; one of a user
RETRY_SECONDS = 5


class PassAnswer(BaseModel):
    """A pass (see tt_cli.identity.passes), and multiaddrs of some members."""

    text: str = Field(serialization_alias="pass")
    members: list[str]
    time: float


class TicketAnswer(BaseModel):
    """With which a proof is handed in, or a user joins; None while the user has not logged in."""

    ticket: str | None


class Conviction(BaseModel):
    """The peer that is banned now."""

    guilty: str


@dataclass
class Limits:
    """Rate limits of requests, by address. A lab behind one address may start its machines at once."""

    asking: RateLimit = field(default_factory=lambda: RateLimit(burst=120, per_second=10.0))  # facts and notice
    proving: RateLimit = field(default_factory=lambda: RateLimit(burst=60, per_second=1.0))  # the rest
    proofs: Places = field(default_factory=lambda: Places(1, MOST_PROOFS))  # by user
    sending: RateLimit = field(default_factory=lambda: RateLimit(4, 0.1 / PROOF_SECONDS))  # too: a tenth of the time
    telling: RateLimit = field(default_factory=lambda: RateLimit(burst=1, per_second=1 / 60))  # the log, by the words
    judging: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time


def make_app(authority: Authority, limits: Limits | None = None) -> FastAPI:
    """The service for one run. It trusts the address that the server gives it: see `serve` for proxies."""
    limits = limits or Limits()
    asking, proving = _counted(limits.asking), _counted(limits.proving)
    app = FastAPI(title="tt authority", version="1", docs_url=None, redoc_url=None, responses=_problems(429, 503))
    app.add_middleware(BoundedBodies, but_for=PROOFS)

    @app.get("/v1/facts", dependencies=asking)
    def facts() -> AuthorityFacts:
        """The run, its organisation and the authority's key."""
        return authority.facts()

    @app.get(
        "/v1/notice",
        dependencies=asking,
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The signed notice"},
            304: {"description": "Still the notice that If-None-Match names"},
            **_problems(422),
        },
    )
    def notice(
        if_none_match: Annotated[str | None, Header(max_length=100, pattern=r"^[\x20-\x7e]*$")] = None,
    ) -> Response:
        """Bans and orders, signed (see tt_cli.identity.passes)."""
        number, text = authority.notice()
        etag = f'"{number}"'
        if if_none_match == etag:
            return Response(status_code=304, headers={"ETag": etag})
        return Response(text, media_type="text/plain", headers={"ETag": etag, "Cache-Control": "no-cache"})

    @app.post("/v1/challenge", dependencies=proving, responses=_problems(400, 413, 422))
    def challenge(body: requests.ChallengeRequest) -> Challenge:
        """A nonce to sign, good for some minutes and once."""
        return authority.challenge(body.peer_id, body.purpose)

    @app.post("/v1/join", dependencies=proving, responses=_problems(400, 401, 403, 413, 422))
    def join(body: requests.JoinRequest) -> PassAnswer:
        """A pass for whoever proves who they are."""
        return PassAnswer(**vars(authority.join(body)), time=authority.clock())

    @app.post("/v1/renew", dependencies=proving, responses=_problems(400, 401, 403, 413, 422))
    def renew(body: requests.RenewRequest) -> PassAnswer:
        """The next pass for the holder of one."""
        return PassAnswer(**vars(authority.renew(body)), time=authority.clock())

    @app.post("/v1/accuse", dependencies=proving, responses=_problems(400, 401, 403, 413, 422))
    def accuse(body: requests.AccuseRequest) -> TicketAnswer:
        """Announce a proof that a member made a wrong average."""
        return TicketAnswer(ticket=authority.hear(body))

    @app.post(
        PROOFS,
        dependencies=proving,
        responses=_problems(401, 403, 413, 422),
        openapi_extra={"requestBody": {"content": {"application/octet-stream": {}}, "required": True}},
    )
    async def hand_in(request: Request, tt_ticket: Annotated[requests.Sealed, Header()]) -> Conviction:
        """Hand in the proof; whoever it proves guilty is banned."""
        try:
            with limits.proofs.one(user := authority.expects(tt_ticket)):  # before a byte is read
                limits.sending.charge(user)
                body = await bounded_body(request.receive, MOST_PROOF, PROOF_SECONDS)
                async with limits.judging:
                    return Conviction(guilty=await asyncio.to_thread(authority.convict, tt_ticket, body))
        except Crowded:
            raise AskedTooOften(JUDGING_SECONDS) from None

    @app.post("/v1/login", dependencies=proving, responses=_problems(400, 401, 403, 413, 422))
    def begin_login(body: requests.LoginRequest) -> LoginInstructions:
        """Begin a login with a code (OAuth's device flow), where the run names an OAuth app."""
        return authority.begin_login(body.key)

    @app.post("/v1/login/poll", dependencies=asking, responses=_problems(400, 401, 403, 413, 422))
    def poll_login(body: requests.PollRequest) -> TicketAnswer:
        """Tell whether the user has logged in."""
        return TicketAnswer(ticket=authority.poll_login(body.handle))

    @app.exception_handler(RequestRefused)
    def refused(request: Request, error: RequestRefused) -> Response:
        return problem(error.status, str(error), error.wait)

    @app.exception_handler(HubUnreachable)
    def not_now(request: Request, error: HubUnreachable) -> Response:
        return problem(503, str(error), RETRY_SECONDS)

    @app.exception_handler(TTError)
    def broken(request: Request, error: TTError) -> Response:
        if not limits.telling.wait(str(error)):
            logger.error(str(error))  # it names files of this host, or where its database is
        return problem(
            503, "the authority cannot do this now; its organiser finds the reason in its log", RETRY_SECONDS
        )

    app.add_exception_handler(RequestValidationError, malformed)
    return app


def _problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    reasons = {
        400: "no JSON",
        401: "bad proof",
        403: "no member, or banned",
        413: "too long",
        422: "malformed",
        429: "too often",
        503: "the Hub or the database does not answer",
    }
    return problems({code: reasons[code] for code in codes})


def _counted(limit: RateLimit) -> list[Any]:
    """The dependency of a path whose requests count, by the address they come from, before they are read."""

    async def count(request: Request) -> None:
        if wait := limit.wait(address_key(request.client.host if request.client else None)):
            raise AskedTooOften(wait)

    return [Depends(count)]
