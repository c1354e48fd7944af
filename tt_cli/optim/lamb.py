"""LAMB (arXiv:1904.00962) with 8-bit moments, on the CPU, equal to the last bit on every machine.

Notable:
- the update is the one of "Training Transformers Together" (arXiv:2207.03481): the gradients of all tensors
  are clipped together, there is no bias correction, weight decay is part of the update that the trust ratio
  scales, and only names that end in "bias" are free of it;
- the arithmetic is in `kernels.py` (torch) and `lamb_numba.py` (numba): two implementations of `LambKernels` that give
  the same bytes, so that a run may mix them;
- the update is kept in the gradient's memory until the norms that its scale needs are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tt_cli.errors import TTError, UsageError
from tt_cli.optim.blockwise import BlockwiseMoment, LambStep, Moment, PlainMoment
from tt_cli.optim.kernels import CHUNK, LambKernels, implementation

if TYPE_CHECKING:
    from tt_cli.run.sections import OptimizerPart

LARGEST = torch.finfo(torch.float32).max


class NonFiniteGradient(TTError):
    """A gradient holds NaN or an infinity: the step was not taken and nothing was changed."""


class NonFiniteState(TTError):
    """A parameter or a moment was not finite when it was to be stepped; those before it in the order have been."""


@dataclass(frozen=True)
class StepReport:
    """Figures of one step. Norms are L2 over all tensors together."""

    gradient_norm: float  # before clipping
    clip_factor: float  # 1 if the gradients were not clipped
    parameter_norm: float  # before the step
    update_norm: float  # of what was subtracted from the parameters


class Lamb8bit:
    """LAMB over `parameters`: names to contiguous fp32 tensors on the CPU, updated in place.

    `settings` is the optimizer part of a run file. Moments of tensors of `min_8bit_size` elements and more
    are stored in 8 bits, in blocks of `block_size`; the others in fp32. `kernels` replaces those that are
    chosen for this machine; the results are the same. Raises ValueError for unsuitable tensors.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], settings: OptimizerPart, kernels: LambKernels | None = None
    ) -> None:
        if CHUNK % settings.block_size:
            raise UsageError(f"optimizer.block_size = {settings.block_size}: must be a power of two, at most {CHUNK}")
        for name, parameter in parameters.items():
            check_tensor("parameter", name, parameter)
        self.settings = settings
        # one order for all members, whatever the order of the mapping: the norms' last bits depend on it
        self._parameters = {name: parameters[name] for name in sorted(parameters)}
        self._moments = {
            name: (self._moment(parameter, signed=True), self._moment(parameter, signed=False))
            for name, parameter in self._parameters.items()
        }
        self._kernels = kernels or implementation().kernels

    def _moment(self, parameter: Tensor, *, signed: bool) -> Moment:
        if parameter.numel() < self.settings.min_8bit_size:
            return PlainMoment(parameter.numel())
        return BlockwiseMoment(parameter.numel(), block_size=self.settings.block_size, signed=signed)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> StepReport:
        """Take one step at learning rate `lr`. **Uses up the gradients**: their memory holds the update then.

        `gradients`: a contiguous fp32 tensor for each parameter, of its shape. Each is asked for twice, and need only
        live until the next one is. Raises NonFiniteGradient, or ValueError for names, shapes or types that do not fit,
        before anything is changed; NonFiniteState where memory was damaged, with a part of the tensors changed.
        """
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"a learning rate is finite and not negative, not {lr}")
        gradient_norm = checked_norm(self._parameters, gradients, self._kernels)
        # the small constant is that of torch.nn.utils.clip_grad_norm_
        clip_factor = min(1.0, self.settings.max_grad_norm / (gradient_norm + 1e-6))
        parameter_squares = update_squares = 0.0
        for name, parameter in self._parameters.items():
            p, g = parameter.detach().view(-1), gradients[name].detach().view(-1)
            decay = 0.0 if name.endswith("bias") else self.settings.weight_decay
            step = LambStep(clip_factor, self.settings.beta1, self.settings.beta2, self.settings.eps, decay)
            p_squares, u_squares = self._kernels.moments_and_update(p, g, *self._moments[name], step)
            # an infinite scale would turn the zeros of a tiny update into NaN
            scale = min(lr * self._trust(math.sqrt(p_squares), math.sqrt(u_squares)), LARGEST)
            self._kernels.subtract(p, g, scale)
            check_bound(name, math.sqrt(p_squares), scale * math.sqrt(u_squares))
            parameter_squares += p_squares
            update_squares += scale * scale * u_squares
        return StepReport(
            gradient_norm=gradient_norm,
            clip_factor=clip_factor,
            parameter_norm=math.sqrt(parameter_squares),
            update_norm=math.sqrt(update_squares),
        )

    def _trust(self, parameter_norm: float, update_norm: float) -> float:
        clamped = min(parameter_norm, self.settings.trust_clamp)
        return clamped / update_norm if clamped > 0 and update_norm > 0 else 1.0

    def state_dict(self) -> dict[str, Tensor]:
        """The moments as plain tensors: the live ones, not copies.

        Names: `m/<parameter>` and `v/<parameter>` (n,) fp32, or `m.codes/…`, `v.codes/…` (n,) uint8 with
        `m.absmax/…`, `v.absmax/…` (blocks,) fp32. LAMB as used here needs nothing else to go on.
        """
        state: dict[str, Tensor] = {}
        for name, moments in self._moments.items():
            for letter, moment in zip("mv", moments, strict=True):
                state |= {f"{letter}{part}/{name}": tensor for part, tensor in moment.tensors().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state into the live tensors, byte for byte; TTError, and no change, if it does not fit."""
        own = self.state_dict()
        if missing := own.keys() - state.keys():
            raise TTError(f"optimizer state is incomplete: {_some(missing)} missing; is it from another run?")
        if unknown := state.keys() - own.keys():
            raise TTError(f"optimizer state does not fit: {_some(unknown)} unknown; is it from another run?")
        for name, tensor in own.items():
            given = state[name]
            if given.dtype != tensor.dtype or given.shape != tensor.shape:
                raise TTError(
                    f"optimizer state {name} is {given.dtype} {tuple(given.shape)}, "
                    f"expected {tensor.dtype} {tuple(tensor.shape)}; is it from another run?"
                )
            if tensor.dtype == torch.float32:
                if not bool(torch.isfinite(given).all()):
                    raise TTError(f"optimizer state {name} is not finite: the state is damaged")
                if not name.startswith("m/") and bool((given < 0).any()):
                    raise TTError(f"optimizer state {name} has negative elements: the state is damaged")
        for name, tensor in own.items():
            tensor.copy_(state[name])


def checked_norm(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], kernels: LambKernels) -> float:
    """The L2 norm of all gradients together. Raises NonFiniteGradient; ValueError where they do not fit."""
    if gradients.keys() != parameters.keys():
        raise ValueError(f"no or unknown gradient: {_some(gradients.keys() ^ parameters.keys())}")
    total = 0.0
    for name, parameter in parameters.items():
        gradient = gradients[name]
        check_tensor("gradient", name, gradient)
        if gradient.shape != parameter.shape:
            raise ValueError(f"gradient {name} has shape {tuple(gradient.shape)}, not {tuple(parameter.shape)}")
        total = kernels.squares(gradient.detach().view(-1), total)
        # squares of fp32 numbers cannot overflow in float64, so a finite sum means finite elements
        if not math.isfinite(total):
            raise NonFiniteGradient(f"the gradient of {name} is not finite: the step was not taken")
    return math.sqrt(total)


def check_bound(name: str, parameter_norm: float, update_norm: float) -> None:
    """Bound every element of a parameter after its step. Raises NonFiniteState."""
    if not parameter_norm + update_norm <= LARGEST:  # NaN compares as false
        raise NonFiniteState(f"{name} or its moments are not finite")


def check_tensor(kind: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{kind} {name} must be contiguous fp32 on the CPU, not {tensor.dtype} on {tensor.device}, "
            f"strides {tensor.stride()}"
        )


def _some(names: set[str]) -> str:
    """Up to three of `names` for an error message."""
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
