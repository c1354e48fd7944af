"""What every peer publishes about itself on the DHT: one signed record, the source of every screen.

The record lies under `<run identity>_peers`, one subkey per signing key, and expires by itself. Every DHT node
of the run refuses records of another form, records that their owner did not sign (hivemind's
`RSASignatureValidator`), and records that speak for a peer id other than their key's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Text = Annotated[str, StringConstraints(max_length=80)]
Hex = Annotated[str, StringConstraints(max_length=64, pattern=r"^[0-9a-f]*$")]
Finite = Annotated[float, Field(ge=0.0, allow_inf_nan=False, le=1e12)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Loss = Annotated[float, Field(allow_inf_nan=False, ge=-1e39, le=1e39)]  # any fp32; weighted means stay finite


class PeerRecord(BaseModel):
    """One peer's own account of itself.

    epoch: global steps its parameters have seen. digest: of its parameters and optimizer state at that epoch;
    peers of one epoch and unlike digests never average together. samples: accumulated towards the next step.
    role: "trainer" or "aux" (an auxiliary peer without a state yet has the digest ""). loss: mean training loss
    of its last step, None before the first. resynced_chunks: chunks of its state that it had to take again at the same
    step, because they differed from the others'. left: the peer said goodbye.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    peer_id: Text
    role: Annotated[str, StringConstraints(pattern=r"^(trainer|aux)$")]
    user: Text = ""
    version: Text = ""
    device: Text = ""
    client_mode: bool
    epoch: Count
    digest: Hex
    samples: Count
    samples_per_second: Finite
    total_samples: Count
    micro_batch: Count = 0
    loss: Loss | None = None
    text_loss: Loss | None = None
    image_loss: Loss | None = None
    round: Text = ""
    bytes_sent: Count = 0
    bytes_received: Count = 0
    rejected_micro_batches: Count = 0
    resynced_chunks: Count = 0
    left: bool = False
    time: Finite


@dataclass
class About:
    """What this peer tells the others about itself, beside its progress."""

    user: str = ""
    version: str = ""
    device: str = ""
    micro_batch: int = 0


class HistoryRecord(BaseModel):
    """The auxiliary peer's memory of the run, for those who come later: recent steps, oldest first.

    steps: (epoch, loss, unix time) of up to 256 steps, thinned evenly when there were more.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[list[tuple[Count, Annotated[float, Field(allow_inf_nan=False)], Finite]], Field(max_length=256)]


def peers_key(identity: str) -> str:
    """The DHT key of a run's peer records."""
    return f"{identity}_peers"


def history_key(identity: str) -> str:
    """The DHT key of the auxiliary peers' histories."""
    return f"{identity}_history"
