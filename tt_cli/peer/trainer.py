"""The training peer's process: what `tt join` starts, from the run file to the last gradient."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tt_cli.data.examples import Batch
from tt_cli.hub.hub_files import on_bytes
from tt_cli.model.allocator import attempt, keep_freed_memory
from tt_cli.model.layers.fused import fusion
from tt_cli.peer.backup import Backups
from tt_cli.peer.device import Device, choose_device, release_memory
from tt_cli.peer.health.lifelines import Lifelines
from tt_cli.peer.health.memory_watch import MemoryWatch
from tt_cli.peer.health.watchdog import ObservedEmit, ProgressWatchdog
from tt_cli.peer.local_steps import LocalSteps
from tt_cli.peer.memory_budget import RoomMemory, check_host, check_room, choose_activation_budget
from tt_cli.peer.micro_batch import (
    BatchSettings,
    MicroBatches,
    MicroBatchSearch,
    Remembered,
    SizeChoice,
    choose_micro_batch,
    repeated,
)
from tt_cli.peer.swarm_peer import PeerOptions, SwarmPeer, prepare_arithmetic
from tt_cli.peer.trained_state import StateLost, TrainedState, move_into_mapping
from tt_cli.run import RunConfig, folders
from tt_cli.supervisor.events import Choice, Download, Emit, Finished, Log, Phase, Trouble
from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.supervisor.reporter import Orders, WorkerBroken
from tt_cli.swarm.collaboration import Collaboration
from tt_cli.swarm.compression.accumulator import Accumulator
from tt_cli.swarm.network.connectivity import places
from tt_cli.swarm.network.dht_node import daemon_watched
from tt_cli.swarm.network.reachability import Astray, astray, start_reachable_dht
from tt_cli.task import task_of
from tt_cli.task.task import Examples, Task, narrow, trained

REPORT_SECONDS = 1.0
HAND_OVER_SECONDS = 30.0
COMPILE_WORKERS = 4  # processes of Inductor at most, each of some hundred MB: there are a handful of kernels
FEW_EXAMPLES = 16  # that micro-batches are tried out with, repeated


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(PeerOptions):
    """Options that `tt join` hands its peer process. memory: bytes of RAM that the peer may use."""

    device: str | None = None
    batch_size: int | None = None
    threads: int | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    seed: int | None = None


def main(options: dict[str, Any], emit: Emit, orders: Orders, parts: Parts | None = None) -> None:
    """Train until the run is done or the supervisor says so. parts: others than a volunteer's peer is made of."""
    parts = parts or Parts()
    opts = TrainerOptions(**options)
    run = RunConfig.from_toml(opts.run, "the run file")
    emit = observed = ObservedEmit(emit)
    before: list[Callable[[], object]] = [lambda: emit(Finished("left"))]
    begin = orders.leave_at_once(before)
    task = parts.task(run)
    emit(Phase("starting", "loading the model and the data"))
    on_bytes.set(lambda received, total, left: emit(Download(received, total, eta=left)))
    check_host(task, opts.device, opts.memory)
    if opts.threads:
        torch.set_num_threads(opts.threads)
    prepare_arithmetic(run, emit)
    task.prepare()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folders.home() / "compiled"))
    workers = min(COMPILE_WORKERS, opts.threads or len(os.sched_getaffinity(0)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(workers))
    model = task.new_model()
    with torch.no_grad():
        move_into_mapping(trained(model))
    peer = SwarmPeer(run, opts, "trainer", model, emit)
    backups, shared, folder = peer.backups, peer.shared, peer.folder

    release_freed_memory()
    emit(Phase("starting", "joining the DHT"))
    start = partial(parts.start_dht, run, peer.identity, emit, listen=opts)
    if peer.met:
        beside = f"{len(places(peer.met))} beside the initial peers"
        emit(Choice("members to join through", beside, "it met them before, or the run's authority named them"))
    dht, client_mode = start(initial_peers=[*opts.initial_peers, *peer.met])
    with ExitStack() as closing:
        local = LocalSteps(run, model, shared, emit) if run.optimizer.name == "local" else None
        part = partial(parts.collaboration, accumulator=local)
        taking_part = peer.taking_part(dht, opts.initial_peers, client_mode, backups.go_back, part)
        collaboration = closing.enter_context(taking_part)
        before.insert(0, collaboration.board.stop)
        collaboration.round_log.slow_line(collaboration.averager.slow_line())
        stream = task.examples(
            backups.choose_seed(opts.seed),
            peer=peer.identity.peer_id,
            folder=folder,
            name=f"{peer.identity.path.stem}-examples",
            tell=lambda words, remedy: emit(Trouble("data stream", words, remedy)),
        )
        closing.callback(stream.close)
        # after the forks: their processes must never touch CUDA, and give back what they free
        keep_freed_memory()
        device = choose_device(opts.device, task, emit)
        room = check_room(task, device, opts.batch_size, opts.memory, opts.gpu_memory)
        narrow(model, device.autocast)
        model.to(device.torch_device)
        budget = choose_activation_budget(task, device, room, emit) if task.recomputes else 0
        task.keep(model, budget)
        _allow_compiling(task, device, emit)
        step = parts.micro_step(task, model, device, collaboration, shared, local)
        memory = RoomMemory(task, device, room, budget)
        size = _choose_size(run, opts, step, memory, stream, emit)
        step.release()  # what trying sizes out has left
        emit(Choice("elementwise kernels", *fusion.reason()))
        peer.about.device, peer.about.micro_batch = device.name, size

        emit(Phase("syncing", "looking for the swarm's state"))

        def save() -> None:
            collaboration.end_steps()
            with collaboration.state.use():  # nothing else is to be done: the state itself is written, not a copy
                backups.write(shared.state(), wait=True)

        def seek() -> Astray | None:
            called = not client_mode and not opts.host.startswith("127.")
            return astray(run, dht, opts.announce, collaboration.board.view.records) if called else None

        marker = peer.identity.path.with_suffix(".restarted-when-stuck")  # others of this machine have their own
        watchdog = closing.enter_context(ProgressWatchdog(run, collaboration, observed, orders, marker, save, seek))
        collaboration.synchronise()
        begin()
        marker, expected = peer.identity.path.with_suffix(".restarted-for-memory"), memory.need(size).host
        memory_watch = MemoryWatch(opts.memory, expected, marker, emit, lower=device.kind == "cpu")
        try:
            with daemon_watched(dht), memory_watch:
                batches = MicroBatches(step, size, emit, together=_most_at_a_time(run))
                _train(step, batches, memory_watch, watchdog, stream, backups, orders)
        except StateLost:
            raise
        except WorkerBroken:  # the next process goes on from here
            save()
            raise
        except getattr(torch, "AcceleratorError", ()) as error:  # (torch 2.8) its state is in RAM still
            save()
            raise WorkerBroken(f"{device.name} failed ({str(error).partition(chr(10))[0]})") from error
        if not orders.leave.is_set():
            _hand_over(collaboration, orders.leave)
        emit(Phase("leaving", "writing a backup"))
        save()
        emit(Finished("the run is done" if collaboration.finished else "left"))


def _choose_size(
    run: RunConfig, opts: TrainerOptions, step: MicroStep, memory: RoomMemory, stream: Examples, emit: Emit
) -> int:
    device, target, compute = step.device, run.swarm.target_batch_size, step.probe(stream)
    most = _most_at_a_time(run)
    if fusion.devices and not opts.batch_size and attempt(lambda: compute(1))[1]:  # compiles, or shows that it fails
        step.release()
    threads, kernels = torch.get_num_threads(), fusion.reason()[0]
    bound = opts.memory if device.kind == "cpu" else opts.gpu_memory
    settings = BatchSettings(device.name, device.dtype_name, threads, bound, target, kernels)
    remembered = Remembered(folders.run_folder(run) / "micro-batch.json", emit)

    def search() -> SizeChoice:
        return MicroBatchSearch(compute, memory, target, most, patient=device.kind == "cuda").run()

    size = choose_micro_batch(opts.batch_size, settings, memory, search, remembered, emit)
    if most is not None and size > most:
        emit(Choice("micro-batch", str(most), f"optimizer.inner_batch: an inner step has no more; it was {size}"))
    return min(size, most or size)


def _most_at_a_time(run: RunConfig) -> int | None:
    """Examples that a micro-batch has at most, by the run: with local steps those of an inner step."""
    return run.optimizer.inner_batch if run.optimizer.name == "local" else None


def _allow_compiling(task: Task[Any], device: Device, emit: Emit) -> None:
    """Have elementwise work compiled on a GPU, where the model is large enough for that to pay."""
    fusion.warn = lambda words: emit(Log(words, "warning"))
    if device.torch_device.type != "cuda":
        fusion.off = "compiling pays on GPUs of CUDA and ROCm"
    elif (has := task.sizes()["effective"]) < task.compiled_from:
        fusion.off = f"compiling is for models of {task.compiled_from:,} parameters or more, and this has {has:,}"
    else:
        fusion.devices.add("cuda")


class MicroStep:
    """Forward and backward of one micro-batch, with the newest shared parameters, or where local steps brought them.

    In fp16 the loss is scaled, so that small gradients do not vanish (Micikevicius et al. 2018), where the model does
    not scale them itself; a pass in which some overflow is repeated with half the scale.
    """

    def __init__(
        self,
        task: Task[Any],
        model: nn.Module,
        device: Device,
        collaboration: Collaboration,
        shared: TrainedState,
        local: LocalSteps | None = None,
    ):
        self.task, self._local = task, local
        self.model, self.device, self.collaboration, self.shared = model, device, collaboration, shared
        self._parameters = trained(model)
        scaled = device.autocast == torch.float16 and not task.reversible
        self._scaler = torch.amp.GradScaler(device.torch_device.type, enabled=scaled)
        # In the place of an optimizer, whose step says that none overflowed: torch's would import its compiler.
        self._finite: Any = SimpleNamespace(param_groups=[{"params": [*self._parameters.values()]}], step=lambda: True)

    def probe(self, stream: Examples) -> Callable[[int], None]:
        """A function that computes one micro-batch of a given size as in training, and counts it for nothing."""
        sums, few = Accumulator(list(self._parameters)), cache(lambda: next(stream.batches(FEW_EXAMPLES)))

        def compute(size: int) -> None:
            loss, figures = self._backward(repeated(few(), size))
            sums.add(self.gradients(), size, loss, figures)
            if self.device.kind == "cuda":
                torch.accelerator.synchronize(self.device.torch_device)

        return compute

    def __call__(self, batch: Batch) -> bool:
        """Compute one micro-batch and count it in; False when it was not finite and was left out.

        Where memory runs out, nothing of it is counted in.
        """
        self.renew()
        loss, figures = self._backward(batch)
        return self.collaboration.step(self.gradients(), len(batch), loss, figures)

    def renew(self) -> None:
        """Give the model the newest parameters."""
        if self._local is not None:
            self._local.renew(self.collaboration.state)
        elif self.collaboration.state.fresh:
            with self.collaboration.state.use():
                self.shared.copy_into(self.model)
                self.collaboration.state.fresh = False

    def release(self) -> None:
        """Give back what an interrupted micro-batch left."""
        self.model.zero_grad()
        release_memory(self.device.torch_device)

    def changed(self, size: int) -> None:
        """Tell the others how many examples this peer computes at a time."""
        self.collaboration.about.micro_batch = size

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the last micro-batch, by name."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _backward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        batch, finite = batch.to(self.device.torch_device), None
        while not finite:
            self.model.zero_grad()
            with self.device.precision():
                loss, figures = self.task.losses(self.model, batch)
            self._scaler.scale(loss).backward()
            self._scaler.unscale_(self._finite)
            finite = self._scaler.step(self._finite)
            self._scaler.update()
            if not finite and self._scaler.get_scale() < 1:
                self._compute_in_full()
        return loss.detach(), figures

    def _compute_in_full(self) -> None:
        self.collaboration.emit(Choice("precision", "fp32", "fp16 does not hold what this model computes"))
        self.model.float()
        self.device, self._scaler = replace(self.device, autocast=None), torch.amp.GradScaler(enabled=False)


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of; tests and benchmarks hand others in."""

    micro_step: type[MicroStep] = MicroStep
    collaboration: type[Collaboration] = Collaboration
    task: Callable[[RunConfig], Task[Any]] = task_of
    start_dht: Callable[..., tuple[Any, bool]] = start_reachable_dht


def _train(
    step: MicroStep,
    batches: MicroBatches,
    memory_watch: MemoryWatch,
    watchdog: ProgressWatchdog,
    stream: Examples,
    backups: Backups,
    orders: Orders,
) -> None:
    """Micro-batches, until the run is done, or this peer shall leave or pause."""
    collaboration, lifelines, reported = step.collaboration, Lifelines(step.collaboration.averager), 0.0
    last: int | None = None  # the step to finish with
    computed = False
    for batch in watchdog.over(each_until(lambda: computed, stream.batches(batches.together))):
        held = orders.hold or collaboration.orders.paused
        memory_watch.relieve(batches, held)
        if computed := not held and collaboration.ready:
            batches(batch)
        else:
            if collaboration.run.optimizer.name == "local":
                step.renew()  # the next round waits for it
            collaboration.stand_by(0.0 if held else REPORT_SECONDS)
            orders.leave.wait(REPORT_SECONDS if held else 0.0)
        if time.monotonic() > reported + REPORT_SECONDS:
            reported = time.monotonic()
            collaboration.report()
            lifelines.check()
            watchdog.check()
        if backups.due(collaboration.epoch):
            with collaboration.state.use():
                state = step.shared.snapshot()
            backups.write(state)
        if not orders.finish.is_set():
            last = None
        elif last is None:
            last = collaboration.epoch + 1
        if orders.leave.is_set() or collaboration.finished or (last is not None and collaboration.epoch >= last):
            return


def each_until(computed: Callable[[], bool], batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, each again and again until it is computed: who waits leaves no example out."""
    for batch in batches:
        yield batch
        while not computed():
            yield batch


def _hand_over(collaboration: Collaboration, leave: threading.Event) -> None:
    """After its last step, stay until the others have it too; at the end of the run, until one that stays holds it.

    A member that leaves at once would take with it the parts of the last average that others still receive.
    """
    deadline = time.monotonic() + HAND_OVER_SECONDS
    while time.monotonic() < deadline and not leave.is_set():
        view = collaboration.board.fresh_view()
        late = any(record.averages and record.epoch < collaboration.epoch for record in view.records)
        holders = [r for r in view.records if (r.epoch, r.digest) == (collaboration.epoch, collaboration.state.digest)]
        kept = any(record.role != "trainer" for record in holders) or len(view.records) <= 1
        if not late and (kept or not collaboration.finished):
            return
