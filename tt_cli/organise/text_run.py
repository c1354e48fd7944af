"""Runs of language models for `tt init`: a small new one, or one that goes on from weights on the Hub."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tt_cli.errors import TTError, UsageError
from tt_cli.hub.hub_files import download, repository_files
from tt_cli.run import RunConfig, load_run
from tt_cli.run.sections import TokenizerSource

NEW = "words"  # the built-in run, with first weights of its own
LENGTH = 1024  # tokens of an example, where the model has places for so many
RATE, LORA_RATE = 5e-5, 2e-4  # of AdamW: usual for weights that were trained before, and for adapters on them


@cache
def text_run(model: str, lora: bool, data: str) -> RunConfig:
    """The run that trains NEW, or OWNER/NAME[@REVISION], on "austen", a folder or OWNER/NAME[:COLUMN].

    Fetches weights, to write down their digest. Raises UsageError for what is no language model, TTError.
    """
    changes: dict[str, Any] = {} if model == NEW else _pretrained(*model.partition("@")[::2])
    if lora:
        changes |= {"lora": {}, "schedule.peak_lr": LORA_RATE}
    if Path(data).is_absolute():
        changes |= {"data.source": "files", "data.name": Path(data).name, "data.location": data}
    elif "/" in data:
        name, _, column = data.partition(":")
        changes |= {"data.source": "hub", "data.name": name, "data.column": column or "text"}
    return load_run(NEW).replaced(changes)


def _pretrained(name: str, revision: str) -> dict[str, Any]:
    """Changes for a run that goes on from a model, of whose files it names the commit."""
    from tt_cli.data.tokenizer import read_tokenizer
    from tt_cli.model.causal_lm import canonical
    from tt_cli.task.causal_lm_task import fetched_model

    file = download(name, "config.json", commit := repository_files(name, revision or None)[0])
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        end = ends[0] if isinstance(ends := fields.get("eos_token_id"), list) else ends
        length = min(LENGTH, int(fields.get("max_position_embeddings") or fields.get("n_positions") or LENGTH))
    except (ValueError, AttributeError, TypeError, IndexError) as error:
        raise TTError(f"{name}: its config.json is not what transformers writes ({error})") from error
    backend = read_tokenizer(TokenizerSource(source="hub", name=name, revision=commit))
    if end is None or (word := backend.id_to_token(end)) is None:
        raise UsageError(f"{name} names no token that ends a text (eos_token_id): take a model that writes text")
    config, place = canonical(fields), {"name": name, "revision": commit}
    return {
        "model": {"config": config, "length": length},
        "pretrained": {**place, "digest": fetched_model(config, **place)[1]},
        "tokenizer": {"source": "hub", **place, "document_end": word},
        "schedule.peak_lr": RATE,
    }
