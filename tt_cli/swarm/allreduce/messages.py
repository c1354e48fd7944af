"""Signed messages of a round, so that a reducer that made a wrong average can be shown to have done so.

- A member asks a leader for a place in its group with a `SignedJoin`. All members get all joins, and the group's id is
  their hash: what a member says of itself nobody else can change.
- A sender opens its stream to a reducer with an `Opening`: its samples, and the hash of every part that it will send.
- A reducer ends with a `Commitment`: the hash of all openings it had and of how many parts of each it used, and the
  hashes of its averages.
- A member signs a `SignedVote` for the average as a whole, and a `Precommit` once it has seen those of a quorum. The
  votes show a later group that the average may be a step. The precommits are kept with it, and show who was not in the
  round that it was made so.
- An `Accusation` is both and the inputs of one part. Who has the run file needs nothing else to compute the part again:
  guilty is who signed an average that does not follow from inputs that their senders signed. Or it is two unlike
  commitments of one reducer to one round, or two unlike votes of one member: nobody honest signs twice, for its own
  join is in the group's id.

Everything else is bound to the run, the state from which the round starts and its group; nothing of one round fits
another, nor what is sent to a reducer what is sent to the same one as the backup of others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import msgpack
import torch
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from tt_cli.run import RunConfig
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES, part_hash
from tt_cli.swarm.allreduce.clipping.centered_clip import LARGEST, Aggregation, ReceivedPart, average_part
from tt_cli.swarm.compression.codec import GradientCodec, MalformedPart, codec_of
from tt_cli.swarm.compression.gradient_buffer import MAX_MEMBERS, MAX_REDUCERS, Partition, TensorPart
from tt_cli.swarm.membership.rsa_identity import peer_id_of

MAX_WEIGHT_IN_TARGETS = 4
INPUT_BYTES = 32  # of an input's hash: nobody finds two inputs with one
GROUP_BYTES = 32  # of a group's id; what follows them names the reducers whose parts are repeated

Fields = TypeVar("Fields")


class NotProven(ValueError):
    """A signature, or what is said to be one, that does not show what it should."""


@dataclass(frozen=True)
class RoundName:
    """One round of one run: the run's identity, the key of the state it starts from, and the group's id.

    lost: of the repetition of some parts, the positions of the reducers that left them; () of a round itself.
    """

    run: str
    state_key: str
    group_id: bytes

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(self.group_id[GROUP_BYTES:])

    def repeated(self, lost: Sequence[int]) -> RoundName:
        """The name of the repetition of what these reducers left."""
        return replace(self, group_id=self.group_id + bytes(lost))

    def cut(self, layout: Partition, shares: Sequence[int]) -> tuple[TensorPart, ...]:
        """Its parts, each with who reduces it. Raises as `Partition.parts`."""
        return layout.repeated(shares, self.lost) if self.lost else layout.parts(shares)


Opened = Callable[[bytes], tuple[str, bytes]]
"""Envelope → peer id of who signed it, body. Raises NotProven where nobody did."""


def open_envelope(envelope: bytes) -> tuple[str, bytes]:
    """Open what `Signer.sign` made."""
    body, public, signature = _read(envelope, wire.ENVELOPE)
    try:
        signer = peer_id_of(public)
        valid = RSAPublicKey.from_bytes(public).verify(body, signature)
    except Exception as error:  # cryptography raises many types
        raise NotProven(f"no signed message: {error}") from error
    if not valid:
        raise NotProven("a signature that is wrong")
    return signer, body


class Signer:
    """Signs as one peer. peer_id: of the key. opened: reads what others signed."""

    def __init__(self, key: RSAPrivateKey):
        self._key = key
        self._public = key.get_public_key().to_bytes()
        self.peer_id = peer_id_of(self._public)
        self.opened: Opened = open_envelope

    def sign(self, fields: Sequence[Any]) -> bytes:
        """An envelope: the fields, the public key and the signature."""
        body = msgpack.packb(list(fields))
        return wire.ENVELOPE.pack((body, self._public, self._key.sign(body)))


def _read(packed: bytes, form: wire.Form[Fields]) -> Fields:
    try:
        return form.read(packed)
    except wire.MalformedMessage as error:
        raise NotProven(f"no {form.name}") from error


@dataclass(frozen=True)
class Lock:
    """A member's word on its earlier rounds from the state of its join.

    liars: how many of the trainers may lie, as it counts them. attempt: the number of the last of those rounds,
    see `OwnVotes.from_state`. average: the hash of the one that it has precommitted last, so that somebody may have
    made it a step.
    """

    liars: int = 0
    attempt: int = 0
    average: bytes = b""


@dataclass(frozen=True)
class SignedJoin:
    """A member's signed word to the leader of a group, for this group alone.

    time: when it was signed (DHT time). listens: the member accepts connections, and so reduces. upload: kbit/s that
    its line carries, 0 where it does not know. steps: it has made some since it began. pass_text: its pass, "" in an
    open run. lock: by its earlier rounds from this state; who joins makes none of those count any more.
    """

    run: str
    state_key: str
    leader: str
    time: float
    listens: bool
    upload: int
    steps: bool
    pass_text: str
    lock: Lock = Lock()

    @property
    def group(self) -> tuple[str, str, str]:
        """The fields that the joins of one group have in common."""
        return self.run, self.state_key, self.leader

    def sign(self, signer: Signer) -> bytes:
        """The envelope."""
        return signer.sign(["join", *astuple(self)])

    @classmethod
    def read(cls, envelope: bytes, opened: Opened = open_envelope) -> tuple[str, SignedJoin]:
        """The signer's peer id, and the join. Raises NotProven for anything else."""
        signer, body = opened(envelope)
        values = _read(body, wire.JOIN)
        return signer, cls(*values[1:-1], Lock(*values[-1]))


class SignedMessage:
    """A dataclass that its signer signs: the round's name, the signer's peer id, the form's fields, hashes of parts."""

    kind: ClassVar[str]
    form: ClassVar[wire.Form[Any]]
    hash_bytes: ClassVar[int]
    name: RoundName

    def sign(self, signer: Signer) -> bytes:
        """The envelope."""
        name, _, *values, hashes = (getattr(self, item.name) for item in fields(self))  # type: ignore[arg-type]
        return signer.sign([self.kind, name.run, name.state_key, name.group_id, *values, b"".join(hashes)])

    @property
    def signer(self) -> str:
        """The peer id of who signed it."""
        return str(getattr(self, fields(self)[1].name))  # type: ignore[arg-type]

    def contradicts(self, other: SignedMessage) -> bool:
        """True for two commitments, or two votes, that nobody honest signs both."""
        return (self.name, self.signer) == (other.name, other.signer) and self != other

    @classmethod
    def read(cls, envelope: bytes, opened: Opened = open_envelope) -> Self:
        """Raises NotProven for anything else than such a message that its signer signed."""
        signer, body = opened(envelope)
        kind, run, state_key, group_id, *values, joined = _read(body, cls.form)
        if kind != cls.kind:
            raise NotProven(f"no {cls.kind}")
        if len(joined) % cls.hash_bytes:
            raise NotProven("hashes of another length")
        hashes = tuple(joined[start : start + cls.hash_bytes] for start in range(0, len(joined), cls.hash_bytes))
        return cls(RoundName(run, state_key, group_id), signer, *values, hashes)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Opening(SignedMessage):
    """A sender's signed word to one reducer. weight: its samples. spread: root mean square of its whole gradient.

    hashes: SHA-256 of each part that it sends there, in their order; of none without samples.
    """

    kind, form, hash_bytes = "opening", wire.OPENING, INPUT_BYTES

    name: RoundName
    sender: str
    reducer: str
    weight: float
    spread: float
    hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class Commitment(SignedMessage):
    """A reducer's signed word about its averages. shares: of all reducers; with its position they give its parts.

    complete: senders all of whose parts count. inputs: SHA-256 of the packed Inputs. outputs: hashes of its averages,
    as members compare them.
    """

    kind, form, hash_bytes = "averages", wire.COMMITMENT, HASH_BYTES

    name: RoundName
    reducer: str
    shares: tuple[int, ...]
    position: int
    complete: int
    inputs: bytes
    outputs: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not (0 <= self.position < len(self.shares) <= MAX_REDUCERS and self.shares[self.position]):
            raise NotProven("a commitment of no reducer")
        if len(self.name.group_id) >= GROUP_BYTES + len(self.shares):
            raise NotProven("a repetition of everything")


@dataclass(frozen=True)
class SignedVote(SignedMessage):
    """A member's signed word that the whole average of a round has this hash; it signs none other in the round.

    attempt: the number of the round. shares: how the average is cut. hashes: one, see `average_hash`.
    """

    kind, form, hash_bytes = "vote", wire.VOTE, INPUT_BYTES

    name: RoundName
    voter: str
    attempt: int
    shares: tuple[int, ...]
    hashes: tuple[bytes, ...]

    @property
    def average(self) -> bytes:
        return self.hashes[0]


class Precommit(SignedVote):
    """A member's signed word that it has this average, and has seen a quorum's votes for it; it shows them later."""

    kind = "precommit"


def average_hash(shares: Sequence[int], hashes: Sequence[bytes]) -> bytes:
    """Hash of an average (INPUT_BYTES,): of how it is cut, and of the hashes of its parts."""
    return hashlib.sha256(wire.AVERAGE_HEADER.pack((tuple(shares), b"".join(hashes), ()))).digest()


@functools.lru_cache(maxsize=4 * MAX_MEMBERS)  # who is locked shows them ten times a second until there is a group
def _read_vote(read: Callable[[bytes, Opened], SignedVote], envelope: bytes, opened: Opened) -> SignedVote | None:
    try:
        return read(envelope, opened)
    except NotProven:
        return None


def read_votes(
    kind: type[SignedVote], votes: Iterable[bytes], run: str, state_key: str, opened: Opened
) -> dict[bytes, SignedVote]:
    """Envelope → vote, of those that are votes of this kind on averages with which to step from this state."""
    read = {envelope: _read_vote(kind.read, envelope, opened) for envelope in votes if len(envelope) <= wire.MOST_VOTE}
    return {
        envelope: vote
        for envelope, vote in read.items()
        if vote is not None and (vote.name.run, vote.name.state_key) == (run, state_key)
    }


@dataclass(frozen=True)
class Inputs:
    """A reducer's inputs. openings: envelopes in the order of the senders' peer ids. used: parts of each that count."""

    openings: tuple[bytes, ...]
    used: tuple[int, ...]

    def pack(self) -> bytes:
        """The bytes whose hash the reducer signs."""
        return wire.INPUTS.pack((self.openings, self.used))

    @classmethod
    def read(cls, packed: bytes) -> Inputs:
        """Raises NotProven for anything else."""
        openings, used = _read(packed, wire.INPUTS)
        if not len(openings) == len(used) <= MAX_MEMBERS:
            raise NotProven("no list of inputs")
        return cls(openings, used)


def may_weigh(weight: float, most: float) -> bool:
    """True for a number of samples up to `most`: less than one, but for none, would have noise without bounds."""
    return weight == 0.0 or 1.0 <= weight <= most


def input_hash(encoded: bytes) -> bytes:
    """Hash of a part on its way to a reducer (INPUT_BYTES,)."""
    return hashlib.sha256(encoded).digest()


@dataclass(frozen=True)
class Accusation:
    """That a reducer's average of one part is wrong: all that is needed to see it, but for the run file.

    commitment: envelope. inputs: packed. index: of the part among the reducer's. parts: what each sender sent of it, in
    the order of the openings; b"" where the reducer did not use it. Where index is UNLIKE, inputs is the envelope of
    another commitment to the same round; where it is UNLIKE_VOTES, both are votes in one round.
    """

    UNLIKE: ClassVar[int] = -1
    UNLIKE_VOTES: ClassVar[int] = -2

    commitment: bytes
    inputs: bytes
    index: int
    parts: tuple[bytes, ...] = field(repr=False)

    def pack(self) -> bytes:
        return wire.ACCUSATION.pack(("tt-accusation-1", self.commitment, self.inputs, self.index, self.parts))

    @classmethod
    def read(cls, packed: bytes) -> Accusation:
        """Raises NotProven for anything else. What it says is not checked: see `verify`."""
        _, commitment, inputs, index, parts = _read(packed, wire.ACCUSATION)
        return cls(commitment, inputs, index, parts)


@dataclass(frozen=True)
class RoundRules:
    """The rules that fix an average: the run's identity, the cut of its gradients, its codec and its aggregation.

    opened: reads what members signed. most: samples that anybody may claim.
    """

    run: str
    layout: Partition
    codec: GradientCodec
    aggregation: Aggregation
    opened: Opened = open_envelope
    most: float = LARGEST

    @classmethod
    def of(cls, run: RunConfig, shapes: Mapping[str, torch.Size]) -> RoundRules:
        """Those of a run. shapes: name → shape of the gradients, in the model's order."""
        codec, most = codec_of(run), float(MAX_WEIGHT_IN_TARGETS * run.swarm.target_batch_size)
        layout = Partition(shapes, run.swarm.large_tensor, codec.block)
        return cls(run.identity, layout, codec, run.swarm.aggregation, most=most)


def verify(accusation: Accusation, rules: RoundRules) -> str:
    """The guilty member's peer id. Raises NotProven where the accusation shows no guilt.

    Guilty is who signed an average of other bytes than its inputs lead to, inputs that nobody signed, two unlike
    averages, or two unlike votes.
    """
    kind = SignedVote if accusation.index == Accusation.UNLIKE_VOTES else Commitment
    signed: SignedVote | Commitment = kind.read(accusation.commitment, rules.opened)
    if signed.name.run != rules.run or not rules.layout.size:
        raise NotProven("an accusation of another run")
    if accusation.index in (Accusation.UNLIKE, Accusation.UNLIKE_VOTES):
        if not signed.contradicts(kind.read(accusation.inputs, rules.opened)):
            raise NotProven("not two unlike words in one round")
        return signed.signer
    commitment = Commitment.read(accusation.commitment, rules.opened)
    if hashlib.sha256(accusation.inputs).digest() != commitment.inputs:
        raise NotProven("other inputs than the reducer signed")
    cut = commitment.name.cut(rules.layout, commitment.shares)
    own = [part for part in cut if part.reducer == commitment.position]
    if len(commitment.outputs) != len(own):
        return commitment.reducer
    if not 0 <= accusation.index < len(own):
        raise NotProven("an accusation without a part")
    part = own[accusation.index]
    try:
        inputs = Inputs.read(accusation.inputs)
        openings = read_openings(inputs, commitment, rules)
    except NotProven:
        return commitment.reducer
    if len(accusation.parts) != len(openings):
        raise NotProven("not all inputs")
    contributions = []
    for opening, used, encoded in zip(openings, inputs.used, accusation.parts, strict=True):
        if used <= accusation.index or not opening.hashes:
            continue
        if input_hash(encoded) != opening.hashes[accusation.index]:
            raise NotProven("another input than its sender signed")
        try:
            rules.codec.check_part(encoded, part.elements, part.large)
        except MalformedPart:
            return commitment.reducer
        contributions.append(ReceivedPart(opening.sender, encoded, opening.weight, opening.spread))
    right = average_part(rules.codec, rules.aggregation, contributions, part.elements, part.large)
    if part_hash(right.encoded) == commitment.outputs[accusation.index]:
        raise NotProven("the average is right")
    return commitment.reducer


def read_openings(inputs: Inputs, commitment: Commitment, rules: RoundRules) -> list[Opening]:
    """The openings that a reducer committed to. Raises NotProven where an honest reducer would have refused them."""
    openings = [Opening.read(envelope, rules.opened) for envelope in inputs.openings]
    order = [PeerID.from_base58(opening.sender).to_bytes() for opening in openings]
    if sorted(set(order)) != order:
        raise NotProven("senders out of order, or twice")
    for opening, used in zip(openings, inputs.used, strict=True):
        fits = opening.name == commitment.name and opening.reducer == commitment.reducer
        sent = len(commitment.outputs) if opening.weight else 0
        if not fits or len(opening.hashes) != sent or used > len(commitment.outputs):
            raise NotProven("an opening of another round or for another reducer")
        if not may_weigh(opening.weight, rules.most):
            raise NotProven("a weight that nobody may claim")
    if commitment.complete != inputs.used.count(len(commitment.outputs)):
        raise NotProven("another number of senders than was signed")
    return openings
