"""The record that every peer publishes about itself on the DHT: signed, and the source of every screen.

The record lies under `<run identity>_peers`, one subkey per signing key, and expires by itself. Every DHT node
of the run refuses records of another form, records that their owner did not sign (hivemind's
`RSASignatureValidator`), records that speak for a peer id other than their key's, and in a closed run those without a
pass for it. What a record claims is believed within bounds: see consensus.py and claim_limits.py.

A figure of a peer is declared once, as a field of `PeerFigures` with `figure(...)`: what it means, its label and its
unit. `tt monitor --json`, the tables of the terminal, the page's answers and their description at /openapi.json, and
the metrics take it from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from tt_cli.identity.passes import MAX_PASS

MAX_NUMBER = 1e12
RENEW_SECONDS = 15.0  # between two records of a peer, at most: what tells that it is there, or leads, is no older
Text = Annotated[str, StringConstraints(max_length=80)]
Hex = Annotated[str, StringConstraints(max_length=64, pattern=r"^[0-9a-f]*$")]
Finite = Annotated[float, Field(ge=0.0, allow_inf_nan=False, le=MAX_NUMBER)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Moved = Annotated[int, Field(ge=0, lt=2**53)]  # bytes since a process began: a line of 1 Gbit/s takes two years
Named = Annotated[list[Text], Field(max_length=8)]
PassText = Annotated[str, StringConstraints(max_length=MAX_PASS)]
Role = Annotated[str, StringConstraints(pattern=r"^(trainer|assistant|aux)$")]
Loss = Annotated[float, Field(allow_inf_nan=False, ge=-1e39, le=1e39)]  # any fp32; weighted means stay finite
FigureName = Annotated[str, StringConstraints(max_length=24, pattern=r"^[a-z][a-z0-9_]*$")]
Figures = Annotated[dict[FigureName, Loss], Field(max_length=4)]


Unit = Literal[
    "text", "digest", "link", "count", "bytes", "per second", "share", "seconds", "loss", "yes or no", "figures"
]
"""Units by which a screen writes a value: link is a boolean, true for a peer that others cannot dial."""


def figure(
    meaning: str,
    label: str = "",
    unit: Unit = "count",
    *,
    cells: tuple[int, int] | None = None,
    keep: int = 0,
    **more: Any,
) -> Any:
    """The declaration of a field that every screen shows.

    meaning: its JSON type and what it says. label: before its value, and above its column. cells: least and most of its
    column, where they are not those of its unit. keep: columns with the smallest are left out first. more: its default,
    and `metric`, its name for Prometheus where that is not `tt_` and the field's.
    """
    shown = {"label": label, "unit": unit, "cells": list(cells or ()), "keep": keep, "metric": more.pop("metric", "")}
    return Field(description=meaning, json_schema_extra={name: value for name, value in shown.items() if value}, **more)


class PeerFigures(BaseModel):
    """The figures that a peer tells of itself and every screen shows."""

    model_config = ConfigDict(frozen=True)

    peer_id: Text = figure("text", "peer id", "text")
    user: Text = figure(
        "text: Hugging Face user; in a run without logins the name that it gives itself, or empty",
        "user",
        "text",
        default="",
    )
    role: Role = figure('"trainer", "assistant" or "aux"', "role", "text", cells=(7, 9), keep=3)
    device: Text = figure("text", "device", "text", cells=(10, 28), keep=2, default="")
    version: Text = figure("text: of the program that it runs", "version", "text", default="")
    client_mode: bool = figure("boolean: others cannot dial this peer", "link", "link", keep=5)
    epoch: Count = figure("integer: global steps that its parameters have seen", "step")
    samples_per_second: Finite = figure("number", "samples/s", "per second", keep=9)
    samples: Count = figure("integer: accumulated towards the next step", "samples")
    total_samples: Count = figure("integer: since it first joined", "in all")
    inner_steps: Count | None = figure("integer or null: since the last global step", "inner steps", default=None)
    sent_per_hour: Count = figure("integer: bytes, over its last global steps", "up an hour", "bytes", default=0)
    received_per_hour: Count = figure("integer: bytes, over its last global steps", "down an hour", "bytes", default=0)
    loss: Loss | None = figure("number or null: of its last step", "loss", "loss", default=None)
    figures: Figures = figure("object: at most four named numbers of what is trained", "figures", "figures", default={})
    round: Text = figure(
        "text: its last averaging round in words", "last round", "text", cells=(16, 60), keep=1, default=""
    )
    digest: Hex = figure("text: of its parameters and optimizer state, empty before it has any", "digest", "digest")
    resynced_chunks: Count = figure(
        "integer: chunks of its state that it took again, as they differed from the others' at one step",
        "resynced",
        default=0,
    )


class PeerRecord(PeerFigures):
    """One peer's own account of itself: its figures, and what the swarm's other members need to know of it.

    Peers of one epoch and unlike digests never average together. role: an assistant takes part in rounds and computes
    nothing. left: the peer said goodbye. vote: it takes part in the swarm's steps and has been in touch since the last
    one, see `records.consensus`. pass_text: its pass, in a closed run. session: the key that signs what changes in the
    record, in hexadecimal, which its DHT node writes. clipped: peer ids of those whose gradients it
    saw clipped again and again. accused: of those against whom it has a proof. slow: of those that hold the others up
    for longer than their samples are worth, or leave its audits unanswered. era: of the run, as the organiser's orders
    number it, to which its state belongs. lease: of an auxiliary peer that could lead the others, the Unix time since
    when it does, 0 while it does not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    micro_batch: Count = 0
    bytes_sent: Moved = 0
    bytes_received: Moved = 0
    left: bool = False
    vote: bool = False
    clipped: Named = []
    accused: Named = []
    slow: Named = []
    pass_text: PassText = ""
    session: Hex = ""
    era: Count = 0
    lease: Finite | None = None
    time: Finite

    @property
    def averages(self) -> bool:
        """True for a member that makes the run's steps in rounds with the others: a trainer, or an assistant."""
        return self.role != "aux"

    @property
    def state(self) -> tuple[int, str]:
        """(epoch, digest) of the state that it holds."""
        return self.epoch, self.digest

    def untold(self, seconds: float) -> float:
        """Samples that it has computed so many seconds after it told this, if it is as fast still.

        Whole micro-batches, as only these count, and those of the time until it tells again at most.
        """
        size = self.micro_batch or 1
        return size * (self.samples_per_second * min(RENEW_SECONDS, max(0.0, seconds)) // size)

    def changed(self, **fields: Any) -> PeerRecord:
        """The record with these fields, which are not checked; itself where it has them."""
        known = self.__dict__
        return self if all(known[name] == value for name, value in fields.items()) else self.model_copy(update=fields)


@dataclass
class About:
    """Facts that this peer tells the others about itself, beside its progress. role: as in `PeerRecord`."""

    role: str = "trainer"
    user: str = ""
    version: str = ""
    device: str = ""
    micro_batch: int = 0


class HistoryRecord(BaseModel):
    """The auxiliary peer's memory of the run, for those who come later: recent steps, oldest first.

    steps: (epoch, loss, unix time) of up to 256 steps, thinned evenly when there were more. The rest is as in
    `PeerRecord`; the board fills it in.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    peer_id: Text = ""
    role: Annotated[str, StringConstraints(pattern=r"^aux$")] = "aux"
    pass_text: PassText = ""
    time: Finite = 0.0
    steps: Annotated[list[tuple[Count, Annotated[float, Field(allow_inf_nan=False)], Finite]], Field(max_length=256)]


def peers_key(identity: str) -> str:
    """The DHT key of a run's peer records."""
    return f"{identity}_peers"


def history_key(identity: str) -> str:
    """The DHT key of the auxiliary peers' histories."""
    return f"{identity}_history"
