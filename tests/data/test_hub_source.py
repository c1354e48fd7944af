"""A data set of pictures on the Hub through the real `datasets`, in a process of its own, against the stand-in."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from data.rows import bomb, png
from hub_standin import HubStandin
from testbed.spawned import spawned

from tt_cli.data.build.picture_sources import open_source
from tt_cli.data.stream.subset import subset_examples
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
    assert too_large.startswith("1 cannot read the data set acme/bomb: ")
    assert photos == (
        [3, 2],
        ["acme/photos shard 0:2"],
        [(f"row {i}", len(png()), {"NSFW": "UNLIKELY"}) for i in range(5)],
    )
    assert words.startswith("2 cannot encode acme/words: it needs a column of pictures (image, picture, jpg")
    assert words.endswith("it has text")
    assert missing.startswith("2 cannot read the data set acme/none: the Hub has no such data set")
    assert secret.startswith("2 cannot read the data set acme/secret")
