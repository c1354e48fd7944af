"""Requests of a peer to a run's authority: their form, what is signed of them, and what a proof on the Hub says."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, SecretStr

from tt_cli.auth.account import AccountName
from tt_cli.errors import UsageError
from tt_cli.identity.passes import MAX_PASS

MOST_ADDRESSES, ADDRESS = 4, r"^/[!-~]{1,200}$"  # of one peer; the form of one
PROOF_REPOSITORY = "tt-proof"  # a public model repository in the volunteer's own namespace

Purpose = Literal["join", "renew", "accuse"]
PeerId = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{32,128}$")]
PublicKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,1400}$", description="DER, base64url without padding")]
Address = Annotated[str, Field(pattern=ADDRESS, description="a multiaddr")]
Sealed = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,4000}$")]


class PassRefused(UsageError):
    """The authority says no, or this machine cannot prove who its user is."""


class Rejected(PassRefused):
    """The authority knows who it is, and says no: not a member, or banned."""


class StrictRequest(BaseModel):
    """The base of all: nothing unknown is taken."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ChallengeRequest(StrictRequest):
    """For which peer and purpose a nonce is wanted."""

    peer_id: PeerId
    purpose: Purpose = "join"


class LoginRequest(StrictRequest):
    """For which peer a login begins."""

    key: PublicKey


class PollRequest(StrictRequest):
    """The handle of one login."""

    handle: Sealed


class SignedRequest(StrictRequest):
    """A request that the peer's key signs together with the nonce."""

    key: PublicKey
    nonce: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,200}$")]
    signature: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,1400}$", description="RSA-PSS, base64url")]

    def said(self) -> dict[str, Any]:
        """All that is asked for, as it is signed: what was not sent was not."""
        return self.model_dump(by_alias=True, exclude_unset=True, exclude={"key", "nonce", "signature"})


class HubProof(StrictRequest):
    """A file in the user's public repository on the Hub."""

    way: Literal["hub"]
    user: AccountName


class OAuthProof(StrictRequest):
    """A ticket of POST /v1/login/poll."""

    way: Literal["oauth"]
    ticket: Sealed


class TokenProof(StrictRequest):
    """A read token: it is asked who it belongs to, and dropped."""

    way: Literal["token"]
    token: Annotated[SecretStr, Field(min_length=1, max_length=500), PlainSerializer(SecretStr.get_secret_value)]


class JoinRequest(SignedRequest):
    """The proof of who the peer's user is."""

    proof: Annotated[HubProof | OAuthProof | TokenProof, Field(discriminator="way")]


class HolderRequest(SignedRequest):
    """The pass before."""

    held: Annotated[str, Field(alias="pass", min_length=1, max_length=MAX_PASS)]


class RenewRequest(HolderRequest):
    """The pass before, and multiaddrs at which the peer accepts connections, for those who join later."""

    addresses: Annotated[list[Address], Field(max_length=MOST_ADDRESSES)] = []


class AccuseRequest(HolderRequest):
    """That the holder of a pass has a proof against a member: the SHA-256 of an Accusation of the swarm's audits."""

    proof: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def signed_message(
    purpose: Purpose, authority_key: str, run: str, nonce: str, peer_id: str, said: dict[str, Any]
) -> bytes:
    """Bytes that the peer's key signs; that it names run and authority keeps another authority from passing it on."""
    content = {"authority": authority_key, "run": run, "nonce": nonce, "peer_id": peer_id, **said}
    return f"tt-{purpose}-1.".encode() + json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def proof_path(run: str, peer_id: str) -> str:
    """Path of the proof for a peer in its user's repository."""
    return f"{run}/{peer_id}.json"


def proof_content(run: str, authority_key: str, nonce: str, key: bytes) -> dict[str, str]:
    """Text of that file. key: the peer's public key (DER)."""
    return {"run": run, "authority": authority_key, "nonce": nonce, "key": hashlib.sha256(key).hexdigest()}
