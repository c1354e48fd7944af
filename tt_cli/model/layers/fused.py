"""Elementwise work as single kernels: torch.compile on GPUs, with eager torch as the fallback.

What lies between two matrix products (norm and shift, GEGLU and its gradient, residual sums) is bound by memory: in
one kernel it is read and written once. On CPUs the products take nearly all of a step (docs/performance.md), so these
parts run as they are. The compiler keeps its kernels on disk (TORCHINDUCTOR_CACHE_DIR), so the next start is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Fusion:
    """The devices on which kernels are compiled, and what came of it."""

    devices: set[str] = field(default_factory=lambda: {"cuda"})
    compiled: set[str] = field(default_factory=set)
    failure: str = ""

    def wanted(self, args: tuple[Any, ...]) -> bool:
        """True when a function of these arguments is to be compiled."""
        return not self.failure and any(isinstance(x, Tensor) and x.device.type in self.devices for x in args)

    def reason(self) -> tuple[str, str]:
        """The way that elementwise work runs, and why, for people."""
        if self.failure:
            return "eager", f"compiling failed: {self.failure}"
        if self.compiled:
            return "compiled", f"{len(self.compiled)} kernels by torch.compile, kept on disk for the next start"
        return "eager", "compiling pays on GPUs only"


fusion = Fusion()


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` of tensors, compiled on the devices of ``fusion``; if that fails once, all run as they are."""
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        if torch.compiler.is_compiling() or not fusion.wanted(args):
            return function(*args, **kwargs)
        if compiled is not None:
            return compiled(*args, **kwargs)
        candidate = torch.compile(function)
        try:
            result = candidate(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler, its C compiler, Triton and the disk have no common error
            fusion.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            return function(*args, **kwargs)
        compiled = candidate
        fusion.compiled.add(function.__name__)
        return result

    return run
