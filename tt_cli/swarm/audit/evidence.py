"""Proofs that a reducer made a wrong average, as they are kept and go from one member to another.

Who has a proof shows it to all members that do not say in their records that they have it: who was busy, or came later,
would go on inviting the guilty one to rounds in which nobody else takes part.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.messages import Accusation, NotProven, RoundRules, verify

logger = get_logger(__name__)

MOST_BYTES, CHUNK = 2**25, 2**20  # of an accusation, and of a message of one
MOST_KEPT, MOST_OF_ONE, MOST_SLANDERERS = 64, 4, 1024  # accusations; of one accuser; who is not heard again


class EvidenceStore:
    """Accusations that were verified here, one file for each guilty peer; the folder is made with the first."""

    def __init__(self, folder: Path):
        self.folder = folder

    def guilty(self) -> frozenset[str]:
        """Their peer ids."""
        with contextlib.suppress(OSError):
            return frozenset(path.stem for path in self.folder.glob("*.accusation"))
        return frozenset()

    def read(self, guilty: str) -> bytes:
        """The proof against this one; b"" where there is none."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{guilty}.accusation").read_bytes()
        return b""

    def keep(self, guilty: str, packed: bytes) -> bool:
        """Write one down, in place of the oldest where there are many; False when it is known or cannot be written."""
        if guilty in self.guilty():
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.folder / f"{guilty}.accusation", packed, mode=PRIVATE, durable=False)
            kept = sorted(self.folder.glob("*.accusation"), key=lambda path: path.stat().st_mtime_ns)
            for oldest in kept[:-MOST_KEPT]:
                oldest.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(f"cannot keep the proof against {guilty}: {error}")
            return False
        return True


async def pass_on(
    packed: bytes, guilty: str, peers: Iterable[PeerID], stub_of: Callable[[PeerID], Any], patience: float
) -> None:
    """Send an accusation to others, who verify it themselves."""

    async def chunks() -> AsyncIterator[runtime_pb2.ExpertInfo]:
        yield wire.ACCUSED.message((guilty,))
        for start in range(0, len(packed), CHUNK):
            yield runtime_pb2.ExpertInfo(serialized_info=packed[start : start + CHUNK])

    for peer in peers:
        try:
            async with asyncio.timeout(patience):
                await stub_of(peer).rpc_accuse(chunks())
        except Exception as error:  # P2P errors of many types
            logger.info(f"{peer} did not take an accusation: {error!r}")


class Court:
    """Hears accusations from others, one at a time. rules: see `verify`.

    Who accuses wrongly, or comes to no end, is not heard again while it is remembered, nor who brought `MOST_OF_ONE`.
    """

    def __init__(self, rules: RoundRules, proofs: EvidenceStore):
        self._rules, self._proofs = rules, proofs
        self._slanderers = deque[str](maxlen=MOST_SLANDERERS)
        self._brought: Counter[str] = Counter()
        self._busy = False

    async def hear(
        self, stream: AsyncIterator[runtime_pb2.ExpertInfo], accused: str, accuser: str, patience: float
    ) -> None:
        """Keep the proof against the accused. Raises ValueError, or TimeoutError."""
        if self._busy or accuser in self._slanderers or self._brought[accuser] >= MOST_OF_ONE:
            raise ValueError("no time for this accusation")
        self._busy = True
        try:
            packed = bytearray()
            async with asyncio.timeout(patience):
                async for message in stream:
                    packed += message.serialized_info
                    if len(packed) > MOST_BYTES:
                        raise NotProven("an accusation without end")
            if await asyncio.to_thread(lambda: verify(Accusation.read(bytes(packed)), self._rules)) != accused:
                raise NotProven("a proof against another one than was named")
        except (NotProven, TimeoutError):
            self._slanderers.append(accuser)
            raise
        finally:
            self._busy = False
        self._brought[accuser] += self._proofs.keep(accused, bytes(packed))
