"""One snapshot of the swarm, and its renderings: terminal, text, JSON."""
