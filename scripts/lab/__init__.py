"""What the benchmarks of the swarm need to measure several machines on one."""
