"""Endless batches: what is in them, in which order, and what is said when there is nothing to train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from data.rows import code, numbered, row, run_on, write
from hub_standin import HubStandin
from testbed.spawned import Call, spawned

from tt_cli.data import builtin
from tt_cli.data.stream.example_stream import ExampleStream
from tt_cli.data.stream.subset import subset_examples
from tt_cli.data.tokenizer import Tokenizer, load_tokenizer
from tt_cli.errors import TTError, UsageError
from tt_cli.run import RunConfig, load_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(load_run("emoji"))


def captions(run: RunConfig, tokenizer: Tokenizer, seed: int, count: int, split: str = "train") -> list[str]:
    batch = next(ExampleStream(run, tokenizer, seed, split).batches(count))
    return batch.captions


def test_every_caption_keeps_its_codes(tokenizer: Tokenizer) -> None:
    known = {example.caption: example.codes.tolist() for example in builtin.examples("emoji")}
    for batch in islice(ExampleStream(load_run("emoji"), tokenizer, seed=3).batches(50), 3):
        assert batch.tensors["text"].dtype == batch.tensors["image"].dtype == torch.int64
        assert batch.tensors["image"].shape == (50, 64)
        assert torch.equal(batch.tensors["text"], tokenizer.encode(batch.captions))
        assert batch.tensors["image"].tolist() == [known[caption] for caption in batch.captions]


@pytest.mark.parametrize("subset", [0, 100])
def test_the_order_is_the_seeds(tokenizer: Tokenizer, subset: int) -> None:
    run = load_run("emoji").replaced({"data.subset": subset})
    first, again, other = (captions(run, tokenizer, seed, 60) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("size", [7, 45])
def test_an_epoch_has_every_example_once(tmp_path: Path, tokenizer: Tokenizer, size: int) -> None:
    for shard in range(3):
        write(tmp_path / f"data/train-{shard}.parquet", numbered(30)[shard * 10 : shard * 10 + 10])
    run = run_on(tmp_path)
    batches = ExampleStream(run, tokenizer, seed=0).batches(size)
    names: list[str] = []
    while len(names) < 90:
        batch = next(batches)
        assert len(batch.captions) == len(batch.tensors["image"]) == size
        names += batch.captions
    everything = Counter(example["caption"] for example in numbered(30))
    epochs = [names[start : start + 30] for start in (0, 30, 60)]
    assert all(Counter(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_subset_is_the_same_for_all_peers_and_each_has_its_order(tokenizer: Tokenizer) -> None:
    run = load_run("emoji").replaced({"data.subset": 40})
    subset = subset_examples(run)
    mine = captions(run, tokenizer, 1, 80)
    theirs = captions(run, tokenizer, 2, 80)
    assert Counter(mine) == Counter(theirs) == Counter([example.caption for example in subset] * 2)
    assert mine[:40] != mine[40:]
    assert mine != theirs
    smaller = subset_examples(run.replaced({"data.subset": 10}))
    assert [e.caption for e in smaller] == [e.caption for e in subset[:10]], "a smaller subset lies in the larger"
    other = subset_examples(run.replaced({"run.seed": 1}))
    assert {e.caption for e in other} != {e.caption for e in subset}


def test_a_subset_of_the_hub_is_the_first_good_rows_of_one_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "train.parquet", [*numbered(60), *[row(caption="bad", code=code(1, 2, 99, 4))] * 20])
    run = run_on(tmp_path, subset=25)
    names = [example.caption for example in subset_examples(run)]
    assert len(set(names)) == 25
    assert "bad" not in names
    assert names == [example.caption for example in subset_examples(run)]
    assert set(captions(run, tokenizer, 5, 25)) == set(names)


def test_all_of_the_built_in_examples_are_a_subset_too() -> None:
    assert len(subset_examples(load_run("emoji"))) == len(builtin.examples("emoji"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.subset": 99_999}, r"data.subset is 99999, but the built-in data 'emoji' have \d+ examples"),
        ({"data.name": "emojo"}, "no built-in data set is called 'emojo'; built in: austen, emoji"),
        ({"vqgan.grid": 4, "vqgan.pixels": 32}, r"do not fit the run file's \[vqgan\]"),
        ({"vqgan.codebook_size": 16}, r"do not fit the run file's \[vqgan\]"),
    ],
)
def test_a_run_that_does_not_fit_the_built_in_data_is_refused(changes, message) -> None:
    with pytest.raises(UsageError, match=message):
        subset_examples(load_run("emoji").replaced(changes))


def test_bad_rows_never_get_through_and_are_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bad = [
        row(caption="bad width", code=code(1, 2, 3)),
        row(caption="bad range", code=code(1, 2, 3, 10)),
        row(caption="bad label", NSFW="UNSURE"),
        row(caption="bad shape", original_width=9000),
        row(caption=""),
    ]
    write(tmp_path / "train.parquet", [*numbered(10), *bad])
    stream = ExampleStream(run_on(tmp_path), tokenizer, seed=0)
    batches = stream.batches(5)
    names = [caption for batch in islice(batches, 4) for caption in batch.captions]
    assert Counter(names) == Counter([example["caption"] for example in numbered(10)] * 2)
    counts = stream.counts
    assert counts.problems() == dict.fromkeys(("code_width", "code_range", "nsfw", "aspect_ratio", "no_caption"), 2)


def test_the_heldout_split(tokenizer: Tokenizer) -> None:
    run = load_run("emoji").replaced({"data.subset": 5})
    names = captions(run, tokenizer, 0, 100, "heldout")
    assert set(names) <= {example.caption for example in builtin.examples("emoji", "heldout")}


def test_unusable_data_end_with_the_reasons(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "train.parquet", [row(code=code(1)), row(code=code(2)), row(caption="ox")])
    with pytest.raises(TTError, match=r"no example that this run can use \(3 rows: code width 2, short caption 1\)"):
        next(ExampleStream(run_on(tmp_path), tokenizer, seed=0).batches(4))


def one_line(caught: pytest.ExceptionInfo[TTError]) -> bool:
    return "\n" not in str(caught.value)


def test_a_missing_split_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "train.parquet", [row()])
    for run in (run_on(tmp_path), load_run("emoji")):
        with pytest.raises(UsageError, match="validation") as caught:
            next(ExampleStream(run, tokenizer, seed=0, split="validation").batches(1))
        assert one_line(caught)


def test_a_truncated_shard_is_one_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "train.parquet"
    write(path, numbered(500))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TTError, match="cannot read the data set") as caught:
        next(ExampleStream(run_on(tmp_path), tokenizer, seed=0).batches(1))
    assert one_line(caught)


@pytest.fixture(scope="module")
def client(_hub_process: HubStandin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """A process with the Hub's real client, which talks to the stand-in."""
    with spawned(_hub_process.environment(tmp_path_factory.mktemp("home"))) as call:
        yield call


def three_captions(name: str) -> list[str] | str:
    """In the client's process."""
    try:
        return sorted(captions(run_on(name), load_tokenizer(load_run("emoji")), 0, 3))
    except TTError as error:
        return f"{error.exit_code} {error}"


def two_sessions(folder: Path) -> tuple[list[tuple[int, int, object]], list[str]]:
    """In the client's process: captions of two batches, unlike ones and rows taken, of each session; what was told."""
    told: list[str] = []
    found = []
    for turn in range(2):
        stream = ExampleStream(
            run_on("acme/codes"),
            load_tokenizer(load_run("emoji")),
            seed=turn,
            folder=folder,
            tell=lambda *words: told.append("; ".join(map(str, words))),
        )
        batches = stream.batches(10)
        seen = [caption for _ in range(2) for caption in next(batches).captions]
        next(batches)
        found.append((len(seen), len(set(seen)), stream.state["position"]["taken"]))
        stream.close()
    return found, told


def test_from_the_hub(hub: HubStandin, client: Call, tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", numbered(3))
    hub.put("dataset", "acme/three", {"data/train-00000.parquet": (tmp_path / "train.parquet").read_bytes()})
    hub.put("dataset", "acme/secret", {"data/train-00000.parquet": b""}, access="gated")
    good, missing, gated = (client(three_captions, f"acme/{name}").result() for name in ("three", "none", "secret"))
    assert good == ["row 0", "row 1", "row 2"]
    assert missing.startswith("2 cannot read the data set acme/none: the Hub has no such data set")
    assert gated.startswith("2 cannot read the data set acme/secret")


def test_from_a_hub_that_fails_now_and_then(hub: HubStandin, client: Call, tmp_path: Path) -> None:
    """It says so, reads another shard meanwhile, and downloads each one once, also over a restart."""
    shards = {}
    for shard in range(4):
        write(tmp_path / "train.parquet", numbered(40)[shard * 10 : shard * 10 + 10])
        shards[f"data/train-{shard}.parquet"] = (tmp_path / "train.parquet").read_bytes()
    hub.put("dataset", "acme/codes", shards)
    hub.fault("train-1", 503)
    hub.fault("train-2", -1)
    (tmp_path / "run").mkdir()
    found, told = client(two_sessions, tmp_path / "run").result()
    assert [seen[:2] for seen in found] == [(20, 20)] * 2
    fetched = [entry for entry in hub.log() if "/resolve/" in entry]
    assert len(fetched) <= 6
    assert len({entry for entry in fetched}) <= 4
    assert all("cannot fetch the shard data/train-" in line and "takes another one" in line for line in told)


def test_a_stream_goes_on_where_the_last_session_was(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """To the row, whatever the sizes of batches; what was taken and not done with comes again."""
    write(tmp_path / "data/train.parquet", numbered(200))
    run, folder = run_on(tmp_path / "data", shuffle_buffer=50), tmp_path / "run"
    folder.mkdir()
    seen: list[str] = []
    for size in (7, 16, 1, 30):
        stream = ExampleStream(run, tokenizer, seed=size, peer="12D3KooW", folder=folder)
        batches = stream.batches(size)
        for _ in range(3):
            seen += next(batches).captions
        next(batches)  # the third one is done with; this one is not
        stream.close()
    assert len(seen) == len(set(seen)) == 3 * (7 + 16 + 1 + 30)


def test_a_disk_that_was_full_for_a_moment_costs_no_weeks_of_the_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A place that could not be written down is once there is room, and that there was none is said once."""
    write(tmp_path / "data/train.parquet", numbered(60))
    run, folder, told = run_on(tmp_path / "data"), tmp_path / "run", list[str]()
    stream = ExampleStream(run, tokenizer, seed=1, folder=folder, tell=lambda words, remedy: told.append(words))
    batches = stream.batches(10)
    seen = [caption for batch in islice(batches, 3) for caption in batch.captions]  # there is no folder
    folder.mkdir()
    seen += next(batches).captions
    next(batches)
    stream.close()
    again = ExampleStream(run, tokenizer, seed=1, folder=folder)
    seen += [caption for batch in islice(again.batches(10), 2) for caption in batch.captions]
    again.close()
    assert len(seen) == len(set(seen)) == 60
    assert told == ["cannot write down which examples were read (No such file or directory)"]


def test_peers_that_were_given_one_seed_are_not_in_step(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "train.parquet", numbered(100))
    for run in (run_on(tmp_path), load_run("emoji"), load_run("emoji").replaced({"data.subset": 100})):
        orders = []
        for peer in ("12D3KooWA", "12D3KooWB", "12D3KooWA"):
            stream = ExampleStream(run, tokenizer, seed=1, peer=peer)
            orders.append(next(stream.batches(100)).captions)
            stream.close()
        assert orders[0] == orders[2] != orders[1]


def test_a_damaged_note_of_the_last_session_is_a_beginning(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "train.parquet", numbered(30))
    for text in ("", "[]", '{"version": 1}', "\x00"):
        (tmp_path / "examples.json").write_text(text)
        stream = ExampleStream(run_on(tmp_path), tokenizer, seed=1, folder=tmp_path)
        assert len(next(stream.batches(30)).captions) == 30
        stream.close()
