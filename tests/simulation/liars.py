"""Members that lie: what they say instead of what the protocol has them say, to whom."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, dht_pb2
from simulation.network import Broken, Lie, Node
from simulation.state import SimulatedTree
from testbed.attacks.neighbours import NAMED, named

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import part_hash
from tt_cli.swarm.allreduce.messages import Commitment, RoundName, SignedVote
from tt_cli.swarm.allreduce.rendezvous import entry_of, read_entry
from tt_cli.swarm.allreduce.votes import group_of, read_status
from tt_cli.swarm.records.dht_protocol import node_id_of, tag_of

METHODS = (
    *("rpc_aggregate_part", "rpc_settle", "rpc_precommit", "rpc_fetch_average", "rpc_audit", "rpc_join_group"),
    *("rpc_accuse", "rpc_state_chunks"),
)
DHT_METHODS = "rpc_ping", "rpc_find", "rpc_store", "rpc_records", "rpc_renew"


def liar(how: str) -> Lie:
    """A liar of a kind, drawn from a seed: "noise 17"."""
    kind, _, seed = how.partition(" ")
    return KINDS[kind](random.Random(seed))


def _some(entropy: random.Random, among: Sequence[str]) -> tuple[set[str], float]:
    """The methods about which one lies (questions and answers), and how often."""
    methods = [method + end for method in among for end in ("", "!")]
    return set(entropy.sample(methods, entropy.randint(1, 4))), entropy.choice([0.1, 0.5, 1.0])


def noise(entropy: random.Random, among: Sequence[str] = METHODS) -> Lie:
    """Turns bytes of what it says over."""
    methods, often = _some(entropy, among)

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method not in methods or entropy.random() >= often:
            return message
        said = bytearray(message.SerializeToString())
        for _ in range(entropy.randint(1, 4) if said else 0):
            said[entropy.randrange(len(said))] ^= entropy.randrange(1, 256)
        try:
            return type(message).FromString(bytes(said))
        except Exception:  # no message at all
            return None

    return lie


def mute(entropy: random.Random, among: Sequence[str] = METHODS) -> Lie:
    """Says nothing, to some."""
    methods, often = _some(entropy, among)

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        chosen = random.Random(f"{peer} {method} {often}").random() < often
        return None if method in methods and chosen else message

    return lie


def repeat(entropy: random.Random, among: Sequence[str] = METHODS) -> Lie:
    """Says again what it said before."""
    methods, often = _some(entropy, among)
    said: dict[str, Any] = {}

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        before = said.setdefault(method, message)
        return before if method in methods and entropy.random() < often else message

    return lie


def broken(entropy: random.Random) -> Lie:
    """Breaks every stream on which it should give an average, or say what it has."""
    methods = ("rpc_aggregate_part!", "rpc_settle", "rpc_settle!", "rpc_precommit", "rpc_precommit!")
    methods = methods[: entropy.choice([1, 5])]

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method in methods:
            raise Broken("an error of its own")
        return message

    return lie


def donor(entropy: random.Random) -> Lie:
    """Hands over a state that nobody made, or other chunks of the one that it names."""
    tree, manifest_too = SimulatedTree(entropy.randint(1, 9), entropy.randbytes(32).hex()), entropy.random() < 0.5

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method != "rpc_state_chunks!":
            return message
        match wire.STATE_ANSWER.read(message):
            case ("manifest", _) if manifest_too:
                return wire.STATE_ANSWER.message(("manifest", tree.manifest()))
            case ("chunk", index, _):
                return wire.STATE_ANSWER.message(("chunk", index, tree.chunk(index)))
        return message

    return lie


class Turned:
    """As a reducer gives some members averages with their sign turned, and signs and tells them so."""

    def __init__(self, deceived: Callable[[PeerID], bool]):
        self._deceived, self._sent = deceived, Counter[tuple[bytes, PeerID]]()

    def __call__(self, node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method not in ("rpc_aggregate_part!", "rpc_settle", "rpc_settle!") or not self._deceived(peer):
            return message
        rounds = list(node.averager._rounds.values())
        if not rounds:
            return message
        allreduce = rounds[-1].phases[-1].allreduce  # as a backup too
        if method != "rpc_aggregate_part!":
            transfers = [phase.allreduce for phase in rounds[-1].phases]
            told = next((one for one in transfers if one.group_id == group_of(message)), None)
            kept = told is not None and told.store.parts == told.parts  # not of another cut, as of a later transfer
            return self._status(told, message) if kept else message
        place = self._sent[allreduce.group_id, peer]
        self._sent[allreduce.group_id, peer] += 1
        if place < len(allreduce._own) and message.tensor_part.buffer:
            message = averaging_pb2.AveragingData.FromString(message.SerializeToString())
            message.tensor_part.buffer = self._turned(allreduce, allreduce._own[place])
            if message.peer_id:
                message.peer_id = self._signed(allreduce, message.peer_id)
        return message

    def _signed(self, allreduce: Any, commitment: bytes) -> bytes:
        signed = Commitment.read(commitment, allreduce.signer.opened)
        outputs = tuple(part_hash(self._turned(allreduce, index)) for index in allreduce._own)
        return replace(signed, outputs=outputs).sign(allreduce.signer)

    @staticmethod
    def _turned(allreduce: Any, index: int) -> bytes:
        part = allreduce.parts[index]
        values, codec = torch.empty(part.elements), allreduce.store.codec.of(part.large)
        codec.decode_into(allreduce.store.get(index), values)
        return bytes(codec.encode(values.neg_()))

    def _status(self, allreduce: Any, message: Any) -> Any:
        status = read_status(message, len(allreduce.parts))
        if not status.commitment:
            return message
        hashes = list(status.hashes)
        for index in allreduce._own:
            hashes[index] = part_hash(self._turned(allreduce, index))
        vote = allreduce.group.vote(allreduce.me, hashes).sign(allreduce.signer) if status.vote else b""
        commitment = self._signed(allreduce, status.commitment)
        return replace(status, hashes=tuple(hashes), vote=vote, commitment=commitment).pack(allreduce.group_id)


def wrong(entropy: random.Random) -> Lie:
    """Gives all the same wrong averages."""
    return Turned(lambda peer: True)


def evasive(entropy: random.Random) -> Lie:
    """Gives all the same wrong averages, and leaves audits unanswered."""
    turned = Turned(lambda peer: True)

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        return None if method == "rpc_audit!" else turned(node, peer, method, message)

    return lie


def unsigned(entropy: random.Random) -> Lie:
    """Signs nothing, or other averages than it gives."""
    turned = Turned(lambda peer: True)
    methods, other = ("rpc_settle", "rpc_settle!"), entropy.random() < 0.5

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        commits = node.averager._rounds.values() if method in methods else []
        rounds = [phase.allreduce for commit in commits for phase in commit.phases]
        for allreduce in (one for one in rounds if one.group_id == group_of(message)):
            status = read_status(message, len(allreduce.parts))
            said = read_status(turned._status(allreduce, message), len(allreduce.parts)) if other else status
            return replace(status, commitment=said.commitment if other else b"").pack(allreduce.group_id)
        return message

    return lie


def two_faced(entropy: random.Random) -> Lie:
    """Gives some members wrong averages, and the others right ones."""
    seed = entropy.random()
    return Turned(lambda peer: random.Random(f"{peer} {seed}").random() < 0.5)


def double(entropy: random.Random) -> Lie:
    """Votes otherwise where it speaks to some members."""
    seed = entropy.random()

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        commits = node.averager._rounds.values() if method in ("rpc_settle", "rpc_settle!") else []
        phases = [phase.allreduce for commit in commits for phase in commit.phases]
        if random.Random(f"{peer} {seed}").random() < 0.5:
            return message
        for allreduce in (one for one in phases if one.group_id == group_of(message)):
            status = read_status(message, len(allreduce.parts))
            hashes = (part_hash(b"another"), *status.hashes[1:])
            vote = allreduce.group.vote(allreduce.me, hashes).sign(allreduce.signer)
            return replace(status, hashes=hashes, vote=vote if status.vote else b"").pack(allreduce.group_id)
        return message

    return lie


class Locks:
    """Says in its joins that it voted for an average that nobody made, or for none; to some it votes for nothing.

    From some states it was in as many attempts as a leader believes, or a message has room for.
    """

    def __init__(self, entropy: random.Random):
        self._hides, self._entropy, self._deaf = entropy.random() < 0.5, entropy, entropy.choice([0.0, 0.5])

    def __call__(self, node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method in ("rpc_settle", "rpc_settle!") and self._entropy.random() < self._deaf:
            return None
        me, signer = node.peer_id.to_bytes(), node.averager.signer
        if method == "rpc_join_group":
            changed = type(message).FromString(message.SerializeToString())
            changed.gather = self._changed(signer, message.gather)
            return changed
        if method == "rpc_join_group!" and message.code == averaging_pb2.BEGIN_ALLREDUCE:
            changed = type(message).FromString(message.SerializeToString())
            place = list(message.ordered_peer_ids).index(me)
            changed.gathered[place] = self._changed(signer, message.gathered[place])
            return changed
        return message

    def _changed(self, signer: Any, entry: bytes) -> bytes:
        fields = joined(entry)
        liars, attempt, _ = fields[-1]
        most = int(fields[4]) - 2, 2**32 - 3  # that a leader takes, and a message has room for
        attempt = random.Random(f"{fields[2]} attempts").choice([attempt, attempt, *most])
        if self._hides:
            fields[-1] = self._entropy.choice([liars, 7]), attempt, b""
            return entry_of(signer.sign(fields))
        made_up = random.Random(f"{fields[2]}").randbytes(32)
        name, fields[-1] = RoundName(fields[1], fields[2], bytes(32)), (liars, attempt + 2, made_up)
        vote = SignedVote(name, signer.peer_id, attempt + 1, (1, 1), (made_up,)).sign(signer)
        return entry_of(signer.sign(fields), (*read_entry(entry)[1], vote))


class Hoarder(Locks):
    """Is locked on what it knows that others have voted for, whatever came of it, and gives that to nobody."""

    def __call__(self, node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method == "rpc_fetch_average!":
            return None
        self._heard = [
            (status.vote, phase.allreduce.name.state_key)
            for commit in node.averager._rounds.values()
            for phase in commit.phases
            for status in phase.statuses.values()
            if status.vote
        ]
        return super().__call__(node, peer, method, message)

    def _changed(self, signer: Any, entry: bytes) -> bytes:
        fields = joined(entry)
        votes = [SignedVote.read(vote, signer.opened) for vote, state_key in self._heard if state_key == fields[2]]
        if not votes:
            return entry
        average = self._entropy.choice(votes).average
        liars, attempt, _ = fields[-1]
        fields[-1] = liars, attempt, average
        mine = replace(votes[-1], voter=signer.peer_id, hashes=(average,)).sign(signer)
        shown = [vote for vote, _ in self._heard if SignedVote.read(vote, signer.opened).average == average]
        return entry_of(signer.sign(fields), (*shown, mine))


def envelope_in(entry: bytes) -> bytes:
    """The signed join in what a leader hands out of a member."""
    return read_entry(entry)[0]


def joined(entry: bytes) -> list[Any]:
    """The fields of that join."""
    return [*wire.JOIN.read(wire.ENVELOPE.read(envelope_in(entry))[0])]


class Leader:
    """Changes what it hands out where it leads, to all or to some."""

    WAYS = (
        "nobody listens",
        "signs for others",
        "without",
        "old",
        "twice",
        "swapped",
        "elsewhere",
        "halves",
        "unshown",
    )

    def __init__(self, entropy: random.Random):
        self._ways = entropy.sample(self.WAYS, entropy.randint(1, 3))
        self._seed, self._often, self._entropy = entropy.random(), entropy.choice([0.5, 1.0, 1.0]), entropy
        self._to_itself = entropy.random() < 0.5  # it lies to a member about that one too
        self._seen: dict[bytes, bytes] = {}  # peer → the first join that it had of it

    def __call__(self, node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method != "rpc_join_group!" or message.code != averaging_pb2.BEGIN_ALLREDUCE:
            return message
        entries = dict(zip(message.ordered_peer_ids, message.gathered, strict=True))
        for member, entry in entries.items():
            self._seen.setdefault(member, entry)
        if random.Random(f"{peer} {self._seed}").random() >= self._often:
            return message
        peers, gathered = list(entries), list(entries.values())
        for way in self._ways:
            peers, gathered = self._changed(node, way, peer.to_bytes(), peers, gathered)
        return averaging_pb2.MessageFromLeader(
            code=message.code, group_id=message.group_id, ordered_peer_ids=peers, gathered=gathered
        )

    def _changed(
        self, node: Node, way: str, told: bytes, peers: list[bytes], gathered: list[bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        me, signer = node.peer_id.to_bytes(), node.averager.signer
        others = [place for place, peer in enumerate(peers) if peer != me and (self._to_itself or peer != told)]
        if not others:
            return peers, gathered
        one, mine, gathered = self._entropy.choice(others), peers.index(me), list(gathered)
        if way in ("nobody listens", "signs for others"):
            for place in others:
                _, key, signature = wire.ENVELOPE.read(envelope_in(gathered[place]))
                fields = self._join(gathered[place], 5, False)
                changed = wire.ENVELOPE.pack((wire.JOIN.pack(tuple(fields)), key, signature))
                gathered[place] = entry_of(changed if way == "nobody listens" else signer.sign(fields))
        elif way == "without":
            left_out = self._entropy.choice([one, peers.index(told)])
            peers, gathered = ([*some[:left_out], *some[left_out + 1 :]] for some in (peers, gathered))
        elif way == "old":
            gathered[one] = self._seen[peers[one]]
        elif way == "twice":
            peers, gathered = [*peers, peers[one]], [*gathered, gathered[one]]
        elif way == "swapped":
            gathered[one], gathered[mine] = gathered[mine], gathered[one]
        elif way == "elsewhere":
            gathered[mine] = entry_of(signer.sign(self._join(gathered[mine], 3, str(PeerID(peers[one])))))
        elif way == "unshown":
            gathered[mine] = entry_of(envelope_in(gathered[mine]))
        elif way == "halves":  # which need nothing of it: it reduces in neither
            gathered[mine] = entry_of(signer.sign(self._join(gathered[mine], 5, False)))
            first = {peer for place, peer in enumerate(sorted({*peers} - {me})) if place % 2}
            half = {*peers} - first if told not in first else first | {me}
            kept = [(peer, entry) for peer, entry in zip(peers, gathered, strict=True) if peer in half]
            peers, gathered = [peer for peer, _ in kept], [entry for _, entry in kept]
        return peers, gathered

    def _join(self, entry: bytes, field: int, value: Any) -> list[Any]:
        """The fields of a join, one of them another one."""
        fields = joined(entry)
        fields[field] = value
        return fields


def hider(entropy: random.Random) -> Lie:
    """As a node that keeps records hides those of some, and says of all that it took them."""
    seed = entropy.random()

    def hides(owner: bytes) -> bool:
        return random.Random(f"{owner.hex()} {seed}").random() < 0.5

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method == "rpc_records!":
            _, records = wire.RECORDS_ANSWER.read(message)
            return wire.RECORDS_ANSWER.message((False, tuple(one for one in records if not hides(one[0]))))
        return wire.RENEWED.message((True,)) if method == "rpc_renew!" else message

    return lie


def unfit(entropy: random.Random) -> Lie:
    """Says that it cannot call back who joins through it, or has another time."""
    available, ahead = entropy.choice([(False, 0.0), (True, 60.0)])

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method != "rpc_ping!":
            return message
        return dht_pb2.PingResponse(peer=message.peer, dht_time=message.dht_time + ahead, available=available)

    return lie


def inventor(entropy: random.Random) -> Lie:
    """Names neighbours that do not exist, each in its place or all where the records are, or itself alone."""
    way = entropy.choice(["in place", "beside", "itself"])

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method != "rpc_find!":
            return message
        key = DHTID.generate(source=node.dht._peers_key)
        places = [(node_id_of(node.peer_id), node.peer_id)]
        for number in range(NAMED if way != "itself" else 0):
            invented = PeerID(b"\x12\x20" + entropy.randbytes(32))
            places.append((DHTID(int(key) ^ (number + 4)) if way == "beside" else node_id_of(invented), invented))
        return dht_pb2.FindResponse(results=[named(places)] * len(message.results), peer=message.peer)

    return lie


def two_voiced(entropy: random.Random) -> Lie:
    """Tells some of those who keep its record, or all, another state, and other samples, than it has."""
    seed, often = entropy.random(), entropy.choice([0.5, 1.0])
    changed = {"epoch": entropy.choice([-1, 0, 1, 2]), "samples": entropy.choice([0, 8, 100])}

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method != "rpc_renew" or random.Random(f"{peer} {seed}").random() >= often:
            return message
        place, owner, links = wire.RENEWAL.read(message)
        protocol, key = node.dht.dht_node.protocol, DHTID.from_bytes(place)
        (subkey, kept), *_ = [one for one in protocol.known(key).items() if tag_of(one[0]) == owner] or [(owner, None)]
        if kept is None:
            return message
        whole, record = protocol._whole(key, subkey, kept.value[0]), protocol.opened(key, subkey, kept.value)
        said = {"epoch": max(0, record["epoch"] + changed["epoch"]), "samples": record["samples"] + changed["samples"]}
        if changed["epoch"]:
            said["digest"] = random.Random(seed).randbytes(32).hex()
        until = links[-1][0] + 1e-3
        pulse = protocol.session.pulse(place, whole, kept.value, {**record, **said}, until)
        return message if pulse is None else wire.RENEWAL.message((place, owner, (pulse,)))

    return lie


KINDS = {
    "noise": noise, "mute": mute, "repeat": repeat, "broken": broken, "wrong": wrong, "evasive": evasive,
    "unsigned": unsigned, "donor": donor, "two-faced": two_faced, "leader": Leader, "locks": Locks,
    "double": double, "hoarder": Hoarder,
    "dht-noise": partial(noise, among=DHT_METHODS), "dht-mute": partial(mute, among=DHT_METHODS),
    "dht-repeat": partial(repeat, among=DHT_METHODS), "hider": hider, "unfit": unfit, "inventor": inventor,
    "two-voiced": two_voiced,
}  # fmt: skip
