"""The choice between compiled and portable kernels, and its reason.

All members of a run hold the same bytes, so kernels that differ in one bit are of no use: numba's are taken where they
come to the portable ones' bytes on this very machine. The portable ones, with torch and numpy, always run.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tt_cli.errors import first_line
from tt_cli.run import folders

INSTALL = "pip install 'tt-cli[numba]'"

Kernels = TypeVar("Kernels")


@dataclass(frozen=True)
class Implementation(Generic[Kernels]):
    """The kernels that run here: their name, "compiled" or "portable", and the reason for people."""

    kernels: Kernels
    name: str
    reason: str


def choose(
    portable: Kernels, compiled_name: str, trial: Callable[[Kernels], Iterable[tuple[str, object]]]
) -> Implementation[Kernels]:
    """The fastest kernels that are right on this machine; compiling or loading and testing them takes a moment.

    compiled_name: "package.module:Class" of numba's. trial: what kernels come to, as (name, bytes or plain values).
    """
    try:
        _keep_machine_code()
        compiled: Kernels = pkgutil.resolve_name(compiled_name)()
        pairs = zip(trial(compiled), trial(portable), strict=True)
        faults = sorted({name for (name, result), (_, expected) in pairs if result != expected})
    except ImportError as error:
        missing = error.name == "numba"
        reason = f"numba is not installed: {INSTALL}" if missing else f"numba cannot be used: {first_line(error)[:200]}"
        return Implementation(portable, "portable", reason)
    except Exception as error:  # numba, LLVM and the disk have no common error
        return Implementation(portable, "portable", f"compiling failed: {first_line(error)[:200]}")
    if faults:
        reason = f"the compiled kernels compute other bytes here ({', '.join(faults)})"
        return Implementation(portable, "portable", reason)
    return Implementation(compiled, "compiled", "numba is installed, and its kernels agree with torch to the last bit")


def _keep_machine_code() -> None:
    """Have numba keep it beside the package, or in this user's folder where that is read-only."""
    from numba import config

    if not (os.access(Path(__file__).parent, os.W_OK) or config.CACHE_DIR):
        config.CACHE_DIR = str(folders.home() / "compiled")
