"""The rules of the authority: who gets a pass, who does not, and with which answer. No HTTP here.

Joining takes three things: a nonce that this authority made for the peer's id, a signature over it by the peer's RSA
key (so nobody gets a pass for another's peer), and a proof of the user's name on the Hub. Renewing takes the nonce,
the signature and the pass before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tt_cli.auth import authority_requests as requests
from tt_cli.auth.authority.authority_folder import AuthorityFolder, SigningKey
from tt_cli.auth.authority.hub_client import HubClient, IdentityNotProven
from tt_cli.auth.authority.introductions import Introductions
from tt_cli.auth.authority.member_store import MemberStore, RegisteredMember, TooManyPeers
from tt_cli.auth.authority.proof_judge import NoProof, judged
from tt_cli.identity import peer_key
from tt_cli.identity.passes import InvalidPass, Notice, Pass, allowed, decode, encode, read_pass, sign
from tt_cli.identity.rate_limit import RateLimit
from tt_cli.run import RunConfig

PASS_SECONDS = 3600.0
NONCE_SECONDS = 600.0  # long enough for a commit on the Hub
TICKET_SECONDS = 300.0
PROOF_SECONDS = 14 * 86400.0  # then a user proves again who they are, and that they are still a member
GRACE_SECONDS = 7 * 86400.0  # an expired pass can be renewed so long, as after the authority was down
MOST_PEERS = 4  # of one user with valid passes
MOST_WRONG = 3  # of one user: judging takes seconds
CONVICTED = "proven to have signed a wrong average"  # the reason of such a ban
NOTICE_SECONDS = 1.0  # a signed notice is handed out so long before the database is asked again


class RequestRefused(requests.Rejected):
    """No. status: 401 bad proof, 403 not a member or banned; wait: seconds until it may be asked again.

    The text says why and what to do.
    """

    def __init__(self, status: int, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.status, self.wait = status, wait


class AskedTooOften(RequestRefused):
    """A refusal for now, 429: wait is how many seconds until the next request counts."""

    def __init__(self, wait: float):
        super().__init__(429, f"asked too often: wait {math.ceil(wait)} s", wait)


@dataclass(frozen=True)
class AuthorityFacts:
    """A run's authority, as it describes itself; nothing about its members. time: its clock, Unix seconds."""

    run: str
    organisation: str | None
    authority_key: str
    ways: list[str]
    pass_seconds: float
    time: float


@dataclass(frozen=True)
class Challenge:
    """nonce: for the peer's key to sign. key: the authority's, which signs now. Times are Unix seconds of its clock."""

    nonce: str
    key: str
    time: float
    expires: float


@dataclass(frozen=True)
class LoginInstructions:
    """Instructions to the user, and how often to ask whether it is done (seconds)."""

    handle: str
    user_code: str
    page: str
    interval: float
    expires_in: float


@dataclass(frozen=True)
class IssuedPass:
    """A pass, as text, and multiaddrs of some members, through whom its holder can join."""

    text: str
    members: list[str]


class Authority:
    """One run's authority. Use it from any thread; several processes may serve one folder and database."""

    def __init__(
        self,
        run: RunConfig,
        folder: AuthorityFolder,
        store: MemberStore,
        *,
        pass_seconds: float = PASS_SECONDS,
        most_peers: int = MOST_PEERS,
        clock: Callable[[], float] = time.time,
    ):
        self.run, self.folder, self.store, self.clock = run, folder, store, clock
        self.pass_seconds, self.most_peers = pass_seconds, most_peers
        self._hub, self._introductions = HubClient(), Introductions()
        self._notice: tuple[float, str, tuple[int, str]] | None = None
        self._lock = threading.Lock()
        # Passes, by user, once it is proven who that is: twice as often as all peers of one renew theirs.
        self._users = RateLimit(burst=2 * most_peers, per_second=4 * most_peers / pass_seconds)
        self._wrong: Counter[str] = Counter()  # proofs that prove nothing, by user, since the start

    def facts(self) -> AuthorityFacts:
        """The run, its organisation and the authority's key."""
        membership = self.run.membership
        ways = ["hub", "token"] if membership.kind == "organisation" else []
        return AuthorityFacts(
            run=self.run.identity,
            organisation=membership.organisation,
            authority_key=self.folder.settings().line(),
            ways=["oauth", *ways] if membership.oauth_client_id else ways,
            pass_seconds=self.pass_seconds,
            time=self.clock(),
        )

    def notice(self) -> tuple[int, str]:
        """The number and the text of the signed notice in force."""
        with self._lock:
            now, key = time.monotonic(), self._key()
            if self._notice is None or now > self._notice[0] + NOTICE_SECONDS or self._notice[1] != key.text:
                held = self.store.notice(self.run.identity)
                self._notice = (now, key.text, (held.number, sign(held, key.private)))
            return self._notice[2]

    def challenge(self, peer_id: str, purpose: requests.Purpose) -> Challenge:
        """A nonce for that peer and purpose. Nothing is stored until it is used."""
        now = self.clock()
        nonce = self._seal("nonce", NONCE_SECONDS, f"{purpose} {peer_id}")
        return Challenge(nonce, self._key().text, now, now + NONCE_SECONDS)

    def join(self, request: requests.JoinRequest) -> IssuedPass:
        """A pass for the peer with this key. Raises RequestRefused; HubUnreachable, which leaves the nonce good."""
        if self.run.membership.kind == "open":
            raise RequestRefused(403, f"the run {self.run.run.name} is open: it needs no pass")
        peer_id, signing = self._possession(request, "join")
        way = request.proof.way
        try:
            user, member = self._who(request, peer_id, signing)
        except IdentityNotProven as error:
            self._note("somebody", "not proven", peer_id, str(error))
            raise RequestRefused(401, str(error)) from None
        if not member:
            organisation = self.run.membership.organisation
            self._note(user, "no member", peer_id, way)
            listed = ", as the Hub shows it to everyone" if way == "hub" else ""
            raise RequestRefused(403, f"{user} is no member of {organisation}{listed}: ask the organisation to add you")
        self._charge(user)
        self._spend(request.nonce)
        now = self.clock()
        issued = self._issue(user, peer_id, way, joined=now, proven=now)
        self._note(user, "joined", peer_id, way)
        return issued

    def renew(self, request: requests.RenewRequest) -> IssuedPass:
        """The next pass for the holder of this one. Raises RequestRefused; 401 means: join again."""
        peer_id, _ = self._possession(request, "renew")
        now = self.clock()
        held = self._own_pass(request.held, peer_id, now)
        known = self.store.member(peer_id)
        if known is None:  # the database was restored from a backup older than the pass
            known = RegisteredMember(peer_id, held.user, "renewed", held.issued, held.issued, held.expires)
        elif known.user != held.user:
            raise RequestRefused(401, "that pass is an older one, of another user: join again")
        if now > known.proven + PROOF_SECONDS:
            days = PROOF_SECONDS / 86400
            raise RequestRefused(401, f"{known.user} proved who they are more than {days:.0f} days ago")
        self._charge(known.user)
        self._spend(request.nonce)
        times = {"joined": known.joined, "proven": known.proven}
        return self._issue(known.user, peer_id, known.way, **times, addresses=request.addresses)

    def issue_here(self, peer_id: str, user: str) -> str:
        """A pass for the organiser's own peer on this host, whose folder holds the key. Raises RequestRefused."""
        now = self.clock()
        return self._issue(user, peer_id, "organiser", joined=now, proven=now).text

    def hear(self, request: requests.AccuseRequest) -> str:
        """A ticket for handing in one proof, for the holder of a pass. Raises RequestRefused."""
        peer_id, _ = self._possession(request, "accuse")
        now = self.clock()
        held = self._own_pass(request.held, peer_id, now)
        if now >= held.expires:
            raise RequestRefused(401, "that pass has expired")
        self._check_ban(held)
        self._check_wrong(held.user)
        self._spend(request.nonce)
        return self._seal("proof", TICKET_SECONDS, proof=request.proof, peer=peer_id, user=held.user)

    def expects(self, ticket: str) -> str:
        """The user who may hand a proof in with this ticket. Raises RequestRefused for one that is none."""
        return self._check_wrong(self._unseal("proof", ticket)[0]["user"])  # it may have been used before

    def convict(self, ticket: str, proof: bytes) -> str:
        """Judge what the ticket's holder hands in: see `judge`."""
        held, _ = self._unseal("proof", ticket)
        if hashlib.sha256(proof).hexdigest() != held["proof"]:
            raise RequestRefused(401, "the proof is not the one that the ticket is for")
        return self.judge(proof, held["user"], held["peer"])

    def judge(self, proof: bytes, user: str, peer_id: str) -> str:
        """Ban the peer whose guilt is proven; its id. Its user too, when it is the second peer of theirs.

        One wrong average may come from a computer that is broken. user, peer_id: who brings the proof. Raises
        RequestRefused; TTError where nothing can be judged here.
        """
        try:
            guilty = judged(self.run, proof)
        except NoProof as error:
            self._wrong[user] += 1
            self._note(user, "accused wrongly", peer_id, str(error))
            raise RequestRefused(403, f"that proves nothing: {error}") from None
        member = self.store.member(guilty)
        if member is None:  # anybody can make a key and sign nonsense with it
            raise RequestRefused(403, "whom it proves guilty never had a pass of this run")
        banned = {ban["name"]: ban["reason"] for ban in self.store.bans() if ban["kind"] == "peer"}
        if guilty not in banned:
            self.folder.keep_proof(guilty, proof)
            self.store.ban("peer", guilty, CONVICTED, self.clock())
            self._note(user, "proved", guilty, f"{member.user} signed a wrong average")
            before = [self.store.member(peer) for peer, reason in banned.items() if reason == CONVICTED]
            if any(convict is not None and convict.user == member.user for convict in before):
                self.store.ban("user", member.user.lower(), f"{CONVICTED}, with two peers", self.clock())
                self._note(user, "proved", guilty, f"the second peer of {member.user}")
        return guilty

    def begin_login(self, key: str) -> LoginInstructions:
        """Begin the device flow for a peer. Raises RequestRefused, HubUnreachable."""
        peer_id = peer_key.peer_id(_public_key(key))
        try:
            login = self._hub.begin_login(self._client_id())
        except IdentityNotProven as error:
            raise RequestRefused(403, f"the Hub refuses the organiser's OAuth app: {error}") from None
        handle = self._seal("login", login.expires_in, code=login.device_code, peer=peer_id)
        return LoginInstructions(handle, login.user_code, login.page, login.interval, login.expires_in)

    def poll_login(self, handle: str) -> str | None:
        """A ticket for `join` once the user has logged in, None before. Raises RequestRefused, HubUnreachable."""
        held, _ = self._unseal("login", handle)
        try:
            account = self._hub.login_granted(self._client_id(), held["code"])
        except IdentityNotProven as error:
            raise RequestRefused(401, str(error)) from None
        if account is None:
            return None
        member = self._organisation() in account.organisations
        return self._seal("ticket", TICKET_SECONDS, user=account.name, member=member, peer=held["peer"])

    def _key(self) -> SigningKey:
        return self.folder.settings().signing(self.clock())

    def _client_id(self) -> str:
        client_id = self.run.membership.oauth_client_id
        if client_id is None:
            raise RequestRefused(403, "this run names no OAuth app: prove who you are another way")
        return client_id

    def _organisation(self) -> str:
        return (self.run.membership.organisation or "").casefold()

    def _possession(self, request: requests.SignedRequest, purpose: requests.Purpose) -> tuple[str, SigningKey]:
        """The peer id of whoever signed this with a nonce of ours that is still good, and the key that made it."""
        public = _public_key(request.key)
        peer_id = peer_key.peer_id(public)
        _, mine = self._unseal("nonce", request.nonce, f"{purpose} {peer_id}")
        message = requests.signed_message(purpose, mine.text, self.run.identity, request.nonce, peer_id, request.said())
        with suppress(ValueError):
            if peer_key.signed(peer_key.public_key(public), decode(request.signature), message):
                return peer_id, mine
        raise RequestRefused(401, "the signature is not that of the peer's key")

    def _charge(self, user: str) -> None:
        if wait := self._users.wait(user.casefold()):
            raise AskedTooOften(wait)

    def _spend(self, nonce: str) -> None:
        """Last, so that a Hub which does not answer costs nobody their nonce; of two at a time, one gets through."""
        now = self.clock()
        if not self.store.use_nonce(hashlib.sha256(decode(nonce)).hexdigest(), now + NONCE_SECONDS, now):
            raise RequestRefused(401, "the nonce has been used already")

    def _who(self, request: requests.JoinRequest, peer_id: str, signing: SigningKey) -> tuple[str, bool]:
        """The user's name, and whether they are a member.

        Raises IdentityNotProven, HubUnreachable, RequestRefused.
        """
        proof = request.proof
        organisation = self._organisation()
        match proof:
            case requests.OAuthProof():
                ticket, _ = self._unseal("ticket", proof.ticket)
                if ticket["peer"] != peer_id:
                    raise IdentityNotProven("that login was begun by another peer")
                return str(ticket["user"]), bool(ticket["member"])
            case requests.TokenProof():
                account = self._hub.user_of_token(proof.token.get_secret_value())
                return account.name, organisation in account.organisations
        user, content = self._hub.proof(proof.user, requests.proof_path(self.run.identity, peer_id))
        if content != requests.proof_content(self.run.identity, signing.text, request.nonce, decode(request.key)):
            raise IdentityNotProven(f"the proof in {user}'s repository is for another run, authority, nonce or key")
        try:
            return user, self._hub.is_member(organisation, user)
        except IdentityNotProven as error:  # a hidden or missing organisation
            raise RequestRefused(403, f"{error}; prove who you are another way") from None

    def _own_pass(self, text: str, peer_id: str, now: float) -> Pass:
        """The pass of this authority in `text`, that peer's; it may have expired GRACE_SECONDS ago."""
        refusal = "no pass of this authority"
        for key in self.folder.settings().keys:
            try:
                held = read_pass(text, key.text, self.run.identity, now, leeway=GRACE_SECONDS)
            except InvalidPass as error:
                refusal = str(error)
                continue
            if held.peer_id != peer_id:
                raise RequestRefused(401, "that pass belongs to another peer")
            return held
        raise RequestRefused(401, f"{refusal}: join again")

    def _check_wrong(self, user: str) -> str:
        """The user, who may hand in another proof."""
        if self._wrong[user] >= MOST_WRONG:
            raise RequestRefused(403, f"{user} has handed in {MOST_WRONG} proofs that prove nothing")
        return user

    def _check_ban(self, held: Pass) -> Notice:
        """The notice in force, by which this pass counts."""
        try:
            allowed(held, notice := self.store.notice(self.run.identity))
        except InvalidPass as error:
            self._note(held.user, "banned", held.peer_id)
            raise RequestRefused(403, f"{error}: ask the run's organiser") from None
        return notice

    def _issue(
        self, user: str, peer_id: str, way: str, *, joined: float, proven: float, addresses: Sequence[str] = ()
    ) -> IssuedPass:
        """The signed pass, from now on. joined, proven: see RegisteredMember. addresses: of the peer."""
        now = self.clock()
        issued = Pass(user, peer_id, self.run.identity, now, now + self.pass_seconds)
        notice = self._check_ban(issued)
        try:
            self.store.admit(RegisteredMember(peer_id, user, way, joined, proven, issued.expires), now, self.most_peers)
        except TooManyPeers:
            raise RequestRefused(403, f"{user} has {self.most_peers} peers in this run already") from None
        return IssuedPass(sign(issued, self._key().private), self._introductions.of(issued, addresses, notice))

    def _note(self, who: str, what: str, peer_id: str = "", detail: str = "") -> None:
        self.store.write_down(self.clock(), who, what, peer_id, detail)

    def _seal(self, what: str, seconds: float, of: str = "", **content: Any) -> str:
        """Text that holds `content`, which only this authority reads, for so long. what: "nonce", "login", ….

        of: what it is for, which has to be said again when it is read.
        """
        nonce, data = os.urandom(12), json.dumps({**content, "until": self.clock() + seconds}).encode()
        return encode(nonce + AESGCM(self._key().secret(f"sealed {what}")).encrypt(nonce, data, of.encode()))

    def _unseal(self, what: str, text: str, of: str = "") -> tuple[dict[str, Any], SigningKey]:
        """The content, and the key that sealed it. Raises RequestRefused."""
        for key in self.folder.settings().keys:
            try:
                raw = decode(text)
                opened = AESGCM(key.secret(f"sealed {what}")).decrypt(raw[:12], raw[12:], of.encode())
            except (InvalidTag, ValueError):
                continue
            content: dict[str, Any] = json.loads(opened)
            if self.clock() < content["until"]:
                return content, key
        words = f"the {what} is not one that this authority made for this, or it is too old: begin again"
        raise RequestRefused(401, words)


def _public_key(text: str) -> bytes:
    """A peer's key (DER)."""
    try:
        key = decode(text)
        peer_key.public_key(key)
    except ValueError as error:
        raise RequestRefused(401, f"no public key of a peer: {error}") from None
    return key
