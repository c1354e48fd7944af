"""The group of the next round, sought so early that it stands when the samples do."""

from __future__ import annotations

from collections.abc import Callable

from hivemind.averaging.control import AveragingStage, StepControl

from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import Contribution, RoundPlan
from tt_cli.swarm.averager import Averager

FIRST_LEAD_SECONDS, SPARE_SECONDS = 2.0, 1.0


class Matchmaker:
    """Seeks the groups of one trainer's rounds; for the thread that makes them. longest: the run's `matchmaking_time`.

    lead: seconds before a round from which its group is sought: what the last ones took, and some to spare.
    """

    def __init__(self, averager: Averager, longest: float):
        self._averager, self._longest = averager, longest
        self._pending: tuple[RoundPlan, StepControl] | None = None  # a group that is sought, or stands and waits
        self.lead = min(FIRST_LEAD_SECONDS, longest)

    @property
    def standing(self) -> bool:
        """True while a group stands and waits for this peer."""
        control = self._pending[1] if self._pending is not None else None
        return control is not None and not control.done() and control.stage == AveragingStage.AWAITING_TRIGGER

    def prepare(self, plan: RoundPlan, seconds: float) -> None:
        """Seek the group of the round that is so many seconds away, if it is time."""
        self._drop_outdated(plan)
        if self._pending is None and seconds < self.lead and len(plan.members) > 1 and plan.enough:
            self._pending = plan, self._averager.seek(plan)

    def average(
        self, plan: RoundPlan, samples: int, loss: float, overtaken: Callable[[], bool]
    ) -> tuple[RoundResult, frozenset[str]]:
        """The round itself, with `averager.local`, and who should have come to it and did not.

        loss: summed over the samples. overtaken: see `Averager.average`.
        """
        self._drop_outdated(plan)
        (sought, control), self._pending = self._pending or (plan, self._averager.seek(plan)), None
        started = self._averager.clock.monotonic()
        result = self._averager.average(control, Contribution(samples, loss, plan.allowed, plan.swarm), overtaken)
        if result.overtaken:  # this peer was late, not the others
            return result, frozenset()
        averaging = sum(result.seconds.get(phase, 0.0) for phase in ("transfer", "commit"))
        waited = self._averager.clock.monotonic() - started - averaging
        result.seconds["matchmaking"] = waited
        self.lead = min(self._longest, SPARE_SECONDS + self.lead / 2 + waited)
        return result, self._missed(sought, control, result)

    def _missed(self, plan: RoundPlan, control: StepControl, result: RoundResult) -> frozenset[str]:
        """Members that did not come: to a group that nobody found, the leader, or for the leader everybody else."""
        if result.members:
            return plan.members - result.members.keys()
        if control.began_allreduce:
            return frozenset()
        me = str(self._averager.peer_id)
        return plan.members - {me} if plan.leader == me else frozenset({plan.leader})

    def drop(self) -> None:
        """Give up the group that is sought."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending[1].done():
            pending[1].cancel()

    def _drop_outdated(self, plan: RoundPlan) -> None:
        """Give a group up that failed, that starts from another state, or in which others are missing now.

        Not for missing members once it stands: the others in it would wait for this peer.
        """
        if self._pending is None:
            return
        sought, control = self._pending
        if control.done() or sought.state_key != plan.state_key or (sought != plan and not self.standing):
            self.drop()
