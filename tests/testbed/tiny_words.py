"""A language model's run of some thousand parameters."""

from __future__ import annotations

import json

from tt_cli.run import CausalLmRun, load_run


def tiny_words(**changes: object) -> CausalLmRun:
    """The built-in run with a small model. changes: keys of its config."""
    run = CausalLmRun.of(load_run("words-demo"))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = json.loads(run.model.config) | sizes | {"head_dim": 16, "num_hidden_layers": 2} | changes
    return run.replaced({"run.name": "tiny-words", "model.config": json.dumps(config), "model.length": 32})
