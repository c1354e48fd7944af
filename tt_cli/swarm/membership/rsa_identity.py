"""A peer's identity: one RSA key, used by libp2p for its peer id and by the DHT for signatures.

Since both come from the same key, a signed record proves which peer id it speaks for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils.crypto import RSAPrivateKey

from tt_cli.errors import TTError
from tt_cli.identity import peer_key
from tt_cli.supervisor.slot import claim_name, try_lock


@dataclass(frozen=True)
class Identity:
    """A key that this process alone uses while it lives (the lock is released when it ends)."""

    path: Path
    key: RSAPrivateKey
    peer_id: str
    lock: IO[str]


@functools.lru_cache(maxsize=1024)  # each look at the records asks for all of them
def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of an RSA public key in OpenSSH form (libp2p specification, "Peer Ids").

    Raises ValueError when the bytes are no such key.
    """
    try:
        key = serialization.load_ssh_public_key(public_key)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, RSAPublicKey):
        raise ValueError("not an RSA key")
    return peer_key.peer_id(peer_key.public_der(key))


def owners_of(subkey: Any) -> list[bytes]:
    """The public keys that a protected subkey names (OpenSSH form)."""
    return RSASignatureValidator._PUBLIC_KEY_RE.findall(subkey) if isinstance(subkey, bytes) else []


def claim_identity(folder: Path, role: str, name: str = "") -> Identity:
    """The identity called `name` in `folder`, else the first of `role` that no living process uses; made if missing.

    A second trainer on one machine gets an identity of its own (`trainer-2.key`); an auxiliary peer's identity
    is fixed, so a second one is refused. A supervisor names the one that it holds a pass for. Files are readable by
    their owner alone.
    """
    if name:
        lock = try_lock(folder / f"{name}.lock")
        if lock is None:
            raise TTError(f"another peer of this machine uses {folder / name}.key: stop it first")
    else:
        name, lock = claim_name(folder, role)
    path = folder / f"{name}.key"
    key = RSAPrivateKey.__new__(RSAPrivateKey)  # hivemind's, which makes a new one otherwise
    key._private_key = private = peer_key.made_key(path)
    return Identity(path, key, peer_key.id_of(private), lock)
