"""Train together: accumulate gradients, average them with the swarm, step the shared state.

The way of one gradient, between `backward` and the next `forward`:

1. `step` (training thread) checks it finite and adds it to the accumulators.
2. When the swarm together has `target_batch_size` samples, the round (background thread) takes the accumulators
   as this peer's mean gradient, and averages it with every peer that holds the same state.
3. An average that all members hold alike goes through the optimizer on the CPU: same bytes in, same bytes out.
   Otherwise the round is dropped, and repeated with the gradient still held.
4. The training loop copies the new parameters into the model. With delayed updates (the paper, section 3.1) the device
   kept computing meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hivemind.dht import DHT

from tt_cli.errors import is_out_of_memory
from tt_cli.identity.passes import RollBack
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Contribution, Emit, Log, Progress
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import RoundPlan, longest_search
from tt_cli.swarm.averager import Averager
from tt_cli.swarm.catch_up import CatchUp
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.compression.accumulator import Accumulator, FigureSums, NamedTensors
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients
from tt_cli.swarm.matchmaking import Matchmaker
from tt_cli.swarm.membership.admission import membership_at
from tt_cli.swarm.membership.orders import OrganiserOrders
from tt_cli.swarm.membership.rsa_identity import Identity
from tt_cli.swarm.network.bandwidth import BandwidthLimiter
from tt_cli.swarm.network.connectivity import ConnectivityMonitor
from tt_cli.swarm.participants.selector import ParticipantSelector
from tt_cli.swarm.participants.stragglers import BLAMELESS
from tt_cli.swarm.records.peer_record import About, PeerRecord
from tt_cli.swarm.records.publisher import PeerDirectory, SwarmState
from tt_cli.swarm.reporting.round_log import PHASES, PUBLISHED, RoundLog
from tt_cli.swarm.reporting.throughput import Throughput, bytes_per_hour
from tt_cli.swarm.shared_state import LockedState, RolledBack, SharedState, StateLoader

__all__ = ["About", "Collaboration", "NetworkAccess"]

LOOK_SECONDS = 0.25
SUSPICIOUS = 3  # micro-batches in a row that were not finite: the device gets its parameters again
IDLE_SECONDS = 3.0  # without delayed updates: so long a step is waited for by who could leave meanwhile


@dataclass(frozen=True)
class NetworkAccess:
    """The way of one peer to the swarm: its node, which stays the caller's, its key, and caps on its traffic.

    initial_peers: those it joined through. averager: the process that speaks for this peer. met: multiaddrs of members
    that it met before it began.
    """

    dht: DHT
    identity: Identity
    line: BandwidthLimiter | None = None
    initial_peers: Sequence[str] = ()
    clock: Clock = field(default_factory=Clock)
    averager: type[Averager] = Averager
    met: Sequence[str] = ()


class Collaboration:
    """One trainer's share in the swarm.

    It forks when it is made: make it before other threads and before CUDA is touched. Then call `synchronise`
    once, `step` after every micro-batch, and `close`. orders: the organiser's. published: loads the newest checkpoint
    of the run, if it publishes any. accumulator: one that makes steps of its own with the gradients.

    state: copy parameters and write checkpoints while it is in `use`. board: all members' records. round_log: what this
    peer does, in words. take_over: how it comes to the others' state. contacts: whom it reaches. seek_anew: set, to
    give up the group that is sought, and try those again who did not come or spoiled a round.
    """

    directory_type, state_type = PeerDirectory, LockedState

    def __init__(
        self,
        run: RunConfig,
        network: NetworkAccess,
        shared: SharedState,
        about: About,
        emit: Emit,
        orders: OrganiserOrders,
        published: StateLoader | None = None,
        accumulator: Accumulator | None = None,
    ):
        dht, identity, self.clock = network.dht, network.identity, network.clock
        self.run, self.emit, self.about = run, emit, about
        self.peer_id, self.client_mode = identity.peer_id, dht.client_mode
        self.orders, self.state = orders, self.state_type(shared)
        orders.begin(self.state.epoch)
        self._target, self._delayed = run.swarm.target_batch_size, run.optimizer.delayed

        self._throughput = Throughput(self.clock.monotonic)
        self._moved = deque[tuple[float, ...]](maxlen=17)  # seconds, bytes sent, received: after the last global steps
        self._rejected = self._rejected_in_row = 0
        self._last_loss = FigureSums()
        self._contributed = self._stood_by = self._averages = False

        self._changed = self.clock.condition()
        self._closing = False
        self._committing = threading.Lock()
        self._broken: BaseException | None = None
        self.seek_anew = threading.Event()

        shapes = shared.shapes()
        self._accumulator = accumulator or Accumulator(list(shapes))
        self.averager = network.averager(
            run,
            dht,
            identity,
            shapes,
            source=self.state.snapshot,
            read_tree=shared.read_tree,
            line=network.line,
            clock=self.clock,
        )
        self.averager.era = orders.era
        self._matchmaker = Matchmaker(self.averager, run.swarm.matchmaking_time)
        self.take_over = CatchUp(
            run, self.averager, self.state, emit, published, lambda: self.board.view, orders.ways_back
        )
        banned = membership_at(dht).is_banned
        self.contacts = ConnectivityMonitor(dht, network.initial_peers, self.clock, network.met, banned)
        self.round_log = RoundLog(self.peer_id, emit, lambda: self.board.view)
        self.board = self.directory_type(
            run, dht, identity, lambda error: self.round_log.trouble(error, "DHT", "records on the DHT"), self.clock
        )
        guilty, late = self.averager.audits.proofs.guilty, BLAMELESS * run.swarm.next_chunk_timeout
        turn = 2 * longest_search(run.swarm.matchmaking_time)
        self._selector = ParticipantSelector(
            self.peer_id, self.board, guilty, self.averager.show_proofs, late, turn, self.clock
        )
        self._selector.before = self.averager.voted_with
        self._worker: threading.Thread | None = None

    # ------------------------------------------------------------------ for the training loop

    @property
    def epoch(self) -> int:
        return self.state.epoch

    @property
    def ready(self) -> bool:
        """False where a gradient would be late: without delayed updates amid a round; with local steps also behind."""
        return self._accumulator.ready and (self._delayed or not self._averages)

    @property
    def finished(self) -> bool:
        return self.epoch >= self.run.schedule.total_steps

    def synchronise(self) -> None:
        """Take the swarm's state over where it is ahead of this peer's, then begin to take part."""
        self._publish()  # before looking: of two peers that start together at least one sees the other
        self.board.start()
        view = self.board.fresh_view()
        while (order := self.orders.due) and not self._closing:
            self._go_back(order)
        if self.take_over.begin(view, self.round_log.phase):
            self._publish()
        self._catch_up(view)
        self._worker = self.clock.thread(self._work, "rounds")
        self._trains()

    def step(self, gradients: NamedTensors, samples: int, loss: torch.Tensor, figures: NamedTensors) -> bool:
        """Count in the mean gradient of one micro-batch of `samples`, its mean loss and up to four figures by name.

        Returns False when any of it is not finite: it is then left out. Without delayed updates it returns only
        after a global step that is due. Raises what broke the background thread.
        """
        self._raise_broken()
        if self._stood_by:
            self._stood_by = False
            self._trains()
        if finite := self._accumulator.add(gradients, samples, loss, figures):
            self._rejected_in_row = 0
            self._throughput.add(samples)
        else:
            self._rejected += 1
            self._rejected_in_row += 1
            if self._rejected_in_row % SUSPICIOUS == 0:
                self.state.fresh = True  # the device's own copy of the parameters may be damaged
            self.emit(Log(f"left out a micro-batch that is not finite ({self._rejected} so far)", "warning"))
        self._publish()
        with self._changed:
            self._changed.notify_all()
            if not self.run.optimizer.delayed:
                self._changed.wait_for(lambda: self._broken is not None or not self._due(self.board.view), IDLE_SECONDS)
        return finite

    def stand_by(self, seconds: float = 0.0) -> None:
        """In place of `step`, now and then, while this peer computes nothing: its record stays fresh.

        It takes part in rounds, without samples. Waits for `ready`, `seconds` at most. Raises what broke the rounds.
        """
        self._raise_broken()
        if self.orders.paused:
            self._stood_by = True
            self.round_log.phase("waiting", self.orders.paused)
        self._publish()
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self.ready, seconds)

    def _raise_broken(self) -> None:
        if self._broken is not None and is_out_of_memory(self._broken):  # no matter of the micro-batch
            raise WorkerBroken(f"memory ran out in a round ({self._broken})") from self._broken
        if self._broken is not None:
            raise self._broken

    def report(self) -> None:
        """Emit the progress towards the next step; the training loop calls it about once a second, each round once."""
        view, mine = self.board.view, self._throughput.per_second()
        others = [r for r in view.records if r.peer_id != self.peer_id and r.role == "trainer"]
        swarm = mine + sum(record.samples_per_second for record in others)
        samples = self._samples_of_swarm(view)
        sent_per_hour, received_per_hour = bytes_per_hour(list(self._moved))
        recent = self._accumulator.new if self._accumulator.new.samples else self._last_loss
        self.emit(
            Progress(
                epoch=self.epoch,
                samples=samples,
                target_samples=self._target,
                peers=len(others) + 1,
                my_samples=self._throughput.total,
                my_samples_per_second=mine,
                swarm_samples_per_second=swarm,
                my_share=mine / swarm if swarm else 0.0,
                eta=max(0, self._target - samples) / swarm if swarm else None,
                loss=recent.mean_loss(),
                figures=recent.mean_figures(),
                bytes_sent=int(self.averager.traffic[0]),
                bytes_received=int(self.averager.traffic[1]),
                rejected_micro_batches=self._rejected,
                inner_steps=self._accumulator.inner_steps,
                inner_steps_due=self._inner_steps_due(samples, mine / swarm if swarm else 0.0),
                sent_per_hour=sent_per_hour,
                received_per_hour=received_per_hour,
            )
        )

    def _inner_steps_due(self, samples: int, share: float) -> int | None:
        """Inner steps that this peer will have made by the next global one; None for none, or while it has no share."""
        made, settings = self._accumulator.inner_steps, self.run.optimizer
        if made is None or settings.name != "local" or not share:
            return None
        return made + math.ceil(max(0, self._target - samples) * share / settings.inner_batch)

    def missing(self) -> list[str]:
        """Names of trainers that count as part of the swarm and hold another state, or are not seen."""
        here = {record.peer_id for record in self.board.view.members(*self.state.position)}
        return sorted(map(self.round_log.name, self._selector.other_trainers() - here))

    def end_steps(self) -> None:
        """Make no step any more; one under way is made and told first."""
        with self._committing:
            self._closing = True

    def close(self) -> None:
        """Leave: withdraw the record, end the averager's process. The others do not wait for this peer."""
        self.end_steps()
        self._wake()
        self._matchmaker.drop()
        self.board.stop()
        self.averager.end()

    def _publish(self) -> None:
        if self.averager.era != self.orders.era:
            return  # it goes back just now: a state of one era under the name of the other would count for neither
        epoch, digest = self.state.position  # at once: another thread may be making a step
        shown = self._last_loss if self._last_loss.samples else self._accumulator.new
        sent_per_hour, received_per_hour = bytes_per_hour(list(self._moved))
        self.board.publish(
            PeerRecord(
                peer_id=self.peer_id,
                role=self.about.role,
                user=self.about.user[:80],
                version=self.about.version[:80],
                device=self.about.device[:80],
                client_mode=self.client_mode,
                epoch=epoch,
                digest=digest,
                samples=self._accumulator.samples,
                samples_per_second=self._throughput.per_second(),
                total_samples=self._throughput.total,
                micro_batch=self.about.micro_batch,
                loss=shown.mean_loss(),
                figures=shown.mean_figures(),
                round=self.round_log.last_round[:80],
                clipped=self.round_log.clipped,
                accused=self.round_log.accused,
                slow=list(self._selector.slow)[:PUBLISHED],
                bytes_sent=int(self.averager.traffic[0]),
                bytes_received=int(self.averager.traffic[1]),
                inner_steps=self._accumulator.inner_steps,
                sent_per_hour=sent_per_hour,
                received_per_hour=received_per_hour,
                resynced_chunks=self.state.resynced,
                era=self.orders.era,
                time=self.clock.dht_time(),
            )
        )

    # ------------------------------------------------------------------ rounds, in the background thread

    def _samples_of_swarm(self, view: SwarmState) -> int:
        others = [r for r in view.members(*self.state.position) if r.peer_id != self.peer_id]
        return self._accumulator.samples + sum(record.samples for record in others)

    def _due(self, view: SwarmState) -> bool:
        return not self.finished and self._accumulator.settled and self._samples_of_swarm(view) >= self._target

    def _behind(self, view: SwarmState) -> bool:
        """Most of the others hold a later state, or another one at this epoch."""
        return self.take_over.attainable(view).leads(*self.state.position)

    def _overtaken(self) -> bool:
        """True when what this peer is about to do is in vain: others did it, or the organiser takes the run back."""
        return self._behind(self.board.view) or self.orders.due is not None

    def _plan(self, view: SwarmState) -> RoundPlan:
        if self.seek_anew.is_set():
            self.seek_anew.clear()
            self._matchmaker.drop()
            self._selector.forgive()
        return self._selector.plan(view, *self.state.position, self.take_over.false_among(view))

    def _wait(self, seconds: float = LOOK_SECONDS, missing: str = "") -> None:
        """Until something changed, or for so long. missing: words about what is waited for."""
        if missing:
            self.round_log.phase("waiting", missing)
        with self._changed:
            self._changed.wait(seconds)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _trains(self) -> None:
        self.round_log.phase("training", f"towards step {self.epoch + 1}")

    def _work(self) -> None:
        try:
            while not self._closing:
                view = self.board.view
                if order := self.orders.due:
                    self._go_back(order)
                elif self._behind(view):
                    self._catch_up(self.board.fresh_view())
                elif self._due(view):
                    self.report()  # what this round is made of; the training loop may wait for its end
                    self._make_step()
                    self._averages = False
                    self._wake()
                else:
                    missing, speed = self._target - self._samples_of_swarm(view), max(view.samples_per_second(), 1e-9)
                    self.board.expect(max(0.0, missing - self.board.untold()) / speed)
                    if not self._selector.late(view, *self.state.position):  # by what was told, for that all know
                        self._matchmaker.prepare(self._plan(view), missing / speed)
                    self._wait()
        except BaseException as error:  # handed to the training thread, which ends the peer with it
            self._broken = error
        finally:
            self._wake()

    def _make_step(self) -> None:
        """Average what was accumulated and step; repeat until committed, or until the others are ahead."""
        started = self.clock.monotonic()
        self._hold()
        encoding = self.clock.monotonic() - started
        view = self.board.view if self._matchmaker.standing else self._wait_for_late(started)
        while not self._closing and self.orders.due is None:
            if self._behind(view):
                self._matchmaker.drop()
                self.round_log.dropped(self.epoch, view.epoch, self._accumulator.held.samples, started)
                self._accumulator.give_back(self.averager.local)
                return
            came = self._accumulator.ready and self._accumulator.new.samples
            if came and not self._accumulator.held.samples:  # it began without any, and gave nothing to any average
                self._hold()
            plan, held = self._plan(view), self._accumulator.held
            if plan.lacking:  # the missing live as far as anyone knows: until their records expire
                self._selector.forgive()
                if self._follow(view, plan, started):
                    return
                self._wait_amid_round(plan.lacking)
            elif len(plan.members) > 1:
                self.contacts.accompanied(plan.members - {self.peer_id})
                self.round_log.phase("averaging", f"for step {self.epoch + 1} with {len(plan.members) - 1} others")
                self._averages = True
                result, missed = self._matchmaker.average(plan, held.samples, held.loss, self._overtaken)
                self._selector.ended(result, missed, view.records, self.epoch)
                self.round_log.slow_line(self.averager.slow_line())
                if result.complete:
                    self.board.met(result.members)
                    result.seconds["encode"] = encoding
                    with self._committing:
                        self._commit(started, result)
                    return
                self._averages = False
                self.round_log.failed(self.epoch, result, missed, held.samples, started)
                if result.voted and self._follow(self.board.view, plan, started):
                    return
                self.board.renew()
                if not (held.samples or self._accumulator.ready):
                    self._wait_amid_round()
            elif not held.samples:
                self._wait_amid_round()
            elif why := self._why_not_alone(view):
                self._wait_amid_round(why)
            else:
                self._matchmaker.drop()
                result = RoundResult.alone(self.peer_id, held.samples, held.loss)
                self._selector.ended(result, (), view.records, self.epoch)
                with self._committing:
                    self._commit(started, result)
                return
            view = self.board.fresh_view()

    def _why_not_alone(self, view: SwarmState) -> str:
        """Words on why this peer should not make a step alone; "" when nothing is against it."""
        if self.board.blind:
            return "for this peer's DHT node, which does not answer"
        why = self.contacts.why_not_alone((r.peer_id for r in view.records), self.board.parted())
        now = self.board.view  # whom it asked may have taken their time, and be back by now
        plan, back = self._plan(now), "for trainers that are back"
        return why or plan.lacking or (back if self._behind(now) or len(plan.members) > 1 else "")

    def _follow(self, view: SwarmState, plan: RoundPlan, started: float) -> bool:
        """Make the step that some made from this state, where more voted for it than may lie."""
        if followed := self.take_over.follow(view, plan):
            self.round_log.dropped(self.epoch - 1, self.epoch, self._accumulator.held.samples, started)
            self._accumulator.give_back(self.averager.local)
            self._publish()
        return followed

    def _hold(self) -> None:
        """Put what was accumulated into the round."""
        try:
            self._accumulator.hold(self.averager.local)
        except ValueError as error:
            self.emit(Log(f"left out the gradient of this step: {error}", "warning"))

    def _wait_amid_round(self, missing: str = "") -> None:
        """Wait for what a round lacks. Local steps go on meanwhile, and this round has them too."""
        if self._accumulator.ready:
            return self._wait(missing=missing)
        self._accumulator.give_back(self.averager.local)
        self._wait(IDLE_SECONDS, missing)
        return self._hold()

    def _wait_for_late(self, started: float) -> SwarmState:
        """Give those who are about to come to this state the time that matchmaking would take; then go without them."""
        view, waited = self.board.fresh_view(), dict[str, float]()
        began = self.clock.monotonic()
        while late := self._selector.late(view, *self.state.position):
            now = self.clock.monotonic()
            waited |= dict.fromkeys((record.peer_id for record in late), now - began)
            if self._closing or now > started + self.run.swarm.matchmaking_time:
                self._selector.no_shows.strike(record.peer_id for record in late)
                break
            view = self.board.fresh_view()
        self._selector.waited(waited, view.members(*self.state.position))
        return view

    def _commit(self, started: float, result: RoundResult) -> None:
        """Step the shared state with the whole average, or with this peer's gradient where it is alone."""
        if self._closing:
            return
        average = self.averager.store.buffer if len(result.members) > 1 else self.averager.local
        before = self.clock.monotonic()
        try:
            facts = self.state.step(DecodedGradients(average))
        except RolledBack as error:
            self.round_log.rolled_back(str(error), self.epoch)
            self._accumulator.release()
            self._publish()
            return
        stepped = self.clock.monotonic()
        self.board.stepped(*self.state.position)
        computing = self._target / max(self.board.view.samples_per_second(), 1e-9) if self._delayed else 0.0
        self.round_log.left_out(self._selector.stepped(self.epoch, result, computing))
        self._moved.append((stepped, *map(float, self.averager.traffic)))
        samples, loss = result.samples_and_loss()
        if result.given:
            self._last_loss = self._accumulator.release()
        else:
            self._accumulator.give_back(self.averager.local)
        phases = {phase: result.seconds[phase] for phase in PHASES if phase in result.seconds}
        self.round_log.committed(
            self.epoch, result, samples, {**phases, "apply": stepped - before, "whole": stepped - started}
        )
        self.round_log.reduced(result.share, self.averager.upload)
        self._publish()
        self.round_log.step(self.epoch, loss, facts, self.state.digest)
        if result.given and self._last_loss.samples and not self._contributed:
            self._contributed = True
            self.emit(Contribution(self.epoch, self._last_loss.samples))
        self._trains()
        self._wake()

    def _go_back(self, order: RollBack) -> None:
        """Come to the state that the organiser ordered; what was computed since belongs to another one."""
        self._matchmaker.drop()
        self._accumulator.forget()
        self.averager.era = order.order
        self.round_log.phase("syncing", f"the organiser takes the run back to step {order.step}")
        if self.take_over.go_back(order, self.board.fresh_view()):
            self._accumulator.give_back(self.averager.local)
            self.orders.done(order)
            self._selector.went_back()
            self._publish()
            self._trains()
        else:
            self._wait(1.0)  # nobody has it yet

    def _catch_up(self, view: SwarmState) -> None:
        """Come to the state that most of the foremost hold; returns when this peer is not behind, or is to go back."""
        attempts = 0
        self._matchmaker.drop()
        self.contacts.accompanied(r.peer_id for r in view.trainers() if r.peer_id != self.peer_id)
        self._accumulator.set_aside(self.averager.local)
        while self._behind(view) and self.orders.due is None and not self._closing:
            attempts += 1
            if self.take_over.catch_up(self.take_over.attainable(view), self.round_log.phase):
                self._publish()
            else:
                self._wait(min(5.0, 0.5 * attempts))
            view = self.board.fresh_view()
        self._accumulator.give_back(self.averager.local)
        if self._worker is not None:
            self._trains()
