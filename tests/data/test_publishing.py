"""An encoded folder on the Hub: the real client against the stand-in, with a Hub that fails in every way it can."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from data.rows import row
from hub_standin import HubStandin
from testbed.spawned import python

from tt_cli.data.build.dataset_publishing import card, finished_folder
from tt_cli.data.build.journal import Journal, agree_on
from tt_cli.errors import TTError, UsageError

pytestmark = pytest.mark.slow

NAME = "acme/codes"
SETTINGS = {
    "format": 1,
    "vqgan": {"source": "builtin", "name": "emoji", "codebook_size": 1024, "grid": 8, "pixels": 64},
    "filters": {"min_caption_length": 3, "max_aspect_ratio": 2.0, "nsfw_allowed": ["UNLIKELY"]},
    "source": {"units": 1, "sha256": "0", "pictures": None},
    "shares": 2,
    "column": "code",
    "container": "parquet",
    "columns": ["caption", "NSFW", "original_width", "original_height", "code"],
}
CLIENT = """
import sys
from pathlib import Path
from tt_cli.data.build import dataset_publishing
from tt_cli.errors import TTError

dataset_publishing.FIRST_WAIT = dataset_publishing.LONGEST_WAIT = 0.01
dataset_publishing.GROUP = 2
for name in sys.argv[2:]:
    try:
        done = dataset_publishing.finished_folder(Path(sys.argv[1]))
        print("=", dataset_publishing.publish(done, name, "cc-by-4.0", tell=lambda words: print(words, flush=True)))
    except TTError as error:
        print("=", error.exit_code, error)
"""


def make(folder: Path, shares: int = 2) -> None:
    """What encoding leaves: five shards of two shares."""
    agree_on(folder, SETTINGS)
    for share in range(shares):
        journal = Journal(folder, share, ".parquet")
        for number in range(3 - share):
            rows = [row(caption=f"row {share} {number} {i}") for i in range(4)]
            journal.record((0, 5 * number), rows, {"seen": 5, "kept": 4, "nsfw": 1}, [])
            journal.seal(done=number == 2 - share)
        journal.close()


@pytest.fixture
def encoded(tmp_path: Path, hub: HubStandin) -> Path:
    hub.add_user("hf_write", "ada", {"acme": "write"}, role="write")
    make(tmp_path / "codes")
    return tmp_path / "codes"


def publish(hub: HubStandin, encoded: Path, *names: str, token: str = "hf_write") -> tuple[list[str], list[str]]:
    """The results of a process that publishes under one name after the other, and what was told on the way."""
    env = {**hub.environment(encoded.parent), "HF_TOKEN": token}
    words = python(CLIENT, str(encoded), *names, env=env).stdout
    results = [line.removeprefix("= ") for line in words.splitlines() if line.startswith("= ")]
    return results, [line for line in words.splitlines() if not line.startswith("= ")]


def assert_published(hub: HubStandin, encoded: Path, name: str = NAME) -> None:
    files = hub.files(name, "dataset")
    shards = {f"data/{path.name}": path.read_bytes() for path in (encoded / "data").iterdir()}
    assert set(files) == {*shards, "README.md", "SHA256SUMS", "encode.json"}
    assert all(files[file] == content for file, content in shards.items())
    sums = dict(reversed(line.split()) for line in files["SHA256SUMS"].decode().splitlines())
    assert sums == {file: hashlib.sha256(content).hexdigest() for file, content in shards.items()}


def count(hub: HubStandin, what: str) -> int:
    return sum(what in line for line in hub.log())


def test_all_of_it_in_one_commit_and_once(hub: HubStandin, encoded: Path) -> None:
    results, told = publish(hub, encoded, NAME, NAME)
    assert results == [f"{hub.url}/datasets/{NAME}"] * 2
    assert told == [*(f"{n} of 5 shards are on the Hub" for n in (2, 4, 5)), f"{NAME} has it already"]
    assert_published(hub, encoded)
    assert count(hub, "/commit/") == 1
    assert count(hub, "PUT /lfs/") == 5


def test_failures_are_tried_again_and_a_hub_that_stays_away_has_nothing(hub: HubStandin, encoded: Path) -> None:
    faults = {"unanswered": -2, "cut": -1, "stale": 412, "busy": 503}
    for name, status in faults.items():
        hub.fault(f"acme/{name}/commit/", status)
    hub.fault("/lfs/objects/batch", 503)
    hub.fault("/lfs/", -1)
    hub.fault("acme/away/commit/", 503, times=1000)
    names = [f"acme/{name}" for name in (*faults, "away")]
    results, told = publish(hub, encoded, *names)
    assert results[:-1] == [f"{hub.url}/datasets/{name}" for name in names[:-1]]
    for name in names[:-1]:
        assert_published(hub, encoded, name)
    assert "acme/unanswered has it already" in told
    assert results[-1].startswith("1 cannot publish the data set acme/away: the Hub answered 503")
    assert hub.files("acme/away", "dataset") == {}
    assert count(hub, "PUT /lfs/") <= 7, "what the Hub has is not sent again"


def test_killed_it_goes_on_with_what_is_missing(hub: HubStandin, encoded: Path) -> None:
    env = {**os.environ, **hub.environment(encoded.parent), "HF_TOKEN": "hf_write"}
    command = [sys.executable, "-c", CLIENT, str(encoded), NAME]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2 of 5 shards are on the Hub\n"
        process.kill()
    assert hub.files(NAME, "dataset") == {}, "nothing is seen before all is there"
    assert publish(hub, encoded, NAME)[0] == [f"{hub.url}/datasets/{NAME}"]
    assert_published(hub, encoded)
    assert count(hub, "PUT /lfs/") <= 7, "no more than what was on the way is sent again"


def test_what_is_there_and_what_is_refused(hub: HubStandin, encoded: Path) -> None:
    hub.put("dataset", NAME, {"data/train-000-00099.parquet": b"old", "encode.json": b"{}", "notes.md": b"mine"})
    hub.put("dataset", "acme/other", {"data/train-0.parquet": b"theirs"})
    results, _ = publish(hub, encoded, NAME, "acme/other", "strangers/codes", "a b/c")
    assert {"notes.md", "SHA256SUMS"} <= set(hub.files(NAME, "dataset"))
    assert "data/train-000-00099.parquet" not in hub.files(NAME, "dataset"), "an older shard of ours"
    assert results[1] == "2 cannot publish the data set acme/other: it holds other data; name another one"
    assert results[2] == "2 cannot publish the data set strangers/codes: the Hub refuses access (403); run `tt login`"
    assert "that is no name of a Hub repository" in results[3]
    assert publish(hub, encoded, NAME, token="")[0][0].endswith("nobody is logged in; run `tt login`")


def test_what_is_not_finished_or_damaged_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder that `tt data encode` made"):
        finished_folder(tmp_path)
    make(tmp_path / "half", shares=1)
    with pytest.raises(UsageError, match="share 2 of 2 of .* is not finished; run `tt data encode` with --shard 2/2"):
        finished_folder(tmp_path / "half")
    make(tmp_path / "codes")
    shard = tmp_path / "codes/data/train-001-00001.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"?")
    with pytest.raises(TTError, match="train-001-00001.parquet is damaged"):
        finished_folder(tmp_path / "codes")
    shard.unlink()
    with pytest.raises(TTError, match="cannot read the shard .*: No such file or directory"):
        finished_folder(tmp_path / "codes")


def test_the_card_says_what_it_is(tmp_path: Path) -> None:
    make(tmp_path)
    found = finished_folder(tmp_path)
    text = card(found, NAME, "cc-by-4.0")
    metadata = yaml.safe_load(text.split("---")[1])
    assert metadata["license"] == "cc-by-4.0"
    assert metadata["configs"][0]["data_files"] == [{"split": "train", "path": "data/train-*.parquet"}]
    for words in (
        "# acme/codes",
        "20 pictures with captions",
        "Of 25 pictures",
        "| nsfw | 5 |",
        "- max aspect ratio: 2.0",
    ):
        assert words in text
    assert all(f"| {one.name} | 4 | {one.bytes:,} | `{one.sha256}` |" in text for one in found.shards)
