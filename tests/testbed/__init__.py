"""What tests of real processes and benchmarks share: networks, unusual peers, attackers, a fork server."""
