"""An optimizer in the host's memory, for a model on a GPU. Used by scripts/finetune_gpt2.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


class Offloaded(torch.optim.Optimizer):
    """Float32 weights and the optimizer's state in the host's memory; the GPU keeps weights and gradients alone.

    inner: the optimizer of the host's weights, masters, as `made` makes it.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], made: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self.own = list(parameters)
        super().__init__(self.own, {})
        self.masters = [nn.Parameter(one.detach().to("cpu", torch.float32, copy=True)) for one in self.own]
        self.inner = made(self.masters)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Gradients come over; the host's weights are updated one by one; the GPU's become copies of them."""
        gradients = [one.grad.cpu() for one in self.own if one.grad is not None]
        for own, master, gradient in zip(self.own, self.masters, gradients, strict=True):
            master.grad = gradient.float()
            self.inner.step()  # of this one: the others have no gradient
            master.grad = None
            own.copy_(master)
