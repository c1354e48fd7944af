"""Texts that an authority signs: the pass of one member, and the notice of who is banned and what is ordered.

Both are texts of the form KIND.PAYLOAD.SIGNATURE: the payload is JSON with sorted keys, the signature Ed25519
(RFC 8032) over the kind, a dot and the payload's bytes, both in base64url without padding. The kind carries the
version and keeps a signed pass from being read as a notice. Only one text is valid for given contents and key:
another spelling of the same base64 or JSON is refused.

Times are Unix seconds. The authority's public key is written "ed25519:" and 43 characters of base64url. A run
file may hold two while the authority changes its key: "ed25519:NEW ed25519:OLD until 2026-12-01" takes the old
key's signatures before that day begins (UTC).
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

MAX_PASS = 4096  # characters
MAX_NOTICE = 2**20  # characters: some twenty thousand bans
CLOCK_LEEWAY = 30.0  # seconds by which two honest clocks may differ
_KEY = re.compile(r"ed25519:[A-Za-z0-9_-]{43}")
_STRICT = ConfigDict(strict=True, extra="forbid")

Words = Annotated[str, Field(max_length=1000)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Time = Annotated[float, Field(ge=0, lt=2**40)]  # Unix seconds
Count = Annotated[int, Field(ge=0, lt=2**63)]


class InvalidPass(Exception):
    """A pass or notice that does not count; the text says why."""


@dataclass(frozen=True)
class Pass:
    """The right of `user` to take part in `run` with the RSA key of `peer_id` from `issued` until `expires`."""

    __pydantic_config__ = _STRICT

    user: Name  # the name on the Hub
    peer_id: Name
    run: Name  # RunConfig.identity
    issued: Time
    expires: Time


@dataclass(frozen=True)
class RollBack:
    """The order to go back to one checkpoint."""

    __pydantic_config__ = _STRICT

    step: Count
    digest: Name  # of the state at that step
    source: Words  # where the checkpoint lies, beside members' own disks; "" for nowhere else
    order: Count  # counts the authority's orders; a peer carries each out once


@dataclass(frozen=True)
class Notice:
    """The bans and the organiser's orders. The higher number is the later notice."""

    __pydantic_config__ = _STRICT

    run: Name
    number: Count
    issued: Time
    banned_users: frozenset[Name]
    banned_peers: frozenset[Name]
    paused: Words  # the reason, or "" while the run goes on
    rollback: RollBack | None


Signed = TypeVar("Signed", Pass, Notice)
_FORMS: dict[type, tuple[str, int, TypeAdapter[Any]]] = {  # kind, most characters
    Pass: ("tt-pass-1", MAX_PASS, TypeAdapter(Pass)),
    Notice: ("tt-notice-1", MAX_NOTICE, TypeAdapter(Notice)),
}


def era_of(notice: Notice | None) -> int:
    """The era of the run by this notice: each order to go back begins one, of its number; 0 before the first."""
    return notice.rollback.order if notice is not None and notice.rollback is not None else 0


def public_text(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    """The public key as it stands in a run file."""
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return f"ed25519:{encode(raw)}"


def authority_keys(text: str) -> list[tuple[Ed25519PublicKey, float]]:
    """The keys that a run file's `authority_key` names, each with the time until which it counts.

    Raises ValueError, in words, when the text is of another form.
    """
    words = text.split()
    if not words or (len(words) > 1 and (len(words) != 4 or words[2] != "until")):
        raise ValueError('must be "ed25519:KEY", or "ed25519:NEW ed25519:OLD until YYYY-MM-DD" while the key changes')
    keys = [(_public_key(words[0]), math.inf)]
    if len(words) == 4:
        keys.append((_public_key(words[1]), begin_of(words[3])))
    return keys


def sign(what: Pass | Notice, key: Ed25519PrivateKey) -> str:
    """The pass, or the notice, as text of at most MAX_PASS or MAX_NOTICE characters."""
    kind, payload = _FORMS[type(what)][0], _canonical(dataclasses.asdict(what))
    return f"{kind}.{encode(payload)}.{encode(key.sign(kind.encode() + b'.' + payload))}"


def read_pass(text: str, authority_key: str, run: str, now: float, *, leeway: float = CLOCK_LEEWAY) -> Pass:
    """The pass in `text`; `authority_key` as in the run file, `run` the reader's RunConfig.identity.

    Raises InvalidPass when it is forged, malformed, of another run, expired or not yet valid.
    """
    read = _open(Pass, text, authority_key, run, now, leeway)
    if read.expires + leeway <= now or read.expires <= read.issued:
        raise InvalidPass(f"pass expired {now - read.expires:.0f} s ago")
    return read


def read_notice(text: str, authority_key: str, run: str, now: float) -> Notice:
    """The notice in `text`. Raises InvalidPass as `read_pass` does; a notice does not expire.

    The caller sees to it that a notice never replaces one with a higher number.
    """
    return _open(Notice, text, authority_key, run, now, CLOCK_LEEWAY)


def allowed(p: Pass, notice: Notice | None) -> None:
    """Raises InvalidPass when the pass's user or peer is banned."""
    if notice is None:
        return
    if p.user.lower() in {user.lower() for user in notice.banned_users}:  # the Hub's names ignore case
        raise InvalidPass(f"user {p.user} is banned from this run")
    if p.peer_id in notice.banned_peers:
        raise InvalidPass(f"peer {p.peer_id} of user {p.user} is banned from this run")


def _open(form: type[Signed], text: str, authority_key: str, run: str, now: float, leeway: float) -> Signed:
    """The signed contents of `text`. The signature is checked before the payload is read."""
    kind, limit, adapter = _FORMS[form]
    name = kind.split("-")[1]
    if not isinstance(text, str) or len(text) > limit:
        raise InvalidPass(f"malformed {name}: longer than {limit} characters")
    parts = text.split(".")
    if len(parts) != 3 or parts[0] != kind:
        raise InvalidPass(f"malformed {name}: it does not begin with {kind} or has not three parts")
    try:
        payload, signature = decode(parts[1]), decode(parts[2])
        keys = authority_keys(authority_key)
    except ValueError as error:
        raise InvalidPass(f"malformed {name}: {error}") from None
    signed = kind.encode() + b"." + payload
    if not any(now < until and _signed(key, signature, signed) for key, until in keys):
        raise InvalidPass(f"forged {name}: its signature is not this run's authority's")
    try:
        if _canonical(json.loads(payload)) != payload:
            raise ValueError("its payload is not in the canonical form")
        read: Signed = adapter.validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "its payload"
        raise InvalidPass(f"malformed {name}: {field}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidPass(f"malformed {name}: {error}") from None
    if read.run != run:
        raise InvalidPass(f"{name} of another run: it is for {read.run}, this run is {run}")
    if read.issued > now + leeway:
        late = f"it begins in {read.issued - now:.0f} s; is this machine's clock right?"
        raise InvalidPass(f"{name} not yet valid: {late}")
    return read


def _signed(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=sorted).encode()


def encode(data: bytes) -> str:
    """Base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    """The bytes again. Raises ValueError for anything but the one spelling that `encode` writes."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise ValueError("not base64url") from None
    if encode(data) != text:
        raise ValueError("not base64url in its one spelling")
    return data


def _public_key(text: str) -> Ed25519PublicKey:
    if not _KEY.fullmatch(text):
        raise ValueError(f"'{text}' is no public key: it must be 'ed25519:' and 43 characters of base64url")
    return Ed25519PublicKey.from_public_bytes(decode(text.removeprefix("ed25519:")))


def begin_of(day: str) -> float:
    """Unix time at which a day begins (UTC). Raises ValueError for what is none."""
    try:
        midnight = datetime.datetime.combine(datetime.date.fromisoformat(day), datetime.time(), datetime.UTC)
    except ValueError:
        raise ValueError(f"'{day}' is no day: write it as in 2026-12-01") from None
    return midnight.timestamp()
