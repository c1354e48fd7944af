"""The memory that drawing takes, known before it starts."""

from __future__ import annotations

import torch

from tt_cli.model.dalle import Dalle
from tt_cli.model.layers.projection import copied_bytes
from tt_cli.model.sampling.generation import PROMPTS_AT_ONCE
from tt_cli.model.sampling.kv_cache import Caches, slot_count

# float32 values that choosing a code holds for each entry of the vocabulary: the filters' sorts most of all.
_SAMPLING_VALUES = 20


def drawing_bytes(dalle: Dalle, prompts: int, samples: int, dtype: torch.dtype) -> int:
    """Bytes that a Decoder of this size takes beside the model: caches, copied weights, and what a step needs.

    The caches are exact; what a step and the prompts' pass through the trunk hold at once is an upper estimate.
    """
    config, rows = dalle.config, prompts * samples
    caches = Caches(config, prompts, samples, torch.device("meta"), dtype).nbytes
    sets = (4 * config.inner_dim + 3 * config.ff_mult * config.dim) * config.dim * config.weight_sets
    weights = sets + config.image_vocab * config.dim
    table = dalle.logits.weight
    copies = copied_bytes(weights, table.dtype, table.device, dtype, rows)
    kinds = {*config.attention_types, config.last_attention}
    seen = sum(config.text_positions + slot_count(config, kind) for kind in kinds)
    tables = config.image_positions * (seen * dtype.itemsize + 12 * config.dim_head + 64)
    # values of a position in a branch: residual streams and normed input, and the widest part
    values = 6 * config.dim + max(4 * config.ff_mult * config.dim, 9 * config.inner_dim)
    prefill = min(prompts, PROMPTS_AT_ONCE) * config.text_positions * values
    scores = 3 * config.heads * (config.text_positions + slot_count(config, "conv_like"))
    own_column = 2 * config.inner_dim * config.image_size
    step = rows * (values + scores + own_column + _SAMPLING_VALUES * config.image_vocab)
    return caches + copies + tables + 4 * max(prefill, step)
