"""A data set of pictures on the Hub through the real `datasets`, in a process of its own, against the stand-in."""

from __future__ import annotations

import io
import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from data.rows import bomb, png
from hub_standin import HubStandin
from testbed.spawned import spawned

from tt_cli.data.build.picture_sources import open_source
from tt_cli.data.stream.shard_cache import ShardCache
from tt_cli.data.stream.shard_locations import HubRepository, Shard
from tt_cli.data.stream.subset import subset_examples
from tt_cli.data.stream.transfer import ShardProblem, fetch
from tt_cli.errors import TTError
from tt_cli.run import load_run


def opened(name: str) -> tuple[list[int], list[str], list[tuple[Any, ...]]] | str:
    """In the client's process: rows of each shard, names from the third row on, and all rows; or an error."""
    try:
        source = open_source(name)
        units = [list(source.read(unit, 0)) for unit in range(len(source.units))]
        rows = [(one.caption, len(one.content or b""), dict(one.fields)) for unit in units for one in unit]
        return [len(unit) for unit in units], [one.name for one in source.read(0, 2)], rows
    except TTError as error:
        return f"{error.exit_code} {error}"


def kept(name: str) -> str:
    """In the client's process: the error with which the first examples of a data set cannot be held in memory."""
    try:
        changes = {"data.source": "hub", "data.name": name, "data.subset": 2}
        return str(subset_examples(load_run("emoji").replaced(changes)))
    except TTError as error:
        return f"{error.exit_code} {error}"


def table(rows: list[dict[str, object]], images: bool = True) -> bytes:
    """As `datasets` itself writes a column of pictures."""
    made = pyarrow.Table.from_pylist(rows)
    if images:
        features = {"image": {"_type": "Image"}, "text": {"dtype": "string", "_type": "Value"}}
        features["NSFW"] = {"dtype": "string", "_type": "Value"}
        made = made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file = io.BytesIO()
    pyarrow.parquet.write_table(made, file)
    return file.getvalue()


def test_a_data_set_is_streamed_shard_by_shard(hub: HubStandin, tmp_path: Path) -> None:
    rows = [{"image": {"bytes": png(), "path": None}, "text": f"row {i}", "NSFW": "UNLIKELY"} for i in range(5)]
    hub.put(
        "dataset",
        "acme/photos",
        {"data/train-00000-of-00002.parquet": table(rows[:3]), "data/train-00001-of-00002.parquet": table(rows[3:])},
    )
    hub.put("dataset", "acme/words", {"data/train-00000.parquet": table([{"text": "no picture"}], images=False)})
    hub.put("dataset", "acme/secret", {"data/train-00000.parquet": b""}, access="gated")
    bomb(tmp_path / "bomb.parquet")
    hub.put("dataset", "acme/bomb", {"data/train-00000.parquet": (tmp_path / "bomb.parquet").read_bytes()})
    hub.fault("train-00001-of-00002.parquet", 503)
    with spawned(hub.environment(tmp_path)) as call:
        answers = [call(opened, f"acme/{name}").result() for name in ("photos", "words", "none", "secret")]
        too_large = call(kept, "acme/bomb").result()
    photos, words, missing, secret = answers
    assert too_large.startswith(
        "1 cannot read the data set acme/bomb: a file of it cannot be read (it takes over a gigabyte"
    )
    assert photos == (
        [3, 2],
        ["acme/photos shard 0:2"],
        [(f"row {i}", len(png()), {"NSFW": "UNLIKELY"}) for i in range(5)],
    )
    assert words.startswith("2 cannot encode acme/words: it needs a column of pictures (image, picture, jpg")
    assert words.endswith("it has text")
    assert missing.startswith("2 cannot read the data set acme/none: the Hub has no such data set")
    assert secret.startswith("2 cannot read the data set acme/secret")


def units_of(**which: str) -> list[str]:
    """In the client's process: the names of the units of a data set, by which `tt data encode` knows it again."""
    return list(open_source("acme/photos", **which).units)


def test_another_split_or_revision_is_another_source(hub: HubStandin, tmp_path: Path) -> None:
    """Else a folder would go on with its pictures from the place in the first one's."""
    picture = table([{"image": {"bytes": png(), "path": None}, "text": "a row", "NSFW": "UNLIKELY"}])
    hub.put("dataset", "acme/photos", {f"data/{split}-00000-of-00001.parquet": picture for split in ("train", "test")})
    with spawned(hub.environment(tmp_path)) as call:
        whiches: list[dict[str, str]] = [{}, {"split": "test"}, {"revision": "main"}]
        names = [call(units_of, **which).result() for which in whiches]
    assert names == [["acme/photos shard 0"], ["acme/photos test shard 0"], ["acme/photos@main shard 0"]]


def brought(folder: str) -> str:
    """In the client's process: words for why a shard does not come."""
    cache = ShardCache(Path(folder), 1 << 20, lambda words: None)
    request = HubRepository("acme/photos").request(Shard("train.parquet"))
    with pytest.raises(ShardProblem) as caught:
        cache.bring("a shard", partial(fetch, request))
    return str(caught.value)


def test_a_client_that_is_to_stay_offline_is_a_trouble_of_the_line(tmp_path: Path) -> None:
    """Where all other shards are kept, a stream lives on those."""
    with spawned({"HF_HUB_OFFLINE": "1"}) as call:
        assert "offline mode is enabled" in call(brought, str(tmp_path)).result()


def text_read(name: str) -> tuple[list[str], list[str], int] | str:
    """In the client's process: documents of an epoch, held-out ones, and the size of a batch; or an error."""
    from testbed.tiny_words import tiny_words

    from tt_cli.data.text.token_reader import TextTokenizer, held_out_ids, token_ids
    from tt_cli.data.text.token_stream import TokenStream

    run = tiny_words().replaced({"data": {"source": "hub", "name": name}})
    tokenizer = TextTokenizer(run.tokenizer)
    try:
        train, held_out = (
            [tokenizer.backend.decode(ids[:-1].tolist()) for ids in found]
            for found in (token_ids(run.data, tokenizer, "train", 3), held_out_ids(run.data, tokenizer))
        )
        with closing(TokenStream(run, tokenizer, 0)) as stream:
            return train, held_out, len(next(stream.batches(4)))
    except TTError as error:
        return f"{error.exit_code} {error}"


def test_text_is_streamed_and_its_validation_split_is_held_out(hub: HubStandin, tmp_path: Path) -> None:
    texts = [f"Document {number} says it. " * 9 for number in range(12)]
    shards = {f"data/train-0000{i}-of-00002.parquet": [{"text": text} for text in texts[i::2]] for i in range(2)}
    shards["data/validation-00000-of-00001.parquet"] = [{"text": "Nobody trains on it."}]
    hub.put("dataset", "acme/stories", {name: table(rows, images=False) for name, rows in shards.items()})
    hub.put("dataset", "acme/numbers", {"data/train-00000.parquet": table([{"number": 1}], images=False)})
    with spawned(hub.environment(tmp_path)) as call:
        stories, numbers, missing = (
            call(text_read, f"acme/{name}").result() for name in ("stories", "numbers", "none")
        )
    train, held_out, size = stories
    assert sorted(train) == sorted(texts) and train != texts and size == 4
    assert held_out == ["Nobody trains on it."]
    assert numbers == "2 the data set acme/numbers has no column text; it has number"
    assert missing.startswith("2 cannot read the data set acme/none: the Hub has no such data set")


def test_a_readme_that_names_files_elsewhere_is_refused_by_all_readers(hub: HubStandin, tmp_path: Path) -> None:
    """Else a member would train on private files, and `tt data` would publish them."""
    private = {"text": "Dear diary. " * 20_000, "image": "", "caption": "", "code": ""}
    (tmp_path / "private.jsonl").write_text(json.dumps(private) + "\n")
    shard = {"data/train-00000.parquet": table([{"text": "Its own. " * 20_000}], images=False)}
    hub.put("dataset", "acme/plain", shard)
    patterns = {
        "own": "data/*.parquet",
        "file": f"{tmp_path}/private.jsonl",
        "glob": f"{tmp_path}/*.jsonl",
        "address": f"{hub.url}/datasets/acme/plain/resolve/main/data/train-00000.parquet",
        "other": "hf://datasets/acme/plain/data/*.parquet",
    }
    for name, pattern in patterns.items():
        card = f"---\nconfigs:\n- config_name: default\n  data_files: {json.dumps(pattern)}\n---\n"
        hub.put("dataset", f"acme/{name}", {"README.md": card, **shard})
    with spawned(hub.environment(tmp_path)) as call:
        own, *_ = call(text_read, "acme/own").result()
        assert own == ["Its own. " * 20_000]
        for name in [name for name in patterns if name != "own"]:
            for answer in [call(read, f"acme/{name}").result() for read in (text_read, opened, kept)]:
                assert answer.startswith(f"2 cannot read the data set acme/{name}: Data files don't belong to")
                assert "\n" not in answer


def room_while_fetching(url: str, names: list[str]) -> int:
    """In the client's process: bytes that it takes at once while a shard is on its way."""
    import numpy as np
    from testbed.tiny_words import tiny_words

    from tt_cli.data.text.token_reader import TextTokenizer
    from tt_cli.data.text.token_stream import TokenStream

    hub = HubStandin()
    hub.url = url
    run = tiny_words().replaced({"data": {"source": "hub", "name": "acme/slow", "shuffle_buffer": 1}})
    with closing(TokenStream(run, TextTokenizer(run.tokenizer), 0)) as stream:
        batches = stream.batches(4)
        assert len(next(batches)) == 4
        while not all(any(name in line for line in hub.log()) for name in names):
            pass
        return np.empty(3 << 29, np.uint8).nbytes


def test_a_fetch_under_way_leaves_the_training_process_its_memory(hub: HubStandin, tmp_path: Path) -> None:
    """Each shard is more than the first batch waits for, and less than may be read ahead."""
    names = [f"train-0000{number}-of-00002.parquet" for number in range(2)]
    rows = [{"text": f"Document {number} says it. " * 9} for number in range(290)]
    hub.put("dataset", "acme/slow", {f"data/{name}": table(rows, images=False) for name in names})
    for name in names:
        hub.fault(name, 0, delay=3.0)
    with spawned(hub.environment(tmp_path)) as call:
        assert call(room_while_fetching, hub.url, names).result() == 3 << 29
