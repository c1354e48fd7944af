"""Local steps: this peer's own optimizer steps between two global ones, and how far they have come.

Notable:
- theta is the shared state, theta_i the parameters on this peer's device. A round averages theta - theta_i of all
  members, by samples (pseudo-gradients, DiLoCo, arXiv:2311.08105), where it would average gradients;
- only the thread that trains changes theta_i, and not while a round has its pseudo-gradient: the micro-batch in hand
  is kept for the first inner step after it;
- with delayed updates it goes on meanwhile, and then from the new theta less what it did since it gave the round its
  pseudo-gradient; the next round has to wait until it did so (`settled`);
- what no round has taken stays: a peer that comes to another theta goes on from there less its own pseudo-gradient;
- what a message left out stays too, and goes into the next one (error feedback), but for a twentieth a round;
- inner moments are private. They begin with the process, with a warm-up, and are in no backup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from tt_cli.errors import first_line
from tt_cli.optim.schedule import learning_rate
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import RunConfig
from tt_cli.run.sections import LocalPart
from tt_cli.supervisor.events import Choice, Emit
from tt_cli.swarm.compression.accumulator import Accumulator, FigureSums, NamedTensors
from tt_cli.swarm.compression.gradient_buffer import DecodedGradients, GradientBuffer
from tt_cli.swarm.shared_state import LockedState
from tt_cli.task.task import is_for_muon, trained

KEPT = 0.95  # of what a message left out, after each round: it was computed from ever older parameters


class LocalSteps(Accumulator):
    """An `Accumulator` that steps with the gradients it gets, and gives the rounds what all steps came to.

    It keeps no sums between inner steps: the gradients of the first micro-batch of each become them.

    model: its parameters are theta_i; it may move to a device before the first `renew`. shared: theta. new, held:
    figures of the samples whose inner steps are made.
    """

    inner_steps: int = 0

    def __init__(self, run: RunConfig, model: nn.Module, shared: TrainedState, emit: Emit):
        assert isinstance(run.optimizer, LocalPart)
        self._parameters = trained(model)
        super().__init__(list(self._parameters))
        self._run, self._shared, self._emit = run, shared, emit
        self._settings = run.optimizer
        self._optimizers: list[torch.optim.Optimizer] = []
        self._made = 0  # with these moments
        self._waiting = FigureSums()  # of gradients of the next inner step
        self._base = ""  # the digest of the theta from which theta_i began; "" where it is to begin anew
        self._holding, self._given = False, 0  # inner steps that are in what is held
        self._kept: GradientBuffer | None = None  # the pseudo-gradient that no round has taken, as of the last `hold`
        self._left: dict[str, Tensor] = {}  # what sparse messages left out, in half precision
        self._at_hold: dict[str, Tensor] = {}  # theta_i as of the last `hold`, on the CPU, with delayed updates

    @property
    def ready(self) -> bool:
        """False while a round has the pseudo-gradient, or the others' state is taken over, or is to be."""
        return not self._holding or (self._settings.delayed and bool(self._base))

    @property
    def settled(self) -> bool:
        """False until theta_i goes on from the theta that a round made."""
        return not (self._at_hold and self._behind)

    def renew(self, state: LockedState) -> None:
        """Give theta_i the newest theta, less what no round has taken. The training thread, before each micro-batch."""
        with self._lock:
            if self._holding or not (state.fresh or self._behind):
                return
            with state.use():
                if not self._behind:
                    self._doubt()
                with self._whole():
                    self._go_on()
                self._base, self._kept, state.fresh = self._shared.digest, None, False
                self._at_hold.clear()

    def _go_on(self) -> None:
        for name, theta in self._shared.state().parameters.items():
            own = self._parameters[name].detach()
            if (held := self._at_hold.get(name)) is None:
                own.copy_(theta)
            else:
                own.sub_(held.to(own.device)).add_(theta.to(own.device))
        for name, way in () if self._kept is None else DecodedGradients(self._kept).items():
            own = self._parameters[name].detach()
            own.sub_(way.to(own.device))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A context that changes theta_i; where it fails midway, as memory does, nothing of that counts."""
        try:
            yield
        except Exception:
            self._doubt()
            raise

    def _doubt(self) -> None:
        """Drop all that came of theta_i but what a round has: it begins anew from theta."""
        self.new, self._waiting, self._optimizers, self._base = FigureSums(), FigureSums(), [], ""
        if not self._holding:
            self._kept = None
        self._left.clear()
        self._at_hold.clear()
        self._clear()

    @property
    def _behind(self) -> bool:
        return self._base != self._shared.digest

    def _sum_up(self, gradients: NamedTensors, samples: float) -> None:
        if self._sums:
            return super()._sum_up(gradients, samples)
        torch._foreach_mul_(list(gradients.values()), samples)
        self._sums = dict(gradients)

    def _clear(self) -> None:
        self._sums = {}

    def _count(self, figures: FigureSums) -> None:
        self._waiting.merge(figures)
        stays = self._behind or (self._holding and not self._settings.delayed)
        if self._waiting.samples >= self._settings.inner_batch and not stays:
            with self._whole():
                self._step()

    def _step(self) -> None:
        """One inner step with the mean of what waits."""
        if not self._optimizers:
            self._optimizers, value, reason = inner_optimizers(self._settings, self._parameters)
            self._emit(Choice("inner optimizer", value, reason))
            self._made = 0
        warm = min(1.0, (self._made + 1) / max(1, self._settings.warmup_steps))
        rate = warm * learning_rate(self._run.schedule, self._shared.epoch)
        for name, parameter in self._parameters.items():
            parameter.grad = self._sums[name].div_(self._waiting.samples)
        nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.max_grad_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self._clear()
        self.new.merge(self._waiting)
        self._waiting = FigureSums()
        self._made, self.inner_steps = self._made + 1, self.inner_steps + 1

    # ------------------------------------------------------------------ for the rounds

    def hold(self, local: GradientBuffer) -> None:
        """Write the pseudo-gradient into `local`; no inner step is made until it is released or given back.

        With delayed updates inner steps go on, for the next round. Raises ValueError where it is not finite: it is
        dropped then, theta_i begins anew, and `local` holds zeros.
        """
        with self._lock:
            self._holding, self._given = True, self.inner_steps
            self.held, self.new = self.new, FigureSums()
            if self._kept is not None and self._behind:
                return  # it lies in `local` as it was held before the state changed
            if self._settings.delayed and not self._behind:
                for name, parameter in self._parameters.items():
                    self._at_hold[name] = parameter.detach().to("cpu", torch.float32, copy=True)
            try:
                self._encode(local)
            except ValueError:
                self.held = FigureSums()
                self._doubt()
                self._encode(local)
                raise
            finally:
                self._kept = local if self.held.samples else None

    set_aside = hold

    def _encode(self, local: GradientBuffer) -> None:
        for name, theta in self._shared.state().parameters.items():
            left = None
            if self._run.sparse and self.held.samples:
                left = self._left.setdefault(name, torch.zeros_like(theta, dtype=torch.bfloat16))
            local.encode_way(name, theta, self._own(name, theta), left)

    def _own(self, name: str, theta: Tensor) -> Tensor:
        """theta_i of one tensor, on any device: theta itself where it is to begin from there."""
        return theta if self._behind else self._at_hold.get(name, self._parameters[name].detach())

    def give_back(self, local: GradientBuffer) -> None:
        """No round has taken what was held: it counts for the next one."""
        with self._lock:
            if self.held.samples and self._left and not self._behind:  # theta_i still has all of it
                encoded = DecodedGradients(local)
                for name, theta in self._shared.state().parameters.items():
                    way = theta - self._own(name, theta).to("cpu", torch.float32)
                    self._left[name].copy_(encoded[name].add_(self._left[name]).sub_(way))
            if not self._behind:
                self._at_hold.clear()
            self.new.merge(self.held)
            self.held, self._holding = FigureSums(), False

    def release(self) -> FigureSums:
        """What was held has entered a step. Returns its figures."""
        with self._lock:
            self._kept = None
            if self.held.samples:
                for left in self._left.values():
                    left.mul_(KEPT)
            self._holding, self.inner_steps = False, self.inner_steps - self._given
            released, self.held = self.held, FigureSums()
            return released

    def forget(self) -> None:
        """Drop all: it belongs to a state that is given up. Until `give_back` no inner step is made."""
        super().forget()
        with self._lock:
            self._waiting, self._kept, self._base = FigureSums(), None, ""
            self._left.clear()
            self._at_hold.clear()
            self._holding, self.inner_steps = True, 0


def inner_optimizers(
    settings: LocalPart, parameters: Mapping[str, nn.Parameter], rate: float = 0.0
) -> tuple[list[torch.optim.Optimizer], str, str]:
    """New optimizers of inner steps, their name and the reason: AdamW, and where it is asked for Muon.

    Muon (Jordan et al. 2024) steps the matrices between embedding and logits, as far as AdamW does (arXiv:2502.16982).
    """
    make, value, reason = adamw(next(iter(parameters.values())).device)
    muon = {name for name, p in parameters.items() if settings.inner == "muon" and is_for_muon(name, p.dim())}
    rest = [(name, p) for name, p in parameters.items() if name not in muon]
    groups = [
        {"params": [p for name, p in rest if name.endswith("bias") == bias], "weight_decay": decay}
        for bias, decay in ((False, settings.weight_decay), (True, 0.0))
    ]
    optimizers = [make(groups, lr=rate, betas=(settings.beta1, settings.beta2), eps=settings.eps)]
    if muon:
        value, reason = f"Muon, and {value} for all but matrices", f"as the run's file says; {reason}"
        matrices = [p for name, p in parameters.items() if name in muon]
        optimizers.append(torch.optim.Muon(matrices, rate, settings.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return optimizers, value, reason


def adamw(device: torch.device) -> tuple[Callable[..., torch.optim.Optimizer], str, str]:
    """AdamW with moments in 8 bits where a step of it works on `device`, else in fp32; its name and the reason."""
    if device.type != "cuda":
        # Fused, a step goes through each tensor once, and takes no memory beside its moments.
        plain = partial(torch.optim.AdamW, fused=True) if device.type == "cpu" else torch.optim.AdamW
        return plain, "AdamW", "bitsandbytes' 8-bit AdamW is for GPUs of CUDA and ROCm"
    try:
        from bitsandbytes.optim.adamw import AdamW8bit

        trial = nn.Parameter(torch.ones(2**14, device=device))
        trial.grad = torch.ones_like(trial)
        AdamW8bit([trial]).step()
        torch.accelerator.synchronize(device)
    except Exception as error:  # whatever a library built for another driver raises
        return torch.optim.AdamW, "AdamW", f"8-bit AdamW does not run here: {first_line(error)}"
    return AdamW8bit, "8-bit AdamW", "a step of bitsandbytes' works on this device"
