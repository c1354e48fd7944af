"""One snapshot of the swarm, and its renderings: terminal, text, JSON."""

from tt_cli.monitor.snapshot import PeerView, Snapshot, take_snapshot

__all__ = ["PeerView", "Snapshot", "take_snapshot"]
