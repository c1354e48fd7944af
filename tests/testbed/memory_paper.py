"""The memory calculator of "Training Transformers Together" (arXiv:2207.03481), its formulas written down again.

Source: mem_calc.py of github.com/training-transformers-together/calc, behind the demonstration's page, which warns that
20 to 30 % may come to the result. It counts elements: a layer is its four attention matrices and two feed-forward ones;
activations are multiples of batch, length and width that were set once for all layers (three times the feed-forward
part's, five times attention's, one norm's), scores without regard to the number of heads. It knows no T5 decoder with a
length of its own, no positions, no biases, no workspace.
"""

from __future__ import annotations

from tt_cli.memory.architectures import Architecture

WARNED = 0.3  # "+20-30 %"


def paper_bytes(
    model: Architecture,
    *,
    micro_batch: int,
    precision: str,
    optimizer: str,
    bits: int,
    checkpointing: bool,
    groups: int = 0,
) -> int:
    """What its page answers for one GPU, without offload. precision: fp32, mixed (its O1) or pure16 (its O3)."""
    b, n, d, hidden = micro_batch, model.sequence, model.dim, model.hidden
    layers = model.layers + model.decoder_layers
    tokens = b * n
    feed_forward = 2 * tokens * hidden + 2 * tokens * d
    attention = 9 * tokens * d + 3 * tokens * n
    kept = tokens * d if checkpointing else 3 * feed_forward + 5 * attention + tokens * d
    weights = (groups or layers) * (4 * d * d + 2 * d * hidden + d) + model.vocab * d + d
    activations = layers * kept + 3 * tokens * d + 2 * tokens * model.vocab
    state = 4.0 if optimizer == "adafactor" else 2 * bits / 8
    held, gradient, item = {"fp32": (4, 4, 4), "mixed": (6, 2, 2), "pure16": (2, 2, 2)}[precision]
    return int(weights * (held + gradient + state) + activations * item)
