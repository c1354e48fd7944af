"""A peer that the run does not know, at its doors: a bare libp2p node that speaks the wire protocol by itself.

It needs no DHT: whom it dials and what they hold it reads from a file that the experiment keeps fresh, as if a member
had told it (`Facts`). It tries until it is told to leave and reports each try as a `Log` whose message is JSON: the
door, whether it was refused, and in which words.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.averager import compute_schema_hash
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from tt_cli.identity.peer_key import made_key
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Emit, Listening, Log, Step
from tt_cli.supervisor.local_swarm import LocalPeer
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce import part_fetch
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES
from tt_cli.swarm.allreduce.messages import SignedJoin, Signer
from tt_cli.swarm.allreduce.round_plan import leader_of
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.pass_guard import PassGuard
from tt_cli.swarm.records.dht_protocol import DHTProtocol, tag_of
from tt_cli.swarm.records.peer_record import peers_key
from tt_cli.swarm.shared_state import state_key
from tt_cli.swarm.state.client import request_of, stream_to

PAUSE_SECONDS = 0.2  # between two tries
PATIENCE = 6.0  # seconds for an answer
MOST_ASKED = 3  # members at one try
ENOUGH = 2**16  # bytes of a state: more need not be taken to see that the door is open


@dataclass(frozen=True)
class Facts:
    """What a stranger may have been told. peers: members' multiaddrs. leader: a peer id. epoch, digest: the state."""

    peers: list[str]
    leader: str
    epoch: int
    digest: str

    def write(self, path: Path) -> None:
        """So that a reader finds it whole."""
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(dataclasses.asdict(self)))
        unfinished.rename(path)


@dataclass(frozen=True)
class Tried:
    """How one try went. words: the refusal, or what it got."""

    door: str
    refused: bool
    words: str


class Refused(Exception):
    """This door is closed; the words are what was said or happened."""


class Pretence(Admission):
    """What shows this text as its pass, and asks nobody for one."""

    def __init__(self, run: RunConfig, text: str = ""):
        super().__init__(run)
        self.closed, self._mine = False, text


def signer_of(path: Path) -> Signer:
    """Who signs with the key in this file, which is made where it is missing."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = made_key(path)
    return Signer(key)


def facts_of(members: Sequence[LocalPeer], newest: Step) -> Facts:
    """What a member could tell a stranger now. newest: what one of these members has made."""
    peers = [member.of(Listening)[0] for member in members]
    leader = leader_of(state_key(newest.epoch, newest.digest), tuple(peer.peer_id for peer in peers))
    return Facts([peer.addresses[0] for peer in peers], leader, newest.epoch, newest.digest)


class Stranger:
    """run, facts: what it knows. p2p, signer: its node, and who signs with its key. pass_text: shown as its pass."""

    def __init__(self, run: RunConfig, p2p: P2P, signer: Signer, facts: Facts, pass_text: str = ""):
        self.run, self.p2p, self.signer, self.facts, self.pass_text = run, p2p, signer, facts, pass_text
        self.peers = [address.rpartition("/p2p/")[2] for address in facts.peers][:MOST_ASKED]

    def averager(self, peer_id: str) -> Any:
        """hivemind's stub for a member's averager."""
        return Averager.get_stub(self.p2p, PeerID.from_base58(peer_id), namespace=self.run.identity)

    def dht(self, peer_id: str) -> Any:
        """hivemind's stub for a member's DHT node, without what would sign its requests."""
        return ServicerBase.get_stub.__func__(DHTProtocol, self.p2p, PeerID.from_base58(peer_id))


Attempt = Callable[[Stranger, str], Awaitable[str]]
"""(stranger, member's peer id) → what it got. Raises Refused; any other error is a refusal too."""


async def state(stranger: Stranger, member: str) -> str:
    """The shared state, chunk by chunk."""
    async with stream_to(stranger.p2p, stranger.run.identity, member) as stream:
        await stream.ask(request_of(stranger.facts.digest, []))
        first = await stream.answer()
        if first is None or first[0] != "manifest":
            raise Refused("no manifest came")
        await stream.ask(request_of(stranger.facts.digest, [0]))
        chunk = await stream.answer()
        data = chunk[2] if chunk is not None and chunk[0] == "chunk" else b""
        return f"a manifest of {len(first[1])} bytes and {len(data)} bytes of the state"


async def hiveminds_state(stranger: Stranger, member: str) -> str:
    """What hivemind's own averager would hand out."""
    received = 0
    stream = await stranger.averager(member).rpc_download_state(averaging_pb2.DownloadRequest())
    async for message in stream:
        received += message.ByteSize()
        if received > ENOUGH:
            break
    if not received:
        raise Refused("nothing came")
    return f"{received} bytes"


async def average(stranger: Stranger, member: str) -> str:
    """The last average: what the members stepped with."""
    key = f"{stranger.facts.epoch - 1}_{stranger.facts.digest[:16]}"
    stream = await stranger.averager(member).rpc_fetch_average(part_fetch.request(key, None))
    async for message in stream:
        return f"{message.ByteSize()} bytes of an average"
    raise Refused("nothing came")


async def group(stranger: Stranger, member: str) -> str:
    """A place in the next round. It sends nothing then, and all others would wait for it."""
    facts, run = stranger.facts, stranger.run.identity
    group = run, state_key(facts.epoch, facts.digest), facts.leader
    join = SignedJoin(*group, get_dht_time(), True, 0, True, stranger.pass_text)
    signed = join.sign(stranger.signer)
    request = averaging_pb2.JoinRequest(
        schema_hash=compute_schema_hash([torch.zeros(1)]),
        expiration=get_dht_time() + 60.0,
        client_mode=False,
        gather=MSGPackSerializer.dumps([1.0, AveragingMode.NODE.value, MSGPackSerializer.dumps(signed)]),
        group_key=f"{run}_{join.state_key}.0b",
    )
    stream = await stranger.averager(facts.leader).rpc_join_group(request)
    async for message in stream:
        if message.code == averaging_pb2.BEGIN_ALLREDUCE:
            return f"in a group of {len(message.ordered_peer_ids)}"
        if message.code != averaging_pb2.ACCEPTED:
            raise Refused(averaging_pb2.MessageCode.Name(message.code))
    raise Refused("nothing came")


async def parts(stranger: Stranger, member: str) -> str:
    """Parts of a gradient, into a round whose number it has to guess."""

    async def sent() -> AsyncIterator[averaging_pb2.AveragingData]:
        yield averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"x" * 20, weight=1.0)

    stream = await stranger.averager(member).rpc_aggregate_part(sent())
    async for message in stream:
        if message.code == averaging_pb2.AVERAGED_PART:
            return "it was sent an average"
        raise Refused(averaging_pb2.MessageCode.Name(message.code))
    raise Refused("nothing came")


async def settling(stranger: Stranger, member: str) -> str:
    """What a member received in a round."""
    status = wire.STATUS.message((b"x" * 20, bytes(HASH_BYTES), b"", {}, b"", {}, {}, False, {}))
    await stranger.averager(member).rpc_settle(status, timeout=PATIENCE)
    return "it was told what a member received"


async def find(stranger: Stranger, member: str) -> str:
    """The members' records on the DHT."""
    return f"{len(await _records(stranger, member))} records"


async def store(stranger: Stranger, member: str) -> str:
    """In the place of each member's record: unsigned, with the old signature, its own for longer, and a pulse on it."""
    key = DHTID.generate(source=peers_key(stranger.run.identity)).to_bytes()
    kept = 0
    for subkey, entry in (await _records(stranger, member)).items():
        whole, last = entry.value[0][2], entry.value[-1][0]  # of its links
        plain, signed, signature = whole.partition(b"[signature:")
        record = MSGPackSerializer.loads(plain)
        lie = MSGPackSerializer.dumps({**record, "epoch": record["epoch"] + 7, "digest": "0" * 64})
        for value in (lie, lie + signed + signature, whole):
            request = dht_pb2.StoreRequest(
                keys=[key],
                subkeys=[MSGPackSerializer.dumps(subkey)],
                values=[value],
                expiration_time=[get_dht_time() + 600.0],
                in_cache=[False],
            )
            answer = await stranger.dht(member).rpc_store(request, timeout=PATIENCE)
            kept += sum(answer.store_ok)
        pulse = get_dht_time() + 600.0, last, MSGPackSerializer.dumps({0: 1}) + bytes(64)
        request = wire.RENEWAL.message((key, tag_of(subkey), (pulse,)))
        answer = await stranger.dht(member).rpc_renew(request, timeout=PATIENCE)
        kept += wire.RENEWED.read(answer)[0]
    if not kept:
        raise Refused("no record was kept")
    return f"{kept} records were kept"


async def _records(stranger: Stranger, member: str) -> Mapping[bytes, Any]:
    """Subkey → what that member's DHT node holds. Raises Refused where it shows nothing."""
    key = DHTID.generate(source=peers_key(stranger.run.identity)).to_bytes()
    request = dht_pb2.FindRequest(keys=[key])
    answer = await stranger.dht(member).rpc_find(request, timeout=PATIENCE)
    if not answer.results or answer.results[0].type != dht_pb2.FOUND_DICTIONARY:
        raise Refused("it shows no records")
    found: Mapping[bytes, Any] = dict(MSGPackSerializer.loads(answer.results[0].value).items())
    return found


STRANGERS: dict[str, tuple[Attempt, ...]] = {
    "stranger downloads state": (state, hiveminds_state, average, find),
    "stranger joins averaging": (group, parts, settling),
    "overwritten donor record": (store,),
}


async def try_door(stranger: Stranger, attempt: Attempt, member: str) -> Tried:
    """One try."""
    door = attempt.__name__
    try:
        async with asyncio.timeout(PATIENCE):
            return Tried(door, False, await attempt(stranger, member))
    except Exception as error:  # P2P errors of many types: no answer is a refusal
        return Tried(door, True, " ".join(str(error).split())[:200] or type(error).__name__)


async def attack(name: str, run: RunConfig, facts: Path, tell: Callable[[Tried], None], orders: Orders) -> None:
    """Try all doors of one attack again and again, at one member after the other."""
    known = await _facts(facts, orders)
    with tempfile.TemporaryDirectory() as folder:
        signer, key = signer_of(Path(folder) / "key"), str(Path(folder) / "key")
        p2p = await P2P.create(
            initial_peers=known.peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="client", identity_path=key
        )
    PassGuard(Pretence(run)).guard_calls(p2p)
    try:
        while not orders.leave.is_set():
            stranger = Stranger(run, p2p, signer, await _facts(facts, orders))
            tries = [try_door(stranger, attempt, member) for attempt in STRANGERS[name] for member in stranger.peers]
            for tried in await asyncio.gather(*tries):
                tell(tried)
            await asyncio.sleep(PAUSE_SECONDS)
    finally:
        await p2p.shutdown()


async def _facts(path: Path, orders: Orders) -> Facts:
    while not path.exists() and not orders.leave.is_set():
        await asyncio.sleep(PAUSE_SECONDS)
    return Facts(**json.loads(path.read_text()))


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """Try until told to leave."""
    run = RunConfig.from_toml(options["run"], "the run file")

    def tell(tried: Tried) -> None:
        emit(Log(json.dumps(dataclasses.asdict(tried))))

    asyncio.run(attack(options["attack"], run, Path(options["facts"]), tell, orders))
