"""What every DHT node of a run checks before it keeps or believes a record."""

from __future__ import annotations

from typing import Any

import msgpack
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from pydantic import ValidationError

from tt_cli.swarm.identity import peer_id_of
from tt_cli.swarm.records import HistoryRecord, PeerRecord, history_key, peers_key


class RecordValidator(RecordValidatorBase):
    """Lets a run's DHT keys hold well-formed records of their owners and nothing else."""

    def __init__(self, identity: str):
        self._models: dict[bytes, type[PeerRecord] | type[HistoryRecord]] = {
            DHTID.generate(source=peers_key(identity)).to_bytes(): PeerRecord,
            DHTID.generate(source=history_key(identity)).to_bytes(): HistoryRecord,
        }

    def validate(self, record: DHTRecord) -> bool:
        """True for keys of other programs, and for records of this run that may be believed."""
        model = self._models.get(record.key)
        if model is None:
            return True
        try:
            owners = owners_of(MSGPackSerializer.loads(record.subkey))
            value = MSGPackSerializer.loads(record.value)
            if len(owners) != 1 or not isinstance(value, dict):
                return False
            parsed = model.model_validate(value)
            return isinstance(parsed, HistoryRecord) or parsed.peer_id == peer_id_of(owners[0])
        except (ValidationError, msgpack.UnpackException, ValueError, TypeError):
            return False

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """A second validator of the same run adds nothing."""
        return isinstance(other, RecordValidator) and other._models.keys() == self._models.keys()


def owners_of(subkey: Any) -> list[bytes]:
    """The public keys that a protected subkey names (OpenSSH form)."""
    return RSASignatureValidator._PUBLIC_KEY_RE.findall(subkey) if isinstance(subkey, bytes) else []
