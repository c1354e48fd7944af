"""The log of rounds, in words: the outcome of every round, who spoils them again and again, and losses that jump."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Set

from tt_cli.supervisor.events import Choice, Emit, Log, Phase, Round, Step, Trouble
from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.network.failures import classify, printable
from tt_cli.swarm.participants.stragglers import Straggler
from tt_cli.swarm.records.consensus import FAR_AHEAD
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.reporting.loss_spikes import LossSpikeDetector
from tt_cli.swarm.shared_state import StepFacts

PHASES = ("encode", "matchmaking", "transfer", "reduce", "commit")  # of a round, as they are shown; "apply" follows
LOOKED_BACK = 20  # rounds
OFTEN = 3  # spoiled among them: then the peer is named
UNANSWERED = 2  # audits among them: once may be a busy machine that had gone on to the next round
NAMED = 3  # members in a line
LONGEST = 200  # letters
SLOW, REFUSED, AWAY = "its parts did not come in time", "what it sent had to be refused", "it did not come"
CLIPPED = "its gradient was so unlike the others' that most of it was clipped"
CLAIMING = "its record names a step to which nobody came"
BOASTING = "its record claims work that nobody can have done"
SILENT = "it left an audit without an answer"
MOSTLY = 0.5  # of the parts: then a member counts as clipped in this round
PUBLISHED = 8  # peer ids
NOTABLE = 0.05  # change of the share that a peer reduces
WORKLESS = "nothing follows from it here: its owner should run `tt doctor`; the organiser can ban it"
REMEDIES = {
    SLOW: "it can join with --client-mode, raise --max-upload, or free its line",
    REFUSED: "it should update tt and check its memory; it is left out for some steps",
    CLIPPED: "it may be broken or hostile: it should run `tt doctor`; the organiser can ban it",
    SILENT: "it may be cut off, or hide what it did",
    CLAIMING: "nothing follows from its record; it should update tt; the organiser can ban it",
    BOASTING: "only what it can have done counts; it should update tt; the organiser can ban it",
    AWAY: "it may be asleep or cut off; on its machine `tt status` and `tt doctor` say more",
}


class RoundLog:
    """Emits the events of one trainer's rounds. view: the newest view of the swarm, for the members' names.

    last_round: the words of the newest one. now: what this peer would do, were it not stuck. clipped, accused: peer ids
    of members that were clipped again and again lately, and of those that were proven guilty; for this peer's record.
    workless: those that do no work.
    """

    def __init__(self, peer_id: str, emit: Emit, view: Callable[[], SwarmState]):
        self._peer_id, self._emit, self._view = peer_id, emit, view
        self.now = Phase("starting")
        self._stuck = self.last_round = ""
        self._slow = False  # this peer's line, as was told
        self._share, self._upload = math.inf, 0  # as last told; what was known of the line before the newest round
        self._spoiled: deque[dict[str, str]] = deque(maxlen=LOOKED_BACK)  # of each round: peer id → how
        self._losses = LossSpikeDetector()
        self.workless: Set[str] = frozenset()
        self.clipped: list[str] = []
        self.accused: list[str] = []

    def phase(self, phase: str, reason: str) -> None:
        """Say what this peer does now, when it is something else than before; later, while it is stuck."""
        if (self.now.phase, self.now.reason) != (phase, reason):
            self.now = Phase(phase, reason)
            if not self._stuck:
                self._emit(self.now)

    def stuck(self, reason: str) -> None:
        """From now on this peer is shown to wait, for this reason; "" when it goes on."""
        if self._stuck != reason:
            self._stuck = reason
            self._emit(Phase("waiting", reason) if reason else Phase(self.now.phase, self.now.reason))

    def trouble(self, failure: BaseException | str, kind: str, subject: str) -> None:
        """Tell a failure of hivemind's in plain words. kind: of one that does not say; subject: what failed."""
        known = classify(failure, kind)
        self._emit(Trouble(known.what, f"{subject}: {known.words}", known.remedy))

    def committed(self, epoch: int, result: RoundResult, samples: int, seconds: Mapping[str, float]) -> None:
        """A round ended with the step `epoch`."""
        if not (others := result.members.keys() - {self._peer_id}):
            self._ended(epoch, "alone", f"step {epoch} made alone, {samples} samples", result, samples, seconds)
            return self._note({})
        words = f"step {epoch} made with {self._names(others)}, {samples} samples"
        if result.repeated:
            words += ", with the average for which members had voted before"
        elif result.repaired:
            words += f", {result.repaired} parts fetched from others than their reducers"
        self._ended(epoch, "committed", words, result, samples, seconds)
        view = self._view()
        ahead = [r.peer_id for r in view.records if r.role == "trainer" and r.epoch > epoch + FAR_AHEAD]
        clipped = [peer_id for peer_id, share in result.clipped.items() if share > MOSTLY]
        spoiled = dict.fromkeys(result.doubts, SILENT) | dict.fromkeys(clipped, CLIPPED)
        spoiled |= dict.fromkeys(view.boasting, BOASTING) | dict.fromkeys((*ahead, *view.claiming), CLAIMING)
        self._note(spoiled | dict.fromkeys(result.rejected, REFUSED))
        for peer_id in sorted(result.workless.keys() - self.workless):
            words = f"{self.name(peer_id)} ({peer_id}) does no work: {result.workless[peer_id]}"
            self._emit(Trouble("member", words, WORKLESS))
        self.workless = result.workless.keys()
        return self._accuse(result)

    def reduced(self, share: float | None, upload: int) -> None:
        """Tell which share of the average this peer reduced, and why, when it changed.

        upload: kbit/s that are known now, for the next round; 0 before anything was measured.
        """
        known, self._upload = self._upload, upload
        if share is not None and known and abs(share - self._share) > NOTABLE:
            self._share = share
            reason = f"this line sends about {known / 1000:.1f} Mbit/s, and the slowest is to be done soonest"
            self._emit(Choice("share of each average", f"{share:.0%}", reason))

    def slow_line(self, words: str) -> None:
        """Tell that this peer's line is too slow, when it begins to be; "": it is not."""
        if words and not self._slow:
            self._emit(Log(words, "warning"))
        self._slow = bool(words)

    def failed(self, epoch: int, result: RoundResult, missed: frozenset[str], samples: int, started: float) -> None:
        """A round ended without a step and is repeated. missed: who should have come; started: monotonic seconds.

        Nothing is told of one that others overtook: it will be `dropped`.
        """
        if result.overtaken:
            return
        problem = result.problem
        for peer_id in {*result.failed, *result.rejected, *result.disputed}:
            problem = problem.replace(peer_id, self.name(peer_id))
        failure = classify(problem, "round")
        absent = f"{self._names(missed)} did not come ({failure.words})" if missed and not result.members else ""
        words = f"round repeated: {absent or failure.words}"[:LONGEST]
        self._ended(epoch, "failed", words, result, samples, {**result.seconds, "whole": time.monotonic() - started})
        self._emit(Trouble(failure.what, words, failure.remedy))
        self._note(
            dict.fromkeys(missed, AWAY) | dict.fromkeys(result.failed, SLOW) | dict.fromkeys(result.rejected, REFUSED)
        )
        self._accuse(result)

    def dropped(self, epoch: int, made: int, samples: int, started: float) -> None:
        """The others made the step `made` without this peer."""
        words = f"the others made step {made} without this peer"
        self._ended(epoch, "dropped", words, RoundResult(), samples, {"whole": time.monotonic() - started})

    def rolled_back(self, why: str, epoch: int) -> None:
        """The state was damaged and is that of the step `epoch` again."""
        self.last_round = f"rolled back to step {epoch}"
        self._emit(Trouble("state", why, f"going on from step {epoch}, or from where the others are"))

    def left_out(self, stragglers: Mapping[str, Straggler]) -> None:
        """Members without which the swarm would be faster."""
        for peer_id, straggler in stragglers.items():
            words = (
                f"{self.name(peer_id)} held up the last steps by {straggler.cost:.0f} of {straggler.whole:.0f} s each, "
                f"with {100 * straggler.share:.0f} % of the samples: it is left out for {straggler.steps} steps if "
                "most say so"
            )
            self._emit(Trouble("member", words, REMEDIES[SLOW]))

    def step(self, epoch: int, loss: float | None, facts: StepFacts, digest: str) -> None:
        """A step was made. loss: the mean over its samples."""
        self._emit(Step(epoch, loss, facts.learning_rate, facts.gradient_norm, digest))
        if loss is not None and (words := self._losses.look(loss)):
            self._emit(Log(f"step {epoch}: {words}", "warning"))

    def name(self, peer_id: str) -> str:
        """The name of a member in a line: its user's, after ~ where it is self-given, else the end of its peer id."""
        record = next((r for r in self._view().records if r.peer_id == peer_id), None)
        if record is None or not (user := printable(record.user)):
            return f"…{peer_id[-6:]}"
        return user if record.pass_text else f"~{user}"

    def _names(self, peer_ids: frozenset[str] | set[str]) -> str:
        names = sorted(map(self.name, peer_ids))
        if len(names) <= NAMED:
            return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else "nobody"
        return f"{', '.join(names[: NAMED - 1])} and {len(names) - NAMED + 1} others"

    def _ended(
        self, epoch: int, outcome: str, words: str, result: RoundResult, samples: int, seconds: Mapping[str, float]
    ) -> None:
        self.last_round = words
        self._emit(
            Round(
                epoch,
                outcome,
                words,
                sorted(result.members),
                result.received,
                samples,
                dict(seconds),
                rejected=result.rejected,
                mended=result.repaired,
                differing=result.differing,
                clipped=result.clipped,
            )
        )

    def _accuse(self, result: RoundResult) -> None:
        """Tell once of each that was proven guilty."""
        for peer_id in sorted(result.guilty - set(self.accused) - {self._peer_id}):
            self.accused = [*self.accused, peer_id][-PUBLISHED:]
            words = f"{self.name(peer_id)} ({peer_id}) made a wrong average, which its own signature proves"
            self._emit(
                Trouble("member", words, "it is left out; the organiser can ban it: the proof is in accusations/")
            )

    def _note(self, spoiled: dict[str, str]) -> None:
        """Remember who spoiled this round, and name whoever did it so often that somebody should look."""
        self._spoiled.append(spoiled)
        times = Counter(fault for past in self._spoiled for fault in past.items())
        clipped = [peer_id for (peer_id, how), count in times.most_common() if how == CLIPPED and count >= OFTEN]
        self.clipped = [peer_id for peer_id in clipped if peer_id != self._peer_id][:PUBLISHED]
        for peer_id, how in spoiled.items():
            name, last, count = self.name(peer_id), f"of the last {len(self._spoiled)} rounds", times[peer_id, how]
            spoilt = sum(times[peer_id, fault] for fault in REMEDIES if fault != SILENT)
            if peer_id == self._peer_id:
                if how == CLIPPED and count % OFTEN == 0:
                    words = f"this peer's gradient is unlike the others', and was clipped in {count} {last}"
                    remedy = "`tt doctor` says whether this machine computes as it should"
                    self._emit(Trouble("gradient", words, remedy))
            elif how == SILENT and count % UNANSWERED == 0:
                self._emit(Trouble("member", f"{name}: in {count} {last} {how}", REMEDIES[how]))
            elif how != SILENT and spoilt % OFTEN == 0:
                self._emit(Trouble("member", f"{name} spoiled {spoilt} {last}: {how}", REMEDIES[how]))
