"""The training peer: device, batch sizing, training loop, checkpoints, and the live view of `tt join`."""
