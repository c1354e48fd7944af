"""What must hold in every schedule, looked at whenever a member steps, and at the end.

- *agreement*: no two honest members commit unlike bytes in one round;
- *durability*: what a majority committed, of which one lives and can hand it over, is what all come to. What is made
  otherwise from the same state, in another round, is a minority's: it is overruled, and counted (docs/protocol.md);
- *validity*: an average holds each member's gradient at most once, with its weight; what stays, of more than half;
- *quorum*: who steps was told by more than half of its round that they have not dropped it;
- *joins*: who accepts connections reduces, whatever the leader says;
- *signature*: nobody steps with averages that a reducer from which it heard did not sign, in the transfer or after it;
- *no solo*: nobody steps alone, or in a group of half or less of those who live and have made steps with others;
- *no two groups*: of two groups that step from one state an honest member is in both, where one of the first lives and
  can hand its step over;
- *origin*: nobody holds a state that nobody made, or from which the organiser took the run back;
- *honesty*: no honest member is proven guilty;
- *bounded memory*: of rounds, averages and tasks a machine keeps as many as the protocol says;
- *progress*: see `schedule.run`.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from simulation.averager import opened

from tt_cli.swarm.allreduce.average_buffer import KEPT_AVERAGES, MISSING
from tt_cli.swarm.allreduce.clipping.centered_clip import FEWEST
from tt_cli.swarm.allreduce.commit import CommitProtocol
from tt_cli.swarm.allreduce.messages import Commitment, NotProven, RoundName, SignedVote, average_hash
from tt_cli.swarm.allreduce.rendezvous import KEPT_GROUPS
from tt_cli.swarm.allreduce.votes import PartStatus, group_of, read_status
from tt_cli.swarm.records.consensus import STEPS_APART, shared_voices

if TYPE_CHECKING:
    from simulation.machine import Machine

    from tt_cli.supervisor.events import Step

State = tuple[int, int, str]  # era, epoch, digest

EXACT = 0.02  # of a member's share of an average, for 8 bits
SEEN_SECONDS = 2.0  # until all see the record of who began, took a state over, or was far behind
MOST_TASKS = 60  # of one machine, beside some for each other member


@functools.lru_cache(2**12)  # each is looked at in some steps
def _status(
    said: bytes, peer: str, parts: int, name: RoundName, attempt: int, shares: tuple[int, ...]
) -> PartStatus | None:
    """The word of this member about this round; None for what is none, as votes are that it did not sign."""
    try:
        status = read_status(said, parts)
        vote = SignedVote(name, peer, attempt, shares, (average_hash(shares, status.hashes),))
        signed = MISSING in status.hashes or SignedVote.read(status.vote, opened) == vote
        return status if signed and group_of(said) == name.group_id else None
    except ValueError:
        return None


@functools.lru_cache(2**12)
def _group(said: bytes) -> bytes | None:
    try:
        return group_of(said)
    except ValueError:
        return None


@functools.lru_cache(2**12)
def _outputs(commitment: bytes) -> tuple[bytes, ...]:
    try:
        return Commitment.read(commitment, opened).outputs
    except NotProven:
        return ()


def _voices(machines: Iterable[Machine]) -> dict[str, Fraction | int]:
    """Their names → shares of their users' voices."""
    return shared_voices({machine.name: machine.user for machine in machines})


class Violation(Exception):
    """An invariant that was broken; which one, and how."""


class Watch:
    """Follows the steps of all machines. valid: averages are means, so that their members' shares can be read off.

    apart: halves may be cut off from each other for so long that each is the whole swarm by the rules.
    """

    def __init__(self, machines: Sequence[Machine], valid: bool, apart: bool = False):
        self.machines, self._valid, self._apart = machines, valid, apart
        self.violation: Violation | None = None
        self._made: dict[tuple[State, bytes], str] = {}  # (state, round) → digest of what came of it
        # state → digest to which members went on from it → their numbers
        self.history: dict[State, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.era, self._tops = 0, Counter[int]()
        self._states = {(0, 0, "00")}  # that somebody came to by a step, or with which an era begins
        self._few: dict[State, str] = {}  # state → words about the half of a round, or less, that made it
        self._groups: dict[State, set[frozenset[int]]] = defaultdict(set)  # state → who went on from it

    @property
    def top(self) -> int:
        """The last step of this era."""
        return self._tops[self.era]

    def taken_back(self, step: int) -> None:
        """The organiser ordered all back to this step: that and what was before it is all there is now."""
        self.era += 1
        self._states |= {(self.era, *state) for _, *state in self._states if state[0] <= step}
        self._tops[self.era] = step

    def check_states(self, machines: Sequence[Machine]) -> None:
        """Note where one holds what nobody made. Who is just going back holds a state of a later era for a moment."""
        for machine in machines:
            state = machine.position
            made = not state[1] or any((era, *state) in self._states for era in range(machine.era, self.era + 1))
            if not made and self.violation is None:
                self.violation = Violation(f"origin: {machine.number} holds step {state[0]}, which nobody made so")

    def __call__(self, machine: Machine, step: Step, alone: bool) -> None:
        self._states.add((machine.era, machine.state.epoch, step.digest))
        if self.violation is not None or not machine.honest:
            return
        try:
            self._look(machine, step.digest, alone)
        except Violation as violation:
            self.violation = violation

    def _look(self, machine: Machine, digest: str, alone: bool) -> None:
        number, state, averager = machine.number, machine.state, machine.collaboration.averager
        era, before = machine.era, (machine.era, *state.before)
        self._tops[era] = max(self._tops[era], state.epoch)
        self.history[before][digest].add(number)
        if state.epoch <= self._tops[era] - STEPS_APART:  # before this step it did not count
            state.taken_at = asyncio.get_running_loop().time()
        # who is further behind, as after a restart, does not count until it has caught up
        began = asyncio.get_running_loop().time() if alone else averager.began_at
        there = [m for m in self.machines if m.honest and m.alive and m.joined and m.era == era]
        living = [m for m in there if self._counts(m, state.epoch - 1, began)]
        if alone:
            anew = era > 0 and machine.starts > 1  # after an order: it sees nobody before another one is back, too
            if len(living) > 1 and not anew:
                raise Violation(f"no solo: {number} made step {state.epoch} alone")
            return
        group_id, commit = list(averager._rounds.items())[-1]
        known = [m for m in living if m is machine or m.collaboration._selector._met]
        members = [m for m in self.machines if m.peer_id in commit.members]
        shares = _voices({*known, *members})
        if not self._apart and 2 * sum(shares[m.name] for m in members) <= sum(shares[m.name] for m in known):
            raise Violation(f"no solo: {number} made step {state.epoch} with {len(members)} of {len(known)}")
        group = frozenset(m.number for m in self.machines if m.honest and m.peer_id in commit.members)
        self._groups[before].add(group)
        keep = {m.number for m in self.machines if m.alive and m.keeps}  # what none of these made may be lost
        others = [sorted(other) for other in self._groups[before] if not other & group and other & keep]
        if others and not self._apart:
            raise Violation(f"no two groups: {sorted(group)} and {others} made step {state.epoch} from one state")
        if self._made.setdefault((before, group_id), digest) != digest:
            raise Violation(
                f"agreement: {number} committed other bytes for step {state.epoch} than others of its round"
            )
        for other in (one for one in self.machines if one.honest and one.peer_id in commit.members):
            if (other.peer_id in commit.listening) == other.client:
                raise Violation(f"joins: {machine.number} took what the leader said of {other.number} for true")
        self._check_words(machine, commit)
        working = [one.collaboration for one in self.machines if one.collaboration is not None]
        rounds = [collaboration.averager._rounds.get(group_id) for collaboration in working]
        origin = next((one.origin for one in rounds if one is not None and one.origin is not None), None)
        if self._valid and origin is not None:
            self._check_shares(machine, origin)
        for honest in (other for other in self.machines if other.honest):
            if honest.name in averager.audits.proofs.guilty():
                raise Violation(f"honesty: {number} holds a proof against {honest.number}, who is honest")
        self._check_memory(machine)

    @staticmethod
    def _counts(machine: Machine, epoch: int, began: float) -> bool:
        """Whether nobody makes a step from `epoch` without it: nor does who is ahead and cannot hand its state over.

        began: when the group did; it was counted then.
        """
        if began < machine.state.taken_at + SEEN_SECONDS:
            return False
        shown = machine.node.dht.shown if machine.node.dht is not None else None  # late where its DHT node hangs
        ahead = (machine.state.epoch if shown is None else min(shown, machine.state.epoch)) - epoch
        return ahead >= -STEPS_APART and (ahead <= 0 or not machine.client)

    def _check_words(self, machine: Machine, commit: CommitProtocol) -> None:
        """What it was told on the wire lets it step: by more than half of the others, and with signatures."""
        me, listening = str(commit.me), {str(peer) for peer in commit.listening}
        for phase in commit.phases:
            told, with_averages = self._told(machine, phase), {p: [word] for p, word in phase.allreduce.signed.items()}
            for place, reducer in enumerate(commit.listening):
                repeated = phase is not commit.phases[-1] and place in commit.phases[-1].allreduce.name.lost
                outputs = [commit.store.hashes[index] for index in phase.allreduce.parts_of(reducer)]
                words = [status.commitment for peer, _, status in told if peer == str(reducer)]
                signed = [_outputs(word) for word in words or with_averages.get(str(reducer), ())]
                if signed and outputs and str(reducer) != me and not repeated and tuple(outputs) not in signed:
                    raise Violation(f"signature: {machine.number} stepped with averages that {reducer} did not sign")
        # those in client mode call by themselves, and cannot be called
        calling = {str(peer) for peer in commit.members} - listening if me in listening else set[str]()
        agreed = {peer for peer, answer, status in told if (not status.dropped if answer else peer in calling)}
        others = (listening | calling) - {me}
        shares = _voices(m for m in self.machines if m.name in others | {me})
        if 2 * sum(shares[peer] for peer in agreed & others | {me}) <= sum(shares.values()):
            raise Violation(f"quorum: {machine.number} stepped by the word of {len(agreed)} of {len(others)} others")

    @staticmethod
    def _told(machine: Machine, phase: CommitProtocol) -> list[tuple[str, bool, PartStatus]]:
        group = phase.allreduce.group
        about = len(phase.allreduce.parts), group.name, group.attempt, group.shares
        told = machine.node.told
        heard = [one for one in told if _group(one[2]) == phase.allreduce.group_id]  # the many others are not read
        return [(peer, answer, status) for peer, answer, said in heard if (status := _status(said, peer, *about))]

    def _number(self, peer_id: str) -> int:
        return next(machine.number for machine in self.machines if machine.name == peer_id)

    def _check_shares(self, machine: Machine, commit: CommitProtocol) -> None:
        """commit: of the round in which the average was made, of one of its members."""
        members = {str(peer): self._number(str(peer)) for peer in commit.members}
        weights = np.zeros(machine.state.average.shape[1])
        for peer, number in members.items():
            status = commit.status() if peer == str(commit.me) else commit.statuses.get(peer)
            said = status.said.get("samples", np.nan) if status is not None else np.nan
            there = self.machines[number].collaboration.averager._rounds.get(commit.allreduce.group_id)
            sent = there.allreduce.weight if there is not None else np.inf  # less than it said if others allow less
            weights[number] = min(said, machine.collaboration.averager.max_weight, sent)
        for shares in {row.tobytes(): row for row in machine.state.average}.values():  # most are alike
            if (shares < -EXACT).any() or shares.sum() > 1.0 + EXACT * len(members):
                raise Violation(f"validity: an average of {machine.number} holds more than a mean does")
            counted = shares > EXACT / 4
            idle = sum(weights[number] == 0.0 or self._gave_nothing(commit, number) for number in members.values())
            if len(members) >= FEWEST and 2 * (counted.sum() + idle) <= len(members):
                words = f"validity: {machine.number} counted {counted.sum()} of {len(members)} members"
                self._few[machine.era, machine.state.epoch, machine.state.digest] = words
            if counted[[n for n in range(len(shares)) if n not in members.values()]].any():
                raise Violation(f"validity: {machine.number} counted somebody outside of its round")
            known = counted & ~np.isnan(weights) & (weights > 0.0)
            if counted.any() and not np.isnan(weights[counted]).any():
                right = weights * known / max(weights[known].sum(), 1.0)
                if np.abs(shares - right)[known].max(initial=0.0) > EXACT:
                    raise Violation(f"validity: {machine.number} has {shares[counted]} for weights {weights[counted]}")

    def _gave_nothing(self, commit: CommitProtocol, number: int) -> bool:
        """True for a machine, from which nothing may have been heard, without samples in the round."""
        other = self.machines[number].collaboration.averager._rounds.get(commit.allreduce.group_id)
        return self.machines[number].idle or (other is not None and other.allreduce.weight == 0.0)

    def _check_memory(self, machine: Machine) -> None:
        averager, most = machine.collaboration.averager, MOST_TASKS + 16 * len(self.machines)
        tasks = machine.process.most_tasks + machine.trainer.most_tasks
        kept = len(averager._rounds), len(averager._averages._kept), tasks
        if kept[0] > KEPT_GROUPS or kept[1] > KEPT_AVERAGES or kept[2] > most:
            raise Violation(f"bounded memory: {machine.number} keeps {kept} rounds, averages and tasks")

    def overruled(self) -> int:
        """How many steps a minority made otherwise than the rest.

        Raises Violation for what a majority lost, and for what half of a round made and stays.
        """
        alive = [machine for machine in self.machines if machine.honest and machine.alive]
        count, final = 0, {(machine.era, machine.state.epoch, machine.state.digest) for machine in alive}
        kept = set(final)
        parents = {(e, step + 1, new): (e, step, old) for (e, step, old), went in self.history.items() for new in went}
        while final := {parents[state] for state in final if state in parents}:
            kept |= final
        if words := next((words for state, words in self._few.items() if state in kept), ""):
            raise Violation(words)
        for (era, step, _), went in self.history.items():
            for digest, numbers in went.items():
                if len(went) > 1 and era == self.era and (era, step + 1, digest) not in kept:
                    held = any(m.keeps for m in alive if m.number in numbers)
                    count += held
                    shares = _voices(machine for machine in self.machines if machine.honest)
                    # of halves that come together who begins from a backup has no voice in which of them goes on
                    voters = [self.machines[n] for n in numbers if not self._apart or self.machines[n].starts == 1]
                    made = sum(shares.get(machine.name, 0) for machine in voters)  # some are banned
                    if held and 2 * made > sum(shares.values()):
                        raise Violation(f"durability: step {step + 1}, which {sorted(numbers)} made, is lost")
        return count
