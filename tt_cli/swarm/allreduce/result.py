"""The result of a round."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tt_cli.swarm.allreduce.allreduce import too_few
from tt_cli.swarm.allreduce.commit import UNHEARD, CommitProtocol
from tt_cli.swarm.allreduce.lateness import beyond_most, longer_of, read_waits

UNLIKE, DOUBLE = "signed unlike averages", "signed unlike votes"


@dataclass(frozen=True)
class RoundResult:
    """One round, as this member saw it.

    complete: the average in the store is whole and finite, this peer may step. members: peer id → what it said about
    itself (samples, loss; {} when that got lost). received: what came from the reducers, 0 to 1. repaired: parts that
    came from other members. differing: parts in whose bytes members differed. rejected: peer id → why what it sent was
    refused. failed: peer id → why its parts of the average did not all come. disputed: reducers of parts of which no
    bytes had a majority. overtaken: it was given up, for others have made the step. seconds: of each phase.
    clipped: peer id → the share of the parts in which it was clipped. guilty: peers that were ever proven to have made
    a wrong average. doubts: peer id → what the last audit could not clear up. workless: see `WorkAudits.look`. late:
    peer id → seconds for which it held the round up. waited: peer id → for which members it waited, as it says, and for
    how many seconds. share: of the average that this peer reduced; None where it could not be asked to. voted: it voted
    for an average from this state, which others may have made a step. given: its gradient is in the average. repeated:
    that was made in an earlier round. voting: who was in a round with this average, as far as this peer was in it.
    """

    complete: bool = False
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    received: float = 0.0
    repaired: int = 0
    differing: int = 0
    rejected: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    disputed: frozenset[str] = frozenset()
    overtaken: bool = False
    problem: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)
    guilty: frozenset[str] = frozenset()
    doubts: dict[str, str] = field(default_factory=dict)
    workless: dict[str, str] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)
    waited: dict[str, dict[str, float]] = field(default_factory=dict)
    share: float | None = None
    voted: bool = False
    given: bool = True
    repeated: bool = False
    voting: frozenset[str] = frozenset()

    @classmethod
    def alone(cls, peer_id: str, samples: int, loss: float) -> RoundResult:
        """Of a peer without others. loss: summed over its samples."""
        members = {peer_id: {"samples": samples, "loss": loss}}
        return cls(complete=True, members=members, received=1.0, voting=frozenset(members))

    def samples_and_loss(self) -> tuple[int, float | None]:
        """Samples of all members and their mean loss, from what they said.

        Of three and more each counts as one between half and twice the median member's: a liar changes little.
        """
        said = [(account["samples"], account["loss"]) for account in self.members.values() if account.get("samples")]
        if not said:
            return 0, None
        middle = statistics.median(loss / samples for samples, loss in said)
        low, high = sorted((middle / 2, 2 * middle)) if len(said) > 2 else (-math.inf, math.inf)
        total = sum(samples for samples, _ in said)
        return total, sum(samples * min(max(loss / samples, low), high) for samples, loss in said) / total


def outcome_of(
    commit: CommitProtocol, received: float, doubts: dict[str, str], guilty: frozenset[str], seconds: dict[str, float]
) -> RoundResult:
    """The result of a round that this peer has committed or dropped. received: before parts were repaired."""
    transfer, agreement = commit.allreduce, commit.agreement
    members, statuses = list(map(str, transfer.members)), commit.statuses | {str(transfer.me): commit.status()}
    silent = {peer: why for peer, why in commit.unsigned.items() if why == UNHEARD or peer not in commit.commitments}
    disputed = frozenset(map(commit.reducer_of, agreement.disputed))
    return RoundResult(
        complete=not commit.dropped,
        members={
            member: _believed(statuses[member].said, transfer.reducer.limits[member]) if member in statuses else {}
            for member in members
        },
        received=received,
        repaired=commit.repaired,
        differing=len(agreement.differing),
        # what was seen first explains the rest
        rejected=dict(commit.unsigned.items() - silent.items())
        | dict.fromkeys(commit.double, DOUBLE)
        | dict.fromkeys(commit.proofs, UNLIKE)
        | transfer.rejected
        | transfer.reducer.rejected,
        failed=silent | transfer.failed,
        disputed=disputed - {str(transfer.me)},
        problem=_problem(commit, received) if commit.dropped else "",
        seconds={**seconds, "reduce": transfer.reducer.seconds},
        clipped=_clipped(commit),
        guilty=guilty,
        doubts=doubts,
        late=late_of(commit),
        waited=_waited_for(commit),
        share=transfer.share,
        given=commit.origin is not None and commit.origin.allreduce.weight > 0.0,
        repeated=commit.origin is not commit,
        voting=commit.voting,
    )


def _believed(said: dict[str, Any], most: float) -> dict[str, Any]:
    """Bound a member's account to the samples that it may claim: more would make the others' share nothing."""
    if said.get("samples", 0) <= most:
        return said
    return {"samples": int(most), "loss": said["loss"] * int(most) / said["samples"]}


def _clipped(commit: CommitProtocol) -> dict[str, float]:
    """Shares of parts in which peers were clipped, as reducers say, none of them about more parts than it has."""
    transfer, counts = commit.allreduce, Counter[str]()
    statuses = commit.statuses | {str(transfer.me): commit.status()}
    for reducer in transfer.reducers:
        parts = len(transfer.parts_of(reducer))
        for peer, count in statuses[str(reducer)].clipped.items() if str(reducer) in statuses else ():
            counts[peer] += min(count, parts)
    return {peer: counts[peer] / len(transfer.parts) for peer in map(str, transfer.members) if counts[peer]}


def late_of(commit: CommitProtocol) -> dict[str, float]:
    """Members that held the round up as this peer saw it, in the transfer and after it."""
    late = dict[str, float]()
    for phase in commit.phases:
        late = longer_of(late, longer_of(phase.allreduce.waits(), beyond_most(phase.heard_at)))
    return {peer: seconds for peer, seconds in late.items() if seconds > 0.0 and peer != str(commit.me)}


def _waited_for(commit: CommitProtocol) -> dict[str, dict[str, float]]:
    """For which members of the round the others say that they waited, the longest wait first."""
    members, waited = set(map(str, commit.members)), dict[str, dict[str, float]]()
    for member, status in commit.statuses.items():
        waits = read_waits(status.waited)
        if known := {other: seconds for other, seconds in waits.items() if other in members}:
            waited[member] = known
    return waited


def _problem(commit: CommitProtocol, received: float) -> str:
    transfer, agreement = commit.allreduce, commit.agreement
    if commit.proofs:
        return "; ".join(f"{peer}: {UNLIKE}" for peer in commit.proofs)
    if agreement.disputed:
        return f"members hold unlike bytes of {len(agreement.disputed)} parts of the average"
    if agreement.unheard:
        return f"{agreement.unheard} what they received"
    if too_few(transfer.used, len(transfer.members)):
        return f"this peer received what {transfer.used} of {len(transfer.members)} members sent"
    if commit.unsigned:
        return "; ".join(f"{peer}: {why}" for peer, why in commit.unsigned.items())
    if commit.precommitted:
        return f"only {len(commit.precommits)} of {len(transfer.members)} members precommitted"
    if agreement.unconfirmed:
        return f"too few members know {len(agreement.unconfirmed)} parts of the average"
    part = math.floor(received * 1000) / 10
    reasons = "; ".join(f"{peer}: {why}" for peer, why in transfer.failed.items())
    return f"only {part} % of the average arrived ({reasons or 'a reducer left'}), and no member has the rest"
