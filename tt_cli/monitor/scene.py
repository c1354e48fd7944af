"""The state of `tt monitor`'s screen at one moment: the swarm now, its past, and who contributed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.text import Text

from tt_cli.supervisor.slot import SeenSlot
from tt_cli.swarm.records.snapshot import PeerView, SwarmNow, SwarmSnapshot
from tt_cli.terminal.format import clean, duration, fit, loss_value, plural, rate, short_digest, short_id
from tt_cli.terminal.live_view import clock
from tt_cli.terminal.swarm_lines import Curve
from tt_cli.web.schemas import Leader

SLOW = 0.25
"""Of the speed of the trainer in the middle: who is slower is said to be slow."""
SILENT = 60.0  # seconds after which a peer's record is old
DAY, EVER = "day", "ever"


class Active(NamedTuple):
    """The swarm's size and speed at a Unix time, or their means over a stretch that ends there."""

    time: float
    trainers: float
    samples_per_second: float


@dataclass(frozen=True)
class Scene:
    """One moment. now, asked_since: Unix seconds.

    empty: the last look found nobody; snapshot is then the last one that showed somebody. trouble: why the last look
    failed, "" if it did not. source: where the snapshot comes from, in words; past_from: where the past does, "" where
    nobody recorded it; past_trouble: why it could not be asked. leaders: by window. log: (Unix time, words), oldest
    first.
    """

    run: str
    identity: str
    now: float
    asked_since: float
    empty: bool = True
    trouble: str = ""
    source: str = ""
    past_from: str = ""
    past_trouble: str = ""
    snapshot: SwarmSnapshot | None = None
    curve: Curve = ()
    activity: list[Active] = field(default_factory=list)
    leaders: dict[str, list[Leader]] = field(default_factory=dict)
    mine: list[SeenSlot] = field(default_factory=list)
    log: list[tuple[float, str]] = field(default_factory=list)
    flops_per_sample: int = 0

    @property
    def answered(self) -> float | None:
        """Unix time when peers were last seen, None for never."""
        return self.snapshot.time if self.snapshot is not None and self.snapshot.peers else None

    def alarm(self, patience: float) -> str:
        """Tell what keeps the run, or the screen from being true, "" for nothing. patience: seconds for an answer."""
        if self.answered is None:
            waits = f"asking since {duration(self.now - self.asked_since)}"
            if self.trouble:
                return f"{self.trouble}; {waits}"
            if self.snapshot is not None:
                return f"no peer trains: nobody has published anything for this run; {waits}"
            return f"looking for peers ({self.source}); {waits}" if self.now - self.asked_since > 3 else ""
        silence = self.now - self.answered
        assert self.snapshot is not None
        if not self.empty and not self.trouble and silence <= patience:
            return pause_words(self.snapshot)
        seen = f"{plural(len(self.snapshot.peers), 'peer')} at step {self.snapshot.epoch:,}, {clock(self.answered)}"
        why = f" ({self.trouble})" if self.trouble else ""
        return f"no peer answers since {duration(silence)}; last seen: {seen}{why}"

    def summary(self) -> str:
        """One line to leave on the terminal."""
        seen = "no peer was seen"
        if self.answered is not None and self.snapshot is not None:
            loss = f", loss {loss_value(self.snapshot.loss)}" if self.snapshot.loss is not None else ""
            seen = f"step {self.snapshot.epoch:,}{loss}, {plural(self.snapshot.trainers, 'trainer')}"
        return f"{self.identity}: {seen}; watched for {duration(self.now - self.asked_since)}"

    @property
    def flops(self) -> float | None:
        """Speed of the whole swarm in FLOP/s: forward and backward pass, recomputation not counted."""
        return self.flops_per_sample * self.snapshot.samples_per_second if self.snapshot is not None else None


def flops_words(flops: float | None) -> str:
    """45.0 GFLOP/s, 12.1 TFLOP/s, 1.20 PFLOP/s; "" for unknown."""
    if flops is None:
        return ""
    for unit, size in (("G", 1e9), ("T", 1e12)):
        if flops < 999.5 * size:
            return f"{rate(flops / size)} {unit}FLOP/s"
    return f"{rate(flops / 1e15)} PFLOP/s"


def pause_words(swarm: SwarmNow) -> str:
    """The sentence about the organiser's pause, "" while the run goes on."""
    return f"the organiser paused the run: {clean(swarm.paused)}" if swarm.paused else ""


def peer_name(peer: PeerView, swarm: SwarmNow) -> str:
    """User, after ~ where that is self-given, and end of the peer id; a long name is cut, so that the id is seen."""
    user = fit(Text(clean(peer.user)), 14).plain
    return f"{'' if swarm.names_checked else '~'}{user} {short_id(peer.peer_id)}" if user else short_id(peer.peer_id)


def middle_speed(snapshot: SwarmNow) -> float:
    """Samples per second of the trainer in the middle of those that compute."""
    speeds = sorted(peer.samples_per_second for peer in snapshot.peers if peer.samples_per_second > 0)
    return speeds[len(speeds) // 2] if speeds else 0.0


def standing(peer: PeerView, trainers: int) -> list[str]:
    """What most trainers say against a peer, the worst first: by itself, anybody can say it of anybody."""
    said = (
        ("made a wrong average", peer.accused_by),
        ("is clipped again and again", peer.clipped_by),
        ("is left out for some steps: it held the others up", peer.slow_by),
    )
    return [words for words, count in said if count and 2 * count >= trainers]


def remarks(peer: PeerView, trainers: int, middle: float) -> list[str]:
    """Name what is not as it should be with a peer, the worst first. trainers: how many there are."""
    words = []
    if peer.accused_by and 2 * peer.accused_by >= trainers:
        words.append(f"made a wrong average, say {plural(peer.accused_by, 'peer')}")
    elif peer.accused_by:
        words.append(f"accused by {plural(peer.accused_by, 'peer')}")
    if peer.digest and not peer.in_agreement:
        words.append(f"differs: holds {short_digest(peer.digest)}")
    if peer.clipped_by:
        words.append(f"clipped, say {plural(peer.clipped_by, 'peer')}")
    if peer.slow_by:
        out = "left out: " if 2 * peer.slow_by > trainers else ""
        words.append(f"{out}holds others up, say {plural(peer.slow_by, 'peer')}")
    if peer.lag and peer.role == "trainer":  # an aux peer takes the state only now and then
        words.append(f"{plural(peer.lag, 'step')} behind")
    if peer.age_s > SILENT:
        words.append(f"silent for {duration(peer.age_s)}")
    if peer.role == "trainer" and peer.digest and peer.samples_per_second < SLOW * middle:
        words.append("slow" if peer.samples_per_second else "computes nothing now")
    if not peer.digest:
        words.append("has no state yet")
    return words


def leaders_now(snapshot: SwarmSnapshot) -> list[Leader]:
    """Contributions of the users who are here now, by their own account; nobody recorded the others."""
    peers_of: dict[str, list[PeerView]] = defaultdict(list)
    for peer in snapshot.peers:
        if peer.role == "trainer":
            peers_of[peer.user or peer.peer_id].append(peer)
    whole = sum(peer.total_samples for peers in peers_of.values() for peer in peers) or 1
    rows = []
    for user, peers in peers_of.items():
        given, seen = sum(peer.total_samples for peer in peers), snapshot.time - min(peer.age_s for peer in peers)
        rows.append(Leader(user=user, samples=given, seconds=0, peers=len(peers), share=given / whole, last_seen=seen))
    return rows
