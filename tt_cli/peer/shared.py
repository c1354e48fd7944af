"""What this peer shares with all others: parameters and optimizer state, from model, optimizer and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tt_cli.checkpoint import CheckpointError, TrainingState, pack, unpack
from tt_cli.errors import TTError
from tt_cli.optim import Lamb8bit, learning_rate
from tt_cli.run import RunConfig
from tt_cli.swarm.shared import StepFacts


class TrainedState:
    """`swarm.shared.SharedState` of a Dalle trained with 8-bit LAMB.

    The parameters are fp32 copies on the CPU: the device goes on with its own while a step changes these.
    """

    def __init__(self, run: RunConfig, model: nn.Module, backup: TrainingState | None):
        self._run = run
        own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        if backup is not None:
            _check_shapes(backup, own)
        source = own if backup is None else backup.parameters
        self._parameters = {name: source[name].to("cpu", torch.float32, copy=True).contiguous() for name in own}
        self._optimizer = Lamb8bit(self._parameters, run.optimizer)
        if backup is not None:
            self._optimizer.load_state_dict(backup.optimizer)
        self._epoch = 0 if backup is None else backup.step
        self._digest = self.state().digest()

    @property
    def epoch(self) -> int:
        """Global steps that these parameters have seen."""
        return self._epoch

    @property
    def digest(self) -> str:
        """Of parameters, optimizer state and step."""
        return self._digest

    def shapes(self) -> dict[str, torch.Size]:
        """Name → shape, in the model's order."""
        return {name: tensor.shape for name, tensor in self._parameters.items()}

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self._parameters.values(), *self._optimizer.state_dict().values()))

    def step(self, gradients: Mapping[str, torch.Tensor]) -> StepFacts:
        """One LAMB step with the averaged gradient, which is used up."""
        rate = learning_rate(self._run.schedule, self._epoch)
        report = self._optimizer.step(gradients, rate)
        self._epoch += 1
        self._digest = self.state().digest()
        return StepFacts(rate, report.gradient_norm)

    def state(self) -> TrainingState:
        """The tensors themselves, not copies."""
        return TrainingState(
            step=self._epoch,
            parameters=self._parameters,
            optimizer=self._optimizer.state_dict(),
            run_toml=self._run.to_toml(),
            identity=self._run.identity,
        )

    def snapshot(self) -> TrainingState:
        """Copies, to be written while training goes on."""
        now = self.state()
        return TrainingState(
            step=now.step,
            parameters={name: tensor.clone() for name, tensor in now.parameters.items()},
            optimizer={name: tensor.clone() for name, tensor in now.optimizer.items()},
            run_toml=now.run_toml,
            identity=now.identity,
        )

    def copy_into(self, model: nn.Module) -> None:
        """Give the model on the device these parameters."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._parameters[name])

    def pack(self) -> bytes:
        """All of it as one safetensors file."""
        return pack(self.state())

    def adopt(self, data: bytes, signed: Callable[[int, str], bool]) -> None:
        """Become a state that another peer sent. Raises ValueError, with nothing changed, for a wrong one."""
        try:
            state = unpack(data)
        except CheckpointError as error:
            raise ValueError(str(error)) from error
        digest = state.digest()
        if state.identity != self._run.identity:
            raise ValueError(f"a state of run {state.identity}")
        if not signed(state.step, digest):
            raise ValueError(f"a state of step {state.step} that no member signed")
        _check_shapes(state, self._parameters)
        try:
            self._optimizer.load_state_dict(state.optimizer)
        except TTError as error:
            raise ValueError(str(error)) from error
        for name, tensor in self._parameters.items():
            tensor.copy_(state.parameters[name])
        self._epoch, self._digest = state.step, digest


def _check_shapes(state: TrainingState, own: Mapping[str, torch.Tensor]) -> None:
    if state.parameters.keys() != own.keys():
        unlike = sorted(state.parameters.keys() ^ own.keys())
        raise ValueError(f"a state with other tensors than this model's ({', '.join(unlike[:3])} …)")
    for name, tensor in own.items():
        if state.parameters[name].shape != tensor.shape or state.parameters[name].dtype != torch.float32:
            raise ValueError(
                f"a state whose {name} is {state.parameters[name].dtype} {tuple(state.parameters[name].shape)}"
            )
