"""Parts of an average are computed again by members that did not reduce them; a wrong one is proven.

After a committed round a member may pick a part (sampling.py). Its reducer shows the list of inputs to which it
committed, each sender that took part what it sent of this part: all of it was signed (messages.py). What follows from
them must be the average that everybody has. If not, the inputs and signatures together are an `Accusation` that
everybody can check: it is kept, passed on to the other members (evidence.py), and whoever is guilty is in no further
round.

Parts are picked when the averages are signed. A sender that does not show its part keeps the reducer from being proven
guilty, so it is named; and who says nothing keeps no other reducer from being asked in its round. When another round
begins an audit asks for nothing more, as what was sent is overwritten; who has been asked by then, and says nothing at
all, is named all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger

from tt_cli.run import RunConfig, folders
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import AllReduce
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import (
    GROUP_BYTES,
    Accusation,
    Commitment,
    Inputs,
    NotProven,
    RoundRules,
    read_openings,
    verify,
)
from tt_cli.swarm.audit.evidence import Court, EvidenceStore, pass_on
from tt_cli.swarm.audit.sampling import AuditSampler, Place
from tt_cli.swarm.clock import loop_time

logger = get_logger(__name__)

MOST_AUDITS = 4  # rounds of which some wait for an answer at once
AMID_ROUND = 2  # times as long an answer is waited for where another round has begun meanwhile, and has the lines
SHOWING = 16  # members of a round for each one more that is asked at once: an audit of many must end before the next
REFUSING = 0.5  # times the patience: who refuses at once is heard so soon, also amid a round
SOON = 0.125  # times the patience: who has shown nothing by then may do so yet, and the next that looks wrong is asked
APART = 0.125  # times the patience: so early one may overwrite what it sent, before another one's next round begins


@dataclass
class Finding:
    """The outcome of one audit. proven: the accusation, packed. doubts: peer id → what it did that cannot be proven.

    hung: the same of who did not answer.
    """

    proven: bytes = b""
    guilty: str = ""
    doubts: dict[str, str] = field(default_factory=dict)
    hung: dict[str, str] = field(default_factory=dict)


class Audits(ServicerBase):
    """A peer's audits: its own, and those of others; in client mode over the connections on which it sent its parts.

    rules: see `verify`. rounds: the newest rounds of this peer by group, filled by the averager. stub_of: peer id → its
    `Audits`. is_member: tells of an id whether it may be in a round of this peer; nobody else is accused. proofs: every
    process of the peer sees them. usual: norm of the last average, 0 when there is none.
    """

    def __init__(
        self,
        run: RunConfig,
        rules: RoundRules,
        rounds: Mapping[bytes, CommitProtocol],
        stub_of: Callable[[PeerID], Any],
        is_member: Callable[[str], bool],
        proofs: EvidenceStore | None = None,
        sampler: AuditSampler | None = None,
    ):
        self.rules, self.proofs, self.usual = rules, proofs or EvidenceStore(folders.accusations(run)), 0.0
        self._rounds, self._stub_of, self._is_member = rounds, stub_of, is_member
        self._patience = run.swarm.next_chunk_timeout  # seconds for an answer
        # Strangers to this peer's rounds are heard too, as whoever is new here, but not in the others' time.
        self._court, self._court_of_strangers = Court(rules, self.proofs), Court(rules, self.proofs)
        self._showing: asyncio.Task[None] | None = None
        self._doubts: dict[str, str] = {}
        self._audits = set[asyncio.Task[None]]()
        self._sampler = sampler or AuditSampler()

    def begin(self, commit: CommitProtocol) -> dict[str, str]:
        """A round is committed: audit a part in the background. Returns the doubts since the last one."""
        doubts, self._doubts = self._doubts, {}
        self.usual = commit.allreduce.norm_of_average()
        if commit.origin is not None and len(self._audits) < MOST_AUDITS:
            look = self._look(commit.origin, commit.origin is not commit, self._overtaken())
            self._audits.add(audit := asyncio.create_task(look))
            audit.add_done_callback(self._audits.discard)
        return doubts

    async def _look(self, commit: CommitProtocol, late: bool, overtaken: Callable[[], bool]) -> None:
        """Audit parts of each phase, up to one whose reducer shows what is its own.

        late: rounds later than its own; nobody need have kept what it sent then.
        """
        async with asyncio.TaskGroup() as audits:
            for phase in commit.phases:
                silent, pick = set[PeerID](), self._sampler.pick
                while not overtaken() and (place := await asyncio.to_thread(pick, phase.allreduce, silent)) is not None:
                    shows = asyncio.Future[None]()
                    look = self._look_at(phase, place, late, overtaken, partial(shows.set_result, None))
                    soon, first = SOON * self._patience, asyncio.FIRST_COMPLETED
                    await asyncio.wait({audits.create_task(look), shows}, timeout=soon, return_when=first)
                    if shows.done():
                        break
                    silent.add(place[0])

    async def _look_at(
        self, phase: CommitProtocol, place: Place, late: bool, overtaken: Callable[[], bool], shows: Callable[[], None]
    ) -> None:
        allreduce = phase.allreduce
        finding = await self.audit(allreduce, place, phase.checked, overtaken, shows)
        since = [self._proven(Finding(), Accusation.read(unlike)) for unlike in phase.proofs.values()]
        for one in (finding, *since):
            if one.proven and self.proofs.keep(one.guilty, one.proven):
                others = {str(peer) for peer in allreduce.members if peer != allreduce.me} - {one.guilty}
                await self._pass_on({one.guilty: sorted(others)})
        if finding.doubts:
            await asyncio.sleep(APART * self._patience)
        if not late:
            self._doubts |= finding.hung | ({} if overtaken() else finding.doubts)

    async def audit(
        self,
        allreduce: AllReduce,
        place: Place,
        commitments: Mapping[str, bytes],
        overtaken: Callable[[], bool] = lambda: False,
        shows: Callable[[], None] = lambda: None,
    ) -> Finding:
        """Compute one part again. Never raises for what others do.

        commitments: peer id → envelope. shows: called once the reducer has shown its inputs, and its own part of them.
        """
        reducer, index = place
        envelope, finding = commitments.get(str(reducer)), Finding()
        if envelope is None:
            return finding

        async def ask(peer: PeerID, part: int | None, signed: bytes) -> bytes:
            asked = loop_time()
            try:
                if peer == allreduce.me:
                    answer = allreduce.encoded(allreduce.parts_of(reducer)[index])
                else:
                    request = wire.AUDIT_REQUEST.message((allreduce.name.group_id, str(reducer), part))
                    answer = await self._answer(peer, request, overtaken)
                if hashlib.sha256(answer).digest() != signed:
                    raise ValueError("it showed something else than it signed")
                return answer
            except Exception as error:
                if loop_time() > asked + REFUSING * self._patience:  # it may have waited for the next round to say so
                    raise TimeoutError from error
                raise

        try:
            commitment = Commitment.read(envelope, self.rules.opened)
            packed = await ask(reducer, None, commitment.inputs)
        except TimeoutError:
            return Finding(hung={str(reducer): "did not show its inputs in time"})
        except Exception as error:  # P2P errors of many types
            words = f"did not show its inputs ({str(error) or type(error).__name__})"
            return Finding(doubts={str(reducer): words})
        try:
            inputs = Inputs.read(packed)
            openings = read_openings(inputs, commitment, self.rules)
        except NotProven:
            return self._proven(finding, Accusation(envelope, packed, index, ()))
        used = {opening.sender: count for opening, count in zip(openings, inputs.used, strict=True)}
        if not used.keys() <= allreduce.group.limits.keys():  # as it signed these itself, it is the one to name
            return Finding(doubts={str(reducer): "averaged what nobody in the round sent"})
        if used.get(str(allreduce.me), 0) <= index and allreduce.weight > 0.0 and str(reducer) not in allreduce.failed:
            finding.doubts[str(reducer)] = "left out what this peer sent"
        if str(reducer) not in used:
            shows()
        shown, me = dict[str, bytes](), str(allreduce.me)
        # who may lie first; all members audit at about the same time: each goes on with the one after itself
        order = iter(sorted(openings, key=lambda one: (one.sender != str(reducer), one.sender <= me)))

        async def ask_one_after_the_other() -> None:
            for opening in order:
                if overtaken() or lacking:
                    return
                sender = PeerID.from_base58(opening.sender)
                try:
                    counts = used[opening.sender] > index and opening.hashes
                    shown[opening.sender] = await ask(sender, index, opening.hashes[index]) if counts else b""
                    if sender == reducer:
                        shows()
                except Exception as error:  # P2P errors of many types
                    logger.info(f"an audit of {reducer} came to no end: {opening.sender}: {error!r}")
                    lacking.add(sender)
                    said = finding.hung if isinstance(error, TimeoutError) else finding.doubts
                    said[opening.sender] = "did not show what it sent"

        lacking = set[PeerID]()
        await asyncio.gather(*(ask_one_after_the_other() for _ in range(1 + len(openings) // SHOWING)))
        if len(shown) < len(openings):
            return finding
        parts = tuple(shown[opening.sender] for opening in openings)
        return await asyncio.to_thread(self._proven, finding, Accusation(envelope, packed, index, parts))

    async def _answer(self, peer: PeerID, request: runtime_pb2.ExpertInfo, overtaken: Callable[[], bool]) -> bytes:
        """A member's answer to an audit. Raises TimeoutError, and whatever the connection raises."""
        call = asyncio.ensure_future(self._stub_of(peer).rpc_audit(request, timeout=AMID_ROUND * self._patience))
        try:
            _, waits = await asyncio.wait({call}, timeout=self._patience)
            if waits and not overtaken():
                raise TimeoutError
            return bytes((await call).serialized_info)
        finally:
            call.cancel()

    def _overtaken(self) -> Callable[[], bool]:
        """Tell from now on whether another round has begun."""
        newest = list(self._rounds)[-1:]
        return lambda: list(self._rounds)[-1:] != newest

    def _proven(self, finding: Finding, accusation: Accusation) -> Finding:
        with contextlib.suppress(NotProven):
            finding.guilty = verify(accusation, self.rules)
            finding.proven = accusation.pack()
        return finding

    def show(self, lacking: Mapping[str, list[str]]) -> None:
        """Show the proofs against the guilty to peers that do not have them (ids), unless that is being done."""
        if self._showing is None or self._showing.done():
            self._showing = asyncio.create_task(self._pass_on(lacking))

    async def _pass_on(self, lacking: Mapping[str, list[str]]) -> None:
        for guilty, peers in lacking.items():
            if proof := self.proofs.read(guilty):
                await pass_on(proof, guilty, map(PeerID.from_base58, peers), self._stub_of, self._patience)

    async def rpc_audit(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """A member of a round is shown what this peer sent, or the list of what it reduced, after the transfer."""
        group_id, reducer, index = wire.AUDIT_REQUEST.read(request)
        commit = self._rounds.get(group_id[:GROUP_BYTES])
        for phase in commit.phases if commit is not None else ():
            if phase.allreduce.group_id == group_id:
                if not phase.over.is_set():
                    raise ValueError("who asked could send as its own what this peer is still sending")
                shown = phase.allreduce.show(str(context.remote_id), reducer, index)
                return runtime_pb2.ExpertInfo(serialized_info=shown)
        raise ValueError("no such round here")

    async def rpc_accuse(
        self, stream: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> runtime_pb2.ExpertInfo:
        """A member shows that a reducer made a wrong average."""
        async with asyncio.timeout(self._patience):
            (accused,) = wire.ACCUSED.read(await anext(stream))
        if accused not in self.proofs.guilty():
            met = {str(peer) for commit in self._rounds.values() for peer in commit.members}
            if accused not in met and not self._is_member(accused):
                raise ValueError("nobody here knows the accused")
            court = self._court if (accuser := str(context.remote_id)) in met else self._court_of_strangers
            await court.hear(stream, accused, accuser, self._patience)
        return runtime_pb2.ExpertInfo(serialized_info=accused.encode())
