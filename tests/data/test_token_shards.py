"""`tt data tokenize`: shards have the documents of the text; a kill loses nothing; published, and read again."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import Tt
from hub_standin import HubStandin
from testbed.spawned import spawned
from testbed.tiny_words import tiny_words

from tt_cli.data.build import token_shards
from tt_cli.data.build.dataset_publishing import card, finished_folder, publish
from tt_cli.data.build.inspection import inspect_tokens
from tt_cli.data.build.token_shards import tokenize
from tt_cli.data.codes import ID_COLUMNS
from tt_cli.data.text.token_reader import TextTokenizer, held_out_ids, token_ids
from tt_cli.errors import UsageError
from tt_cli.run import CausalLmRun

RUN = tiny_words()
TEXTS = [f"Document {number} says that it is a truth." if number % 7 else " " for number in range(40)]


def on_files(place: Path, column: str = "text") -> CausalLmRun:
    data = {"source": "files", "name": "mine", "location": str(place), "column": column}
    return RUN.replaced({"data": data})


def of_run(run: CausalLmRun) -> tuple[list[list[int]], list[list[int]]]:
    """The ids of its documents to train on, and of those that are held out."""
    tokenizer = TextTokenizer(run.tokenizer)
    both = token_ids(run.data, tokenizer, "train"), held_out_ids(run.data, tokenizer)
    train, held_out = ([ids.tolist() for ids in documents] for documents in both)
    return train, held_out


@pytest.fixture
def text(tmp_path: Path) -> CausalLmRun:
    """A run on lines of JSON, some of which have no text."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    return on_files(tmp_path / "text")


def test_tokens_are_those_of_the_text_and_a_kill_loses_nothing(
    text: CausalLmRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shards, "AT_ONCE", 5)
    monkeypatch.setattr(token_shards, "REPORT_SECONDS", 0.0)

    class Killed(Exception):
        """What comes amid the work."""

    def killed(progress: object) -> None:
        raise Killed

    for _ in range(3):
        with pytest.raises(Killed):
            tokenize(text, tmp_path / "tokens", killed)
    assert not (tmp_path / "tokens" / "SHA256SUMS").exists()
    # What was done with is not tokenised once more, nor looked at: 15 documents of these 18 were.
    lines = [json.dumps({"text": one if number >= 18 else " "}) + "\n" for number, one in enumerate(TEXTS)]
    (tmp_path / "text" / "train.jsonl").write_text("".join(lines))
    told: list[int] = []
    done = tokenize(text, tmp_path / "tokens", lambda progress: told.append(progress.counts["kept"]))
    assert told[0] == 20 and done.counts["seen"] == 40 and done.counts["kept"] == 34 and done.counts["no_text"] == 6
    again = tokenize(text, tmp_path / "tokens", lambda progress: None)
    assert (again.counts, again.shards, again.bytes) == (done.counts, done.shards, done.bytes)
    (tmp_path / "text" / "train.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    from_text = of_run(text)
    assert of_run(on_files(tmp_path / "tokens" / "data", "ids16")) == from_text
    with pytest.raises(UsageError, match="was begun with source"):
        tokenize(on_files(tmp_path / "tokens"), tmp_path / "tokens", lambda progress: None)
    assert done.to_json()["tokens"] == done.counts["tokens"] == sum(map(len, from_text[0])) and from_text[1] == []
    with pytest.raises(UsageError, match="is of token ids already: its column is ids16"):
        tokenize(on_files(tmp_path / "tokens" / "data", "ids16"), tmp_path / "twice", lambda progress: None)


def test_long_documents_are_fewer_at_once(text: CausalLmRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 256 books together take more than the GiB that reading may."""
    monkeypatch.setattr(token_shards, "TOKENS_AT_ONCE", 30)
    monkeypatch.setattr(token_shards, "REPORT_SECONDS", 0.0)
    told = list[Counter[str]]()
    tokenize(text, tmp_path / "tokens", lambda progress: told.append(Counter(progress.counts)))
    batches = [later - before for before, later in pairwise([Counter[str](), *told])]
    assert max(batch["tokens"] / batch["kept"] * (batch["kept"] - 1) for batch in batches) < 30 and len(batches) > 10
    assert of_run(on_files(tmp_path / "tokens" / "data", "ids16")) == of_run(text)


def test_ids_of_another_tokenizer_are_one_line(tmp_path: Path) -> None:
    for ids in ([5, 511, 512], [5, 6]):
        content = {"ids16": [np.array(ids, "<u2").tobytes()]}
        pyarrow.parquet.write_table(pyarrow.table(content), tmp_path / "train.parquet")
        with pytest.raises(UsageError, match="^the data set mine has ids of another tokenizer than austen$"):
            of_run(on_files(tmp_path, "ids16"))
        assert inspect_tokens([tmp_path / "train.parquet"], RUN, 1, 0).problems == {"other_tokenizer": 1}


def test_a_vocabulary_beyond_16_bits_has_32(text: CausalLmRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shards, "ID_COLUMNS", {name: dtype for name, dtype in ID_COLUMNS.items() if "3" in name})
    tokenize(text, tmp_path / "tokens", lambda progress: None)
    assert of_run(on_files(tmp_path / "tokens" / "data", "ids32")) == of_run(text)


def published(folder: str) -> tuple[list[list[int]], list[list[int]]]:
    """In a client's process: publish the shards, and read them from the Hub."""
    publish(finished_folder(Path(folder)), "acme/tokens", "cc0-1.0", tell=lambda words: None)
    return of_run(RUN.replaced({"data": {"source": "hub", "name": "acme/tokens", "column": "ids16"}}))


@pytest.mark.slow
def test_from_the_command_line_to_the_hub_and_back(here: Tt, hub: HubStandin, tmp_path: Path) -> None:
    hub.add_user("hf_write", "ada", {"acme": "write"}, role="write")
    (tmp_path / "tiny.toml").write_text(RUN.to_toml())
    made = here("data", "tokenize", "tiny.toml", "tokens")
    assert made.returncode == 0 and made.stdout.startswith("269 of 269 documents are tokenised, "), made.stderr
    looked = here("data", "inspect", "tokens", "--run", "tiny.toml", "--json")
    facts = json.loads(looked.stdout)
    assert looked.returncode == 0 and (facts["rows"], facts["shards"], facts["column"]) == (269, 2, "ids16"), facts
    assert facts["problems"] == {} and len(facts["samples"]) == 16
    unnamed = here("data", "inspect", "tokens")
    assert (
        unnamed.returncode == 2
        and "encode.json (of tokens); name the run that they are of with --run" in unnamed.stderr
    )
    words = card(finished_folder(tmp_path / "tokens"), "acme/tokens", "cc0-1.0")
    assert "  - split: validation\n    path: data/validation-*.parquet" in words
    assert "tokens of the tokenizer `austen`" in words and str(tmp_path) not in words
    with spawned({**os.environ, **hub.environment(tmp_path), "HF_TOKEN": "hf_write"}) as call:
        train, held_out = call(published, str(tmp_path / "tokens")).result(240)
    plain = of_run(RUN)
    assert (sorted(train), sorted(held_out)) == (sorted(plain[0]), sorted(plain[1])) and len(held_out) == 13
