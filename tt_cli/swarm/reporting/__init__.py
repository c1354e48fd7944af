"""Reports on rounds: outcomes in words, loss spikes, throughput."""
