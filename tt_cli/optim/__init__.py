"""The optimizer of a run: LAMB with 8-bit moments on the CPU, and the learning-rate schedule."""
