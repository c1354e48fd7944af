"""Elementwise work as single kernels: torch.compile on GPUs, with eager torch as the fallback.

What lies between products is bound by memory: one kernel reads and writes it once. On CPUs products take nearly all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from tt_cli.errors import first_line, is_out_of_memory

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Fusion:
    """The devices on which kernels are compiled, none until training asks for it, and what came of it.

    off: why none are. warn: told in one line of a failure, which may come with a shape that is met late.
    """

    devices: set[str] = field(default_factory=set)
    compiled: set[str] = field(default_factory=set)
    failure: str = ""
    off: str = "compiling pays where a GPU trains"
    warn: Callable[[str], object] = lambda words: None

    def wanted(self, args: tuple[Any, ...]) -> bool:
        """True when a function of these arguments is to be compiled."""
        return not self.failure and any(isinstance(x, Tensor) and x.device.type in self.devices for x in args)

    def reason(self) -> tuple[str, str]:
        """The way that elementwise work runs, and why, for people."""
        if self.failure:
            return "eager", f"compiling failed: {self.failure}"
        if self.compiled:
            return "compiled", "by torch.compile, kept on disk for the next start"
        return "eager", self.off

    def give_up(self, error: Exception) -> None:
        """Compile nothing any more."""
        cause = getattr(error, "inner_exception", error)  # torch's own error says in its first line that there is one
        self.failure = f"{type(cause).__name__}: {first_line(cause)[:200]}"
        self.warn(f"elementwise kernels run eagerly from now on: compiling failed: {self.failure}")


fusion = Fusion()


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` of tensors, compiled on the devices of ``fusion``; if that fails once, all run as they are.

    One graph serves all micro-batches from 2 on: the first argument's first dimension, and those of its size, may vary.
    All else is known to the compiler, for a GPU divides indices by what it does not know, and slowly.
    """
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        if torch.compiler.is_compiling() or not fusion.wanted(args):
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function)
        for x in (tensors := [x for x in args if isinstance(x, Tensor) and x.dim()]):
            if x.size(0) == tensors[0].size(0) > 1:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        try:
            result = compiled(*args, **kwargs)
        except Exception as error:  # the compiler, its C compiler, Triton and the disk have no common error
            if is_out_of_memory(error):
                raise
            result = function(*args, **kwargs)  # an error of its own is raised again here, and nothing given up
            fusion.give_up(error)
            return result
        fusion.compiled.add(function.__name__)
        return result

    return run
