"""A record as it travels: all of it once, signed with its owner's key, and then what changed, signed by its session's.

A whole record has some 1,100 bytes, a third of them an RSA signature, and most of it is the same for hours. So it names
a key of Ed25519, which its owner's DHT node made when it started, and pulses follow it, of about 110 bytes: the fields
that differ from those of the link on which a pulse builds. The first pulse builds on the whole record, later ones on
that first one for as long as the peer's state is the same, so that a step is told once. Every link says until when the
record lasts; that time rises from link to link, and names them.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage

from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.wire import MOST_LINKS

FIELDS = dict(enumerate(PeerRecord.model_fields))  # by the numbers that pulses give them
NUMBERS = {name: number for number, name in FIELDS.items()}
FIXED = {"peer_id", "pass_text", "session", "time"}  # a pulse leaves them as they are; its time follows from its end
MOST_CHANGED = 2**9  # bytes of the fields in a pulse
SIGNATURE = 64


class Link(NamedTuple):
    """A whole record, or a pulse. until: to when the record lasts, in Unix seconds, as this one says.

    since: `until` of the link on which a pulse builds, 0 for a whole record. data: that record with its signature, or
    a pulse's fields by their numbers in MessagePack, and then the signature.
    """

    until: float
    since: float
    data: bytes


Chain = tuple[Link, ...]  # the whole record first


class BrokenChain(ValueError):
    """Links that do not fit, or a pulse that its session did not sign."""


class ChainStorage(DHTLocalStorage):
    """A node's records, as links: one that is stored whole is one link. tell: gets each that is new."""

    def __init__(self, tell: Callable[[DHTID, Any, Chain], None] = lambda key, subkey, chain: None):
        super().__init__()
        self._tell = tell

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes | Chain, expiration_time: float) -> bool:
        """As hivemind's does."""
        chain = (Link(expiration_time, 0.0, value),) if isinstance(value, bytes) else value
        if kept := bool(super().store_subkey(key, subkey, chain, expiration_time)):
            self._tell(key, subkey, chain)
        return kept


def opened(whole: Any, chain: Chain) -> Any:
    """The fields of a record as they are now. whole: those of its first link, unsigned. Raises BrokenChain."""
    for pulse in chain[1:]:
        changed = _read(pulse.data[:-SIGNATURE])
        whole = {**whole, **changed, "time": whole["time"] + pulse.until - pulse.since}
    return whole


def grown(key: bytes, whole: Any, chain: Chain, pulse: Link) -> Chain:
    """A chain with one more pulse, and without those that it replaces. whole: as for `opened`. Raises BrokenChain."""
    kept = next((chain[: place + 1] for place, link in enumerate(chain) if link.until == pulse.since), ())
    if not kept or len(kept) >= MOST_LINKS or not pulse.until > chain[-1].until:
        raise BrokenChain("a pulse on a record that is not known")
    changed, signature = pulse.data[:-SIGNATURE], pulse.data[-SIGNATURE:]
    try:
        session = Ed25519PublicKey.from_public_bytes(bytes.fromhex(whole["session"]))
        session.verify(signature, _signed(key, chain[0], pulse, changed))
        PeerRecord.model_validate(opened(whole, (*kept, pulse)))
    except (InvalidSignature, KeyError, TypeError, ValueError) as error:
        raise BrokenChain(f"no pulse of this session: {error}") from None
    return (*kept, pulse)


def _signed(key: bytes, whole: Link, pulse: Link, changed: bytes) -> bytes:
    """The bytes that a session signs."""
    of = blake2b(whole.data, digest_size=32).digest()
    return b"tt-pulse-1" + bytes(msgpack.packb((key, of, whole.until, pulse.until, pulse.since, changed)))


def _written(old: dict[str, Any], new: dict[str, Any]) -> bytes:
    changed = {number: new[name] for number, name in FIELDS.items() if new[name] != old[name] and name != "time"}
    digest = changed.get(NUMBERS["digest"], "?")
    if len(digest) == 64:
        changed[NUMBERS["digest"]] = bytes.fromhex(digest)  # half as long
    return bytes(msgpack.packb(changed))


def _read(data: bytes) -> dict[str, Any]:
    """The fields in a pulse. Raises BrokenChain for anything else."""
    try:
        if len(data) > MOST_CHANGED:
            raise ValueError("too long")
        changed = {FIELDS[number]: value for number, value in msgpack.unpackb(data, strict_map_key=False).items()}
        if FIXED & changed.keys():
            raise ValueError("another peer's")
        digest = changed.get("digest")
        return {**changed, "digest": digest.hex()} if isinstance(digest, bytes) else changed
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, msgpack.UnpackException) as error:
        raise BrokenChain(f"no pulse: {error}") from None


class Session:
    """The key with which a node signs what changes in the records that it sends. public: 64 hex digits."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw().hex()

    def pulse(self, key: bytes, whole: Any, chain: Chain, record: dict[str, Any], until: float) -> Link | None:
        """A record's next link on a chain of this node; None where all of it has to be sent.

        whole: as for `opened`. record: what it is to say now. until: to when it lasts.
        """
        if whole.get("session") != self.public or any(whole[name] != record[name] for name in FIXED - {"time"}):
            return None
        for links in (chain[:2], chain[:1]):
            base = opened(whole, links)
            changed = _written(base, record)
            same = len(links) == 1 or (base["epoch"], base["digest"]) == (record["epoch"], record["digest"])
            if same and len(changed) <= MOST_CHANGED and until > chain[-1].until:
                pulse = Link(until, links[-1].until, changed)
                return pulse._replace(data=changed + self.sign(key, chain[0], pulse))
        return None

    def sign(self, key: bytes, whole: Link, pulse: Link) -> bytes:
        """The signature of a pulse that has none yet."""
        return self._key.sign(_signed(key, whole, pulse, pulse.data))
