"""The memory budget of a peer: whether its run fits, said before it is begun, and how much training may use.

`Room` is what this peer may take in all, `check_room` refuses in one line what cannot fit, with the options that would
make it fit. What a run needs comes from tt_cli.memory, what is free from the driver, the kernel and the control groups.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from tt_cli.errors import TTError, UsageError
from tt_cli.memory import CUDA_ON_DEVICE, Kind, Need, Place, shown
from tt_cli.model.allocator import device_memory
from tt_cli.peer.device import Device, release_memory
from tt_cli.supervisor.events import Choice, Emit
from tt_cli.supervisor.host_memory import HostMemory, family_memory, host_memory
from tt_cli.task.task import Task

HEADROOM = {"host": 0.2, "device": 0.1}  # of what is free: left to desktops and other programs
PLANNED = 0.9  # of --memory; the rest is for what no account foresees
# Of what is left beside the rest of the peer, for activations to keep: those of some layers, or all of a pass or none.
ACTIVATION_SHARE, WHOLE_SHARE = {"cpu": 0.4, "cuda": 0.5}, {"cpu": 0.8, "cuda": 1.0}


@dataclass(frozen=True)
class Room:
    """Bytes that this peer may take in all where it trains: RAM of the whole family on a CPU, else GPU memory.

    most: what there is, or the bound. usual: what training is planned with, less the headroom for others. free: what is
    free just now. memory: the bound, given with --memory or, of a GPU, with --gpu-memory. whose: "this machine", "this
    container" or the GPU's name.
    """

    place: Place
    most: int
    usual: int
    free: int
    total: int
    whose: str
    memory: int | None = None

    @property
    def flag(self) -> str:
        """The flag that bounds it."""
        return "--memory" if self.place == "host" else "--gpu-memory"

    def in_words(self) -> str:
        """Such as "6.1 of 7.7 GiB are free on this machine"."""
        if self.memory is not None and self.memory <= self.most:
            return f"{self.flag} allows {shown(self.memory)}"
        return f"{shown(self.free)} of {shown(self.total)} are free on {self.whose}"


def host_room(memory: int | None) -> Room:
    """RAM for this process and all that it starts."""
    return _room("host", sum(family_memory(os.getpid())), host_memory(), memory)


def _room(place: Place, own: int, there: HostMemory, memory: int | None) -> Room:
    allowed = there.total if memory is None else memory
    usual = own + int((1 - HEADROOM[place]) * there.free)
    planned = usual if memory is None else min(usual, int(PLANNED * memory))
    return Room(place, min(own + there.free, allowed), planned, there.free, there.total, there.whose, memory)


def check_host(task: Task[Any], wanted: str | None, memory: int | None) -> None:
    """Refuse, before anything is loaded, what no device of this machine could train in its RAM.

    Must not touch CUDA: processes are still to be forked. Raises TTError.
    """
    may_be = wanted != "cpu" if wanted else bool(torch.version.cuda or torch.version.hip)  # others are taken by name
    kinds: list[Kind] = ["cpu", "cuda"] if may_be else ["cpu"]
    room = host_room(memory)
    need = min((task.need(kind) for kind in kinds), key=lambda need: need.host)
    if need.host > room.most:
        raise refusal(task, need, room)


def check_room(
    task: Task[Any], device: Device, wanted: int | None, memory: int | None, gpu_memory: int | None = None
) -> Room:
    """The room on the chosen device. Raises TTError where one example (or --batch-size) does not fit.

    A GPU's allocator takes no more than that: beyond, a desktop stutters, and WSL spills into RAM.
    """
    room = host = host_room(memory)
    if device.kind == "cuda":
        there = device_memory(device.torch_device)
        gpu = HostMemory(there.free, there.total, device.name)
        room = _room("device", there.taken + CUDA_ON_DEVICE, gpu, gpu_memory)
    need = task.need(device.kind, itemsize=device.itemsize, micro_batch=wanted or 1)
    for taken in (host, room):
        if need.total(taken.place) > taken.most:
            raise refusal(task, need, taken)
    if room.place == "device":
        most = max(need.total(room.place), room.usual if gpu_memory is None else room.most)
        share = min(1.0, max(0, most - CUDA_ON_DEVICE) / room.total)
        where = () if device.torch_device.type == "mps" else (device.torch_device,)
        torch.get_device_module(device.torch_device).set_per_process_memory_fraction(share, *where)
    return room


def refusal(task: Task[Any], need: Need, room: Room) -> TTError:
    """One line: what it needs, what there is, what would make it fit."""
    fixes, taken = [], need.total(room.place)
    if room.memory is not None and taken <= room.total and room.memory < taken:
        fixes.append(f"give {room.flag} {-(-taken * 1.1 // 10**8) / 10:g}GB")
    elif taken <= room.total:
        fixes.append("close other programs")
    if need.micro_batch > 1:
        fixes.append("give --batch-size 1, or leave it out")
    if room.place == "device" and task.need("cpu").host <= host_room(None).most:
        fixes.append("give --device cpu")
    if not fixes:
        fixes.append(f"it takes a machine with {shown(taken)} free")
    examples = f"with {need.micro_batch} example{'s' if need.micro_batch > 1 else ''} at a time"
    asked = room.memory is not None or need.micro_batch > 1
    kind = UsageError if asked and "close other programs" not in fixes else TTError  # which a peer that worked outlives
    return kind(
        f"{task.run.run.name} needs {shown(taken)} of {'GPU memory' if room.place == 'device' else 'RAM'} {examples} "
        f"({need.in_words(room.place)}), and {room.in_words()}: {' or '.join(fixes)}"
    )


def choose_activation_budget(task: Task[Any], device: Device, room: Room, emit: Emit) -> int:
    """Bytes of activations that a model may keep for its backward pass; the more, the less it computes again."""
    least = task.need(device.kind, itemsize=device.itemsize)
    rest = max(0, room.usual - least.total(room.place))
    share = (ACTIVATION_SHARE if task.reversible else WHOLE_SHARE)[device.kind]
    reason = f"{share:.0%} of the {shown(rest)} left beside the rest of the peer; what does not fit is computed again"
    emit(Choice("activations", shown(share * rest), reason))
    return int(share * rest)


class RoomMemory:
    """The memory of a peer of a run on its device, by size of micro-batch, in bytes.

    budget: activations to keep. limit: all that the peer may take.
    """

    def __init__(self, task: Task[Any], device: Device, room: Room, budget: int):
        self._task, self._device, self._room, self._budget = task, device, room, budget
        self.limit = room.usual

    def predicted(self, size: int) -> int:
        """Bytes that it takes by the memory model."""
        return self.need(size).total(self._room.place)

    def need(self, size: int) -> Need:
        """All that it takes by the memory model."""
        kind, itemsize = self._device.kind, self._device.itemsize
        return self._task.need(kind, itemsize=itemsize, micro_batch=size, budget=self._budget)

    def measured(self) -> int:
        """The most that it has taken so far; on a CPU what the family takes now: freed memory stays with it."""
        if self._room.place == "host":
            return sum(family_memory(os.getpid()))
        return device_memory(self._device.torch_device).peak + CUDA_ON_DEVICE

    def release(self) -> None:
        """Give back all that nobody uses."""
        release_memory(self._device.torch_device)
