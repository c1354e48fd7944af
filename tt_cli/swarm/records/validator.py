"""Checks of every DHT node of a run before it keeps or believes a record.

What is checked here does not change with time, nor from node to node: hivemind throws away all records under a key that
a node answers with if one of them is refused. So a pass is looked at as of the time that the record says, which may not
be later than its expiration; whether it still counts now, and who is banned, is for whoever reads (publisher.py)
and for the guard of connections (membership/pass_guard.py).
"""

from __future__ import annotations

import msgpack
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from tt_cli.identity.passes import InvalidPass, read_notice
from tt_cli.swarm.membership.admission import Admission, NotAdmitted
from tt_cli.swarm.membership.control_notices import notice_key
from tt_cli.swarm.membership.dht_auth import MAX_LIFE
from tt_cli.swarm.membership.rsa_identity import MAX_OWNER, owners_of, peer_id_of
from tt_cli.swarm.records.peer_record import HistoryRecord, PeerRecord, history_key, peers_key

BROKEN = msgpack.UnpackException, ValueError, TypeError, RecursionError  # what reading bytes of others may raise
MAX_RECORD = 2**12  # bytes of a peer's record beside its signature: 1.5 kB with a pass, 3 with all lists and texts full
MAX_HISTORY = 10 * 2**10  # the same of a history: 256 steps of 25 bytes, 28 where numbers are large
MAX_SPREAD_NOTICE = 2**16  # of a notice that passes from peer to peer


class RecordValidator(RecordValidatorBase):
    """Lets a run's DHT keys hold well-formed records of their owners and nothing else, and no other keys be used.

    identity: the run's. authority_key: of its notices, "" without an authority.
    """

    def __init__(self, identity: str, membership: Admission, authority_key: str = ""):
        self._identity, self._membership, self._authority_key = identity, membership, authority_key
        self._models: dict[bytes, type[PeerRecord] | type[HistoryRecord]] = {
            DHTID.generate(source=peers_key(identity)).to_bytes(): PeerRecord,
            DHTID.generate(source=history_key(identity)).to_bytes(): HistoryRecord,
        }
        self._notice = DHTID.generate(source=notice_key(identity)).to_bytes()

    def validate(self, record: DHTRecord) -> bool:
        """True for records of this run that may be believed."""
        try:
            if record.key == self._notice:
                return self._is_notice(record)
            model = self._models.get(record.key)
            return model is not None and self._is_owners(record, model)
        except (*BROKEN, InvalidPass, NotAdmitted, UnsupportedAlgorithm):
            return False

    def _is_owners(self, record: DHTRecord, model: type[PeerRecord] | type[HistoryRecord]) -> bool:
        if len(record.value) > (MAX_RECORD if model is PeerRecord else MAX_HISTORY) or len(record.subkey) > MAX_OWNER:
            return False
        subkey, value = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
        owners = owners_of(subkey)
        if len(owners) != 1 or subkey != owner_subkey(owners[0]) or not isinstance(value, dict):
            return False
        parsed = model.model_validate(value)
        if parsed.peer_id != peer_id_of(owners[0]):
            return False
        if not parsed.time <= record.expiration_time <= parsed.time + MAX_LIFE:
            return False
        self._membership.vouched(parsed.pass_text, parsed.peer_id, parsed.time)
        return True

    def _is_notice(self, record: DHTRecord) -> bool:
        """The authority's notice, under its number. It may be passed on by anybody."""
        if not self._authority_key or len(record.value) > MAX_SPREAD_NOTICE or len(record.subkey) > 16:
            return False
        number, text = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
        if type(number) is not int or not isinstance(text, str):
            return False
        read = read_notice(text, self._authority_key, self._identity, record.expiration_time)
        return read.number == number


def owner_subkey(public_key: bytes) -> bytes:
    """The one subkey under which this key (OpenSSH form) may sign. Raises ValueError for what is no key."""
    written = load_ssh_public_key(public_key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return RSASignatureValidator.PUBLIC_KEY_FORMAT.replace(b"_key_", written)
