"""The swarm at one moment, worked out from the records that its peers publish. Pure: records in, numbers out.

Notable:
- only trainers count towards samples, rates and loss; auxiliary peers are listed;
- the loss is the median over trainers, so that one wrong record cannot move it far;
- two peers agree when their digests are equal at the same step; where no digest has the most votes at a
  step, nobody there is said to agree.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tt_cli.run import RunConfig
    from tt_cli.swarm.records.peer_record import HistoryRecord, PeerRecord

MAX_LOSS = 1e6
"""Nats per token. A record with a larger loss, or a negative one, is wrong and is not counted."""

SNAPSHOT_FIELDS: Mapping[str, str] = {
    "run": "text: the run's name",
    "identity": "text: the name and a hash of everything that changes training",
    "time": "number: Unix seconds of this snapshot",
    "epoch": "integer: global steps done",
    "total_steps": "integer: global steps of the whole run",
    "target_batch_size": "integer: samples that make one global step",
    "samples": "integer: samples accumulated by the swarm towards the next step",
    "samples_per_second": "number: of all trainers together",
    "eta_s": "number or null: seconds to the next step",
    "loss": "number or null: median training loss of the trainers' last steps",
    "digest": "text: of the state that most peers at this step have; empty where there is no majority",
    "holders": "integer: peers that have a state of this step",
    "agreeing": "integer: those of them that hold the digest",
    "resynced_chunks": "integer: of all peers together",
    "trainers": "integer: training peers",
    "peers": "list of objects, trainers first:",
    "history": "list of [step, loss, Unix seconds], oldest first, from an auxiliary peer; empty without one",
}
PEER_FIELDS: Mapping[str, str] = {
    "peer_id": "text",
    "user": "text: Hugging Face user, empty where the run asks for none",
    "role": '"trainer", "assistant" or "aux"',
    "device": "text",
    "client_mode": "boolean: others cannot dial this peer",
    "epoch": "integer: global steps that its parameters have seen",
    "lag": "integer: steps behind the swarm",
    "samples_per_second": "number",
    "share": "number from 0 to 1: its part of the swarm's samples per second",
    "samples": "integer: accumulated towards the next step",
    "total_samples": "integer: since it first joined",
    "loss": "number or null: of its last step",
    "round": "text: its last averaging round in words",
    "digest": "text: of its parameters and optimizer state, empty before it has any",
    "in_agreement": "boolean: its digest is the majority's at its step",
    "resynced_chunks": "integer: chunks of its state that it took again, as they differed from the others' at one step",
    "clipped_by": "integer: peers that saw its gradient clipped again and again",
    "accused_by": "integer: peers that say that they have a proof that it made a wrong average",
    "slow_by": "integer: peers that say that it holds them up for longer than its samples are worth",
    "age_s": "number: seconds since it published this",
}


@dataclass(frozen=True)
class PeerView:
    """One peer as the swarm sees it; the fields are those of PEER_FIELDS."""

    peer_id: str
    user: str
    role: str
    device: str
    client_mode: bool
    epoch: int
    lag: int
    samples_per_second: float
    share: float
    samples: int
    total_samples: int
    loss: float | None
    round: str
    digest: str
    in_agreement: bool
    resynced_chunks: int
    clipped_by: int
    accused_by: int
    slow_by: int
    age_s: float


@dataclass(frozen=True)
class SwarmSnapshot:
    """The swarm at one moment; the fields are those of SNAPSHOT_FIELDS."""

    run: str
    identity: str
    time: float
    epoch: int
    total_steps: int
    target_batch_size: int
    samples: int
    samples_per_second: float
    eta_s: float | None
    loss: float | None
    digest: str
    holders: int
    agreeing: int
    resynced_chunks: int
    trainers: int
    peers: list[PeerView]
    history: list[tuple[int, float, float]]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values (lists, not tuples; no infinity), with the keys of SNAPSHOT_FIELDS in order."""
        fields = dataclasses.asdict(self)
        fields["history"] = [list(step) for step in self.history]
        return fields


def take_snapshot(
    run: RunConfig, records: list[PeerRecord], history: HistoryRecord | None, now: float
) -> SwarmSnapshot:
    """Work out the swarm's state from one valid record per peer. now: Unix seconds.

    The swarm's epoch is the one that most voters agree on; before anybody votes the largest of
    any trainer, or of any auxiliary peer where nobody trains. Samples of trainers behind it are not counted: they
    belong to a step that has been made without them.
    """
    from tt_cli.swarm.records.consensus import SwarmState

    trainers = [record for record in records if record.role == "trainer"]
    view = SwarmState.of(records)
    epoch = view.epoch if view.voters else max((record.epoch for record in trainers or records), default=0)
    level = [record for record in trainers if record.epoch == epoch]
    per_second = view.samples_per_second()
    target = run.swarm.target_batch_size
    samples = sum(record.samples for record in level)
    losses = [record.loss for record in level if record.loss is not None and _possible(record.loss)]
    steps = sorted(step for step in history.steps if _possible(step[1])) if history is not None else []
    if not losses and steps:
        losses = [steps[-1][1]]
    eta = max(0, target - samples) / per_second if per_second else math.inf
    majority = _majorities(records)
    clipped = Counter(peer_id for record in records for peer_id in set(record.clipped) - {record.peer_id})
    accused = Counter(peer_id for record in records for peer_id in set(record.accused) - {record.peer_id})
    slow = Counter(peer_id for record in records for peer_id in set(record.slow) - {record.peer_id})
    peers = [
        PeerView(
            peer_id=record.peer_id,
            user=record.user,
            role=record.role,
            device=record.device,
            client_mode=record.client_mode,
            epoch=record.epoch,
            lag=max(0, epoch - record.epoch),
            samples_per_second=record.samples_per_second,
            share=record.samples_per_second / per_second if record.role == "trainer" and per_second else 0.0,
            samples=record.samples,
            total_samples=record.total_samples,
            loss=record.loss,
            round=record.round,
            digest=record.digest,
            in_agreement=bool(record.digest) and record.digest == majority.get(record.epoch),
            resynced_chunks=record.resynced_chunks,
            clipped_by=clipped[record.peer_id],
            accused_by=accused[record.peer_id],
            slow_by=slow[record.peer_id],
            age_s=max(0.0, now - record.time),
        )
        for record in sorted(records, key=lambda r: (r.role != "trainer", -r.total_samples, r.peer_id))
    ]
    holders = [peer for peer in peers if peer.epoch == epoch and peer.digest]
    return SwarmSnapshot(
        run=run.run.name,
        identity=run.identity,
        time=now,
        epoch=epoch,
        total_steps=run.schedule.total_steps,
        target_batch_size=target,
        samples=samples,
        samples_per_second=per_second,
        eta_s=eta if math.isfinite(eta) else None,
        loss=statistics.median(losses) if losses else None,
        digest=majority.get(epoch, ""),
        holders=len(holders),
        agreeing=sum(peer.in_agreement for peer in holders),
        resynced_chunks=sum(peer.resynced_chunks for peer in peers),
        trainers=len(trainers),
        peers=peers,
        history=steps,
    )


def _possible(loss: float) -> bool:
    return 0.0 <= loss <= MAX_LOSS


def _majorities(records: list[PeerRecord]) -> dict[int, str]:
    """The digest that most peers have, by step; steps where two digests have equally many are left out."""
    votes: dict[int, Counter[str]] = {}
    for record in records:
        if record.digest:
            votes.setdefault(record.epoch, Counter())[record.digest] += 1
    found = {}
    for epoch, counter in votes.items():
        first, *others = counter.most_common(2)
        if not others or first[1] > others[0][1]:
            found[epoch] = first[0]
    return found
