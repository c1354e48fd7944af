"""The auxiliary peer: welcomes peers, keeps the swarm's latest state, records its progress. Needs no GPU."""
