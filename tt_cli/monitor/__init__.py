"""One snapshot of the swarm, and its renderings: terminal, text, JSON."""

from tt_cli.swarm.records.snapshot import PeerView, SwarmSnapshot, take_snapshot

__all__ = ["PeerView", "SwarmSnapshot", "take_snapshot"]
