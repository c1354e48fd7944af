"""Attackers as real processes, each of which misbehaves in one way: what scripts/bench attacks measures.

- `rounds`: what a member does inside an averaging round;
- `gradients`: what it puts into its own gradient before one;
- `records`: what it says about itself, and the state it hands out;
- `member`: a training peer that does one of these;
- `stranger`: a bare libp2p peer that the run does not know;
- `table`: all of them by name.

An attacker changes our own classes in its own process and nowhere else. What it does is decided by its number, the step
and a seed, so that a failure happens again.
"""
