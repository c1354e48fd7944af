"""The state that this peer shares with all others: parameters and optimizer state, from model, optimizer and files.

With local steps parameters alone: the optimizer is `OuterStep`, and each peer has another one (`local_steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from tt_cli.checkpoint.hash_tree import CHUNK, StateTree, bytes_of
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.model.allocator import mapped_like
from tt_cli.optim.lamb import NonFiniteState
from tt_cli.optim.outer_step import shared_optimizer
from tt_cli.optim.schedule import learning_rate
from tt_cli.run import RunConfig
from tt_cli.supervisor.reporter import WorkerBroken
from tt_cli.swarm.shared_state import RolledBack, StepFacts
from tt_cli.task.task import trained


class StateLost(WorkerBroken):
    """A state damaged in memory, which no backup can take its place: the next process begins anew."""


class TrainedState:
    """The `SharedState` of a model.

    The parameters are fp32 copies on the CPU: the device goes on with its own while a step changes these.
    epoch: global steps that they have seen. tree: the hashes of all chunks, as of the last one.
    backup: to begin with. newest: reads the newest one again, when the state turns out to be damaged.
    """

    def __init__(
        self,
        run: RunConfig,
        model: nn.Module,
        backup: TrainingState | None,
        newest: Callable[[], TrainingState | None] = lambda: None,
    ):
        self._run, self._newest = run, newest
        self._parameters = _copies({name: p.detach().float() for name, p in trained(model).items()})
        self._optimizer = shared_optimizer(self._parameters, run.optimizer)
        move_into_mapping(self._optimizer.state_dict())
        self.epoch = 0
        if backup is None:
            self.tree = self.state().tree()
        else:
            self._load(backup)

    @property
    def digest(self) -> str:
        """Hash of parameters, optimizer state and step."""
        return self.tree.digest

    def shapes(self) -> dict[str, torch.Size]:
        """Name → shape, in the model's order."""
        return {name: tensor.shape for name, tensor in self._parameters.items()}

    def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
        """One step with the averaged gradient, which is used up.

        Raises RolledBack, with the newest backup loaded, where parameters or moments are not finite: a finite state and
        a finite gradient lead to a finite state, so the memory was damaged. Raises StateLost when there is no backup.
        """
        rate = learning_rate(self._run.schedule, self.epoch)
        try:
            report = self._optimizer.step(gradients, rate)
        except NonFiniteState as error:
            why = f"the memory was damaged before step {self.epoch + 1}: {error}"
            if (backup := self._newest()) is None:
                raise StateLost(f"{why}, and there is no backup") from error
            self._load(backup)
            raise RolledBack(why) from error
        self.epoch += 1
        self.tree = self.state().tree()
        return StepFacts(rate, report.gradient_norm)

    def _load(self, backup: TrainingState) -> None:
        _check_shapes(backup, self._parameters)
        for name, tensor in self._parameters.items():
            tensor.copy_(backup.parameters[name])
        self._optimizer.load_state_dict(backup.optimizer)
        self.epoch = backup.step
        self.tree = self.state().tree()

    def state(self) -> TrainingState:
        """The tensors themselves, not copies."""
        return TrainingState(
            step=self.epoch,
            parameters=self._parameters,
            optimizer=self._optimizer.state_dict(),
            run_toml=self._run.to_toml(),
            identity=self._run.identity,
        )

    def snapshot(self) -> TrainingState:
        """Copies, to be written while training goes on."""
        now = self.state()
        return replace(now, parameters=_copies(now.parameters), optimizer=_copies(now.optimizer))

    @torch.no_grad()
    def copy_into(self, model: nn.Module) -> None:
        """Give the model on the device these parameters."""
        for name, parameter in trained(model).items():
            parameter.copy_(self._parameters[name])

    def read_tree(self, manifest: bytes) -> StateTree:
        """The tree of a state that could be this one. Raises ValueError."""
        return StateTree.parse(manifest, self._run.identity, self.shapes())

    def write_into(self, write: Callable[[int, memoryview], object]) -> StateTree:
        """Copy all of it, each tensor at its place in the tree."""
        self.state().write_into(self.tree, write)
        return self.tree

    def patch(self, tree: StateTree, chunks: Mapping[int, memoryview]) -> None:
        """Become the state of `tree` by taking the chunks that differ. ValueError, and no change, if they do not fit.

        Every chunk is verified again here: whatever happened to it on the way, the state then has this digest.
        """
        if tree.layout != self.tree.layout:
            raise ValueError("a state with other tensors than this one's")
        needed = tree.differing(self.tree)
        if missing := [index for index in needed if index not in chunks]:
            raise ValueError(f"{len(missing)} of {len(needed)} chunks are missing, {tree.name_of(missing[0])} first")
        tree.check(needed, chunks)
        for index in needed:
            _check_values(tree, index, chunks[index])
        now = self.state()
        tensors = [*(now.parameters[s.name] for s in tree.parameters), *(now.optimizer[s.name] for s in tree.optimizer)]
        own = [bytes_of(tensor) for tensor in tensors]
        for index in needed:
            tensor, number = tree.find(index)
            own[tensor][number * CHUNK : number * CHUNK + len(chunks[index])] = chunks[index]
        self.epoch, self.tree = tree.step, tree


def move_into_mapping(tensors: Mapping[str, torch.Tensor]) -> None:
    """Give these tensors, in place, memory that forked processes do not inherit."""
    for name, moved in _copies(tensors).items():
        tensors[name].set_(moved.untyped_storage(), moved.storage_offset(), moved.shape, moved.stride())


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    copies = mapped_like(tensors)
    for name, tensor in tensors.items():
        copies[name].copy_(tensor)
    return copies


def _check_values(tree: StateTree, index: int, data: memoryview) -> None:
    """A state's numbers are finite, and those that `Lamb8bit.load_state_dict` refuses below zero are not."""
    tensor, _ = tree.find(index)
    spec = tree.layout[tensor]
    if not spec.torch_dtype.is_floating_point:
        return
    low, high = torch.aminmax(torch.frombuffer(data, dtype=spec.torch_dtype))  # passes NaN on, needs no memory
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ValueError(f"a state whose {tree.name_of(index)} is not finite")
    if tensor >= len(tree.parameters) and not spec.name.startswith("m/") and low < 0:
        raise ValueError(f"a state whose {tree.name_of(index)} has negative elements")


def _check_shapes(state: TrainingState, own: Mapping[str, torch.Tensor]) -> None:
    if state.parameters.keys() != own.keys():
        unlike = sorted(state.parameters.keys() ^ own.keys())
        raise ValueError(f"a state with other tensors than this model's ({', '.join(unlike[:3])} …)")
    for name, tensor in own.items():
        given = state.parameters[name]
        if given.shape != tensor.shape or given.dtype != torch.float32:
            raise ValueError(f"a state whose {name} is {given.dtype} {tuple(given.shape)}")
