"""Terms on which a peer and the authority agree to the byte: what is signed, and what a proof on the Hub says."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

PROOF_REPOSITORY = "tt-proof"  # a public model repository in the volunteer's own namespace

Purpose = Literal["join", "renew", "accuse"]


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
