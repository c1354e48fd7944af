"""Drawing code by code: caches, sampling, CUDA graphs."""
