"""One model of memory: what a peer of a run takes, on its device and of the host; usable without hivemind."""

from tt_cli.memory.sizes import GIB, parse_size, shown

__all__ = ["GIB", "parse_size", "shown"]
