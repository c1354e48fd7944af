"""The group of the next round, sought so early that it stands when the samples do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hivemind.averaging.control import AveragingStage, StepControl

from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import Participants, RoundPlan
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.state.locked_state import LockedState

FIRST_LEAD_SECONDS, SPARE_SECONDS = 2.0, 1.0


@dataclass(frozen=True)
class PendingGroup:
    """A group that is sought, or found and waiting: for which state, and with which members."""

    key: str
    members: Participants
    control: StepControl


class Matchmaker:
    """longest: seconds that hivemind's matchmaking waits for members, the run's `matchmaking_time`.

    lead: seconds before a round from which its group is sought: what the last ones took, and some to spare.
    """

    def __init__(self, averager: Averager, state: LockedState, longest: float):
        self._averager, self._state, self._longest = averager, state, longest
        self._sought: PendingGroup | None = None
        self.lead = min(FIRST_LEAD_SECONDS, longest)

    @property
    def found(self) -> bool:
        """True while a group stands and waits for this peer."""
        control = self._sought.control if self._sought is not None else None
        return control is not None and not control.done() and control.stage == AveragingStage.AWAITING_TRIGGER

    def prepare(self, members: Participants, seconds: float, avoided: Iterable[str]) -> None:
        """Seek the group of the round that is so many seconds away, if it is time. members: this peer included."""
        self._drop_outdated(members)
        if self._sought is None and seconds < self.lead and len(members) > 1 and members.enough:
            self._seek(members, avoided)

    def average(
        self, members: Participants, samples: int, loss: float, avoided: Iterable[str], overtaken: Callable[[], bool]
    ) -> tuple[RoundResult, frozenset[str]]:
        """The round itself, with `averager.local`, and who should have come to it and did not.

        loss: summed over the samples. overtaken: see `Averager.average`.
        """
        self._drop_outdated(members)
        sought, self._sought = self._sought or self._seek(members, avoided), None
        started = time.monotonic()
        result = self._averager.average(sought.control, samples, loss, overtaken, members.allowed)
        if result.overtaken:  # this peer was late, not the others
            return result, frozenset()
        waited = time.monotonic() - started - result.seconds.get("transfer", 0.0) - result.seconds.get("commit", 0.0)
        result.seconds["matchmaking"] = waited
        self.lead = min(self._longest, SPARE_SECONDS + self.lead / 2 + waited)
        return result, self._missed(sought, result)

    def _missed(self, sought: PendingGroup, result: RoundResult) -> frozenset[str]:
        """Who did not come: of a group that nobody found, the leader, or for the leader everybody else."""
        if result.members:
            return sought.members.peer_ids - result.members.keys()
        if sought.control.began_allreduce:
            return frozenset()
        me = str(self._averager.peer_id)
        return sought.members.peer_ids - {me} if sought.members.leader == me else frozenset({sought.members.leader})

    def drop(self) -> None:
        """Give up what is sought."""
        sought, self._sought = self._sought, None
        if sought is not None and not sought.control.done():
            sought.control.cancel()

    def _seek(self, members: Participants, avoided: Iterable[str]) -> PendingGroup:
        key, there_are = self._state.key, max(members.swarm, len(members))
        meeting = RoundPlan(key, len(members), members.leader, there_are, frozenset(avoided), members.welcome)
        self._sought = PendingGroup(key, members, self._averager.seek(meeting))
        return self._sought

    def _drop_outdated(self, members: Participants) -> None:
        """Give a group up that failed, that starts from another state, or in which others are missing now.

        Not for missing members once it is found: the others in it would wait for this peer.
        """
        if (sought := self._sought) is None:
            return
        if sought.control.done() or sought.key != self._state.key or (sought.members != members and not self.found):
            self.drop()
