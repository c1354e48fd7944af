"""The swarm at one moment, worked out from the records that its peers publish. Pure: records in, numbers out.

Notable:
- only trainers count towards samples, rates and loss; auxiliary peers are listed;
- the loss is the median over trainers, so that one wrong record cannot move it far;
- two peers agree when their digests are equal at the same step; where no digest has the most votes at a
  step, nobody there is said to agree.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from tt_cli.identity.passes import Notice, Words
from tt_cli.swarm.records.consensus import SwarmState, voters_among
from tt_cli.swarm.records.peer_record import (
    MAX_NUMBER,
    Count,
    Finite,
    Hex,
    HistoryRecord,
    Loss,
    PeerFigures,
    PeerRecord,
    figure,
)

if TYPE_CHECKING:
    from tt_cli.run import RunConfig

MAX_PEERS = 20_000
Name = Annotated[str, StringConstraints(max_length=300)]
MAX_LOSS = 1e6
"""Nats per token. A record with a larger loss, or a negative one, is wrong and is not counted."""

Sum = Annotated[int, Field(ge=0, le=10**16)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False, le=1e16)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Made = tuple[Count, Annotated[float, Field(allow_inf_nan=False)], Finite]
"""A global step: its number, its loss, the Unix time."""


class PeerView(PeerFigures):
    """One peer as the swarm sees it: what it tells of itself, and what follows from the others' records."""

    lag: Count = figure("integer: steps behind the swarm", "lag", cells=(3, 6), keep=6)
    share: Share = figure("number from 0 to 1: its part of the swarm's samples per second", "share", "share", keep=7)
    in_agreement: bool = figure("boolean: its digest is the majority's at its step", "agrees", "yes or no")
    clipped_by: Count = figure("integer: peers that saw its gradient clipped again and again", "clipped by")
    accused_by: Count = figure(
        "integer: peers that say that they have a proof that it made a wrong average", "accused by"
    )
    slow_by: Count = figure(
        "integer: peers that say that it costs them more time than its samples are worth, or hides from audits",
        "slow by",
    )
    age_s: Finite = figure("number: seconds since it published this", "seen", "seconds", keep=4)


class SwarmNow(BaseModel):
    """The swarm's figures at one moment, and its peers."""

    model_config = ConfigDict(frozen=True)

    run: Name = figure("text: the run's name", unit="text")
    identity: Name = figure("text: the name and a hash of everything that changes training", unit="text")
    time: Finite = figure("number: Unix seconds of this snapshot", unit="text")
    epoch: Count = figure("integer: global steps done", metric="tt_step")
    total_steps: Count = figure("integer: global steps of the whole run")
    target_batch_size: Count = figure("integer: samples that make one global step")
    samples: Sum = figure(
        "integer: samples accumulated by the swarm towards the next step", metric="tt_samples_towards_step"
    )
    inner_steps: Sum | None = figure("integer or null: of all trainers since the last global step", default=None)
    inner_steps_due: Sum | None = figure("integer or null: such as make one global step", default=None)
    samples_per_second: Rate = figure("number: of all trainers together", unit="per second")
    eta_s: Finite | None = figure("number or null: seconds to the next step", unit="seconds")
    loss: Loss | None = figure("number or null: median training loss of the trainers' last steps", unit="loss")
    digest: Hex = figure(
        "text: of the state that most peers at this step have; empty where there is no majority", unit="digest"
    )
    holders: Count = figure("integer: peers that have a state of this step", metric="tt_state_holders")
    agreeing: Count = figure("integer: those of them that hold the digest", metric="tt_state_agreeing")
    resynced_chunks: Sum = figure("integer: of all peers together")
    trainers: Count = figure("integer: training peers")
    names_checked: bool = figure(
        "boolean: a pass vouches for each user's name; else all are self-given", unit="text", default=False
    )
    paused: Words = figure("text: why the organiser paused the run; empty while it goes on", unit="text", default="")
    peers: Annotated[list[PeerView], Field(max_length=MAX_PEERS, description="list of objects, trainers first:")]

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the run's last step at the present rate, None for unknown."""
        steps = self.total_steps - self.epoch
        if steps <= 0 or self.eta_s is None or not self.samples_per_second:
            return None
        return self.eta_s + (steps - 1) * self.target_batch_size / self.samples_per_second


class SwarmSnapshot(SwarmNow):
    """The swarm at one moment, with its past as far as an auxiliary peer published it."""

    history: list[Made] = Field(
        description="list of [step, loss, Unix seconds], oldest first, from an auxiliary peer; empty without one"
    )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values (lists, not tuples; no infinity), with the keys of SNAPSHOT_FIELDS in order."""
        return self.model_dump(mode="json")


SAID = "clipped", "accused", "slow"  # of others, by their peer ids
PEER_FIELDS, SNAPSHOT_FIELDS = (
    {name: field.description or "" for name, field in model.model_fields.items()} for model in (PeerView, SwarmSnapshot)
)


def take_snapshot(
    run: RunConfig, records: list[PeerRecord], history: HistoryRecord | None, now: float, notice: Notice | None = None
) -> SwarmSnapshot:
    """Work out the swarm's state from one valid record per peer. now: Unix seconds. notice: the organiser's newest.

    The swarm's epoch is the one that most voters agree on; before anybody votes the largest of
    any trainer, or of any auxiliary peer where nobody trains. Samples of trainers behind it are not counted: they
    belong to a step that has been made without them.
    """
    trainers = [record for record in records if record.role == "trainer"]
    view = SwarmState.of(records)
    epoch = view.epoch if voters_among(records) else max((record.epoch for record in trainers or records), default=0)
    level = [record for record in trainers if record.epoch == epoch]
    per_second = view.samples_per_second()
    target = run.swarm.target_batch_size
    samples = sum(record.samples for record in level)
    due = -(-target // run.optimizer.inner_batch) if run.optimizer.name == "local" else None
    losses = [record.loss for record in level if record.loss is not None and _possible(record.loss)]
    steps = sorted(step for step in history.steps if _possible(step[1])) if history is not None else []
    if not losses and steps:
        losses = [steps[-1][1]]
    paused = notice.paused if notice is not None else ""
    eta = max(0, target - samples) / per_second if per_second and not paused else math.inf
    majority = _majorities(records)
    said = {
        name: Counter(peer_id for record in records for peer_id in set(getattr(record, name)) - {record.peer_id})
        for name in SAID
    }
    peers = [
        PeerView(
            **{name: vars(record)[name] for name in PeerFigures.model_fields},
            lag=max(0, epoch - record.epoch),
            share=min(1.0, record.samples_per_second / per_second) if per_second and record.role == "trainer" else 0.0,
            in_agreement=bool(record.digest) and record.digest == majority.get(record.epoch),
            **{f"{name}_by": said[name][record.peer_id] for name in SAID},
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
        inner_steps=sum(record.inner_steps or 0 for record in level) if due is not None else None,
        inner_steps_due=due,
        samples_per_second=per_second,
        eta_s=eta if eta <= MAX_NUMBER else None,
        loss=statistics.median(losses) if losses else None,
        digest=majority.get(epoch, ""),
        holders=len(holders),
        agreeing=sum(peer.in_agreement for peer in holders),
        resynced_chunks=sum(peer.resynced_chunks for peer in peers),
        trainers=len(trainers),
        names_checked=run.membership.closed,
        paused=paused,
        peers=peers,
        history=steps,
    )


def _possible(loss: float) -> bool:
    return 0.0 <= loss <= MAX_LOSS


def _majorities(records: list[PeerRecord]) -> dict[int, str]:
    """The digest that most peers have, by step; steps where two digests have equally many are left out."""
    foremost: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for (epoch, digest), count in Counter(record.state for record in records if record.digest).most_common():
        foremost[epoch].append((digest, count))
    return {e: first[0] for e, (first, *others) in foremost.items() if not others or first[1] > others[0][1]}
