"""The result of a round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tt_cli.swarm.allreduce.allreduce import AllReduce, too_few
from tt_cli.swarm.allreduce.commit import Agreement, CommitProtocol, PartStatus, may_step
from tt_cli.swarm.allreduce.lateness import beyond_most, read_waits


@dataclass(frozen=True)
class RoundResult:
    """One round, as this member saw it.

    complete: the average in the store is whole and finite, this peer may step. members: peer id → what it said about
    itself (samples, loss; {} when that got lost). received: what came from the reducers, 0 to 1. repaired: parts that
    came from other members. differing: parts in whose bytes members differed. rejected: peer id → why what it sent was
    refused. failed: peer id → why its parts of the average did not all come. disputed: reducers of parts of which no
    bytes had a majority. overtaken: it was given up, for others have made the step. seconds: of each phase.
    clipped: peer id → the share of the parts in which it was clipped. guilty: peers that were ever proven to have made
    a wrong average. doubts: peer id → what the last audit could not clear up. late: peer id → seconds for which it held
    the round up. waited: peer id → for which members it waited, as it says, and for how many seconds.
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
    late: dict[str, float] = field(default_factory=dict)
    waited: dict[str, dict[str, float]] = field(default_factory=dict)

    def samples_and_loss(self) -> tuple[int, float | None]:
        """Samples of all members and their mean loss, from what they said."""
        said = [each for each in self.members.values() if each.get("samples")]
        samples = sum(each["samples"] for each in said)
        return samples, sum(each["loss"] for each in said) / samples if samples else None


def outcome_of(
    allreduce: AllReduce,
    commit: CommitProtocol,
    agreement: Agreement,
    received: float,
    unsigned: dict[str, str],
    doubts: dict[str, str],
    seconds: dict[str, float],
) -> RoundResult:
    """The result of a round that this peer has committed or dropped.

    received: before parts were repaired. unsigned: reducers that did not sign.
    """
    statuses = commit.statuses | {str(allreduce.me): commit.status()}
    whole = may_step(allreduce, agreement) and not unsigned
    return RoundResult(
        complete=whole,
        members={str(peer): statuses[str(peer)].said if str(peer) in statuses else {} for peer in allreduce.members},
        received=received,
        repaired=commit.repaired,
        differing=len(agreement.differing),
        rejected=unsigned | allreduce.rejected | allreduce.reducer.rejected,  # what was seen first explains the rest
        failed=dict(allreduce.failed),
        disputed=_disputed(allreduce, agreement),
        problem="" if whole else _problem(allreduce, agreement, received, unsigned),
        seconds={**seconds, "reduce": allreduce.reducer.seconds},
        clipped=_clipped(allreduce, statuses),
        doubts=doubts,
        late=late_of(allreduce, commit),
        waited=waited_for(allreduce, commit),
    )


def _clipped(allreduce: AllReduce, statuses: Mapping[str, PartStatus]) -> dict[str, float]:
    """Shares of parts in which peers were clipped, as reducers say, none of them about more parts than it has."""
    counts: Counter[str] = Counter()
    for reducer in allreduce.reducers:
        parts = len(allreduce.parts_of(reducer))
        for peer, count in statuses[str(reducer)].clipped.items() if str(reducer) in statuses else ():
            counts[peer] += min(count, parts)
    return {str(peer): counts[str(peer)] / len(allreduce.parts) for peer in allreduce.members if counts[str(peer)]}


def late_of(allreduce: AllReduce, commit: CommitProtocol) -> dict[str, float]:
    """Members that held the round up as this peer saw it, in the transfer and after it."""
    waits, settled = allreduce.waits(), beyond_most(commit.heard_at)
    late = {str(peer): max(waits.get(str(peer), 0.0), settled.get(str(peer), 0.0)) for peer in allreduce.members}
    return {peer: seconds for peer, seconds in late.items() if seconds > 0.0 and peer != str(allreduce.me)}


def waited_for(allreduce: AllReduce, commit: CommitProtocol) -> dict[str, dict[str, float]]:
    """For which members of the round the others say that they waited, the longest wait first."""
    members = {str(peer) for peer in allreduce.members}
    told = {one: read_waits(status.waited) for one, status in commit.statuses.items() if one in members}
    kept = {one: {other: s for other, s in waits.items() if other in members} for one, waits in told.items()}
    return {one: waits for one, waits in kept.items() if waits}


def _disputed(allreduce: AllReduce, agreement: Agreement) -> frozenset[str]:
    """Reducers of parts about which members disagree, but for this peer."""
    reducers = {allreduce.reducers[allreduce.parts[index].reducer] for index in agreement.disputed}
    return frozenset(str(reducer) for reducer in reducers if reducer != allreduce.me)


def _problem(allreduce: AllReduce, agreement: Agreement, received: float, unsigned: dict[str, str]) -> str:
    if agreement.disputed:
        return f"members hold unlike bytes of {len(agreement.disputed)} parts of the average"
    if agreement.unheard:
        return f"{agreement.unheard} what they received"
    if too_few(allreduce.used, len(allreduce.members)):
        return f"this peer received what {allreduce.used} of {len(allreduce.members)} members sent"
    if may_step(allreduce, agreement):
        return "; ".join(f"{peer}: {why}" for peer, why in unsigned.items())
    part = math.floor(received * 1000) / 10
    reasons = "; ".join(f"{peer}: {why}" for peer, why in allreduce.failed.items())
    return f"only {part} % of the average arrived ({reasons or 'a reducer left'}), and no member has the rest"
