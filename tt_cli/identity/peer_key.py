"""A peer's RSA key without hivemind: its file, its libp2p peer id, and signatures that hivemind's keys also make.

The file is libp2p's own form, a protobuf message of two fields (libp2p specification, "Keys"): the key's type, RSA = 0,
and its DER. The signature is RSA-PSS with SHA-256 and the longest salt, as hivemind signs DHT records.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey, generate_private_key

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.errors import TTError, os_errors

KEY_BITS = 2048  # as hivemind's
MAX_PUBLIC_KEY = 1024  # bytes of DER: more than an RSA key of 4096 bits has
MAX_EXPONENT = 2**32  # as long as the modulus a signature would cost a hundred times as much
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
PEER_ID = "Qm[1-9A-HJ-NP-Za-km-z]{44}"  # a pattern of what `peer_id` makes
_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.MAX_LENGTH)


def make_key_file(path: Path) -> None:
    """Write a new key to `path`, readable by its owner alone; a kill meanwhile leaves no half a key. Raises OSError."""
    key = generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    atomic_write(path, _message(der), mode=PRIVATE)


def made_key(path: Path) -> RSAPrivateKey:
    """The key in a peer's key file, which is made where it is missing. Raises TTError."""
    with os_errors(f"cannot keep this peer's identity in {path}"):
        if not path.exists():
            make_key_file(path)
        data = path.read_bytes()
    return key_of_file(path, data)


def key_of_file(path: Path, data: bytes) -> RSAPrivateKey:
    """The key in `data`, which `path` holds. Raises TTError when it is none."""
    try:
        return private_key(data)
    except ValueError as error:
        raise TTError(f"{path} is no identity file ({error}): move it away to get a new identity") from error


def private_key(data: bytes) -> RSAPrivateKey:
    """The key in a file's bytes. Raises ValueError when it is none."""
    try:
        key = serialization.load_der_private_key(_content(data), password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, RSAPrivateKey):
        raise ValueError("not an RSA key")
    return key


def public_der(key: RSAPublicKey) -> bytes:
    """The public key as bytes (DER, SubjectPublicKeyInfo)."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def public_key(der: bytes) -> RSAPublicKey:
    """The key in `public_der`'s bytes. Raises ValueError for other bytes and for keys of an unusual size."""
    if len(der) > MAX_PUBLIC_KEY:
        raise ValueError("too long for a public key")
    try:
        key = serialization.load_der_public_key(der)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    found = usual(key)
    if public_der(found) != der:
        raise ValueError("not in the one form of its bytes")  # else one key would have several peer ids
    return found


def usual(key: object) -> RSAPublicKey:
    """The key, where it costs no more than usual to verify what it signed. Raises ValueError for any other."""
    if not isinstance(key, RSAPublicKey) or not 2048 <= key.key_size <= 4096 or key.public_numbers().e > MAX_EXPONENT:
        raise ValueError("not an RSA key of 2048 to 4096 bits with a small exponent")
    return key


def peer_id(der: bytes) -> str:
    """The libp2p peer id of a public key: base58 of the SHA-256 multihash of the key's message."""
    digest = hashlib.sha256(_message(der)).digest()
    number, text = int.from_bytes(b"\x12\x20" + digest, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return text


def id_of(key: RSAPrivateKey) -> str:
    """The peer id of whoever holds this key."""
    return peer_id(public_der(key.public_key()))


def sign(key: RSAPrivateKey, data: bytes) -> bytes:
    """The signature of `data`."""
    return key.sign(data, _PADDING, hashes.SHA256())


def signed(key: RSAPublicKey, signature: bytes, data: bytes) -> bool:
    """Tell whether `signature` is that key's of `data`."""
    try:
        key.verify(signature, data, _PADDING, hashes.SHA256())
    except InvalidSignature:
        return False
    return True


def _message(der: bytes) -> bytes:
    """The protobuf message {1: RSA (0), 2: der}."""
    length, size = len(der), b""
    while length > 0x7F:
        size += bytes([length & 0x7F | 0x80])
        length >>= 7
    return b"\x08\x00\x12" + size + bytes([length]) + der


def _content(message: bytes) -> bytes:
    """The DER in such a message. Raises ValueError for any other."""
    for start in range(4, 7):
        if _message(message[start:]) == message:
            return message[start:]
    raise ValueError("not an RSA key in libp2p's form, or torn")
