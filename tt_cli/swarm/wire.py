"""The messages between peers: one strict form each, and nothing else is taken.

A message is MessagePack of one array, whose fields have the types that its `Form` names; hivemind carries it in an
`ExpertInfo`. Bytes of any other form, or more of them than a message may have, raise `MalformedMessage`, with no more
memory than they have themselves. Records on the DHT are pydantic models (records/peer_record.py), passes and notices
signed JSON (identity/passes.py). `FORMS` has all, each with what an honest peer may send: one test tries them.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgpack
from hivemind.proto import runtime_pb2
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from tt_cli.identity.passes import MAX_PASS

Fields = TypeVar("Fields")

FORMS: dict[str, Form[Any]] = {}


class MalformedMessage(ValueError):
    """Bytes that are no message of the form that was expected; the text says why."""


class Form(Generic[Fields]):
    """The form of one kind of message. fields: the type of their tuple. example: an honest message's. most: bytes."""

    def __init__(self, name: str, fields: type[Fields], example: Fields, most: int = 2**20):
        self.name, self.example, self.most = name, example, most
        self._fields: TypeAdapter[Fields] = TypeAdapter(fields, config=ConfigDict(strict=True))
        FORMS[name] = self

    def pack(self, fields: Fields) -> bytes:
        """The message's bytes. What is in them is not checked."""
        return bytes(msgpack.packb(fields))

    def message(self, fields: Fields) -> runtime_pb2.ExpertInfo:
        """As hivemind carries it."""
        return runtime_pb2.ExpertInfo(serialized_info=self.pack(fields))

    def read(self, message: bytes | runtime_pb2.ExpertInfo) -> Fields:
        """The fields. Raises MalformedMessage for anything else than such a message."""
        data = message if isinstance(message, bytes) else message.serialized_info
        try:
            if len(data) > self.most:
                raise ValueError(f"more than {self.most} bytes")
            values = msgpack.unpackb(data, use_list=False, strict_map_key=False, max_ext_len=0)
            return self._fields.validate_python(values)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise MalformedMessage(f"no {self.name}: {first['msg']}") from None
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise MalformedMessage(f"no {self.name}: {error}") from None


def _rising(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if any(one >= two for one, two in zip(numbers, numbers[1:], strict=False)):
        raise ValueError("numbers that do not rise")
    return numbers


def _in_twelves(held: bytes) -> bytes:
    if len(held) % 12:
        raise ValueError("a record without its time")
    return held


def _even(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(numbers) % 2:
        raise ValueError("a run without an end")
    return numbers


Count = Annotated[int, Field(ge=0, lt=2**32)]
Rising = Annotated[tuple[Count, ...], AfterValidator(_rising)]
PeerId = Annotated[str, Field(max_length=128)]
Words = Annotated[str, Field(max_length=2**10)]
Hashes = bytes  # of parts, one after the other
Shares = tuple[Count, ...]  # of reducers
Finite = Annotated[float, Field(allow_inf_nan=False)]

# ------------------------------------------------------------------ records on the DHT

MOST_HELD = 2**12  # records that a request names
Key = Annotated[bytes, Field(min_length=20, max_length=20)]
Held = Annotated[bytes, Field(max_length=12 * MOST_HELD), AfterValidator(_in_twelves)]

RECORDS_REQUEST = Form("request for records", tuple[Key, Held], (bytes(20), bytes(24)), most=2**17)
"""(key, for each record that the caller has 8 bytes of its owner's hash and 4 of the time until which it lasts)"""

MOST_LINKS = 3  # of a record: see records/record_chain.py
Time = Annotated[float, Field(allow_inf_nan=False, ge=0.0)]
Links = Annotated[tuple[tuple[Time, Time, bytes], ...], Field(min_length=1, max_length=MOST_LINKS)]
LINKS_EXAMPLE = ((1e9, 0.0, b"record"), (1e9 + 1, 1e9, b"pulse"))

RECORDS_ANSWER = Form(
    "answer with records",
    tuple[bool, tuple[tuple[bytes, Links], ...]],
    (False, ((b"owner", LINKS_EXAMPLE),)),
    most=2**22,
)
"""(whether the caller has something newer, of the records that it lacks: owner as it is packed or was named, links)"""

RENEWAL = Form("renewal of a record", tuple[Key, bytes, Links], (bytes(20), b"owner", LINKS_EXAMPLE), most=2**14)
"""(key, owner as in an answer, the last link or all of them)"""

RENEWED = Form("answer to a renewal", tuple[bool], (True,))
"""(whether it is kept; if not, all links are needed)"""

# ------------------------------------------------------------------ the state on its way to a newcomer

Runs = Annotated[Rising, AfterValidator(_even)]  # of chunks: first, end, first, end, …
MAX_MANIFEST = 2**21

MOST_LISTED = 16  # peer ids

STATE_REQUEST = Form(
    "request for a state", tuple[Annotated[str, Field(max_length=64)], Runs, bool], ("ab" * 32, (1, 3, 5, 6), True)
)
"""(digest of the state, runs of chunks, whether who asks hands on what it takes)"""

ChunkSet = Annotated[bytes, Field(max_length=2**13)]  # a bit for each chunk, the first in the lowest bit
Takers = Annotated[
    tuple[Annotated[str, Field(max_length=128, pattern="^[1-9A-HJ-NP-Za-km-z]+$")], ...], Field(max_length=MOST_LISTED)
]

Answer = (
    tuple[Literal["manifest"], Annotated[bytes, Field(max_length=MAX_MANIFEST)]]
    | tuple[Literal["chunk"], Count, bytes]
    | tuple[Literal["held"], ChunkSet, ChunkSet, Takers]
    | tuple[Literal["refused"], Words, Takers]
)
"""held: chunks that are here, those of them that others were given, who takes this state too"""

STATE_ANSWER = Form[Answer](
    "answer of a donor",
    Answer,  # type: ignore[arg-type] # a union, like what is annotated, is no class to mypy
    ("chunk", 3, bytes(50)),
    most=MAX_MANIFEST + 2**10,
)

# ------------------------------------------------------------------ rounds

PARTS_REQUEST = Form("request for parts", tuple[bytes | str, Rising | None], ("5_ab", (1, 2)), most=2**16)
"""(group id, or the state key of a round that was committed; parts, None for all)"""

Envelopes = tuple[bytes, ...]

AVERAGE_HEADER = Form(
    "header of an average", tuple[Shares, Hashes, Envelopes], ((1, 1), bytes(64), (b"vote",)), most=2**21
)
"""(shares of the reducers, hashes of all parts, signed votes for them where members stepped with it)"""

STATUS = Form(
    "status of a round",
    tuple[bytes, Hashes, bytes, dict[str, Any], bytes, dict[Any, Any], dict[str, bytes], bool, dict[str, bytes]],
    (b"group", bytes(32), b"vote", {"samples": 4, "loss": 1.0}, b"", {}, {}, False, {}),
    most=2**22,
)
"""(group id, hashes, vote, what is said, commitment, parts clipped by peer, others' commitments, dropped, votes)"""

MOST_JOIN = MAX_PASS + 2**12  # bytes: with a key of 4,096 bits
MOST_SHOWN = 2**21  # of it and of votes, one for each of 1,024 members
MOST_VOTE = 2032  # some kilobyte; 1,975 with a key of 4,096 bits and 64 shares
Join = Annotated[bytes, Field(max_length=MOST_JOIN)]

GATHERED = Form(
    "word to the leader", tuple[float | None, int, bytes], (None, 0, b"\x92\xc4\x04join\x90"), most=MOST_SHOWN
)
"""(bandwidth, averaging mode, packed signed join), as hivemind's matchmaking writes it; the join alone counts"""

ROSTER_REQUEST = Form("request for joins", tuple[bytes], (bytes(32),), most=2**10)
"""(group id)"""

ROSTER = Form("joins of a group", tuple[Envelopes], ((b"entry", b"entry"),), most=2**22)
"""(the word to the leader of each member)"""

PassText = Annotated[str, Field(max_length=MAX_PASS)]
SIGNED_JOIN = Form("signed join", tuple[Join, Envelopes], (b"envelope", (b"vote",)), most=MOST_SHOWN)
"""(envelope of a join, signed votes for what its signer is locked on; of the leader: those that all have shown)"""

# ------------------------------------------------------------------ what is signed of a round, and audits

ENVELOPE = Form(
    "signed message",
    tuple[bytes, Annotated[bytes, Field(max_length=2048)], Annotated[bytes, Field(max_length=1024)]],
    (b"body", b"key", b"signature"),
    most=2**23,
)
"""(body, public key, signature)"""

Cut = Annotated[Shares, Field(max_length=64)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Lock = tuple[Count, Count, Annotated[bytes, Field(max_length=32)]]

JOIN = Form(
    "join",
    tuple[Literal["join"], str, str, str, Finite, bool, Count, bool, PassText, Lock],
    ("join", "run-1a2b3c4d", "5_ab", "leader", 1.5, True, 10_000, True, "pass", (1, 2, bytes(32))),
    most=MOST_JOIN,
)
"""("join", run, state key, leader, DHT time, whether it listens, upload in kbit/s, whether it made steps, pass, lock)

A lock: how many may lie, the last attempt, the hash of the average that may be a step, or nothing."""

OPENING = Form(
    "opening",
    tuple[Literal["opening"], str, str, bytes, str, float, Annotated[Finite, Field(ge=0.0)], Hashes],
    ("opening", "run-1a2b3c4d", "5_ab", b"group", "reducer", 4.0, 0.1, bytes(64)),
    most=2**23,
)
"""("opening", run, state key, group id, reducer, weight, spread, hashes of the parts that follow)"""

VoteKind = Literal["vote", "precommit"]

VOTE = Form(
    "vote",
    tuple[VoteKind, str, str, bytes, Count, Cut, Digest],
    ("vote", "run-1a2b3c4d", "5_ab", b"group", 2, (1, 1), bytes(32)),
)
"""(kind, run, state key, group id, attempt, cut, hash of the whole average: of the cut and its parts' hashes)"""

PRECOMMITTED = Form("precommits of a round", tuple[bytes, Envelopes], (b"group", (b"precommit",)), most=2**21)
"""(group id, a signed precommit; none where the round was dropped, and to ask for all: see allreduce/commit.py)"""

LAST_VOTE = Form(
    "last vote",
    tuple[str, Count, Cut, Hashes, dict[str, Any], tuple[PeerId, ...], Envelopes],
    ("5_ab", 2, (1, 1), bytes(32), {"samples": 4, "loss": 1.0}, ("somebody",), (b"vote",)),
    most=MOST_SHOWN,
)
"""(state key, the last attempt, cut, votes on the parts, what was said, members, the quorum's signed votes): on disk"""

COMMITMENT = Form(
    "commitment",
    tuple[Literal["averages"], str, str, bytes, Shares, int, int, bytes, Hashes],
    ("averages", "run-1a2b3c4d", "5_ab", b"group", (1, 1), 0, 3, bytes(32), bytes(32)),
    most=2**23,
)
"""("averages", run, state key, group id, reducers' shares, position, complete senders, hash of the inputs, hashes)"""

INPUTS = Form("list of inputs", tuple[tuple[bytes, ...], tuple[Count, ...]], ((b"opening",), (1,)), most=2**25)
"""(openings, parts used of each)"""

ACCUSATION = Form(
    "accusation",
    tuple[Literal["tt-accusation-1"], bytes, bytes, int, tuple[bytes, ...]],
    ("tt-accusation-1", b"commitment", b"inputs", 0, (b"part", b"")),
    most=2**25,
)
"""(kind, commitment, inputs, index of the part, what each sender sent of it)"""

ACCUSED = Form("name of the accused", tuple[PeerId], ("somebody",), most=2**10)

AUDIT_REQUEST = Form("request for what was sent", tuple[bytes, str, int | None], (b"group", "reducer", 3), most=2**10)
"""(group id, reducer, part; None for the list of its inputs)"""

# ------------------------------------------------------------------ dialling back

Port = Annotated[int, Field(gt=0, lt=2**16)]
Ports = Annotated[tuple[Port, ...], Field(min_length=1, max_length=3)]

DIAL_REQUEST = Form[tuple[int, ...]]("request to be dialled", Ports, (31337,), most=2**10)
DIAL_ANSWER = Form(
    "answer of who dialled", tuple[Words, tuple[Port, ...], Words], ("203.0.113.7", (31337,), ""), most=2**12
)
"""(address where the caller is seen, ports of it that were reached, words of a refusal)"""
