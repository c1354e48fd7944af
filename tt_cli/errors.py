"""Errors that a person can meet.

Each carries one line that says what happened, why, and what to do; the command line prints that line and
exits with the error's code. A traceback is for bugs.
"""

from __future__ import annotations


class TTError(Exception):
    """Something outside the program went wrong (network, disk, another process)."""

    exit_code = 1


class UsageError(TTError):
    """A request that cannot be met as it stands: a wrong name, flag, file or value."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, the name of its class where it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__
