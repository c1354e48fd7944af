"""Commit or abort: after a transfer members compare and repair what they received, and step, or drop the round.

1. When its own transfer is over a member tells every member that accepts connections the hash of each part it has, and
   is told theirs as soon as their transfers are over. What a reducer signed that it did not hear of, others pass on.
2. These hashes are its votes: who lacks a part votes for what the first word of its reducer says that it gets to know,
   and no vote changes. Where a part has too few, the members without a vote are told what its reducer signed.
   A part without its reducer's word has no vote. Who votes on all parts signs that.
3. When each part has the votes of a quorum of members who have not dropped the round, and of the trainers, and it has
   fetched what it lacks, or holds other bytes of, from members with these votes, it writes these votes down, and
   precommits: it says so, signed. It commits when a quorum has. Else it drops the round. Who cannot be called hears
   some of the members alone: these tell it what all signed.
4. Where votes differ all are asked what their reducer signed, and how those voted who vote otherwise. Who signed unlike
   averages for two members is guilty by that, and who knows it does not step; so is who signed unlike votes.
5. Where nobody knows what a reducer signed, those who know that it had begun send its parts to their backups, and
   settle under the name of this repetition. They have not voted on these parts, and now never do but there. So of what
   a reducer that seemed dead signed and what its backups did, a quorum has voted for one at most.
6. Who precommitted an average and dropped it shows the votes for it as it joins the next group. So somebody may have
   made it a step, and the group makes none: these members vote for it again, the others as they hear of it, and all
   fetch it. Of two quorums one honest member is in both: whoever else denies its vote, that one shows it.

Heard is who answered, not who called: whoever calls may have given up since. Who has dropped the round says so when it
is asked later, and only its parts count: a member that comes late does not commit what the others have dropped.

A member that is not heard and one that was sent other bytes must not commit two different steps: so who hears less than
the others (a lost message, a member that died) may drop a round that others commit. It then sees that they are a step
ahead and takes the average over from them; it never steps on anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import AllReduce, too_few
from tt_cli.swarm.allreduce.average_buffer import MISSING
from tt_cli.swarm.allreduce.lateness import waits_to_report
from tt_cli.swarm.allreduce.messages import Commitment, Lock, NotProven, Precommit, SignedVote, average_hash
from tt_cli.swarm.allreduce.part_fetch import fetch_parts
from tt_cli.swarm.allreduce.settling import ASKED_TIMES, RETRY_SECONDS, SOON, Settling
from tt_cli.swarm.allreduce.votes import Agreement, agree, are_enough, electorates_of, liars_among
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.compression.gradient_buffer import NOBODY

logger = get_logger(__name__)

UNHEARD = "nobody heard what it signed"
DENIED = "no vote for what it said that it had voted for"
DECIDING = 2.0  # times the patience: a member may wait for others, twice, before it decides


@dataclass(frozen=True)
class LastVote:
    """The last vote of this peer in rounds from one state.

    attempt: the number of the last of these rounds. shares, votes: the cut, and its votes on the parts. said, voting:
    see `CommitProtocol`. shown: the signed votes of a quorum, once it has precommitted. commit: the round in which it
    voted, None once its process has ended.
    """

    state_key: str = ""
    attempt: int = 0
    shares: tuple[int, ...] = ()
    votes: tuple[bytes, ...] = ()
    said: dict[str, Any] = field(default_factory=dict)
    voting: frozenset[str] = frozenset()
    shown: tuple[bytes, ...] = ()
    commit: CommitProtocol | None = None

    @property
    def average(self) -> bytes:
        """The hash of the average for which it voted; b"" without one."""
        return average_hash(self.shares, self.votes) if self.votes else b""

    @property
    def lock(self) -> Lock:
        """The word of its joins on it."""
        return Lock(attempt=self.attempt, average=self.average if self.shown else b"")


class CommitProtocol(Settling):
    """One member's side of the commit or abort after a transfer.

    before: where the group repeats an average, this member's last vote for it, None without one. keep: writes its vote
    down before it precommits.

    repaired: parts that were fetched. agreement, unsigned: why the round was dropped, if it was: see `unsigned_by`.
    asked: who answered when it was asked for parts. precommits: peer id → what it signed of the average that is here.
    precommitted: this member has. origin: the round in which the average was made; None where this member was not in
    that. voting: peer ids of the members of all rounds with this average, as far as it was in them. repetition: of the
    parts that reducers left, if there is one.
    """

    def __init__(
        self,
        allreduce: AllReduce,
        said: dict[str, Any],
        before: LastVote | None = None,
        keep: Callable[[LastVote], None] = lambda vote: None,
    ):
        super().__init__(allreduce, said if before is None else before.said)
        self.store, self._keep = allreduce.store, keep
        self.asked, self.repaired = set[str](), 0
        self.agreement, self.unsigned = Agreement(), dict[str, str]()
        self._hashes: list[bytes] = []
        self.origin: CommitProtocol | None = None if self._locked else self
        self.voting = frozenset(map(str, self.members))
        if before is not None:
            self.voting, self._votes = self.voting | before.voting, list(before.votes)
        if before is not None and (made := before.commit) is not None:
            self.origin, allreduce.hashes = made.origin, made._hashes
        self._precommits: dict[str, tuple[bytes, bytes]] = {}  # peer → hash of the average, what it signed of that
        group = allreduce.group
        self._voices, liars = {peer: group.voices.get(peer, 1) for peer in group.limits}, liars_among(group.swarm)
        self._electorates = electorates_of(self._voices, liars, group.steps, group.trainers, group.swarm)
        self._told: dict[str, tuple[tuple[bytes, ...], bytes]] = {}  # peer → its votes as others heard them, signed
        self._awaited, self._asking = set[str](), list[asyncio.Task[None]]()  # whose precommits may still come
        self._locked_on: LastVote | None = None  # what it precommits
        self._compared, self._decided, self._ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.repetition: CommitProtocol | None = None

    @property
    def precommits(self) -> dict[str, bytes]:
        """Peer id → its precommit of the average that is here."""
        heard = self.phases[-1]._precommits  # a repetition decides about the whole round
        return {peer: signed for peer, (average, signed) in heard.items() if average == self._average}

    def last_vote(self) -> LastVote:
        """The average that this member precommitted, else the one for which it voted, if it did."""
        votes, last = self.phases[-1]._votes, self.phases[-1]._locked_on
        return last or self._vote_for(() if MISSING in votes else votes)

    def _vote_for(self, hashes: Sequence[bytes], shown: Sequence[bytes] = ()) -> LastVote:
        group, votes = self.allreduce.group, tuple(hashes)
        rest = self._said, self.voting, tuple(shown), self
        return LastVote(group.name.state_key, group.attempt, group.shares, votes, *rest)

    @property
    def precommitted(self) -> bool:
        return self.phases[-1]._locked_on is not None

    @property
    def _average(self) -> bytes:
        return self.allreduce.group.vote(self.me, self.phases[-1]._hashes).average

    @property
    def phases(self) -> list[CommitProtocol]:
        """The round itself, and the repetition of some of its parts."""
        return [self] if self.repetition is None else [self, self.repetition]

    async def phase(self, group_id: bytes) -> CommitProtocol | None:
        """The one of which others speak by this id; waits while this member may be about to begin it."""
        if group_id != self.allreduce.group_id:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._compared.wait(), self.patience)
        return next((phase for phase in self.phases if phase.allreduce.group_id == group_id), None)

    def holds(self) -> bool:
        """True while the store still holds this round's average."""
        return self.store.hashes is self._hashes

    async def precommit(self, peer: PeerID, signed: Sequence[bytes]) -> tuple[bytes, ...]:
        """Another member has precommitted so; what this one signed, nothing where it dropped the round, once it knows.

        Who cannot hear all says nothing, and is told what these signed: the votes that this member precommitted; who
        has precommitted itself, all precommits that are here when this member has ended.
        """
        if peer not in self.members:
            raise ValueError("not a member of this round")
        confirmed = str(peer) in self._precommits
        if signed:
            await self._take_signed(signed, str(peer))
        known = self._ended if confirmed and not signed else self._decided
        await asyncio.wait_for(known.wait(), DECIDING * self.patience)
        if signed:
            return self._precommits.get(str(self.me), ())[1:]
        return tuple(self.precommits.values()) if confirmed else self.last_vote().shown

    async def run(self) -> None:
        """Compare, repeat and fetch, when the transfer is over, then commit or drop the round."""
        try:
            await self._run()
        except asyncio.CancelledError:  # the round's time is over; what this member has voted for stays its vote
            self.dropped, self.agreement = True, replace(self.agreement, unheard="did not hear in time")
        finally:
            self._decided.set()
            self._ended.set()

    async def _run(self) -> None:
        self._hashes, self._waited = self.allreduce.hashes, waits_to_report(self.allreduce.waits())
        self._votes = [
            digest if self.reducer_of(index) in {str(self.me), *self.allreduce.signed} else vote
            for index, (digest, vote) in enumerate(zip(self._hashes, self._votes, strict=True))
        ]
        self.over.set()
        gone = self.allreduce.gone()
        called = {str(member): member for member in self.listening if member != self.me}
        # members that cannot be called call by themselves; nobody can call this one if it does not listen
        calling = {str(member) for member in self.members if member not in self.listening and self.me in self.listening}
        asking = [self._ask(member) for peer, member in called.items() if peer not in gone]
        late = bool(self._locked) and MISSING in self._votes  # it votes as it hears the others, and tells them then
        await asyncio.gather(self._wait_for(calling - gone), *asking)
        for first in (True, False):  # what is learned in the first exchange is told in the second
            self._agree(called.keys() | calling, calling)
            about = {*map(self.reducer_of, self.agreement.differing)} if first else set()
            if not self.agreement.unheard:
                about |= {*map(self.reducer_of, self.agreement.unconfirmed)}
                reducing = {peer for peer, member in called.items() if self.allreduce.parts_of(member)}
                about |= reducing - self.commitments.keys() - self.passed_on.keys()
            if not (about := about - {""}) and not (first and (late or self._whole_votes_lack())):
                break
            await asyncio.gather(*(self._ask_about(about, called[peer]) for peer in self._answered))
        else:
            self._agree(called.keys() | calling, calling)
        self._compare_words({*map(self.reducer_of, self.agreement.differing)})
        if lost := self._lost():
            await self._repeat(lost)
            return
        if self.me not in self.listening and not self._heard_enough():
            await self._be_told(self._heard_enough, self._asks_until)
            self._agree(called.keys() | calling, calling)
        self._compared.set()
        for index in self.agreement.wanted:
            self._hashes[index] = MISSING  # what this member has there instead is not the average
        if self.agreement.reached:
            await self._repair()
        few = too_few(self.allreduce.used, len(self.members))  # so say all others, whom it told
        for peer in self.allreduce.group.claims & self.statuses.keys():
            if MISSING in self.statuses[peer].hashes:
                self.allreduce.rejected[peer] = DENIED
        unlike, lacks = bool(self.proofs), not self.agreement.reached or not self.holds() or bool(self.store.missing())
        self.checked = self.commitments
        self.unsigned = unsigned_by(self.allreduce, self.checked, self.passed_on)
        if self.agreement.unheard:  # this peer's own line may be why it heard nothing signed
            self.unsigned = {peer: why for peer, why in self.unsigned.items() if why != UNHEARD}
        voted = self._has_quorum(self._voters()) and not self.left
        self.dropped = few or unlike or lacks or bool(self.unsigned) or not voted
        if not self.dropped:
            await self._precommit(calling - gone)

    def _has_quorum(self, peers: Iterable[str]) -> bool:
        return are_enough(peers, self._electorates)

    def _voters(self) -> list[str]:
        """The signers of votes for the whole average as this member has it, or is to have it."""
        wanted = self.agreement.wanted
        average = tuple(wanted[index][0] if index in wanted else held for index, held in enumerate(self._hashes))
        return [peer for peer, hashes in self._votes_heard().items() if hashes == average]

    def _votes_heard(self) -> dict[str, tuple[bytes, ...]]:
        """Peer id → its votes on the parts, as it said, or as others heard them."""
        heard = {peer: status.hashes for peer, status in self.statuses.items()}
        heard |= {peer: hashes for peer, (hashes, _) in self._told.items()}
        return heard | {str(self.me): tuple(self._votes)}

    def _heard_enough(self) -> bool:
        """True for a quorum of members that vote alike."""
        alike = defaultdict[tuple[bytes, ...], list[str]](list)
        for peer, hashes in self._votes_heard().items():
            alike[hashes].append(peer)
        return any(map(self._has_quorum, alike.values()))

    def _whole_votes_lack(self) -> bool:
        """True where each part has a quorum's votes, of members that did not know all of them."""
        return self.agreement.reached and not self._has_quorum(self._voters())

    async def _precommit(self, calling: Set[str]) -> None:
        """Write down what a quorum has voted for, say so, and commit when a quorum has.

        calling: members that call this one, and cannot be called.
        """
        mine, hashes = self.allreduce, tuple(self._hashes)
        said = {peer: (status.hashes, status.vote) for peer, status in self.statuses.items()} | self._told
        said[str(self.me)] = tuple(self._votes), self.status().vote
        shown = [vote for votes, vote in said.values() if votes == hashes]
        self._locked_on = self._vote_for(hashes, shown)
        self._keep(self._locked_on)
        signed = mine.group.vote(self.me, hashes, Precommit).sign(mine.signer)
        self._precommits[str(self.me)] = self._average, signed
        self._decided.set()
        there = {peer for peer, dropped in self._answered.items() if not dropped} - self._precommits.keys()
        # who has called is told by the answer; none of these calls is cancelled: all are to hear of this precommit
        others = [member for member in self.listening if str(member) in there]
        self._asking += [asyncio.create_task(self._ask_precommit(member, (signed,))) for member in others]
        self._awaited = there | calling - self._precommits.keys()
        until = self._ends if self.me in self.listening else loop_time() + self.patience / SOON
        try:
            async with asyncio.timeout(max(0.0, min(until, self._ends) - loop_time())), self._heard:
                await self._heard.wait_for(lambda: self._has_quorum(self.precommits) or not self._awaited)
        except TimeoutError:
            logger.info(f"no word of {self._awaited} about their precommits")
        if self.me not in self.listening:  # others can tell it of those who are late
            await self._be_told(lambda: self._has_quorum(self.precommits), self._ends)
        self.dropped = not self._has_quorum(self.precommits)

    async def _be_told(self, enough: Callable[[], bool], until: float) -> None:
        """Ask one after the other of those whom it can hear what all signed: nobody can call this member.

        One may know less, lie, or take its time: then the next is asked, and what it says counts when it comes.
        """
        there = [member for member in self.listening if not self._answered.get(str(member), True)]
        turn = self.members.index(self.me) % max(1, len(there))
        there, asked = there[turn:] + there[:turn], {ask for ask in self._asking if not ask.done()}
        while not enough() and (there or asked) and (left := until - loop_time()) > 0.0:
            if there:
                self._asking.append(asyncio.create_task(self._ask_precommit(there.pop(), ())))
                asked.add(self._asking[-1])
            patience = min(left, self.patience / SOON) if there else left
            _, asked = await asyncio.wait(asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)

    async def _ask_precommit(self, member: PeerID, signed: Sequence[bytes]) -> None:
        """Tell one member of this one's precommit, and be told its own; or nothing, and be told what all signed.

        It answers once it knows, and may wait for others: see `precommit`.
        """
        question, answer = wire.PRECOMMITTED.message((self.allreduce.group_id, tuple(signed))), tuple[bytes, ...]()
        for attempt in range(ASKED_TIMES):
            try:
                stub, timeout = self.allreduce.stub_of(member), self._left(self._ends, DECIDING * self.patience)
                _, answer = wire.PRECOMMITTED.read(await stub.rpc_precommit(question, timeout=timeout))
                break
            except TimeoutError:
                break
            except Exception as error:  # P2P errors of many types
                logger.info(f"asking {member} whether it has precommitted failed: {error!r}")
                await asyncio.sleep(RETRY_SECONDS * attempt)
        await self._take_signed(answer, str(member) if signed else "")

    async def _take_signed(self, signed: Iterable[bytes], peer: str = "") -> None:
        """Remember members' precommits: nothing more is awaited from `peer`; without one it is what others signed."""
        mine, voted = self.allreduce, set() if peer else {*self._votes_heard().values()}
        averages = {mine.group.vote(self.me, hashes).average: hashes for hashes in voted}
        async with self._heard:
            self._awaited.discard(peer)
            for envelope, kind in itertools.product(signed, (Precommit, SignedVote)):
                with contextlib.suppress(NotProven):
                    said = kind.read(envelope, mine.signer.opened)
                    if said.name != mine.name or said.voter not in mine.group.limits:
                        continue
                    if kind is Precommit:
                        self._precommits[said.voter] = said.average, envelope
                    elif said.average in averages:
                        self._told[said.voter] = averages[said.average], envelope
            self._heard.notify_all()

    def _lost(self) -> list[int]:
        """The positions of reducers that had begun and of whose averages nobody knows what they signed.

        Empty where a repetition of their parts is not all that the round lacks.
        """
        agreement, mine = self.agreement, self.allreduce
        reducing = {str(reducer) for reducer in mine.reducers if mine.parts_of(reducer)}
        few, late = too_few(mine.used, len(self.members)), loop_time() >= self._ends
        if reducing <= self.commitments.keys() | {str(mine.me)} or mine.name.lost:
            return []
        if self.proofs or agreement.unheard or few or late:
            return []
        unsigned = unsigned_by(mine, self.commitments, self.passed_on)
        begun = unsigned.keys() & (self._began | mine.openings).keys()
        doubtful = {*map(self.reducer_of, (*agreement.lost, *agreement.disputed, *agreement.unconfirmed))}
        voted = {self.reducer_of(index) for index, vote in enumerate(self._votes) if vote != MISSING}
        if {*unsigned.values()} != {UNHEARD} or not doubtful <= begun == unsigned.keys() or voted & begun:
            return []
        return [position for position, reducer in enumerate(mine.reducers) if str(reducer) in begun]

    async def _repeat(self, lost: Sequence[int]) -> None:
        """Have the backups reduce what these reducers left; this decides about the whole round."""
        mine, heard = self.allreduce, {peer for peer, status in self.statuses.items() if not status.dropped}
        absent = frozenset(map(str, self.members)) - heard - {str(self.me)}
        transfer = mine.repeated(lost, absent, max(0.0, self._ends - loop_time()))
        again = type(self)(transfer, self._said, keep=self._keep)
        again._votes, again.left, self.repetition = list(self._votes), self.left, again
        self._compared.set()
        self._decided.set()
        await again.allreduce.run()
        await again.run()
        left = {str(mine.reducers[position]) for position in lost}
        self.checked = self.commitments
        unsigned = unsigned_by(mine, self.checked, self.passed_on)
        self.unsigned = again.unsigned | {peer: why for peer, why in unsigned.items() if peer not in left}
        self.dropped = again.dropped = again.dropped or bool(self.unsigned)
        self.agreement, self.repaired = again.agreement, again.repaired
        self.proofs |= again.proofs
        self.double |= again.double
        mine.failed |= again.allreduce.failed
        mine.rejected |= again.allreduce.rejected | again.allreduce.reducer.rejected
        mine.used = min(mine.used, again.allreduce.used)

    def _agree(self, others: Set[str], calling: Set[str]) -> None:
        """Compare the votes that were heard. others: members that this one can hear. calling: those that call it.

        Who cannot hear all goes by these, until others tell it of enough votes, without which it does not precommit.
        """
        self._vote()
        electorates = self._electorates
        if self.me not in self.listening and not self._heard_enough():
            heard = {peer: self._voices[peer] for peer in others | {str(self.me)}}
            electorates = electorates_of(heard, steps=self.allreduce.group.steps)
        spoke = electorates[0][0].keys() & (self._answered.keys() | calling | self._told.keys() | {str(self.me)})
        votes = {peer: hashes for peer, hashes in self._votes_heard().items() if peer in spoke}
        dropped = [peer for peer, gone in self._answered.items() if gone]
        self.agreement = agree(self._hashes, votes, electorates, dropped)

    def _vote(self) -> None:
        """Vote on each part on which this member has not voted yet, as its reducer signed; not once it is repeated.

        On an average that the group repeats it votes as who has voted for that.
        """
        group = self.allreduce.group
        for status in self.statuses.values() if self._locked and MISSING in self._votes else ():
            if MISSING not in status.hashes and group.vote(self.me, status.hashes).average == self._locked:
                self._votes = list(status.hashes)
        lacking = {index for index, vote in enumerate(self._votes) if vote == MISSING and self.repetition is None}
        words = self.commitments
        for position in {self.allreduce.parts[index].reducer for index in lacking} - {NOBODY}:
            reducer = self.allreduce.reducers[position]
            own, passed_on = self.allreduce.signed.get(str(reducer)), self.passed_on.get(str(reducer), {})
            for envelope in filter(None, (own, words.get(str(reducer)), *passed_on.values())):
                with contextlib.suppress(NotProven):
                    outputs = signed_by(self.allreduce, position, envelope).outputs
                    signed = dict(zip(self.allreduce.parts_of(reducer), outputs, strict=False))
                    self._votes = [signed.get(n, vote) if n in lacking else vote for n, vote in enumerate(self._votes)]
                    break

    def reducer_of(self, index: int) -> str:
        """Who reduced a part, a backup where it was repeated; "" in a repetition of others."""
        positions = [phase.allreduce.parts[index].reducer for phase in self.phases]
        position = next((position for position in reversed(positions) if position != NOBODY), NOBODY)
        return str(self.allreduce.reducers[position]) if position != NOBODY else ""

    async def _repair(self) -> None:
        """Fetch what is wanted, from one holder after the other, while there is time."""
        for holder in (member for member in self.listening if member != self.me):
            lacking = {
                index: digest
                for index, (digest, holders) in self.agreement.wanted.items()
                if str(holder) in holders and self._hashes[index] == MISSING
            }
            if not lacking or not self.holds():
                continue
            try:
                async with asyncio.timeout(max(0.0, self._ends - loop_time())):
                    mine, stub = self.allreduce, self.allreduce.stub_of(holder)
                    await fetch_parts(stub, mine.group_id, self.store, lacking, mine.patience, mine.traffic)
                    self.asked.add(str(holder))
            except Exception as error:  # the next holder is asked
                logger.info(f"fetching parts from {holder} failed: {error!r}")
        self.repaired = sum(self._hashes[index] != MISSING for index in self.agreement.wanted)


def signed_by(allreduce: AllReduce, position: int, envelope: bytes) -> Commitment:
    """Read the commitment of the reducer at this position to this round. Raises NotProven for anything else."""
    signed, reducer = Commitment.read(envelope, allreduce.signer.opened), str(allreduce.reducers[position])
    place = (allreduce.name, reducer, allreduce.group.shares, position)
    if (signed.name, signed.reducer, signed.shares, signed.position) != place:
        raise NotProven("signed for another round or by somebody else")
    return signed


def unsigned_by(
    allreduce: AllReduce, commitments: Mapping[str, bytes], passed_on: Mapping[str, Mapping[str, bytes]]
) -> dict[str, str]:
    """Other reducers that did not sign the averages that are here, with words. commitments: peer id → envelope.

    Nor do averages count that were made of the parts of half of the members or less: a reducer could say that it did
    not hear of the others. So its word is needed. passed_on: what others say that a reducer signed, of whom nothing was
    heard; it counts if it is true.
    """
    faults = {}
    for position, reducer in enumerate(allreduce.reducers):
        peer, indexes = str(reducer), allreduce.parts_of(reducer)
        if reducer == allreduce.me or not indexes:
            continue
        faults[peer] = UNHEARD
        for envelope in (
            [commitments[peer]] if peer in commitments else sorted({*passed_on.get(peer, {}).values()} - {b""})
        ):
            try:
                signed = signed_by(allreduce, position, envelope)
                held = (allreduce.store.hashes[index] for index in indexes)
                if any(one not in (MISSING, output) for one, output in zip(held, signed.outputs, strict=False)):
                    raise NotProven("signed other averages")
                faults[peer] = ""
                if too_few(signed.complete, len(allreduce.members)):
                    faults[peer] = f"used what {signed.complete} of {len(allreduce.members)} members sent"
                    break
            except NotProven as error:
                if peer in commitments:
                    faults[peer] = f"did not sign its averages ({error})"
    return {peer: words for peer, words in faults.items() if words}
