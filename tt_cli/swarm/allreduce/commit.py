"""Commit or abort: after a transfer members compare and repair what they received, and step, or drop the round.

1. When its own transfer is over a member tells every member that accepts connections the hash of each part it has, and
   is told theirs as soon as their transfers are over. What a reducer signed that it did not hear of, others pass on.
2. A part that it lacks it fetches from a member that has it. Where hashes differ, the bytes that more than half of the
   members with this part hold are the average; who holds others fetches those.
3. It commits when it then has every part, and has heard from more than half of those whom it can hear. It drops the
   round when nobody has some part, or no bytes have a majority whatever the others hold from whom it heard nothing.

Heard is who answered, not who called: whoever calls may have given up since. Who has dropped the round says so when it
is asked later, and only its parts count: a member that comes late does not commit what the others have dropped.

A member that is not heard and one that was sent other bytes must not commit two different steps: so a lost word costs
who did not hear it the round. Who hears less than the others (a lost message, a member that died) may drop a round that
others commit. It then sees that they are a step ahead and takes the average over from them; it never steps on anything
else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import AllReduce, too_few
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES, MISSING, AverageBuffer
from tt_cli.swarm.allreduce.lateness import waits_to_report
from tt_cli.swarm.allreduce.part_fetch import fetch_parts
from tt_cli.swarm.allreduce.round_plan import RoundGroup

logger = get_logger(__name__)

ASKED_TIMES = 3  # a message may get lost
RETRY_SECONDS = 0.2
ASKING, ENDING = 0.8, 0.95  # of the time for the round: until then one waits for answers, until then all is fetched
PATIENCE = 3  # times that of the transfer: a reducer waits for its senders, its members for it
SOON = 3.0  # part of the patience in which a member answers whose own transfer is over


@dataclass(frozen=True)
class PartStatus:
    """One member's word about a round. hashes: of its parts, MISSING where it has none. said: samples and loss.

    commitment: to what it reduced (messages.py), b"" without. clipped: peer id → of how many parts it clipped them.
    others: peer id → what that member signed; in a question b"", for who asks did not hear it. dropped: it will not
    step with this average. waited: peer id → seconds for which it waited for that one, not checked.
    """

    hashes: tuple[bytes, ...]
    said: dict[str, Any]
    commitment: bytes = b""
    clipped: dict[str, int] = field(default_factory=dict)
    others: dict[str, bytes] = field(default_factory=dict)
    dropped: bool = False
    waited: object = None

    def pack(self, group_id: bytes) -> runtime_pb2.ExpertInfo:
        """The message that carries it."""
        said = {**self.said, "waited": self.waited} if self.waited else self.said
        joined = b"".join(self.hashes)
        return wire.STATUS.message((group_id, joined, said, self.commitment, self.clipped, self.others, self.dropped))


def read_status(message: runtime_pb2.ExpertInfo, parts: int) -> PartStatus:
    """Raises ValueError for anything else than the status of a round with so many parts."""
    _, joined, said, commitment, clipped, others, dropped = wire.STATUS.read(message)
    if len(joined) != HASH_BYTES * parts:
        raise ValueError("a status of another round")
    samples, loss = said.get("samples"), said.get("loss")
    honest = isinstance(samples, int) and 0 <= samples <= 10**12 and isinstance(loss, float) and math.isfinite(loss)
    hashes = tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))
    counted = all(
        isinstance(peer, str) and isinstance(count, int) and 0 < count <= parts for peer, count in clipped.items()
    )
    known = {"samples": samples, "loss": loss} if honest else {}
    return PartStatus(hashes, known, commitment, clipped if counted else {}, others, dropped, said.get("waited"))


def group_of(message: runtime_pb2.ExpertInfo) -> bytes:
    """The round that a status belongs to. Raises ValueError for anything else than a status."""
    return wire.STATUS.read(message)[0]


@dataclass(frozen=True)
class Agreement:
    """wanted: part → (hash, members that hold it) of what must be fetched. lost: parts that nobody has.

    disputed: parts of which no bytes have a majority. differing: parts in whose bytes some members differed.
    unheard: words where too few members were heard, "" else.
    """

    wanted: dict[int, tuple[bytes, list[str]]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    disputed: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    unheard: str = ""


def agree(own: Sequence[bytes], others: Mapping[str, Sequence[bytes]], silent: int = 0, dropped: int = 0) -> Agreement:
    """The outcome of comparing this member's hashes and the others' (peer id → hashes).

    silent: how many more there are from whom nothing was heard. dropped: how many of `others` have dropped the round.
    More than half must be heard that have not; and where members differ, the majority must be one whatever the silent
    ones hold.
    """
    there, all_others = 1 + len(others) - dropped, len(others) + silent
    few = f"heard from {there - 1} of {all_others} others" if there <= silent + dropped else ""
    found = Agreement(unheard=few)
    for index, mine in enumerate(own):
        votes = Counter(hashes[index] for hashes in (own, *others.values()) if hashes[index] != MISSING)
        if not votes:
            found.lost.append(index)
            continue
        best, count = votes.most_common(1)[0]
        if len(votes) > 1:
            found.differing.append(index)
        if 2 * count <= votes.total() + (silent if len(votes) > 1 else 0):
            found.disputed.append(index)
        elif best != mine:
            found.wanted[index] = (best, [peer for peer, hashes in others.items() if hashes[index] == best])
    return found


class CommitProtocol:
    """One member's side of the commit or abort after the transfer of one round, whose time begins now.

    parts: of the average, how many. said: what this member says about itself.

    statuses: what the others said. passed_on: reducer from whom nothing was heard → what it signed, if others say true.
    repaired: parts that were fetched. dropped: to be set when this member has dropped the round. heard_at: peer id →
    when it had answered, or was given up.
    """

    def __init__(self, group: RoundGroup, parts: int, store: AverageBuffer, said: dict[str, Any]):
        self._asks_until, self._ends = (time.monotonic() + share * group.longest for share in (ASKING, ENDING))
        self.group_id, self.me = group.name.group_id, group.me
        self.members, self.listening = group.members, group.reducers
        self.store, self.traffic, self.patience = store, group.traffic, PATIENCE * group.patience
        self.statuses: dict[str, PartStatus] = {}
        self.passed_on: dict[str, set[bytes]] = {}
        self.repaired = 0
        self.commitment: bytes = b""
        self.clipped: dict[str, int] = {}
        self.waited: dict[str, float] = {}
        self.heard_at: dict[str, float] = {}
        self.dropped = False
        self._answered, self._gave_up = set[str](), set[str]()
        self._parts, self._said, self._stub_of = parts, said, group.stub_of
        self._hashes: list[bytes] | None = None
        self._over = asyncio.Event()
        self._heard = asyncio.Condition()

    def report(self, commitment: bytes, clipped: Mapping[str, int], waits: Mapping[str, float]) -> None:
        """Set what this member says of the transfer, before `run`: see `PartStatus`."""
        self.commitment, self.clipped, self.waited = commitment, dict(clipped), waits_to_report(waits)

    async def answer(self, peer: PeerID, request: runtime_pb2.ExpertInfo) -> runtime_pb2.ExpertInfo:
        """Another member tells its status; tell it ours, when our transfer is over."""
        if peer not in self.members:
            raise ValueError("not a member of this round")
        status = read_status(request, self._parts)
        await self._hear(str(peer), status)
        await asyncio.wait_for(self._over.wait(), self.patience)
        known = {one: self.statuses[one].commitment for one in status.others if one in self.statuses}
        return replace(self.status(), others=known).pack(self.group_id)

    def holds(self) -> bool:
        """True while the store still holds this round's average."""
        return self.store.hashes is self._hashes

    async def run(self, gone: set[str]) -> Agreement:
        """Compare and fetch. When nothing is lost or disputed and nothing is missing, the average is whole."""
        self._hashes = self.store.hashes
        self._over.set()
        asking = [self._timed(member) for member in self.listening if member != self.me and str(member) not in gone]
        calling = {str(member) for member in self.members if member not in self.listening}
        if self.me not in self.listening:  # nobody can call this member
            calling = set()
        await asyncio.gather(self._wait_for(calling - gone), *asking)
        heard = self._answered | calling
        others = {peer: status.hashes for peer, status in self.statuses.items() if peer in heard}
        hearable = {str(member) for member in self.listening if member != self.me} | calling
        agreement = agree(self._hashes, others, len(hearable - others.keys()), len(self._gave_up & others.keys()))
        dropped = agreement.lost or agreement.disputed or agreement.unheard
        silent = {str(member) for member in self.listening if member != self.me} - self.statuses.keys()
        if silent and not dropped:
            asked = [member for member in self.listening if str(member) in self._answered]
            await asyncio.gather(*(self._ask_about(silent, member) for member in asked))
        for index in agreement.wanted:
            self._hashes[index] = MISSING  # what this member has there instead is not the average
        if not dropped:
            await self._repair(agreement)
        return agreement

    def status(self) -> PartStatus:
        """This member's word at this moment."""
        return PartStatus(
            tuple(self._hashes or ()), self._said, self.commitment, self.clipped, {}, self.dropped, self.waited
        )

    def _left(self, patience: float = math.inf, until: float | None = None) -> float:
        """Seconds to wait for an answer."""
        until = self._asks_until if until is None else until
        return max(0.0, min(self.patience, patience, until - time.monotonic()))

    async def _hear(self, peer: str, status: PartStatus) -> None:
        async with self._heard:
            self.heard_at.setdefault(peer, time.monotonic())
            self.statuses[peer] = status
            self._heard.notify_all()

    async def _wait_for(self, peers: set[str]) -> None:
        """Members that cannot be called call by themselves."""
        try:
            async with asyncio.timeout(self._left()), self._heard:
                await self._heard.wait_for(lambda: peers <= self.statuses.keys())
        except TimeoutError:
            logger.info(f"no word from {peers - self.statuses.keys()}")

    async def _timed(self, member: PeerID) -> None:
        await self._ask(member)
        self.heard_at[str(member)] = time.monotonic()

    async def _ask(self, member: PeerID) -> None:
        timeout, asked_again = self._left(), False
        for attempt in range(ASKED_TIMES):
            try:
                stub = self._stub_of(member)
                answer = await stub.rpc_settle(self.status().pack(self.group_id), timeout=timeout)
                status = read_status(answer, self._parts)
            except Exception as error:  # P2P errors of many types
                logger.info(f"asking {member} for its status failed: {error!r}")
                if isinstance(error, TimeoutError):
                    if str(member) not in self.statuses or asked_again:
                        return
                    asked_again, timeout = True, self._left(self.patience / SOON)  # it has called meanwhile
                await asyncio.sleep(RETRY_SECONDS * attempt)
                continue
            self._answered.add(str(member))
            if status.dropped:
                self._gave_up.add(str(member))
            return await self._hear(str(member), status)

    async def _ask_about(self, silent: set[str], member: PeerID) -> None:
        """Ask if this member heard of those from whom this peer heard nothing: else one of them may drop the round."""
        question = replace(self.status(), others=dict.fromkeys(silent, b""))
        try:
            timeout = self._left(self.patience / SOON, self._ends)
            answer = await self._stub_of(member).rpc_settle(question.pack(self.group_id), timeout=timeout)
            for peer, signed in read_status(answer, self._parts).others.items():
                if peer in silent:
                    self.passed_on.setdefault(peer, set()).add(signed)
        except Exception as error:  # P2P errors of many types
            logger.info(f"asking {member} about {silent} failed: {error!r}")

    async def _repair(self, agreement: Agreement) -> None:
        """Fetch what is wanted, from one holder after the other, while there is time."""
        wanted = {index: digest for index, (digest, _) in agreement.wanted.items()}
        for holder in self.listening:
            here = {index: wanted[index] for index in wanted if str(holder) in agreement.wanted[index][1]}
            if not here:
                continue
            asked = set(here)
            try:
                async with asyncio.timeout(max(0.0, self._ends - time.monotonic()) if self._ends < math.inf else None):
                    await fetch_parts(
                        self._stub_of(holder), self.group_id, self.store, here, self.patience, self._count_received
                    )
            except Exception as error:  # the next holder is asked
                logger.info(f"fetching parts from {holder} failed: {error!r}")
            for index in asked - here.keys():
                del wanted[index]
                self.repaired += 1

    def _count_received(self, size: int) -> None:
        self.traffic[1] += size


def may_step(allreduce: AllReduce, agreement: Agreement) -> bool:
    """True if this member may step with what is in the store."""
    if too_few(allreduce.used, len(allreduce.members)):  # so say all others, whom it told
        return False
    return not (agreement.lost or agreement.disputed or agreement.unheard or allreduce.store.missing())
