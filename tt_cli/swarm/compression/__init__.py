"""Gradients as they travel: codec, 8-bit blocks, the buffer that a peer's processes share."""
