"""What glibc does with freed memory, set for training and drawing on a CPU.

By default blocks above 32 MiB are taken from the system at every allocation and given back at once, and so is the end
of the heap: every activation is paged in anew. Measured on two cores at the paper's size, a training step took a
fifteenth less time without that.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_REUSED = 1 << 30  # bytes: blocks up to this size, and as much free memory at the heap's end, stay with the process


def keep_freed_memory() -> bool:
    """Let this process reuse freed blocks; False where the C library is not glibc. Call it before the first work."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(key, _REUSED) for key in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
