"""What the doors of a closed run cost: a message, beside hivemind's own authorizer, and a round of a real swarm.

One DHT request there and back is measured in one process, without the network: both peers' part of it. A round's joins
are those of a leader with as many followers as `--members` says. Then as many trainers as that, all real processes on
loopback, train the emoji run's data with a model of 267,000 parameters, which is little work beside the checks, for
`--steps` steps; every peer counts what its doors check. Of the peer with the most of it, for a step:

- `requests`: through the DHT's door, its own and those of others; `admits`: looks at a pass, at any door;
- `checks_cpu_s`: CPU seconds of those looks, as they were measured there, and of carrying the pass in the DHT's
  requests, by the figure of one; `checks_share`: of all CPU time of that peer; `checks_of_time`: of the step's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import MSGPackSerializer
from hivemind.utils.auth import AuthRole, AuthRPCWrapper, TokenAuthorizerBase
from hivemind.utils.crypto import RSAPrivateKey
from testbed.attacked import NAMES, Size, attacked_run, in_training
from testbed.disturbance import need
from testbed.passes import Issuer, key_file

from tt_cli.identity.peer_key import made_key
from tt_cli.identity.rate_limit import RateLimit
from tt_cli.run import load_run
from tt_cli.supervisor.events import Finished, Log
from tt_cli.supervisor.local_swarm import LocalPeer, LocalSwarm
from tt_cli.swarm.allreduce.messages import SignedJoin, Signer
from tt_cli.swarm.allreduce.rendezvous import member_in
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.dht_auth import DHTAuthorizer
from tt_cli.swarm.membership.pass_guard import frame

QUICK = "few members and steps"
REQUESTS, REPEATS = 2000, 3
WITHOUT, OPEN, CLOSED = "dht request without a door", "dht request, open run", "dht request, closed run"
TRAINER = "testbed.counting_trainer"
FIRST_STEP = 2  # with the first one come the meetings, which are no round's


class Tokens(TokenAuthorizerBase):
    """hivemind's way: each message signed by the key in its token."""

    async def get_token(self) -> AccessToken:
        return AccessToken(username="anna", public_key=self.local_public_key.to_bytes(), signature=bytes(256))

    def is_token_valid(self, access_token: AccessToken) -> bool:
        return True  # the token's own signature is not counted

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        return False


class Service:
    """A DHT node that finds nothing."""

    async def rpc_find(self, request: dht_pb2.FindRequest, *_: Any, **__: Any) -> dht_pb2.FindResponse:
        return dht_pb2.FindResponse()


def request() -> dht_pb2.FindRequest:
    return dht_pb2.FindRequest(keys=[DHTID.generate(source="key").to_bytes()])


def per_call(count: int, call: Callable[[], Awaitable[object]]) -> float:
    """CPU seconds of one, the best of some repetitions."""

    async def many() -> float:
        best = float("inf")
        for _ in range(REPEATS):
            before = time.process_time()
            for _ in range(count):
                await call()
            best = min(best, (time.process_time() - before) / count)
        return best

    return asyncio.run(many())


def through(door: DHTAuthorizer, peer: str) -> Callable[[], Awaitable[Any]]:
    """One request of this peer's to itself, through both sides of the door."""
    door.passes.requests, door._bytes = RateLimit(1e9, 1e9), RateLimit(1e12, 1e12)
    service, context, peer_id = Service(), SimpleNamespace(remote_id=peer), PeerID.from_base58(peer)

    async def serve(data: bytes, caller: PeerID) -> bytes:
        asked = dht_pb2.FindRequest.FromString(data)
        answer: dht_pb2.FindResponse = await door.serve(service, service.rpc_find, asked, context)  # type: ignore[arg-type]
        return bytes(answer.SerializeToString())

    served = door.passes.guarded(serve)

    async def call(peer: PeerID, name: str, data: bytes) -> bytes:
        return await served(data, peer)

    async def asked() -> dht_pb2.FindResponse:
        data = await door.passes.call(call, peer_id, "DHTProtocol.rpc_find", request().SerializeToString())
        return dht_pb2.FindResponse.FromString(data)

    return asked


def by_tokens() -> Callable[[], Awaitable[Any]]:
    """The same through hivemind's authorizer."""
    tokens = Tokens(RSAPrivateKey())
    served = AuthRPCWrapper(Service(), AuthRole.SERVICER, tokens)
    called = AuthRPCWrapper(served, AuthRole.CLIENT, tokens)
    return lambda: called.rpc_find(request())


def measure_messages(members: int) -> dict[str, float]:
    """Microseconds and bytes."""
    issuer = Issuer()
    run = issuer.closed(load_run("emoji"))
    with tempfile.TemporaryDirectory() as folder:
        peer = issuer.admit(Path(folder), run, "trainer", "anna")
        closed = Admission(run, key_file(Path(folder), run, "trainer"))
        text = closed.mine()

        async def verified() -> None:
            Admission(run).admit(text, peer)

        async def remembered() -> None:
            closed.admit(text, peer)

        key = RSAPrivateKey.__new__(RSAPrivateKey)
        key._private_key = made_key(key_file(Path(folder), run, "trainer"))
        join, signer = SignedJoin(run.identity, "5_ab", peer, 0.0, True, 0, True, text), Signer(key)
        signed = [
            MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps(join.sign(signer))]) for _ in range(members)
        ]

        async def joins() -> None:
            for gathered in signed:
                member_in(gathered, PeerID.from_base58(peer), closed)

        service = Service()
        found = {
            WITHOUT: per_call(REQUESTS, lambda: service.rpc_find(request())),
            OPEN: per_call(REQUESTS, through(DHTAuthorizer(Admission(load_run("emoji"))), peer)),
            CLOSED: per_call(REQUESTS, through(DHTAuthorizer(closed), peer)),
            "dht request, hivemind's tokens": per_call(REQUESTS // 10, by_tokens()),
            "a pass, verified": per_call(REQUESTS // 4, verified),
            "a pass, remembered": per_call(REQUESTS, remembered),
            f"the signed joins of a group of {members}": per_call(REQUESTS // 10, joins),
        }
        microseconds = {f"{name} (µs)": round(seconds * 1e6, 1) for name, seconds in found.items()}
        return microseconds | {"bytes of a pass, once for each service": len(frame(text))}


def counted(member: LocalPeer) -> dict[int, dict[str, float]]:
    """Step → what a counting trainer said at it, of those that it made."""
    lines = [json.loads(event.message) for event in member.of(Log) if event.message.startswith("{")]
    return {line.pop("epoch"): line for line in lines if line["epoch"] >= FIRST_STEP}


def in_rounds(members: int, steps: int, carrying: float) -> dict[str, float]:
    """Of a step of a real swarm. carrying: seconds that the pass adds to a DHT request, both sides together."""
    issuer, size = Issuer(), Size(members, 0, steps)
    run = issuer.closed(attacked_run(size, 0))
    toml = run.to_toml()
    with tempfile.TemporaryDirectory(prefix="bench-doors-") as scratch, LocalSwarm(toml, Path(scratch)) as swarm:
        gate = Path(scratch) / "gate"
        issuer.admit(Path(scratch) / "aux", run, "aux", "organiser")
        swarm.start_aux()
        trainers = []
        for seed, name in enumerate(NAMES[:members]):
            issuer.admit(Path(scratch) / name, run, "trainer", name)
            common = {"batch_size": size.micro_batch, "lockstep": True, "longest": size.longest, "gate": str(gate)}
            trainers.append(swarm.start_trainer(name, module=TRAINER, seed=seed, **common))
        need(swarm, lambda: all(in_training(one) for one in trainers), "the start of all", trainers)
        gate.touch()
        need(swarm, lambda: all(one.of(Finished) for one in trainers), f"step {steps}", trainers)
    rows = []
    for said in map(counted, trainers):
        (begin, first), (end, last) = min(said.items()), max(said.items())  # who missed a step takes it over
        row = {key: (last[key] - first[key]) / (end - begin) for key in first}
        spent = row["admit_s"] + row["requests"] / 2 * carrying
        found = {key: round(row[key], 1) for key in ("requests", "admits")} | {"checks_cpu_s": round(spent, 5)}
        shares = {"checks_share": round(spent / row["cpu_s"], 5), "checks_of_time": round(spent / row["at"], 6)}
        rows.append({**found, "peer_cpu_s": round(row["cpu_s"], 3), "step_s": round(row["at"], 2), **shares})
    return max(rows, key=lambda row: row["checks_share"])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of its own."""
    parser.add_argument(
        "--members", type=int, choices=range(2, len(NAMES) + 1), help="of a group (default 8; quick: 3)"
    )
    parser.add_argument("--steps", type=int, help=f"of the swarm, over {FIRST_STEP} (default 12; quick: 4)")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Messages, then rounds."""
    members, steps = args.members or (3 if args.quick else 8), args.steps or (4 if args.quick else 12)
    costs = measure_messages(members)
    carrying = (costs[f"{CLOSED} (µs)"] - costs[f"{OPEN} (µs)"]) / 1e6
    return {**costs, "members": members, **in_rounds(members, max(steps, FIRST_STEP + 1), max(0.0, carrying))}
