"""Passes from a run's authority: join, renew, and the notice of bans and orders.

Three ways to say who one is. "oauth", where the run names an app: its user types a code on the Hub's own page. "hub":
this machine commits a file to the public repository `tt-proof` of the user who is logged in here. "token": a read token
is sent to the authority, which could keep it; only when asked for, and never one that may write.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tt_cli import __version__
from tt_cli.auth.join_proof import (
    PROOF_REPOSITORY,
    Purpose,
    proof_content,
    proof_path,
    signed_message,
)
from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import HubUnreachable, hub_errors, quiet_and_bounded
from tt_cli.identity import peer_key
from tt_cli.identity.passes import (
    CLOCK_LEEWAY,
    MAX_NOTICE,
    InvalidPass,
    Pass,
    authority_keys,
    encode,
    public_text,
    read_pass,
)
from tt_cli.run import RunConfig

JUDGED_SECONDS = 180.0  # for the answer to a proof
TIMEOUT = 30.0  # seconds for an answer: the authority asks the Hub meanwhile
MAX_ANSWER = MAX_NOTICE + 1024  # bytes
MOST_POLL_SECONDS = 30.0

Say = Callable[[str], None]


class PassRefused(UsageError):
    """The authority says no, or this machine cannot prove who its user is."""


class Rejected(PassRefused):
    """The authority knows who it is, and says no: not a member, or banned."""


class ProofNeeded(PassRefused):
    """The pass before does not do any more: its user must prove again who they are."""


class AuthorityUnreachable(TTError):
    """The authority, or the Hub behind it, does not answer now."""


class AuthorityClient:
    """One peer's side. key_file: the peer's RSA key, made where it is missing. say: gets lines for a person."""

    def __init__(self, run: RunConfig, key_file: Path, say: Say, *, send_token: bool = False):
        membership = run.membership
        assert membership.authority is not None and membership.authority_key is not None
        self._run, self._say, self._send_token = run, say, send_token
        self._keys = membership.authority_key
        self._known = {public_text(key) for key, _ in authority_keys(self._keys)}
        self._key = peer_key.private_key(made_key(key_file))
        self._public = peer_key.public_der(self._key.public_key())
        self.peer_id = peer_key.peer_id(self._public)
        self._http = httpx2.Client(
            base_url=membership.authority,
            timeout=TIMEOUT,
            headers={"User-Agent": f"tt/{__version__}"},
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def admission(self, held: str) -> str:
        """The next pass: by renewing `held`, else by proving who one is. Raises Refused, AuthorityUnreachable."""
        if held:
            try:
                return self._renew(held)
            except ProofNeeded:
                pass
        return self._join()

    def notice(self, known: int) -> str | None:
        """The signed notice; None when it is the one with this number. Raises AuthorityUnreachable, TTError."""
        answer = self._send("GET", "/v1/notice", headers={"If-None-Match": f'"{known}"'})
        return None if answer.status_code == 304 else answer.text

    def accuse(self, proof: bytes, held: str) -> str:
        """Hand in a proof that a member made a wrong average; `held` is this peer's pass. Returns the guilty peer's id.

        Raises Refused, AuthorityUnreachable, TTError.
        """
        digest = hashlib.sha256(proof).hexdigest()
        ticket = self._signed("accuse", {"pass": held, "proof": digest})["ticket"]
        headers = {"TT-Ticket": str(ticket), "Content-Type": "application/octet-stream"}
        return str(self._post("/v1/proofs", content=proof, headers=headers, timeout=JUDGED_SECONDS)["guilty"])

    # ---------------------------------------------------------------- the two requests

    def _renew(self, held: str) -> str:
        return self._ask("renew", {"pass": held})

    def _join(self) -> str:
        challenge = self._challenge("join")
        way = "token" if self._send_token else "oauth" if self._run.membership.oauth_client_id else "hub"
        if way == "oauth":
            proof = {"way": way, "ticket": self._login()}
            challenge = self._challenge("join")  # the login may have taken long
        elif way == "hub":
            proof = {"way": way, "user": self._commit_proof(challenge)}
        else:
            proof = {"way": way, "token": self._read_token()}
        return self._ask("join", {"proof": proof}, challenge)

    def _challenge(self, purpose: Purpose) -> dict[str, Any]:
        before = time.time()
        challenge = self._post("/v1/challenge", json={"peer_id": self.peer_id, "purpose": purpose})
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
        self, purpose: Purpose, said: dict[str, Any], challenge: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        challenge = challenge or self._challenge(purpose)
        nonce = challenge["nonce"]
        message = signed_message(purpose, challenge["key"], self._run.identity, nonce, self.peer_id, said)
        signature = encode(peer_key.sign(self._key, message))
        body = {"key": encode(self._public), "nonce": nonce, "signature": signature, **said}
        return self._post(f"/v1/{purpose}", json=body)

    def _ask(self, purpose: Purpose, said: dict[str, Any], challenge: dict[str, Any] | None = None) -> str:
        text = str(self._signed(purpose, said, challenge)["pass"])
        try:
            issued = read_pass(text, self._keys, self._run.identity, time.time())
        except InvalidPass as error:
            raise TTError(
                f"the authority answered with a pass that does not count ({error}): ask the organiser"
            ) from None
        if issued.peer_id != self.peer_id:
            raise TTError("the authority answered with another peer's pass: ask the organiser")
        return text

    # ---------------------------------------------------------------- the three ways

    def _commit_proof(self, challenge: dict[str, Any]) -> str:
        """Put the proof into the user's own repository. Returns their name."""
        from huggingface_hub import HfApi

        from tt_cli.auth.account import token_source, whoami

        if token_source() is None:
            raise PassRefused(
                f"the run {self._run.run.name} admits members of {self._run.membership.organisation} on the Hub only, "
                "and nobody is logged in here: run `tt login`"
            )
        user = whoami().name
        repository = f"{user}/{PROOF_REPOSITORY}"
        content = proof_content(self._run.identity, challenge["key"], challenge["nonce"], self._public)
        action = f"cannot put the proof that you are {user} into {repository} on the Hub"
        try:
            with quiet_and_bounded(), hub_errors(action):
                api = HfApi()
                api.create_repo(repository, exist_ok=True, private=False)
                api.upload_file(
                    path_or_fileobj=json.dumps(content, indent=1).encode(),
                    path_in_repo=proof_path(self._run.identity, self.peer_id),
                    repo_id=repository,
                    commit_message=f"Take part in {self._run.identity}",
                )
        except HubUnreachable:
            raise
        except UsageError as error:
            raise PassRefused(
                f"{error}, with a token that may write to your own repositories; or see --send-token"
            ) from error
        return user

    def _login(self) -> str:
        """Have the user log in on the Hub's page. Returns the authority's ticket for it."""
        login = self._post("/v1/login", json={"key": encode(self._public)})
        self._say(f"To take part, open {login['page']} in any browser and enter the code: {login['user_code']}")
        deadline = time.monotonic() + float(login["expires_in"])
        while time.monotonic() < deadline:
            time.sleep(min(float(login["interval"]), MOST_POLL_SECONDS))
            try:
                ticket = self._post("/v1/login/poll", json={"handle": login["handle"]})["ticket"]
            except AuthorityUnreachable:  # the code still counts
                continue
            if ticket is not None:
                return str(ticket)
        raise PassRefused("nobody entered the code in time: start again")

    def _read_token(self) -> str:
        """The token that is to be sent. Raises Refused for one that may do more than read, before it leaves here."""
        import huggingface_hub

        from tt_cli.auth.account import token_source, whoami

        address = urlsplit(self._run.membership.authority or "")
        if address.scheme != "https" and address.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise PassRefused(
                "--send-token: the authority's address is not https, so others could read the token on its way"
            )
        if token_source() is None:
            raise PassRefused("--send-token: nobody is logged in here: run `tt login --token` with a read token")
        whoami()  # words for what can be wrong with a login
        with quiet_and_bounded(), hub_errors("cannot ask the Hub what your token may do"):
            auth = huggingface_hub.whoami(cache=True).get("auth", {})
        if auth.get("accessToken", {}).get("role") != "read":
            raise PassRefused(
                '--send-token: your token may do more than read, so it stays here: make one of the type "read" in the '
                "settings of your Hugging Face account, and set HF_TOKEN to it"
            )
        token = huggingface_hub.get_token()
        assert token is not None
        return token

    # ---------------------------------------------------------------- HTTP

    def _post(self, path: str, **arguments: Any) -> dict[str, Any]:
        answer = self._send("POST", path, **arguments)
        try:
            content = answer.json()
            if not isinstance(content, dict):
                raise ValueError("no object")
        except ValueError as error:
            raise AuthorityUnreachable(
                f"{self._where} does not answer as an authority does: is it the right address?"
            ) from error
        return content

    def _send(self, method: str, path: str, **arguments: Any) -> httpx2.Response:
        """One answer of 200 or 304. Raises Refused (401, 403), AuthorityUnreachable (503, none), TTError (others)."""
        try:
            with self._http.stream(method, path, **arguments) as answer:
                data = b""
                for piece in answer.iter_bytes():
                    data += piece
                    if len(data) > MAX_ANSWER:
                        raise TTError(f"{self._where} answers without end: is it the right address?")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise AuthorityUnreachable(f"{self._where} cannot be reached ({reason})") from error
        whole = httpx2.Response(answer.status_code, headers=_plain(answer.headers), content=data)
        if whole.status_code in (200, 304):
            return whole
        words = _detail(whole)
        match whole.status_code:
            case 401:
                raise ProofNeeded(f"the authority of run {self._run.run.name} does not take the proof: {words}")
            case 403:
                raise Rejected(f"the authority of run {self._run.run.name} refuses: {words}")
            case 429:
                raise TTError(f"the authority of run {self._run.run.name} is asked too often from here: {words}")
            case 503:
                raise AuthorityUnreachable(f"the authority of run {self._run.run.name} cannot decide now: {words}")
        raise TTError(f"{self._where} answered {whole.status_code}: {words}")

    @property
    def _where(self) -> str:
        return f"the authority at {self._run.membership.authority}"


def made_key(path: Path) -> bytes:
    """The bytes of a peer's key file, which is made where it is missing. Raises TTError."""
    try:
        if not path.exists():
            peer_key.make_key_file(path)
        data = path.read_bytes()
        peer_key.private_key(data)
    except OSError as error:
        raise TTError(f"cannot keep this peer's identity in {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TTError(f"{path} is no identity file ({error}): move it away to get a new identity") from error
    return data


def still_good(run: RunConfig, text: str, peer_id: str, now: float) -> Pass | None:
    """The pass in `text` while it counts, for this peer."""
    try:
        found = read_pass(text, run.membership.authority_key or "", run.identity, now, leeway=0.0)
    except InvalidPass:
        return None
    return found if found.peer_id == peer_id else None


def _plain(headers: httpx2.Headers) -> dict[str, str]:
    """The body has been decoded already."""
    return {
        name: value for name, value in headers.items() if name.lower() not in ("content-encoding", "content-length")
    }


def _detail(answer: httpx2.Response) -> str:
    try:
        words = str(answer.json()["detail"])
    except (ValueError, LookupError, TypeError):
        words = f"it answered {answer.status_code}"
    return " ".join(words.split())[:300]
