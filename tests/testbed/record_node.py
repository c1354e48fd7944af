"""A DHT node that publishes the records of many simulated peers, each with a key of its own: for scripts/bench records.

The records are real ones, signed and checked as those of any peer; what is simulated is the training behind them, and
that each owner stores its own: all nodes of this DHT take records from whoever brings them (record_aux.py too).
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Emit, Listening, Log
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.membership.dht_auth import DHTAuthorizer
from tt_cli.swarm.membership.rsa_identity import claim_identity, peer_id_of
from tt_cli.swarm.network.dht_node import addresses_of, start_dht, stop_dht
from tt_cli.swarm.records.peer_record import PeerRecord, peers_key

AT_ONCE = 2  # keys in one message to the DHT process, whose pipe breaks long ones
ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Options:
    """count: simulated peers. every: seconds between two records of one of them. seed: of what they say."""

    run: str
    host: str
    initial_peers: list[str] = field(default_factory=list)
    count: int = 1
    every: float = 3.0
    seed: int = 0


class Owner(RecordValidatorBase):  # type: ignore[misc]
    """Signs the records of one simulated peer; the node's own validator checks all of them."""

    priority = RSASignatureValidator.priority

    def __init__(self, key: RSAPrivateKey):
        self.signer, self.public = RSASignatureValidator(key), key.get_public_key().to_bytes()

    def sign_value(self, record: DHTRecord) -> bytes:
        """Signed, if it is this peer's."""
        return bytes(self.signer.sign_value(record))

    def validate(self, record: DHTRecord) -> bool:
        """Left to the node's own."""
        return True

    def strip_value(self, record: DHTRecord) -> bytes:
        """As it is."""
        return bytes(record.value)


class AnyOwner(DHTAuthorizer):
    """Takes records of many owners from one node."""

    def check_owner(self, subkey: Any, caller: str) -> None:
        """Anybody's."""


class Simulated:
    """One peer, and what it says next."""

    def __init__(self, chance: random.Random, number: int):
        self.owner = Owner(RSAPrivateKey())
        self.peer_id = peer_id_of(self.owner.public)
        self._number, self._chance, self._samples = number, chance, 0
        self._speed = chance.uniform(1.0, 20.0)
        self._device = chance.choice(["NVIDIA GeForce RTX 3090", "NVIDIA GeForce GTX 1080 Ti", "Tesla T4"])

    def record(self) -> PeerRecord:
        """As a trainer's."""
        self._samples += int(self._speed * 3) + 1
        return PeerRecord(
            peer_id=self.peer_id,
            role="trainer",
            user=f"volunteer-{self._number}",
            version="0.1.0",
            device=self._device,
            client_mode=self._chance.random() < 0.5,
            epoch=100,
            digest="3f" * 32,
            samples=self._samples,
            samples_per_second=self._speed,
            total_samples=self._samples,
            micro_batch=8,
            loss=4.0 + self._chance.random(),
            figures={"text_loss": 4.0, "image_loss": 4.0},
            round="step 100 made with 63 others, 4,102 samples",
            bytes_sent=10**9,
            bytes_received=10**9,
            vote=True,
            time=get_dht_time(),
        )


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """Publish until it is asked to leave; once a second, what was stored and what was not."""
    opts = Options(**options)
    run = RunConfig.from_toml(opts.run, "the run file")
    identity = claim_identity(folders.run_folder(run), "trainer")
    chance = random.Random(opts.seed)
    peers = [Simulated(chance, opts.seed * 10_000 + number) for number in range(opts.count)]
    dht = start_dht(run, identity, initial_peers=opts.initial_peers, host=opts.host, authorizer=AnyOwner)
    for first in range(0, len(peers), AT_ONCE):
        dht.add_validators([peer.owner for peer in peers[first : first + AT_ONCE]])
    emit(Listening(identity.peer_id, addresses_of(dht), False))
    key, begun = peers_key(run.identity), time.monotonic()
    due = [begun + opts.every * chance.random() for _ in peers]
    waiting: list[Any] = []
    stored = failed = 0
    late = told = 0.0
    while not orders.leave.is_set():
        now = time.monotonic()
        for number, peer in enumerate(peers):
            if due[number] > now or len(waiting) > 2 * len(peers):
                continue
            late = max(late, now - due[number])
            due[number] = max(due[number] + opts.every, now)
            expires = get_dht_time() + run.swarm.statistics_expiration
            value = peer.record().model_dump()
            subkey = peer.owner.signer.local_public_key
            waiting.append(
                (now, dht.store(key, subkey=subkey, value=value, expiration_time=expires, return_future=True))
            )
        done = [one for began, one in waiting if one.done() or now > began + ANSWER_SECONDS]
        for one in done:
            kept = one.done() and not one.cancelled() and one.exception() is None and bool(one.result())
            stored, failed = stored + kept, failed + (not kept)
        waiting = [(began, one) for began, one in waiting if not any(one is each for each in done)]
        if now > told + 1.0:
            told = now
            emit(Log(json.dumps({"stored": stored, "failed": failed, "late_s": round(late, 2)})))
            late = 0.0
        orders.leave.wait(0.02)
    stop_dht(dht)
