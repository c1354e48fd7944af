"""Passes from a run's authority: join, renew, and the notice of bans and orders.

Three ways to say who one is. "oauth", where the run names an app: its user types a code on the Hub's own page. "hub":
this machine commits a file to the public repository `tt-proof` of the user who is logged in here. "token": a read token
is sent to the authority, which could keep it; only when asked for, and never one that may write.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from tt_cli import __version__
from tt_cli.auth import authority_requests as requests
from tt_cli.auth.account import token, token_source, whoami
from tt_cli.auth.authority_requests import PassRefused, Rejected
from tt_cli.errors import TTError, UsageError, first_line
from tt_cli.hub.hub_files import PLAIN, TooLong, http_client, hub_errors, plain_body, quiet_and_bounded
from tt_cli.identity import peer_key
from tt_cli.identity.multiaddr import is_multiaddr
from tt_cli.identity.passes import CLOCK_LEEWAY, MAX_NOTICE, authority_keys, encode, public_text
from tt_cli.run import RunConfig
from tt_cli.run.sections import is_plain_http

JUDGED_SECONDS = 180.0  # for the answer to a proof
TIMEOUT = 30.0  # seconds for an answer: the authority asks the Hub meanwhile
MAX_ANSWER = MAX_NOTICE + 1024  # bytes
MOST_POLL_SECONDS = 30.0

Tell = Callable[[str, str], None]  # a line for a person, and its level: "info", "warning" or "error"


class ProofNeeded(PassRefused):
    """The pass before does not do any more: its user must prove again who they are."""


class AuthorityUnreachable(TTError):
    """The authority, or the Hub behind it, does not answer now, or not so many at one address."""


class TooLarge(TTError):
    """A request too large for the authority, for a proxy before it or for this line: sending it again is no use."""


class AuthorityConnection:
    """A run's authority over HTTP: what it tells everybody, and how it answers."""

    def __init__(self, run: RunConfig):
        assert run.membership.authority is not None
        self._run = run
        headers = {"User-Agent": f"tt/{__version__}", **PLAIN}
        self._http = http_client(base_url=run.membership.authority, timeout=TIMEOUT, headers=headers)
        self.close = self._http.close

    def notice(self, known: int, seconds: float = TIMEOUT) -> str | None:
        """The signed notice; None when it is the one with this number. Raises AuthorityUnreachable, TTError."""
        text = self._send("GET", "/v1/notice", headers={"If-None-Match": f'"{known}"'}, timeout=seconds)
        return text.decode(errors="replace") or None

    def _post(self, path: str, *names: str, **arguments: Any) -> dict[str, Any]:
        """The answer, an object with at least these names."""
        try:
            content = json.loads(self._send("POST", path, **arguments))
            if not isinstance(content, dict) or not content.keys() >= set(names):
                raise ValueError("another answer")
        except ValueError as error:
            reason = f"{self._where} does not answer as an authority does: is it the right address?"
            raise AuthorityUnreachable(reason) from error
        return content

    def _send(self, method: str, path: str, **arguments: Any) -> bytes:
        """The body of one answer, empty of a 304.

        Raises PassRefused (401, 403), TooLarge (408, 413), AuthorityUnreachable (429, 503, none), TTError (others).
        """
        try:
            with self._http.stream(method, path, **arguments) as answer:
                body = plain_body(answer, MAX_ANSWER)
        except TooLong:
            raise TTError(f"{self._where} answers without end: is it the right address?") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise AuthorityUnreachable(f"{self._where} cannot be reached ({first_line(error)})") from error
        status = answer.status_code
        if status in (200, 304):
            return body
        try:
            detail = " ".join(str(json.loads(body)["detail"]).split())[:300]
        except (ValueError, LookupError, TypeError):  # a proxy's words refuse nobody: it may be well again soon
            detail, status = f"it answered {status}", 503 if status in (401, 403) or status >= 500 else status
        if status in _REFUSALS:
            kind, sentence = _REFUSALS[status]
            raise kind(sentence.format(self._run.run.name, detail))
        raise TTError(f"{self._where} answered {status}: {detail}")

    @property
    def _where(self) -> str:
        return f"the authority at {self._run.membership.authority}"


class AuthorityClient(AuthorityConnection):
    """One peer's side. key_file: the peer's RSA key, made where it is missing. tell: gets lines for a person.

    members: multiaddrs of members, as the authority named them last; None of one that names none.
    """

    def __init__(self, run: RunConfig, key_file: Path, tell: Tell, *, send_token: bool = False):
        super().__init__(run)
        self._tell, self._send_token = tell, send_token
        self.members: list[str] | None = None
        self._told = list[str]()
        self._known = {public_text(key) for key, _ in authority_keys(run.membership.authority_key or "")}
        self._key = peer_key.made_key(key_file)
        self._public = peer_key.public_der(self._key.public_key())
        self.peer_id = peer_key.peer_id(self._public)

    def admission(self, held: str, addresses: Sequence[str] = ()) -> str:
        """The next pass: by renewing `held`, else by proving who one is. addresses: where others reach this peer.

        Raises PassRefused, AuthorityUnreachable, TTError.
        """
        answer, told = None, list(addresses) if self.members is not None else []
        with suppress(ProofNeeded):
            if held:
                answer = self._signed("renew", {"pass": held, **({"addresses": told} if told else {})})
                self._told = told
        answer = answer or self._join()
        if isinstance(named := answer.get("members"), list):
            self.members = list(filter(is_multiaddr, named))
        return str(answer["pass"])

    def lacks(self, addresses: Sequence[str]) -> bool:
        """True for an authority that names members, and does not know these addresses of this one."""
        return self.members is not None and list(addresses) != self._told

    def accuse(self, proof: bytes, held: str) -> str:
        """Hand in a proof that a member made a wrong average; `held` is this peer's pass. Returns the guilty peer's id.

        Raises PassRefused, TooLarge, AuthorityUnreachable, TTError.
        """
        digest = hashlib.sha256(proof).hexdigest()
        ticket = self._signed("accuse", {"pass": held, "proof": digest})["ticket"]
        headers = {"TT-Ticket": str(ticket), "Content-Type": "application/octet-stream"}
        return str(self._post("/v1/proofs", "guilty", content=proof, headers=headers, timeout=JUDGED_SECONDS)["guilty"])

    def _join(self) -> dict[str, Any]:
        challenge = self._challenge("join")
        if self._send_token:
            proof = {"way": "token", "token": self._read_token()}
        elif self._run.membership.oauth_client_id:
            proof = {"way": "oauth", "ticket": self._login()}
            challenge = self._challenge("join")  # the login may have taken long
        else:
            proof = {"way": "hub", "user": self._commit_proof(challenge)}
        return self._signed("join", {"proof": proof}, challenge)

    def _challenge(self, purpose: requests.Purpose) -> dict[str, Any]:
        before = time.time()
        sent = {"peer_id": self.peer_id, "purpose": purpose}
        challenge = self._post("/v1/challenge", "key", "nonce", "time", json=sent)
        after = time.time()
        if challenge["key"] not in self._known:
            raise PassRefused(
                f"the authority of run {self._run.run.name} signs with another key than the run file names: ask the "
                "organiser for the newest run file"
            )
        ahead = before - challenge["time"] if before > challenge["time"] else min(0.0, after - challenge["time"])
        if abs(ahead) > CLOCK_LEEWAY:
            raise TTError(
                f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the authority's, "
                "so passes would not count: set it (`timedatectl set-ntp true`)"
            )
        return challenge

    def _signed(
        self, purpose: requests.Purpose, said: dict[str, Any], challenge: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The answer to what this peer's key signs together with a nonce."""
        challenge = challenge or self._challenge(purpose)
        nonce = challenge["nonce"]
        message = requests.signed_message(purpose, challenge["key"], self._run.identity, nonce, self.peer_id, said)
        signature = encode(peer_key.sign(self._key, message))
        body = {"key": encode(self._public), "nonce": nonce, "signature": signature, **said}
        return self._post(f"/v1/{purpose}", "ticket" if purpose == "accuse" else "pass", json=body)

    def _commit_proof(self, challenge: dict[str, Any]) -> str:
        """Put the proof into the user's own repository. Returns their name."""
        from huggingface_hub import HfApi

        if token_source() is None:
            raise PassRefused(
                f"the run {self._run.run.name} admits members of {self._run.membership.organisation} on the Hub only, "
                "and nobody is logged in here: run `tt login`"
            )
        user = whoami().name
        repository = f"{user}/{requests.PROOF_REPOSITORY}"
        content = requests.proof_content(self._run.identity, challenge["key"], challenge["nonce"], self._public)
        action = f"cannot put the proof that you are {user} into {repository} on the Hub"
        try:
            with hub_errors(action), quiet_and_bounded():
                api = HfApi()
                api.create_repo(repository, exist_ok=True, private=False)
                api.upload_file(
                    path_or_fileobj=json.dumps(content, indent=1).encode(),
                    path_in_repo=requests.proof_path(self._run.identity, self.peer_id),
                    repo_id=repository,
                    commit_message=f"Take part in {self._run.identity}",
                )
        except UsageError as error:
            remedy = "with a token that may write to your own repositories; or see --send-token"
            raise PassRefused(f"{error}, {remedy}") from error
        return user

    def _login(self) -> str:
        """Have the user log in on the Hub's page. Returns the authority's ticket for it."""
        needed = "handle", "user_code", "page", "interval", "expires_in"
        login = self._post("/v1/login", *needed, json={"key": encode(self._public)})
        line = f"To take part, open {login['page']} in any browser and enter the code: {login['user_code']}"
        self._tell(line, "warning")
        deadline = time.monotonic() + float(login["expires_in"])
        while time.monotonic() < deadline:
            time.sleep(min(float(login["interval"]), MOST_POLL_SECONDS))
            try:
                ticket = self._post("/v1/login/poll", "ticket", json={"handle": login["handle"]})["ticket"]
            except AuthorityUnreachable:  # the code still counts
                continue
            if ticket is not None:
                return str(ticket)
        raise PassRefused("nobody entered the code in time: start again")

    def _read_token(self) -> str:
        """The token to be sent. Raises PassRefused for one that may do more than read, before it leaves here."""
        if is_plain_http(self._run.membership.authority or ""):
            raise PassRefused(
                "--send-token: the authority's address is not https, so others could read the token on its way"
            )
        if token_source() is None:
            raise PassRefused("--send-token: nobody is logged in here: run `tt login --token` with a read token")
        if whoami().token_role != "read":
            raise PassRefused(
                '--send-token: your token may do more than read, so it stays here: make one of the type "read" in the '
                "settings of your Hugging Face account, and set HF_TOKEN to it"
            )
        return token() or ""


_REFUSALS: dict[int, tuple[type[TTError], str]] = {
    401: (ProofNeeded, "the authority of run {} does not take the proof: {}"),
    403: (Rejected, "the authority of run {} refuses: {}"),
    408: (TooLarge, "the line to the authority of run {} is too slow for a request of this size: {}"),
    413: (
        TooLarge,
        "the authority of run {}, or the proxy before it, takes no request of this size ({}): ask the organiser to let "
        "32 MiB through to /v1/proofs",
    ),
    429: (AuthorityUnreachable, "the authority of run {} is asked too often from here: {}"),
    503: (AuthorityUnreachable, "the authority of run {} cannot decide now: {}"),
}
