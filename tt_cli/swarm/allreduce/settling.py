"""Settling: what the members of a round tell each other when its transfer is over, and what they vote.

A member's status is the hash of each part that it has, and what its reducers signed; these hashes are its votes. Two
unlike signatures of one member for one round are proof by themselves: see `CommitProtocol` for what follows from all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger

from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.average_buffer import MISSING
from tt_cli.swarm.allreduce.messages import Accusation, Commitment, NotProven, Opening, SignedVote
from tt_cli.swarm.allreduce.votes import PartStatus, group_of, read_status
from tt_cli.swarm.clock import loop_time

logger = get_logger(__name__)

ASKED_TIMES = 3  # a message may get lost
RETRY_SECONDS = 0.2
MOST_OTHERWISE = 8  # votes that one tells of
ASKING, ENDING = 0.8, 0.95  # of the time for the round: until then one waits for answers, until then all is fetched
PATIENCE = 3  # times that of the transfer: a reducer waits for its senders, its members for it
SOON = 3.0  # part of the patience in which a member answers whose own transfer is over


class Settling(ABC):
    """One member's words after the transfer `allreduce`, whose time begins now, and those of the others.

    said: what this member says about itself.

    statuses: what the others said. passed_on: reducer → member → what it signed, if that one says true; of reducers
    from whom nothing was heard, or whose averages differ. proofs: reducers that signed unlike averages, each with an
    accusation. double: the same of members that signed unlike votes. heard_at: peer id → when it had answered, or was
    given up. dropped: this member does not step with the average. left: this member has signed a join for another group
    since. checked: the commitments with which this member decided. over: this member's transfer is.
    """

    def __init__(self, allreduce: AllReduce, said: dict[str, Any]):
        self._asks_until, self._ends = (loop_time() + share * allreduce.group.longest for share in (ASKING, ENDING))
        self.allreduce, self.patience = allreduce, PATIENCE * allreduce.patience
        self.me, self.members, self.listening = allreduce.me, allreduce.members, allreduce.reducers
        self.statuses: dict[str, PartStatus] = {}
        self.passed_on: dict[str, dict[str, bytes]] = {}
        self.proofs, self.double, self.heard_at = dict[str, bytes](), dict[str, bytes](), dict[str, float]()
        self.dropped, self.left, self.checked = False, False, dict[str, bytes]()
        self.over = asyncio.Event()
        self._said, self._waited = said, dict[str, float]()
        self._answered: dict[str, bool] = {}  # peer id → whether it has dropped the round
        self._votes, self._signed = [MISSING] * len(allreduce.parts), b""
        self._locked = allreduce.group.locked
        self._began: dict[str, bytes] = {}  # reducer → its opening in this round
        self._heard = asyncio.Condition()

    @property
    def commitments(self) -> dict[str, bytes]:
        """Reducer → what it signed, as it said last."""
        return self.allreduce.signed | {peer: status.commitment for peer, status in self.statuses.items()}

    async def answer(self, peer: PeerID, request: runtime_pb2.ExpertInfo) -> runtime_pb2.ExpertInfo:
        """Another member tells its status; tell it ours, when our transfer is over."""
        if peer not in self.members:
            raise ValueError("not a member of this round")
        status = self._read(request, str(peer))
        self._pass_on(str(peer), status)
        await self._hear(str(peer), status)
        self._compare_votes(status)
        self._compare_words({str(peer)})
        await asyncio.wait_for(self.over.wait(), self.patience)
        if self._locked:
            await self._wait_for(set())
        self._vote()
        words = self.commitments | self.allreduce.signed  # what was signed of the averages that are here comes first
        begun = self._began | self.allreduce.openings
        known = {other: words.get(other) or begun.get(other, b"") for other in status.others}
        asked = sorted(status.votes.keys() & self.statuses.keys())[:MOST_OTHERWISE]
        heard = {other: self.statuses[other].vote for other in asked}
        return self.status(known, heard).pack(self.allreduce.group_id)

    @abstractmethod
    def _vote(self) -> None:
        """Vote on each part on which this member has not voted yet and can."""

    def _pass_on(self, peer: str, status: PartStatus) -> None:
        """Take what another member says that reducers signed."""
        for reducer in {*map(str, self.listening)} & status.others.keys():
            if word := status.others[reducer]:
                self._learn(reducer, word, peer)

    def _learn(self, reducer: str, word: bytes, peer: str) -> None:
        """Take what a reducer signed, as another member says. It counts if it is true."""
        with contextlib.suppress(NotProven):
            opening = Opening.read(word, self.allreduce.signer.opened)
            if (opening.name, opening.sender) == (self.allreduce.name, reducer):
                self._began[reducer] = word
            return
        self.passed_on.setdefault(reducer, {})[peer] = word

    def status(self, others: dict[str, bytes] | None = None, heard: dict[str, bytes] | None = None) -> PartStatus:
        """This member's word at this moment. others, heard: see `PartStatus.others` and `votes`."""
        clipped = dict(self.allreduce.reducer.clipped)
        votes, mine = tuple(self._votes), self.allreduce
        if MISSING not in votes and not self._signed:
            self._signed = mine.group.vote(self.me, votes).sign(mine.signer)
        rest = mine.commitment, clipped, others or {}, self.dropped or self.left, heard or {}, self._waited
        return PartStatus(votes, self._said, self._signed, *rest)

    def _read(self, message: runtime_pb2.ExpertInfo, peer: str) -> PartStatus:
        """Another member's status. Raises ValueError for any other, and for votes that it did not sign."""
        status, mine = read_status(message, len(self.allreduce.parts)), self.allreduce
        voted = MISSING not in status.hashes
        if voted and SignedVote.read(status.vote, mine.signer.opened) != mine.group.vote(peer, status.hashes):
            raise NotProven("votes that are not signed")
        return status

    def _left(self, until: float, patience: float | None = None) -> float:
        return max(0.0, min(self.patience if patience is None else patience, until - loop_time()))

    async def _hear(self, peer: str, status: PartStatus) -> None:
        async with self._heard:
            self.heard_at.setdefault(peer, loop_time())
            self.statuses[peer] = status
            if self._locked:
                self._vote()
            self._heard.notify_all()

    def _have_spoken(self, peers: set[str]) -> bool:
        """Tell whether these have said something; where an average is repeated, whether they and this peer voted."""
        if not peers <= self.statuses.keys() or not self._locked:
            return peers <= self.statuses.keys()
        return not any(MISSING in votes for votes in (self._votes, *(self.statuses[peer].hashes for peer in peers)))

    async def _wait_for(self, peers: set[str]) -> None:
        try:
            async with asyncio.timeout(self._left(self._asks_until)), self._heard:
                await self._heard.wait_for(lambda: self._have_spoken(peers))
        except TimeoutError:
            logger.info(f"no word from {peers - self.statuses.keys()}")
            self.heard_at |= dict.fromkeys(peers - self.statuses.keys(), loop_time())

    async def _call(self, member: PeerID, timeout: float, *told: dict[str, bytes]) -> PartStatus:
        """Tell one member this one's status, and be told its own. told: see `status`."""
        question = self.status(*told).pack(self.allreduce.group_id)
        answer = await self.allreduce.stub_of(member).rpc_settle(question, timeout=timeout)
        if group_of(answer) != self.allreduce.group_id:
            raise ValueError("a status of another round")
        return self._read(answer, str(member))

    async def _ask(self, member: PeerID) -> None:
        peer, patience, asked_again = str(member), self.patience, False
        for attempt in range(ASKED_TIMES):
            try:
                status = await self._call(member, self._left(self._asks_until, patience))
            except Exception as error:  # P2P errors of many types
                logger.info(f"asking {member} for its status failed: {error!r}")
                if isinstance(error, TimeoutError):
                    if peer not in self.statuses or asked_again:
                        break
                    asked_again, patience = True, self.patience / SOON  # it has called
                await asyncio.sleep(RETRY_SECONDS * attempt)
            else:
                self._answered[peer] = status.dropped
                await self._hear(peer, status)
                break
        self.heard_at[peer] = loop_time()

    async def _ask_about(self, reducers: Collection[str], member: PeerID) -> None:
        """Tell this member what these signed, as far as it is known, and ask what it knows, and for its votes."""
        words = self.commitments | self.allreduce.signed
        passed_on = {peer: next(filter(None, self.passed_on.get(peer, {}).values()), b"") for peer in reducers}
        try:
            timeout = self._left(self._ends, self.patience / SOON)
            others = {peer: words.get(peer) or passed_on[peer] for peer in reducers}
            status = await self._call(member, timeout, others, self._votes_otherwise())
        except Exception as error:  # P2P errors of many types
            logger.info(f"asking {member} about {reducers} failed: {error!r}")
            return
        finally:
            self.heard_at[str(member)] = loop_time()
        for peer in status.others.keys() & reducers:
            self.passed_on.setdefault(peer, {})
            self._learn(peer, status.others[peer], str(member))
        self._answered[str(member)] = status.dropped
        await self._hear(str(member), status)
        self._compare_votes(status)

    def _votes_otherwise(self) -> dict[str, bytes]:
        """Votes of some of those who vote otherwise than this member: what did they sign for the others?"""
        unlike = [peer for peer, said in self.statuses.items() if said.vote and said.hashes != tuple(self._votes)]
        return {peer: self.statuses[peer].vote for peer in sorted(unlike)[:MOST_OTHERWISE]}

    def _compare_votes(self, told: PartStatus) -> None:
        """Find who signed a vote for this member and another one for who tells of it."""
        for peer, envelope in list(told.votes.items())[:MOST_OTHERWISE]:
            own = self.statuses[peer].vote if peer in self.statuses else b""
            with contextlib.suppress(NotProven):
                one, other = (SignedVote.read(said, self.allreduce.signer.opened) for said in (own, envelope))
                if (one.name, one.voter) == (self.allreduce.name, peer) and one.contradicts(other):
                    self.double[peer] = Accusation(own, envelope, Accusation.UNLIKE_VOTES, ()).pack()

    def _compare_words(self, reducers: Collection[str]) -> None:
        """Find who signed unlike averages."""
        for reducer in reducers:
            told = self.allreduce.signed, self.checked, self.commitments
            heard = {words.get(reducer, b"") for words in told} | {*self.passed_on.get(reducer, {}).values()}
            signed = dict[bytes, Commitment]()
            for envelope in sorted(heard):
                with contextlib.suppress(NotProven):
                    signed[envelope] = Commitment.read(envelope, self.allreduce.signer.opened)
            for one, other in itertools.combinations(signed, 2):
                mine = (signed[one].name, signed[one].reducer) == (self.allreduce.name, reducer)
                if mine and signed[one].contradicts(signed[other]):
                    self.proofs[reducer] = Accusation(one, other, Accusation.UNLIKE, ()).pack()
