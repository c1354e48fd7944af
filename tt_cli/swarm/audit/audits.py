"""Parts of an average are computed again by members that did not reduce them; a wrong one is proven.

After a committed round a member may pick a part (sampling.py). Its reducer shows the list of inputs to which it
committed, each sender that took part what it sent of this part: all of it was signed (messages.py). What follows from
them must be the average that everybody has. If not, the inputs and signatures together are an `Accusation` that
everybody can check: it is kept, passed on to the other members (evidence.py), and whoever is guilty is in no further
round.

A reducer cannot know which parts will be looked at, for they are picked when its averages are signed. A sender that
does not show its part keeps the reducer from being proven guilty, so it is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils import get_logger

from tt_cli.run import RunConfig, folders
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.allreduce import AllReduce, too_few
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import (
    Accusation,
    Commitment,
    Inputs,
    NotProven,
    RoundRules,
    input_hash,
    read_openings,
    verify,
)
from tt_cli.swarm.audit.evidence import Court, EvidenceStore, pass_on
from tt_cli.swarm.audit.sampling import AuditSampler, Place

logger = get_logger(__name__)

ANSWERS = 8  # that one member gets for a round


@dataclass
class Finding:
    """The outcome of one audit. proven: the accusation, packed. doubts: peer id → what it did that cannot be proven."""

    proven: bytes = b""
    guilty: str = ""
    doubts: dict[str, str] = field(default_factory=dict)


def commitments_in(commit: CommitProtocol) -> dict[str, bytes]:
    """Member → what it signed, of those that were heard."""
    return {peer: status.commitment for peer, status in commit.statuses.items()}


def unsigned(
    allreduce: AllReduce, commitments: Mapping[str, bytes], passed_on: Mapping[str, Collection[bytes]] | None = None
) -> dict[str, str]:
    """Other reducers that did not sign the averages that everybody has, with words. commitments: peer id → envelope.

    Nor do averages count that were made of the parts of half of the members or less: a reducer could say that it did
    not hear of the others. passed_on: what others say that a reducer signed, of whom nothing was heard; it counts if it
    is true.
    """
    found = {}
    for reducer in allreduce.reducers:
        name, signed = str(reducer), []
        if reducer == allreduce.me or not allreduce.parts_of(reducer):
            continue
        for envelope in [commitments[name]] if name in commitments else (passed_on or {}).get(name, ()):
            try:
                signed.append(_commitment(allreduce, reducer, envelope).complete)
            except NotProven as error:
                if name in commitments:
                    found[name] = f"did not sign its averages ({error})"
        for complete in signed:
            if too_few(complete, len(allreduce.members)):
                found[name] = f"used what {complete} of {len(allreduce.members)} members sent"
    return found


def _commitment(allreduce: AllReduce, reducer: PeerID, envelope: bytes) -> Commitment:
    commitment = Commitment.read(envelope)
    place = (allreduce.name, str(reducer), len(allreduce.reducers), allreduce.reducers.index(reducer))
    if (commitment.name, commitment.reducer, commitment.reducers, commitment.position) != place:
        raise NotProven("signed for another round or by somebody else")
    if commitment.outputs != tuple(allreduce.store.hashes[index] for index in allreduce.parts_of(reducer)):
        raise NotProven("signed other averages")
    return commitment


class Shown:
    """Answers to the audits of others: this peer's inputs as a reducer, and its own parts as a sender."""

    def __init__(self, allreduce: AllReduce):
        self._allreduce = allreduce
        self._asked: Counter[str] = Counter()

    def answer(self, asker: str, reducer: str, index: int | None) -> bytes:
        """index: of the part among the reducer's; None for the list of its inputs. Raises ValueError."""
        allreduce = self._allreduce
        known = {str(member): member for member in allreduce.members}
        if asker not in known or reducer not in known:
            raise ValueError("not a member of this round")
        self._asked[asker] += 1
        if self._asked[asker] > ANSWERS + len(allreduce.members):
            raise ValueError("asked too often")
        if index is None:
            return allreduce.inputs
        indexes = allreduce.parts_of(known[reducer])
        if not 0 <= index < len(indexes):
            raise ValueError("no such part")
        return allreduce.encoded(indexes[index])


async def audit(
    allreduce: AllReduce,
    picked: Place | None,
    commitments: Mapping[str, bytes],
    rules: RoundRules,
    stub_of: Callable[[PeerID], Any],
    patience: float,
) -> Finding:
    """Compute one part again, if one was picked. Never raises for what others do."""
    finding = Finding()
    if picked is None or str(picked[0]) not in commitments:
        return finding
    reducer, index = picked

    async def ask(peer: PeerID, part: int | None) -> bytes:
        if peer == allreduce.me:
            return allreduce.encoded(allreduce.parts_of(reducer)[index])
        request = wire.AUDIT_REQUEST.message((allreduce.name.group_id, str(reducer), part))
        answer = await stub_of(peer).rpc_audit(request, timeout=patience)
        return bytes(answer.serialized_info)

    with contextlib.suppress(NotProven):  # told already, see `unsigned`
        envelope = commitments[str(reducer)]
        commitment = _commitment(allreduce, reducer, envelope)
        try:
            packed = await ask(reducer, None)
            if hashlib.sha256(packed).digest() != commitment.inputs:
                raise ValueError("it showed other inputs than it signed")
        except Exception as error:  # P2P errors of many types
            finding.doubts[str(reducer)] = f"did not show its inputs ({str(error) or type(error).__name__})"
            return finding
        try:
            inputs = Inputs.read(packed)
            openings = read_openings(inputs, commitment)
        except NotProven:
            return _proven(finding, Accusation(envelope, packed, index, ()), rules)
        used = {opening.sender: count for opening, count in zip(openings, inputs.used, strict=True)}
        if used.get(str(allreduce.me), 0) <= index and allreduce.weight > 0.0 and str(reducer) not in allreduce.failed:
            finding.doubts[str(reducer)] = "left out what this peer sent"
        parts = []
        for opening in openings:
            encoded = b""
            if used[opening.sender] > index:
                try:
                    encoded = await ask(PeerID.from_base58(opening.sender), index)
                    if input_hash(encoded) != opening.hashes[index]:
                        raise ValueError("it showed another part than it signed")
                except Exception as error:  # P2P errors of many types
                    logger.info(f"an audit of {reducer} came to no end: {opening.sender}: {error!r}")
                    finding.doubts[opening.sender] = "did not show what it sent"
                    return finding
            parts.append(encoded)
        return await asyncio.to_thread(_proven, finding, Accusation(envelope, packed, index, tuple(parts)), rules)
    return finding


def _proven(finding: Finding, accusation: Accusation, rules: RoundRules) -> Finding:
    with contextlib.suppress(NotProven):
        finding.guilty = verify(accusation, rules)
        finding.proven = accusation.pack()
    return finding


class Audits(ServicerBase):
    """A peer's audits: its own, and those of others. In client mode too: others reach it by the
    connection over which it sent its parts.

    rules: see `verify`. rounds: the newest rounds of this peer by group, filled by the averager. proofs: every process
    of the peer sees them. usual: norm of the last average, 0 when there is none.
    """

    def __init__(
        self,
        run: RunConfig,
        rules: RoundRules,
        rounds: Mapping[bytes, tuple[AllReduce, CommitProtocol]],
    ):
        self.rules, self.proofs, self.usual = rules, EvidenceStore(folders.accusations(run)), 0.0
        self._rounds, self._patience = rounds, run.swarm.next_chunk_timeout  # seconds for an answer
        # Strangers to this peer's rounds are heard too, as whoever is new here, but not in the others' time.
        self._court, self._court_of_strangers = Court(rules, self.proofs), Court(rules, self.proofs)
        self._showing: asyncio.Task[None] | None = None
        self._shown: dict[bytes, Shown] = {}
        self._doubts: dict[str, str] = {}
        self._audit: asyncio.Task[None] | None = None
        self._picker = AuditSampler()

    def unsigned(self, allreduce: AllReduce, commit: CommitProtocol) -> dict[str, str]:
        """Reducers that did not sign the averages that everybody has, with words: no step is made with those."""
        return unsigned(allreduce, commitments_in(commit), commit.passed_on)

    def begin(self, allreduce: AllReduce, commit: CommitProtocol, stub_of: Callable[[PeerID], Any]) -> dict[str, str]:
        """A round is committed: audit one part in the background. Returns the doubts of the audit before."""
        commitments, doubts, self._doubts = commitments_in(commit), self._doubts, {}
        self.usual = allreduce.norm_of_average()
        if self._audit is not None:
            self._audit.cancel()
        self._audit = asyncio.create_task(self._look(allreduce, commitments, stub_of))
        return doubts

    async def _look(
        self, allreduce: AllReduce, commitments: Mapping[str, bytes], stub_of: Callable[[PeerID], Any]
    ) -> None:
        picked = await asyncio.to_thread(self._picker.pick, allreduce)
        finding = await audit(allreduce, picked, commitments, self.rules, stub_of, self._patience)
        if list(self._rounds)[-1:] == [allreduce.group_id]:  # else what was sent may be gone
            self._doubts |= finding.doubts
        if finding.proven and self.proofs.keep(finding.guilty, finding.proven):
            others = [peer for peer in allreduce.members if peer != allreduce.me and str(peer) != finding.guilty]
            await self._pass_on(finding.guilty, others, stub_of)

    def show(self, lacking: Mapping[str, list[str]], stub_of: Callable[[PeerID], Any]) -> None:
        """Show the proofs against the guilty to peers that do not have them (ids), unless that is being done."""

        async def showing() -> None:
            for guilty, peers in lacking.items():
                await self._pass_on(guilty, [PeerID.from_base58(peer) for peer in peers], stub_of)

        if self._showing is None or self._showing.done():
            self._showing = asyncio.create_task(showing())

    async def _pass_on(self, guilty: str, peers: list[PeerID], stub_of: Callable[[PeerID], Any]) -> None:
        if packed := self.proofs.read(guilty):
            await pass_on(packed, guilty, peers, stub_of, self._patience)

    async def rpc_audit(self, request: runtime_pb2.ExpertInfo, context: P2PContext) -> runtime_pb2.ExpertInfo:
        """A member of a round is shown what this peer sent, or the list of what it reduced."""
        group_id, reducer, index = wire.AUDIT_REQUEST.read(request)
        found = self._rounds.get(group_id)
        if found is None:
            raise ValueError("no such round here")
        shown = self._shown.setdefault(group_id, Shown(found[0]))
        self._shown = {group: each for group, each in self._shown.items() if group in self._rounds}
        return runtime_pb2.ExpertInfo(serialized_info=shown.answer(str(context.remote_id), reducer, index))

    async def rpc_accuse(
        self, stream: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> runtime_pb2.ExpertInfo:
        """A member shows that a reducer made a wrong average."""
        accuser, known = str(context.remote_id), self.proofs.guilty()
        async with asyncio.timeout(self._patience):
            (guilty,) = wire.ACCUSED.read(await anext(stream))
        if guilty not in known:
            together = any(context.remote_id in allreduce.members for allreduce, _ in self._rounds.values())
            guilty = await (self._court if together else self._court_of_strangers).hear(stream, accuser, self._patience)
        return runtime_pb2.ExpertInfo(serialized_info=guilty.encode())
