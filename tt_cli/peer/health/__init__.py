"""Health of a training peer: what it cannot do without, why it makes no step, how much memory is left."""
