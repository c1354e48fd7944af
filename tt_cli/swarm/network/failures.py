"""hivemind's failures in words for a person: of which kind they are, and what is done about them."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 160  # letters


@dataclass(frozen=True)
class SwarmFailure:
    """One failure. what: its kind, by which failures are counted: matchmaking, transfer, DHT, state, …"""

    what: str
    words: str
    remedy: str


_REMEDIES = {
    "clock": "set it by the network's time: sudo timedatectl set-ntp true",
    "matchmaking": "the group is sought again",
    "transfer": "the round is repeated, with the gradients kept",
    "state": "it is asked for again; what came is kept",
    "connection": "it is made again",
    "p2p daemon": "it is started again if it has ended",
    "DHT": "it is asked again; `tt doctor` says more if it lasts",
}
# The first that matches counts. Words: None for the text itself, where it is in plain words already.
_KINDS: tuple[tuple[str, str, str | None], ...] = (
    (r"local time must be within", "clock", "this machine's clock differs from the others' by more than 3 s"),
    (r"only \d+ of \d+ trainers came|the group includes", "matchmaking", None),
    (r"unlike bytes of \d+ parts|of the average arrived", "transfer", None),
    (r"no peer handed over|hand over a state|nothing came for|the averager process", "state", None),
    (
        r"failed to dial|no addresses|[Cc]onnection ?(refused|reset)|Connection\w*Error|stream reset|BrokenPipe|EOF",
        "connection",
        "a connection to another peer broke",
    ),
    (
        r"p2pd|p2p daemon|P2PDaemonError|ControlFailure|DispatchFailure",
        "p2p daemon",
        "the p2p daemon of this peer does not answer",
    ),
    (
        r"could not find a group|[Mm]atchmaking|join_group|looking for group|disband|no group",
        "matchmaking",
        "no group formed in time",
    ),
    (r"[Aa]ll-?[Rr]educe|aggregate_part|BAD_GROUP|the round failed", "transfer", "the transfer broke"),
    (r"\bdht\b|DHT", "DHT", "the DHT does not answer"),
)


def classify(failure: BaseException | str, otherwise: str = "hivemind") -> SwarmFailure:
    """Kind of a failure of hivemind's, or of what is built on it. otherwise: the kind of one that is unknown."""
    said = printable(" ".join(str(failure).split()))
    name = type(failure).__name__ if isinstance(failure, BaseException) else ""
    text = ": ".join(filter(None, (name, said)))
    for pattern, what, words in _KINDS:
        if re.search(pattern, text):
            return SwarmFailure(what, (words or said.removeprefix("the round failed: "))[:LONGEST], _REMEDIES[what])
    if re.search(r"^$|^(TimeoutError|CancelledError|InvalidStateError)\b|[Tt]imed? ?out", text):
        text = "there was no answer in time"
    return SwarmFailure(otherwise, text[:LONGEST], "it is tried again")


def printable(words: str) -> str:
    """One short line: another peer may have chosen some of these words, and a terminal will show them."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in words).split())[:200]
