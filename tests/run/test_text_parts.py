"""The run file of a language model."""

from __future__ import annotations

import json

import pytest
from testbed.tiny_words import tiny_words

from tt_cli.errors import UsageError
from tt_cli.model.causal_lm import canonical
from tt_cli.run import CausalLmRun, RunConfig, load_run


@pytest.mark.parametrize("name", ["words", "words-demo"])
def test_a_built_in_model_is_written_out(name: str) -> None:
    run = load_run(name)
    assert isinstance(run, CausalLmRun) and run.kind == "causal_lm"
    assert canonical(json.loads(run.model.config)) == run.model.config, "a default of transformers is left open"
    assert RunConfig.from_toml(run.to_toml(), name) == run


def test_one_model_is_one_identity_however_it_is_written() -> None:
    run = tiny_words()
    fields = json.loads(run.model.config)
    spaced = run.replaced({"model.config": json.dumps(dict(reversed(fields.items())), indent=1)})
    assert spaced.identity == run.identity and spaced.model.config == run.model.config
    assert tiny_words(rms_norm_eps=1e-5).identity != run.identity


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.config": "llama"}, r"model\.config.*must be a config\.json as text"),
        ({"model.config": "[]"}, r"model\.config.*must be a config\.json as text"),
        ({"model.config": '{"hidden_size": 8}'}, r"model\.config.*must be a config\.json as text"),
        ({"model.config": '{"model_type": 3}'}, r"model\.config.*model_type: must be a name"),
        ({"model.config": '{"model_type": "llama", "rope": NaN}'}, r"model\.config.*must be a config\.json"),
        ({"model.length": 1}, r"model\.length = 1: must be at least 2"),
        ({"data.location": "/text"}, r"location: a file or a folder, with source = \"files\" and no other"),
        ({"data.source": "files"}, r"location: a file or a folder"),
        ({"vqgan": {"grid": 8}}, r"vqgan: no such key"),
    ],
)
def test_what_is_wrong_in_it_is_one_line(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        tiny_words().replaced(changes)
    assert "\n" not in str(caught.value)
