"""Typed events, which a worker process sends its supervisor: one JSON object a line.

The screen, plain log lines, `--json`, the demo and the tests all read these same events; a worker prints
nothing else that anyone parses. Add a field with a default rather than change the meaning of one.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

STEPPED = ("committed", "alone")
"""Outcomes of rounds after which a step is made."""

EVENTS: dict[str, type[Event]] = {}
"""By their kinds."""

Emit: TypeAlias = "Callable[[Event], None]"
"""Receiver of a worker's events."""


@dataclass(frozen=True)
class Event:
    """One thing that happened. `at` is Unix time in seconds; `kind` is the class's name in lower case."""

    kind: ClassVar[str] = ""
    at: float = field(default_factory=time.time, kw_only=True)

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()
        EVENTS[cls.kind] = cls

    def to_json(self) -> str:
        """One line of JSON without a newline; `kind` names the class."""
        return json.dumps({"kind": self.kind, **dataclasses.asdict(self)}, ensure_ascii=False)


@dataclass(frozen=True)
class Log(Event):
    """A line for a person. level: "info", "warning" or "error"."""

    message: str
    level: str = "info"


@dataclass(frozen=True)
class Choice(Event):
    """An automatic choice and its reason: ("micro-batch", "16", "fastest of 4, 8, 16, 32 on cpu")."""

    what: str
    value: str
    reason: str


@dataclass(frozen=True)
class Card(Event):
    """The GPU that trains. uuid: as nvidia-smi tells it, "GPU-…"."""

    uuid: str


@dataclass(frozen=True)
class Phase(Event):
    """The peer's phase, and why: starting, syncing, training, averaging, waiting or leaving; of a supervisor
    also paused. until: Unix time at which that will change, where it is known.
    """

    phase: str
    reason: str = ""
    until: float | None = None


@dataclass(frozen=True)
class Listening(Event):
    """The DHT is up: who this peer is and where others reach it (full multiaddrs with /p2p/…)."""

    peer_id: str
    addresses: list[str]
    client_mode: bool


@dataclass(frozen=True)
class Progress(Event):
    """The way to the next global step, sent about once a second.

    epoch: global steps done. samples/target_samples: of the whole swarm towards the next one.
    my_share: this peer's part of the swarm's samples per second, 0 to 1. eta: seconds to the next step, None while
    nobody computes. bytes_sent/bytes_received: gradients and state since the start. loss: mean of the last
    micro-batches. figures: what else the task measures, such as the loss of text, means by name. inner_steps: with
    local steps, those of this peer since the last global one. inner_steps_due: those that it will have made for the
    next one, as far as is known. sent_per_hour/received_per_hour: bytes, over the last global steps.
    """

    epoch: int
    samples: int
    target_samples: int
    peers: int
    my_samples: int
    my_samples_per_second: float
    swarm_samples_per_second: float
    my_share: float
    eta: float | None
    loss: float | None
    bytes_sent: int
    bytes_received: int
    rejected_micro_batches: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    inner_steps: int | None = None
    inner_steps_due: int | None = None
    sent_per_hour: int = 0
    received_per_hour: int = 0


@dataclass(frozen=True)
class Contribution(Event):
    """This peer's gradients entered a committed round (sent once, after the first one)."""

    epoch: int
    samples: int


@dataclass(frozen=True)
class Round(Event):
    """The end of an averaging round.

    outcome: "committed" (averaged and stepped), "alone" (the only peer, stepped), "failed" (repeated with
    the gradients still held), "dropped" (others stepped without this peer: it synchronises).
    received: part of the averaged gradient that arrived, 0 to 1. rejected: members whose parts were refused,
    with the reason. words: for the screen. mended: parts that came from another member than their reducer. differing:
    parts in whose bytes members differed. clipped: members whose gradient was moved towards the others', and in which
    share of its parts.

    seconds, by phase: encode (this peer's gradient), matchmaking, transfer (of which reduce is this peer's CPU time),
    commit (comparing, mending), apply (decoding, the optimizer's step, the digest), whole.
    """

    epoch: int
    outcome: str
    words: str
    members: list[str]
    received: float
    samples: int
    seconds: dict[str, float]
    rejected: dict[str, str] = field(default_factory=dict)
    mended: int = 0
    differing: int = 0
    clipped: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step(Event):
    """A global step was made; `epoch` counts them. digest: of parameters and optimizer state after it."""

    epoch: int
    loss: float | None
    learning_rate: float
    gradient_norm: float
    digest: str


@dataclass(frozen=True)
class Download(Event):
    """A state is on its way here, told about once a second.

    received/total: bytes. donors: that give now. bytes_per_second: over the last seconds. eta: seconds to the end,
    None while nothing comes.
    """

    received: int
    total: int
    donors: int = 0
    bytes_per_second: float = 0.0
    eta: float | None = None


@dataclass(frozen=True)
class Synchronised(Event):
    """State was taken over: from a peer id, or "backup" or "seed" (fresh weights).

    chunks: of the state that were taken; names: which, as "tensor[number]", when they are few.
    """

    epoch: int
    source: str
    digest: str
    seconds: float
    bytes: int
    chunks: int = 0
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint was written."""

    epoch: int
    path: str


@dataclass(frozen=True)
class Snapshot(Event):
    """The auxiliary peer's view of the swarm (fields of `tt monitor --json`)."""

    swarm: dict[str, Any]


@dataclass(frozen=True)
class Trouble(Event):
    """Something failed that the peer lives with; counted by `what`, which is one or two words: "state download".

    words: what happened and why, in one line. remedy: what the peer does about it, or what a person can do.
    """

    what: str
    words: str
    remedy: str = ""


@dataclass(frozen=True)
class Failure(Event):
    """The worker cannot go on: one line, and the exit code that fits it."""

    message: str
    exit_code: int = 1


@dataclass(frozen=True)
class Finished(Event):
    """The worker ends by itself; nothing comes after this."""

    reason: str


def from_json(line: str) -> Event:
    """Read a line written by `Event.to_json`. Raises ValueError for anything else."""
    data = json.loads(line)
    if not isinstance(data, dict) or str(data.get("kind")) not in EVENTS:
        raise ValueError(f"not an event: {line[:120]}")
    cls = EVENTS[data.pop("kind")]
    names = {f.name for f in dataclasses.fields(cls)}
    try:
        return cls(**{key: value for key, value in data.items() if key in names})
    except TypeError as error:
        raise ValueError(f"not a {cls.kind} event: {error}") from error
