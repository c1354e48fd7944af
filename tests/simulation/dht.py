"""A machine's DHT node, the real one: what it keeps for others, what it reads of them, and whom it knows.

RSA is stood in for (`HashSignatures`), and passes are not shown here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord
from simulation.network import Node
from simulation.virtual import Answer, Process

from tt_cli.run import RunConfig
from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.membership.admission import Admission
from tt_cli.swarm.membership.dht_auth import DHTAuthorizer
from tt_cli.swarm.network.dht_node import ANSWER_SECONDS
from tt_cli.swarm.records import dht_search
from tt_cli.swarm.records.dht_protocol import node_id_of
from tt_cli.swarm.records.peer_record import peers_key
from tt_cli.swarm.records.publisher import lives_of
from tt_cli.swarm.records.validator import RecordValidator

JOIN_SECONDS = 1.0  # until a peer that could join nobody tries again


class HashSignatures(RSASignatureValidator):
    """As hivemind's, with a hash of the record and its owner's public key for a signature."""

    def __init__(self, key: Any):
        super().__init__(_HashKey(key))

    def validate(self, record: DHTRecord) -> bool:
        owners, signed = self._PUBLIC_KEY_RE.findall(record.subkey), self._SIGNATURE_RE.findall(record.value)
        stripped = self._serialize_record(dataclasses.replace(record, value=self.strip_value(record)))
        return not owners or signed == [_signature(owner, stripped) for owner in owners]


class _HashKey:
    def __init__(self, key: Any):
        self.get_public_key = key.get_public_key
        self.sign = functools.partial(_signature, key.get_public_key().to_bytes())


def _signature(owner: bytes, record: bytes) -> bytes:
    return hashlib.sha256(owner + record).hexdigest().encode()


class PassesElsewhere(DHTAuthorizer):
    """Whose node shows no passes: the simulated network looks at them, for all of a machine's calls."""

    def guard(self, p2p: Any) -> None: ...


class RealDht:
    """A DHT node, as `PeerDirectory` and the averager call it from their threads.

    signatures: the validator that signs with its identity's key. process: in which all of it runs.
    """

    def __init__(
        self,
        node: Node,
        run: RunConfig,
        membership: Admission,
        signatures: RSASignatureValidator,
        client_mode: bool = False,
        process: Process | None = None,
        clock: Clock | None = None,
    ):
        self.node, self.membership, self.client_mode, self.peer_id = node, membership, client_mode, node.peer_id
        self._process, node.dht = process or node.process, self
        self._checks = [signatures, RecordValidator(run.identity, membership, run.membership.authority_key or "")]
        self._guard = PassesElsewhere(membership, lives_of(run), clock)
        self._peers_key, self.shown = peers_key(run.identity), None  # the step that its newest stored record says

    async def join(self, initial_peers: Sequence[str], met: Sequence[str] | None) -> None:
        """Join through these and those that it met before; None: where nobody answers it begins alone."""
        hivemind_patches.apply()
        known = [*initial_peers, *(met or ())]
        while True:
            try:
                self.dht_node = await self._process.run(
                    dht_search.DHTNode.create(
                        p2p=self.node,
                        node_id=node_id_of(self.peer_id),
                        initial_peers=known,
                        client_mode=self.client_mode,
                        record_validator=dht_search.Checked(self._checks),
                        authorizer=self._guard,
                        wait_timeout=ANSWER_SECONDS,
                        **dht_search.NO_CACHES,
                    )
                )
                return
            except RuntimeError as error:
                if met is None and not any(words in str(error) for words in ("access this node", "local time")):
                    known = []  # nobody answered
                await asyncio.sleep(JOIN_SECONDS)

    def is_alive(self) -> bool:
        return True

    def hangs(self) -> float:
        """For so many seconds from now it does nothing."""
        now = self.node.network.now
        return self._process.awake(now) - now

    def get(self, key: str, latest: bool, return_future: bool) -> Answer:
        return self._begun(self.dht_node.get(key, latest=latest))

    def store(self, key: str, subkey: Any, value: Any, expiration_time: float, return_future: bool) -> Answer:
        return self._begun(self._store(key, subkey, value, expiration_time))

    async def _store(self, key: str, subkey: Any, value: Any, until: float) -> bool:
        stored = await self.dht_node.store(key, value, until, subkey=subkey)
        if stored and key == self._peers_key:
            self.shown = value["epoch"]
        return stored

    def run_coroutine(self, work: Callable[..., Coroutine[Any, Any, Any]], return_future: bool) -> Answer:
        return self._begun(work(self, self.dht_node))

    def _begun(self, work: Coroutine[Any, Any, Any]) -> Answer:
        answer, task = Answer(), self._process.run(work)

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled():
                answer.set_exception(error) if (error := task.exception()) else answer.set_result(task.result())

        task.add_done_callback(ended)
        return answer
