"""What the doors of a closed run cost: CPU time and bytes of the pass checks, beside hivemind's own authorizer.

    python scripts/bench_doors.py [--json]

One DHT request there and back is measured in one process, without the network: both peers' part of it. A round's joins
are those of a leader with as many followers as `--members` says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import MSGPackSerializer
from hivemind.utils.auth import AuthRole, AuthRPCWrapper, TokenAuthorizerBase
from hivemind.utils.crypto import RSAPrivateKey

from scripts.lab.passes import Issuer, key_file
from tt_cli.run import load_run
from tt_cli.swarm.door import DhtDoor
from tt_cli.swarm.limits import Rate
from tt_cli.swarm.meeting import member_in
from tt_cli.swarm.membership import Closed, Open, membership_of

REQUESTS, REPEATS = 2000, 3


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


def through(door: DhtDoor, peer: str) -> Callable[[], Awaitable[Any]]:
    """One request of this peer's to itself, through both sides of the door."""
    door._requests, door._bytes = Rate(1e9, 1e9), Rate(1e12, 1e12)
    service, context = Service(), SimpleNamespace(remote_id=peer)

    async def serve(asked: dht_pb2.FindRequest) -> dht_pb2.FindResponse:
        found: dht_pb2.FindResponse = await door.serve(service, service.rpc_find, asked, context)  # type: ignore[arg-type]
        return found

    return lambda: door.call(serve, request(), peer)


def by_tokens() -> Callable[[], Awaitable[Any]]:
    """The same through hivemind's authorizer."""
    tokens = Tokens(RSAPrivateKey())
    served = AuthRPCWrapper(Service(), AuthRole.SERVICER, tokens)
    called = AuthRPCWrapper(served, AuthRole.CLIENT, tokens)
    return lambda: called.rpc_find(request())


def measure(members: int) -> dict[str, float]:
    """Microseconds and bytes."""
    issuer = Issuer()
    run = issuer.closed(load_run("emoji"))
    with tempfile.TemporaryDirectory() as folder:
        peer = issuer.admit(Path(folder), run, "trainer", "anna")
        closed = membership_of(run, key_file(Path(folder), run, "trainer"))
        text = closed.mine()

        async def verified() -> None:
            Closed(run).admit(text, peer)

        async def remembered() -> None:
            closed.admit(text, peer)

        gathered = MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps(text)])

        async def joins() -> None:
            for _ in range(members):
                member_in(gathered, PeerID.from_base58(peer), closed)

        service = Service()
        answered = asyncio.run(through(DhtDoor(closed), peer)())
        found = {
            "dht request without a door": per_call(REQUESTS, lambda: service.rpc_find(request())),
            "dht request, open run": per_call(REQUESTS, through(DhtDoor(Open(load_run("emoji"))), peer)),
            "dht request, closed run": per_call(REQUESTS, through(DhtDoor(closed), peer)),
            "dht request, hivemind's tokens": per_call(REQUESTS // 10, by_tokens()),
            "a pass, verified": per_call(REQUESTS // 4, verified),
            "a pass, remembered": per_call(REQUESTS, remembered),
            f"the passes of a group of {members}": per_call(REQUESTS // 10, joins),
        }
        microseconds = {f"{name} (µs)": round(seconds * 1e6, 1) for name, seconds in found.items()}
        return microseconds | {"bytes of a pass in each message": answered.ByteSize()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.members)
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print("\n".join(f"{name:<42}{value:>10}" for name, value in found.items()))


if __name__ == "__main__":
    main()
