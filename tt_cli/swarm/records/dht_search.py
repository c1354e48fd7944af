"""Look-ups in a DHT that keeps all of a swarm under one key, with no more traffic than they need.

hivemind's node asks for a key's value whenever it searches for the nodes nearest to that key, so each peer that renews
its record is told the records of all others, by every node that keeps them, and checks each signature; it keeps what it
read in caches, sends it on to a node that lacks it, and reads all of it again when one record changes. Here a search
for nodes brings nodes, there are no caches, and what was checked once is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

import msgpack
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase

NO_CACHES = {"cache_locally": False, "cache_nearest": 0, "cache_on_store": False, "cache_refresh_before_expiry": 0}
MOST_KNOWN = 2**14  # records that passed, of some 200 bytes each here


class Checked(CompositeValidator):
    """All of these validators in one, which does not check again what has passed.

    That needs validators whose answer never changes for the same bytes: see validator.py.
    """

    priority = 10  # as that of hivemind's signatures: before whatever reads the record

    def __init__(self, validators: Iterable[RecordValidatorBase]):
        super().__init__(validators)
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """True for a record that all of them let pass, now or before."""
        digest = digest_of(record)
        if digest in self._passed:
            self._passed.move_to_end(digest)
            return True
        if not super().validate(record):
            return False
        self._passed[digest] = None
        if len(self._passed) > MOST_KNOWN:
            self._passed.popitem(last=False)
        return True


def digest_of(record: DHTRecord) -> bytes:
    """Of all that a signature covers, and of the signature. 16 bytes."""
    parts = record.key, record.subkey, record.value, record.expiration_time
    return blake2b(msgpack.packb(parts), digest_size=16).digest()
