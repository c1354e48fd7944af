"""One model of memory: what a peer of a run takes, on its device and of the host; usable without hivemind.

`DalleAccount` gives the account, `parse_size` and `shown` read and write amounts.
"""

from tt_cli.memory.byte_sizes import GIB, parse_size, shown
from tt_cli.memory.trainer_account import CUDA_ON_DEVICE, DalleAccount, Kind, MemoryComponent, Need, Place

__all__ = ["CUDA_ON_DEVICE", "GIB", "Kind", "MemoryComponent", "Need", "Place", "parse_size", "shown", "DalleAccount"]
