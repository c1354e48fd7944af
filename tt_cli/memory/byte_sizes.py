"""Amounts of memory as people write and read them."""

from __future__ import annotations

import re

from tt_cli.errors import UsageError

GIB = 2**30
_UNITS = {
    "": 1,
    "b": 1,
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), 1)},
    **{unit: 1024**power for power, unit in enumerate("kmgt", 1)},
}


def parse_size(text: str) -> int:
    """Bytes in "8GB" (10^9), "8GiB" or "8G" (2^30), "512 MB", "1.5gb" or a bare number of bytes.

    Raises UsageError for anything else, and for less than a MiB: who writes 8 means 8GB.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if match is None or (unit := _UNITS.get(match[2].lower())) is None:
        raise UsageError(f"{text!r} is no amount of memory: write it like 8GB, 7.5GiB or 800MB")
    size = float(match[1]) * unit
    if not 2**20 <= size < 2**63:
        hint = "" if match[2] else " (without a unit it is bytes)"
        raise UsageError(f"{text!r} is no amount of memory that a machine can have{hint}: write it like 8GB")
    return int(size)


def shown(size: float) -> str:
    """A number of bytes for people: "3.2 GiB", "640 MiB"; below one MiB in KiB."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if abs(size) >= unit:
            return f"{size / unit:.1f} {name}" if abs(size) < 100 * unit else f"{size / unit:.0f} {name}"
    return f"{size / 1024:.0f} KiB"
