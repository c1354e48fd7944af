"""Selection of the participants of the next round, and of those whom it does without, for how long."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction

from tt_cli.swarm.allreduce.lateness import beyond_most
from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import SPOILED, TOO_FEW, RoundPlan, claim_limits
from tt_cli.swarm.allreduce.votes import is_quorum, liars_among
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.participants.no_shows import NoShows
from tt_cli.swarm.participants.stragglers import FIRST_STEPS, MOST_STEPS, REMEMBERED, Straggler, StragglerDetector
from tt_cli.swarm.records.consensus import STEPS_APART, voices, voters_among
from tt_cli.swarm.records.peer_record import PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory, SwarmState
from tt_cli.swarm.shared_state import state_key

AVOIDED_STEPS, FOREVER = 10, 2**62
SHOW_SECONDS = 5.0  # between two tries to make proofs known to all


class ParticipantSelector:
    """The choice of one trainer, round by round; for the thread that makes rounds.

    me: this peer's id. guilty: peer ids of those against whom there is a proof. show: shows the proof against a peer to
    others (ids). patience: seconds by which one may be late without blame. turn: seconds for which rounds of a
    state may fail: from then on another one leads in each such time, by the clock, which all have in common.

    avoided: peer id → the epoch until which no round includes it. slow: the same, of those of whom this peer says that
    they hold the others up, or leave its audits unanswered. before: who was in the last round in which it voted before
    it began: whom it has not met again since would not count for its steps, and less than half of all be enough.
    """

    def __init__(
        self,
        me: str,
        board: PeerDirectory,
        guilty: Callable[[], Collection[str]],
        show: Callable[[dict[str, list[str]]], None] = lambda lacking: None,
        patience: float = math.inf,
        turn: float = math.inf,
        clock: Clock | None = None,
    ):
        self._me, self._board, self._guilty, self._show = me, board, guilty, show
        self._clock, self._showed_at = clock or Clock(), -math.inf
        self.avoided, self.slow = dict[str, int](), dict[str, int]()
        self._left_out: frozenset[str] = frozenset()  # of whom most say so
        self._patience = patience
        self.no_shows, self._stragglers = NoShows(), StragglerDetector(patience)
        self._stepped_at = self._clock.monotonic()
        self._silences: dict[str, list[int]] = {}  # peer id → the steps after which it left an audit unanswered
        self._disputed: frozenset[str] = frozenset()  # reducers about whose parts the last round disagreed
        self._turn, self._fails_since = turn, math.inf
        self._state_key = ""  # of the last plan
        self.before, self._met = frozenset[str](), set[str]()  # the second in rounds that were committed

    @property
    def shunned(self) -> frozenset[str]:
        """Peers with which no round is made now."""
        return self._left_out | self.avoided.keys()

    def plan(self, view: SwarmState, epoch: int, digest: str, false: Collection[str] = ()) -> RoundPlan:
        """The round that this peer should make from this state. false: see `counted`.

        Without those who did not come to the last rounds: they may be dead.
        """
        guilty = set(self._guilty()) - {self._me}
        self.avoided |= dict.fromkeys(guilty, FOREVER)
        self._show_proofs(guilty, view)
        here = [record for record in view.members(epoch, digest) if record.peer_id not in guilty]
        counted, newcomer = self.counted(view, {record.peer_id for record in here}, false)
        self._left_out = self._slow_by_most([record for record in view.records if record.peer_id in counted])
        own = [record for record in view.records if record.peer_id == self._me]
        out = self.shunned | {self._me}
        others = [record for record in here if record.peer_id not in out and self.no_shows.expects(record)]
        # others would take the places of those who should come; records may be read late
        welcome = frozenset(r.peer_id for r in view.records if r.averages and r.epoch <= epoch + STEPS_APART)
        known = voices(record for record in view.records if record.peer_id in counted)
        shares = dict.fromkeys(counted, 1) | known
        if (key := state_key(epoch, digest)) != self._state_key:
            self._state_key, self._fails_since = key, math.inf
        now = self._clock.dht_time()
        stuck = self._clock.monotonic() >= self._fails_since + self._turn
        plan = RoundPlan.of(key, [*own, *others], shares, 1 + int(now / self._turn) if stuck else 0, here)
        told = [self._board.told] if self._board.told is not None else []  # its own claim is bounded there, too
        steps, allowed = bool(counted & self._met), claim_limits([*told, *others], now)
        return replace(plan, steps=steps, newcomer=newcomer, avoided=self.shunned, welcome=welcome, allowed=allowed)

    def _slow_by_most(self, trainers: Sequence[PeerRecord]) -> frozenset[str]:
        """Stragglers by the word of more than half of the trainers; never so many that the rest is no quorum."""
        shares, votes = {self._me: 1} | voices(trainers), defaultdict[str, Fraction | int](int)
        for record in trainers:
            for peer in set(self.slow if record.peer_id == self._me else record.slow) - {record.peer_id, self._me}:
                votes[peer] += shares[record.peer_id]
        swarm = sum(shares.values())
        named = [peer for said, peer in sorted((-said, peer) for peer, said in votes.items()) if -2 * said > swarm]
        while named and not is_quorum(swarm - sum(shares.get(peer, 0) for peer in named), swarm):
            named.pop()
        return frozenset(named)

    def _show_proofs(self, guilty: set[str], view: SwarmState) -> None:
        """Show the proofs to those who do not say that they have them, now and then."""
        if not guilty or self._clock.monotonic() < self._showed_at + SHOW_SECONDS:
            return
        self._showed_at = self._clock.monotonic()
        trainers = [r for r in view.records if r.averages and r.peer_id not in guilty | {self._me}]
        lacking = {peer: [r.peer_id for r in trainers if peer not in r.accused] for peer in guilty}
        if any(lacking.values()):
            self._show(lacking)

    def late(self, view: SwarmState, epoch: int, digest: str) -> list[PeerRecord]:
        """Members that are about to come to this state, and may come to the next round."""
        late = [record for record in view.late(epoch, digest) if record.peer_id not in self.shunned]
        return [record for record in late if self.no_shows.expects(record)]

    def waited(self, late: Mapping[str, float], here: Iterable[PeerRecord]) -> None:
        """Before a round this peer waited so many seconds for who was late. here: who holds the state by now."""
        there = {record.peer_id: 0.0 for record in here if record.peer_id != self._me}
        self._stragglers.round_ended(beyond_most({**there, **late}))

    def counted(self, view: SwarmState, here: Set[str], false: Collection[str]) -> tuple[frozenset[str], bool]:
        """Of whom a group must hold a quorum: this peer and the trainers with whom it has made steps, if there are any.

        Anybody can write records of trainers that do not exist. A newcomer counts those that say that they vote, so
        that newcomers alone are no group where others made the state; where these may all lie, everybody. And whether
        this peer is one where some vote. here: who holds its state. false: whose word on states counts for nothing.
        """
        others = self.other_trainers()
        voting = others & {record.peer_id for record in voters_among(view.records)} - {*false}
        if others & self._met:
            return others & self._met | {self._me}, False
        everybody = others | here | {self._me}
        return voting if len(voting) > liars_among(len(everybody)) else everybody, bool(voting)

    def other_trainers(self) -> frozenset[str]:
        """Trainers that may be training, but for this peer and those against whom there is a proof.

        Whose gradients had to be refused counts: two peers that refuse each other must not both step without the other.
        """
        guilty = {peer_id for peer_id, until in self.avoided.copy().items() if until >= FOREVER}
        return self._board.trainers() - guilty - {self._me}

    def ended(self, result: RoundResult, missed: Collection[str], records: Iterable[PeerRecord], epoch: int) -> None:
        """A round ended. missed: who should have come. It is repeated without those who spoiled it.

        Who sent what must be refused stays out for longer. Who is at fault where two disagree is not known: they try
        once more.
        """
        self.no_shows.ended(missed, result.members, records)
        spoilers = set() if result.complete else result.failed.keys() | result.rejected.keys()
        if 2 * len(spoilers) >= len(result.members):  # then it is rather this peer's own line
            spoilers = set()
        lost = sum(result.seconds.get(phase, 0.0) for phase in ("transfer", "commit"))
        self._stragglers.round_ended(result.late, result.waited, spoilers, lost)
        if result.complete:
            return
        self._fails_since = min(self._fails_since, self._clock.monotonic())
        if SPOILED in result.problem or TOO_FEW in result.problem:  # others take it in: rather so than not at all
            self.avoided = {peer_id: until for peer_id, until in self.avoided.items() if until >= FOREVER}
        again, self._disputed = result.disputed & self._disputed, result.disputed
        self.avoided |= dict.fromkeys(result.failed.keys() | again, epoch)
        self.avoided |= dict.fromkeys(result.rejected, epoch + AVOIDED_STEPS)
        self.avoided.pop(self._me, None)

    def stepped(self, epoch: int, result: RoundResult, computing: float = 0.0) -> dict[str, Straggler]:
        """This peer came to `epoch`: those who spoiled rounds before may come again.

        computing: seconds in which the swarm computes the samples of a step, where it does so while it averages.
        Returns of whom it says from now on that the swarm is faster without it.
        """
        self._disputed = frozenset()
        self._met |= result.voting | self.before
        self.avoided = {peer_id: until for peer_id, until in self.avoided.items() if until >= epoch}
        now = self._clock.monotonic()
        whole, self._stepped_at = now - self._stepped_at, now
        samples = {peer: said.get("samples") or 0 for peer, said in result.members.items()}
        stragglers = self._stragglers.stepped(epoch, whole, max(0.0, whole - computing), samples)
        stragglers.pop(self._me, None)
        self.slow = {peer_id: until for peer_id, until in self.slow.items() if until >= epoch}
        self.slow |= {peer_id: epoch + straggler.steps for peer_id, straggler in stragglers.items()}
        for peer_id in result.doubts:  # once may be a busy machine
            lately = [past for past in self._silences.get(peer_id, ()) if past > epoch - REMEMBERED]
            self._silences[peer_id] = [*lately, epoch]
            if lately:
                self.slow[peer_id] = epoch + min(MOST_STEPS, FIRST_STEPS * 2 ** (len(lately) - 1))
        return stragglers

    def forgive(self) -> None:
        """Try those again who did not come or spoiled a round, but for those against whom there is a proof."""
        self.no_shows.forgive()
        self.slow = {}
        self.avoided = {peer_id: until for peer_id, until in self.avoided.items() if until >= FOREVER}

    def went_back(self) -> None:
        """The run was taken back: what was to last until a step that it had made already would last for very long."""
        self.forgive()
        self._stragglers, self._silences = StragglerDetector(self._patience), {}
