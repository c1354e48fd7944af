"""Consensus from the members' records: which state is the swarm's, who holds it, how fast it is.

Any key may sign any claim, so nothing follows from one record. Trainers **vote** with their records: those that took
part in the swarm's steps and were in touch with it since. (A peer that begins, with a backup too, or that takes the
state over follows the vote; it votes with its next step. Otherwise newcomers, or laptops that wake up, would outvote
those who trained.)
The middle of the voters' epochs is near the truth as long as less than half of them lie; who claims to be further from
it than one step is left out; of the rest at least half must have signed a state for it to be believed.

Not promised: anything where half of the voters or more lie together, and so for a swarm of two trainers; and, in open
runs, where one person makes as many keys as there are trainers. Before anybody votes, when a swarm starts or comes back
after all of it ended, the foremost state of those who can hand it over counts.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tt_cli.swarm.clock import Clock
from tt_cli.swarm.records.peer_record import PeerRecord

STEPS_APART = 1  # voters in touch: a step is made by a quorum of them
FASTER = 16.0  # than the trainer in the middle: more of a peer's speed does not count
FAR_AHEAD = 2  # steps before what most hold, beyond what a late look at the records explains


@dataclass(frozen=True)
class SwarmState:
    """The swarm as its members' records tell it. (epoch, digest): the state that most hold.

    claiming: peer ids of those whose records name a step that the run does not have; they are not among the records.
    boasting: of those whose records claim work that nobody can have done; so much of it counts as can be. absent: votes
    for the state of an order to go back, of those who voted before it and do not yet again.
    The digest is "" while none has the votes, as for the moment in which members step one after the other.
    """

    records: tuple[PeerRecord, ...]
    epoch: int
    digest: str
    claiming: frozenset[str] = frozenset()
    boasting: frozenset[str] = frozenset()
    absent: tuple[PeerRecord, ...] = ()

    @classmethod
    def of(cls, records: Iterable[PeerRecord], absent: Iterable[PeerRecord] = ()) -> SwarmState:
        """One record of each peer. absent: votes, where their owners' records have none and name no other state."""
        records = tuple(records)
        there = {record.peer_id: (record.vote, record.state) for record in records}
        absent = tuple(r for r in absent if there.get(r.peer_id, (False, r.state)) == (False, r.state))
        voters = voters_among(records, absent)
        if not voters:
            return cls(records, *_foremost(records))
        votes, shares = defaultdict[tuple[int, str], Fraction | int](int), voices(voters)
        for record in voters:
            votes[record.state] += shares[record.peer_id]
        believed = [state for state in votes if enough(votes[state], voters)]
        state = min(believed, key=lambda state: (-state[0], state[1]), default=(_middle(voters), ""))
        return cls(records, *state, absent=absent)

    def leads(self, epoch: int, digest: str) -> bool:
        """Tell whether a peer that holds this state should come to the view's: there is one who can hand that over.

        It goes back only to what half of all voters hold: where they are at many steps the middle may be one alone.
        """
        if self.epoch == epoch:
            return self.digest != digest and bool(self.donors())
        if epoch > self.epoch + FAR_AHEAD:
            shares = voices(voters := _voting(self.records, self.absent))
            held = sum(shares[record.peer_id] for record in voters if record.state == (self.epoch, self.digest))
            return enough(held, voters) and bool(self.donors())
        return self.epoch > epoch and bool(self.donors())

    def vouched(self, epoch: int, digest: str = "") -> bool:
        """Tell whether two voters, in a closed run two users, hold this state; without a digest: are as far."""
        voters = voters_among(self.records, self.absent)
        agree = (record for record in voters if (record.state == (epoch, digest) if digest else record.epoch >= epoch))
        return sum(voices(agree).values()) >= 2

    def members(self, epoch: int, digest: str) -> list[PeerRecord]:
        """Members that hold exactly this state, of all that make steps: those who can average together."""
        return [r for r in self.records if r.averages and r.state == (epoch, digest)]

    def late(self, epoch: int, digest: str) -> list[PeerRecord]:
        """Members exactly one step behind: most likely about to finish the step that others have finished.

        All that are behind where nobody else holds this state: who steps alone could be ahead of them for ever.
        """
        behind = [r for r in self.records if r.averages and r.epoch < epoch]
        return behind if len(self.members(epoch, digest)) < 2 else [r for r in behind if r.epoch == epoch - 1]

    def trainers(self) -> list[PeerRecord]:
        """Those that count as part of the swarm: not more than a step away from what most hold."""
        making = [record for record in self.records if record.averages]
        # who is ahead and cannot hand that over waits for the others to come by themselves: they do not wait for it
        ahead = [r for r in making if r.client_mode and r.epoch > self.epoch]
        return [r for r in making if abs(r.epoch - self.epoch) <= STEPS_APART and r not in ahead]

    def samples_per_second(self) -> float:
        """Of all trainers together; none counts for more than FASTER times the one in the middle."""
        return sum(speeds(record for record in self.records if record.role == "trainer"))

    def donors(self) -> list[str]:
        """Peer ids that can hand over the state (epoch, digest), trainers first."""
        able = [r for r in self.records if not r.client_mode and r.state == (self.epoch, self.digest)]
        return [record.peer_id for record in sorted(able, key=lambda record: record.role == "aux") if self.digest]


class Vote:
    """The vote of this peer's own record. lifetime: seconds after which others forget a record that is not renewed.

    silence: seconds after which they do not count its vote. clock: seconds, which go on while the machine sleeps.
    """

    def __init__(self, lifetime: float, silence: float, clock: Callable[[], float] = Clock.boottime):
        self._lifetime, self._silence, self._clock = lifetime, silence, clock
        self._follows = True  # it took a state over or begins with a backup, or others may have gone on without it
        self._state: tuple[int, str] | None = None
        self._stepped_to: tuple[int, str] | None = None
        self._tried_at = self._stored_at = math.inf

    def of(self, record: PeerRecord) -> bool:
        """Tell whether it votes with this record. Who computed nothing yet may be about to take a state over."""
        state = record.state
        if self._state is not None and state != self._state:
            self._follows = state != self._stepped_to
        self._state = state
        return record.role == "trainer" and bool(record.digest) and record.total_samples > 0 and not self._follows

    def stepped(self, epoch: int, digest: str) -> None:
        """It came to this state by a step of its own, with others or as the only one."""
        self._stepped_to = epoch, digest
        if self._state == self._stepped_to:
            self._follows = False

    def about_to_store(self) -> None:
        """Its record is published again: has it been away so long that others may not count it any more?

        A line that is busy for so long does not keep it from trying.
        """
        now = self._clock()
        if now > min(self._tried_at + self._silence, self._stored_at + self._lifetime):
            self._follows = True
        self._tried_at = now

    def stored(self) -> None:
        """Its record is on the DHT."""
        self._stored_at = self._clock()


def voters_among(records: Iterable[PeerRecord], absent: Iterable[PeerRecord] = ()) -> list[PeerRecord]:
    """The trainers whose records decide which state is the swarm's; none while nobody votes."""
    votes = _voting(records, absent)
    middle = _middle(votes) if votes else 0
    return [record for record in votes if abs(record.epoch - middle) <= STEPS_APART]


def _voting(records: Iterable[PeerRecord], absent: Iterable[PeerRecord]) -> list[PeerRecord]:
    """Those who vote, at whatever step.

    Trainers in client mode vote for what somebody can hand over, and for anything when there is nobody who could.
    """
    records = [record for record in records if record.digest]
    able = {record.state for record in records if not record.client_mode}
    votes = [record for record in records if record.role == "trainer" and record.vote]
    return [*(record for record in votes if record.state in able or not able), *absent]


def voices(records: Iterable[PeerRecord]) -> dict[str, Fraction | int]:
    """Peer id → its share of its user's one voice: however many peers a user of a closed run has, it has one.

    In an open run anybody can say to be any user: there each peer has a voice of its own.
    """
    return shared_voices({record.peer_id: record.user if record.pass_text else "" for record in records})


def shared_voices(users: Mapping[str, str]) -> dict[str, Fraction | int]:
    """As `voices`, of peer ids and the users for whom a pass vouches, "" without one."""
    named = {peer: user.lower() for peer, user in users.items()}
    peers = Counter(named.values())
    return {peer: Fraction(1, peers[user]) if user and peers[user] > 1 else 1 for peer, user in named.items()}


def enough(signers: Fraction | int, voters: Iterable[PeerRecord]) -> bool:
    """Tell whether a state that voters with so many voices signed is the swarm's."""
    return 2 * signers >= sum(voices(voters).values())


def speeds(trainers: Iterable[PeerRecord]) -> list[float]:
    """Samples per second of each that count, in their order."""
    trainers = list(trainers)
    known = [record.samples_per_second for record in trainers if record.samples_per_second > 0]
    most = FASTER * statistics.median_low(known) if known else 0.0
    return [min(record.samples_per_second, most) for record in trainers]


def _middle(voters: Sequence[PeerRecord]) -> int:
    """The median of their epochs by voices, the later one of two: the records of the dead are behind."""
    rest = whole = sum((shares := voices(voters)).values())
    for record in sorted(voters, key=lambda one: one.epoch):
        rest -= shares[record.peer_id]
        if 2 * rest < whole:
            break
    return record.epoch


def _foremost(records: Sequence[PeerRecord]) -> tuple[int, str]:
    """The largest epoch of those who can hand their state over, and the digest that most of them hold there.

    At one epoch trainers outvote auxiliary peers, which only hold what a trainer gave them. Peers in client mode cannot
    hand over; they count when there is nobody else.
    """
    states = [record for record in records if record.digest]
    holders = [r for r in states if not r.client_mode] or [r for r in states if r.averages]
    if not holders:
        return 0, ""
    epoch = max(record.epoch for record in holders)
    foremost = [record for record in holders if record.epoch == epoch]
    votes = Counter(r.digest for r in [r for r in foremost if r.averages] or foremost)
    return epoch, min(votes, key=lambda candidate: (-votes[candidate], candidate))
