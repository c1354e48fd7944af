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
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils.crypto import RSAPrivateKey

from tt_cli.errors import TTError
from tt_cli.identity import peer_key
from tt_cli.supervisor.slot import claim_name, try_lock

MAX_OWNER = 2**10  # bytes of the key in a subkey: 390, and 740 with 4,096 bits


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

    Raises ValueError when the bytes are no such key, or one whose signatures take long to verify.
    """
    try:
        key = serialization.load_ssh_public_key(public_key)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    return peer_key.peer_id(peer_key.public_der(peer_key.usual(key)))


def owners_of(subkey: Any) -> list[bytes]:
    """The public keys that a protected subkey names (OpenSSH form); none in one that is longer than a key needs.

    The time that the search takes grows with the square of the length.
    """
    fits = isinstance(subkey, bytes) and len(subkey) <= MAX_OWNER
    return RSASignatureValidator._PUBLIC_KEY_RE.findall(subkey) if fits else []


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
