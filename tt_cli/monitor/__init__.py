"""One snapshot of the swarm, and its renderings: terminal, text, JSON."""

from tt_cli.monitor.snapshot import PeerView, SwarmSnapshot, take_snapshot

__all__ = ["PeerView", "SwarmSnapshot", "take_snapshot"]
