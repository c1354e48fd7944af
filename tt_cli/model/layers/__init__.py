"""Layers of the decoder, with gradients written by hand."""
