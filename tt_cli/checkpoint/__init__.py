"""Weights at rest: the state of training as one safetensors file with the run file inside."""
