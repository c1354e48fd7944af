"""Errors that a person can meet.

Each carries one line that says what happened, why, and what to do; the command line prints that line and
exits with the error's code. A traceback is for bugs.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

_OUT_OF_MEMORY = (  # in lower case: of the CPU's allocator, C++, CUDA, HIP, MPS, XPU, their libraries, and oneDNN
    *("can't allocate memory", "not enough memory", "bad_alloc", "out of memory", "out_of_memory", "outofmemory"),
    *("alloc_failed", "memoryallocation", "out_of_device_memory", "out_of_host_memory", "out_of_resources"),
    "could not create a primitive",
)


class TTError(Exception):
    """Something outside the program went wrong (network, disk, another process)."""

    exit_code = 1


class UsageError(TTError):
    """A request that cannot be met as it stands: a wrong name, flag, file or value."""

    exit_code = 2


def nearest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Which of the names may be meant, as a question; `otherwise` where none is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean '{close[0]}'?" if close else otherwise


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, the name of its class where it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch and Python raise when memory runs out, on any device."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(refusal in words for refusal in _OUT_OF_MEMORY)
    )


@contextmanager
def os_errors(
    action: str, remedy: str | Callable[[OSError], str] = "", kind: type[TTError] = TTError
) -> Iterator[None]:
    """Raise `kind` in place of OSError. action: what cannot be done, such as "cannot write FILE"."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error)  # libraries add paths to it
        advice = remedy if isinstance(remedy, str) else remedy(error)
        raise kind(f"{action}: {reason}{advice and f'; {advice}'}") from error


def disk_remedy(error: OSError, otherwise: str, space: str = "free some space") -> str:
    """The remedy for a file that cannot be written. otherwise: where there is room for it."""
    if error.errno == errno.EFBIG:
        return "raise the limit on file sizes (ulimit -f)"
    return space if error.errno in (errno.ENOSPC, errno.EDQUOT) else otherwise
