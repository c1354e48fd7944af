"""Benchmarks, one file each; scripts/bench starts them (see `harness`)."""
