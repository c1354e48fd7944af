"""Diagnosis of a peer that makes no step: from facts to a cause in words, from a cause to remedies.

Nothing here looks at a clock or touches the swarm; `watchdog.py` gathers the facts and carries the remedies out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from tt_cli.swarm.network.connectivity import Connectivity
from tt_cli.swarm.network.reachability import Astray

CLOCK_SECONDS = 3.0  # hivemind's own bound: a peer whose clock is off by more cannot join anybody
PULSE_SECONDS = 120.0  # without a sign of life from the averager's process
DATA_SECONDS, DEVICE_SECONDS = 120.0, 300.0  # without a batch of data, a micro-batch; at least
USUAL_TIMES, BATCH_TIMES = 3.0, 20.0  # how often the usual time of a step, of a micro-batch
STANDSTILL_SECONDS = 90.0  # of a state download
READ_SECONDS = 6.0  # for the others' records on the DHT
STARTING_SECONDS = 300.0  # in which who answers may try out micro-batches yet, and has no record
FAILED_ROUNDS = 3  # in a row
NAMED = 4


class Remedy(StrEnum):
    """A remedy that a peer tries by itself; the words follow "it"."""

    WAIT = "waits"
    REJOIN = "connects to all the peers that it knows again"
    REMATCH = "seeks its group anew"
    RESYNC = "asks for the state anew"
    RESTART = "starts again from its backup"


@dataclass(frozen=True)
class PeerFacts:
    """Facts of a peer and its swarm at one moment. Times are seconds, `since_…` how long ago.

    usual_step: what a step should take, from the newest ones and from the swarm's speed. patience: of one round, the
    run's matchmaking_time and averaging_timeout. since_growth: since the swarm's samples grew. download: bytes that
    came, all, bytes a second. missing: names of trainers without which there is no quorum. alone: no other trainer is
    seen. lost_company: there were some, and not all said goodbye. unmet: how long nobody of this run has been seen at
    all, not even an aux peer. listening: some trainer accepts connections.
    """

    phase: str = "training"
    since_phase: float = 0.0
    since_step: float = 0.0
    usual_step: float = 10.0
    patience: float = 30.0
    samples: int = 0
    target: int = 1
    samples_per_second: float = 0.0
    since_growth: float = 0.0
    reading: bool = False
    held: bool = False
    since_batch: float = 0.0
    usual_batch: float = 1.0
    since_read: float = 0.0
    since_pulse: float = 0.0
    download: tuple[int, int, float] | None = None
    since_bytes: float = 0.0
    failed_rounds: int = 0
    problem: str = ""
    missing: tuple[str, ...] = ()
    alone: bool = False
    lost_company: bool = False
    unmet: float = 0.0
    client_mode: bool = False
    listening: bool = True
    contact: Connectivity | None = None
    astray: Astray | None = None

    @property
    def late(self) -> bool:
        """A step takes so long that somebody should look."""
        return self.since_step > USUAL_TIMES * self.usual_step + 2 * self.patience

    @property
    def waits(self) -> bool:
        """Waiting for other peers, longer than they usually take to come."""
        return self.phase == "waiting" and self.since_phase > self.patience / 4

    @property
    def suspicious(self) -> bool:
        """Worth asking the others whether they are there."""
        return (
            self.late
            or self.waits
            or self.lost_company
            or self.since_read > READ_SECONDS
            or (self.contact is not None and (self.contact.cut_off or self.contact.unanswered > 0))
            or self.failed_rounds >= FAILED_ROUNDS
            or (self.phase == "syncing" and self.since_bytes > STANDSTILL_SECONDS / 3)
        )


@dataclass(frozen=True)
class Diagnosis:
    """A cause for no step. what: by which it is counted. words: for a person. stuck: nothing goes on meanwhile.

    ladder: what is tried, one after the other; the last one again and again. pause: seconds that each of them gets.
    advice: what a person can do.
    """

    what: str
    words: str
    ladder: tuple[Remedy, ...] = (Remedy.WAIT,)
    advice: str = ""
    stuck: bool = True
    pause: float = 10.0


def diagnose(facts: PeerFacts) -> Diagnosis | None:
    """The one cause that explains most, None where all is well. A peer that is only slow is not stuck."""
    causes = (_own_processes, _network, _state, _rounds, _slowness, _company)
    return next(filter(None, (cause(facts) for cause in causes)), None)


def _own_processes(facts: PeerFacts) -> Diagnosis | None:
    if facts.since_pulse > PULSE_SECONDS:
        words = f"the averager process of this peer has not answered for {seconds(facts.since_pulse)}"
        return Diagnosis("averager", words, (Remedy.RESTART,))
    if facts.contact is not None and not facts.contact.alive:
        words = "the DHT process of this peer does not answer"
        return Diagnosis("DHT", words, (Remedy.WAIT, Remedy.RESTART), pause=30.0)
    if facts.held:
        return None
    if facts.reading and facts.since_batch > DATA_SECONDS:
        words = f"the data stream has given nothing for {seconds(facts.since_batch)}: the Hub may be down, or the line"
        return Diagnosis("data stream", words, (Remedy.WAIT, Remedy.WAIT, Remedy.WAIT, Remedy.RESTART), pause=300.0)
    if not facts.reading and facts.since_batch > max(DEVICE_SECONDS, BATCH_TIMES * facts.usual_batch):
        words = (
            f"no micro-batch has ended for {seconds(facts.since_batch)}, they usually take "
            f"{seconds(facts.usual_batch)}: the device hangs, or something else keeps it busy"
        )
        return Diagnosis("device", words, (Remedy.RESTART,))
    return None


def _network(facts: PeerFacts) -> Diagnosis | None:
    contact = facts.contact
    if contact is None:
        return None
    if contact.clock is not None and abs(contact.clock) > CLOCK_SECONDS:
        way = "ahead of" if contact.clock > 0 else "behind"
        return Diagnosis(
            "clock",
            f"this machine's clock is {seconds(abs(contact.clock))} {way} the others': "
            "records expire too early or too late, and groups do not form",
            advice="set it by the network's time: sudo timedatectl set-ntp true",
            stuck=facts.late,
        )
    if contact.cut_off:
        words = f"cut off from the swarm: none of the {len(contact.asked)} peers that this one knows answers"
        advice = (
            "see whether this machine is online, and `tt doctor`; if the others are gone for good, `tt join` with "
            "--new-swarm and without --peer goes on alone from the backup"
        )
        return Diagnosis("connection", words, (Remedy.REJOIN,), advice)
    if facts.astray is not None:
        advice = facts.astray.advice
        return Diagnosis(
            "address", facts.astray.words, (Remedy.WAIT if advice else Remedy.RESTART,), advice, stuck=False
        )
    if contact.split and facts.suspicious:
        words = (
            f"none of the {len(contact.initial)} initial peers answers, {len(contact.answered)} other peers do: "
            "newcomers may not find this part of the swarm"
        )
        return Diagnosis("initial peers", words, (Remedy.REJOIN,), stuck=False)
    return None


def _state(facts: PeerFacts) -> Diagnosis | None:
    if facts.phase != "syncing":
        return None
    received, total, rate = facts.download or (0, 0, 0.0)
    have = f"{received / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else "nothing"
    if facts.since_bytes > STANDSTILL_SECONDS:
        words = f"the state download stands still: {have} came, and no more for {seconds(facts.since_bytes)}"
        ladder = (Remedy.REJOIN, Remedy.RESYNC, Remedy.REJOIN, Remedy.RESYNC, Remedy.RESTART)
        return Diagnosis("state download", words, ladder, pause=60.0)
    if total and rate and facts.since_phase > 2 * facts.patience:
        left = f"about {seconds((total - received) / rate)} more"
        words = f"the state download is slow: {have} so far, at {rate * 8 / 1e6:.1f} Mbit/s: {left}"
        return Diagnosis("state download", words, stuck=False)
    return None


def _rounds(facts: PeerFacts) -> Diagnosis | None:
    if facts.waits and facts.client_mode and not facts.listening:
        words = "this peer is in client mode, and no trainer that accepts connections is there to average with"
        advice = "make one peer reachable (see `tt doctor`), or ask the organiser for `tt aux-peer --assist`"
        return Diagnosis("averaging", words, (Remedy.REJOIN,), advice)
    if facts.waits and facts.missing:
        more = f" and {len(facts.missing) - NAMED} others" if len(facts.missing) > NAMED else ""
        words = f"waits for a quorum of the trainers: {', '.join(facts.missing[:NAMED])}{more} did not come"
        advice = "who does not come back counts no more when its record has expired"
        return Diagnosis("quorum", words, (Remedy.REMATCH, Remedy.REJOIN), advice)
    if facts.failed_rounds >= FAILED_ROUNDS:
        words = f"{facts.failed_rounds} rounds in a row failed, the last one: {facts.problem or 'without a word'}"
        ladder = (Remedy.REMATCH, Remedy.REJOIN, Remedy.REMATCH, Remedy.REJOIN, Remedy.RESTART)
        return Diagnosis("averaging", words, ladder, pause=facts.patience)
    if facts.waits and facts.alone and facts.contact is not None and facts.contact.answered:
        words = "other trainers answer, and the DHT does not show their records: this peer does not step without them"
        return Diagnosis("records", words, (Remedy.REJOIN,))
    if facts.lost_company and facts.contact is not None and facts.contact.answered:
        words = "alone in the swarm: the other trainers are not seen any more, while others answer"
        return Diagnosis("alone", words, (Remedy.REJOIN, Remedy.WAIT), stuck=False)
    return None


def _slowness(facts: PeerFacts) -> Diagnosis | None:
    if not facts.late or facts.held or facts.phase in ("starting", "syncing"):
        return None
    since = f"no step for {seconds(facts.since_step)}, they usually take {seconds(facts.usual_step)}"
    missing = facts.target - facts.samples
    if missing > 0 and facts.since_growth < facts.usual_step + facts.patience:
        more = f", about {seconds(missing / facts.samples_per_second)} more" if facts.samples_per_second else ""
        words = f"{since}: the swarm is slow ({facts.samples:,} of {facts.target:,} samples{more})"
        return Diagnosis("slow", words, stuck=False)
    if missing > 0:
        words = f"{since}: nobody has computed anything for {seconds(facts.since_growth)}"
        return Diagnosis("no samples", words, (Remedy.REJOIN, Remedy.WAIT, Remedy.RESTART), pause=2 * facts.patience)
    ladder = (Remedy.REMATCH, Remedy.REJOIN, Remedy.REMATCH, Remedy.RESTART)
    return Diagnosis("step", f"{since}, and the samples for it are there", ladder, pause=2 * facts.patience)


def _company(facts: PeerFacts) -> Diagnosis | None:
    contact = facts.contact
    if facts.unmet < STARTING_SECONDS or contact is None or not contact.answered & contact.initial:
        return None
    words = "alone in the run: who answers at the initial peers has no record of anybody in it"
    advice = "if the organiser's page shows others, take the organiser's run file and version of tt"
    return Diagnosis("swarm", words, advice=advice, stuck=False, pause=600.0)


@dataclass
class Treatment:
    """Remedies for causes that come and go, one at a time. longest: seconds between two of what is repeated."""

    longest: float = 120.0
    cause: Diagnosis | None = None
    began: float = 0.0
    _tried: int = 0
    _due: float = -math.inf
    _last: dict[str, float] = field(default_factory=dict)  # what → when it was told

    def next(self, diagnosis: Diagnosis | None, now: float) -> Remedy | None:
        """The remedy to try now, if one is due; the cause is then to be told."""
        if diagnosis is None:
            self.cause = None
            return None
        if self.cause is None or self.cause.what != diagnosis.what:
            lately = now < self._last.get(diagnosis.what, -math.inf) + diagnosis.pause
            self.began = now
            self._tried = 0
            self._due = now + diagnosis.pause if lately else now
        self.cause = diagnosis
        if now < self._due:
            return None
        remedy = diagnosis.ladder[min(self._tried, len(diagnosis.ladder) - 1)]
        self._tried += 1
        # a ladder is climbed quickly; what is only repeated is repeated less and less often
        over = max(0, self._tried - len(diagnosis.ladder))
        pause = diagnosis.pause * (1 if diagnosis.stuck else 3)
        self._due = now + min(max(self.longest, pause), pause * 1.5**over)
        self._last[diagnosis.what] = now
        return remedy


def seconds(duration: float) -> str:
    """Seconds below two minutes, then minutes, then hours."""
    if duration < 120:
        return f"{duration:.0f} s" if duration >= 10 else f"{duration:.1f} s"
    return f"{duration / 60:.0f} min" if duration < 7200 else f"{duration / 3600:.1f} h"
