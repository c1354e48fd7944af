"""Shards from an http(s) address: what comes is read, what does not is said and another one taken; kept on the disk."""

from __future__ import annotations

import hashlib
import io
import json
import re
import ssl
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import httpx2
import pytest
from data.rows import numbered, run_on, write
from data.shard_server import ShardServer

from tt_cli.data.stream.plan import plan_of
from tt_cli.data.stream.row_reader import RowReader
from tt_cli.data.stream.transfer import LONGEST_WAIT, Request, ShardProblem, fetch, seconds_to_wait
from tt_cli.errors import TTError, UsageError

NAMES = [f"data/train {shard}.parquet" for shard in range(4)]
EVERYTHING = Counter(f"row {number}" for number in range(80))


class Peer:
    """Readers of one peer, its disk, and what they said."""

    def __init__(self, server: ShardServer, cache: Path, **data: Any) -> None:
        data.setdefault("location", server.url)
        self.run = run_on("shards", **{"source": "files", **data})
        self.cache, self.words, self.remedies, self.pauses = cache, [], [], []

    def reader(self, state: Any = None, patience: float = 20.0) -> RowReader:
        from dataclasses import replace

        plan = plan_of(self.run, "train", 0, cache=self.cache, state=state)
        return RowReader(replace(plan, patience=patience), self._tell, self.pauses.append)

    def epoch(self, reader: RowReader | None = None) -> Counter[str]:
        """What came of the first pass."""
        found: Counter[str] = Counter()
        for block in (reader or self.reader()).blocks():
            if block.epoch:
                break
            found.update(block.captions)
        return found

    def _tell(self, words: str, remedy: str) -> None:
        assert "\n" not in words
        self.words.append(words)
        self.remedies.append(remedy)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    """Four shards of twenty rows, with an index that knows their SHA-256."""
    folder = tmp_path / "served"
    entries = []
    for shard, name in enumerate(NAMES):
        write(folder / name, numbered(80)[shard * 20 : shard * 20 + 20])
        content = (folder / name).read_bytes()
        entries.append({"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    (folder / "index.json").write_text(json.dumps({"rows": 80, "shards": entries}))
    with ShardServer(folder) as server:
        yield server


@pytest.fixture
def peer(server: ShardServer, tmp_path: Path) -> Peer:
    return Peer(server, tmp_path / "shards")


def test_all_that_an_index_names_is_read(peer: Peer, server: ShardServer) -> None:
    assert peer.epoch() == EVERYTHING
    assert peer.words == []
    assert len(server.fetched()) == 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("index.json", json.dumps(NAMES)),
        ("half.json", json.dumps([*NAMES, "train-\ud800.parquet"])),
        ("list.txt", "\n".join(["# shards", *NAMES, "../out.parquet"])),
        ("SHA256SUMS", "".join(f"{'0' * 64}  {name}\n" for name in NAMES)),
        ("list.html", "".join(f'<a href="data/train%20{shard}.parquet">x</a>' for shard in range(4))),
    ],
)
def test_plain_indexes_will_do(server: ShardServer, tmp_path: Path, name: str, text: str) -> None:
    (server.folder / name).write_text(text)
    peer = Peer(server, tmp_path / "shards", location=f"{server.url}/{name}?key=1")
    if name == "SHA256SUMS":
        with pytest.raises(TTError, match="its SHA-256 is another one"):
            peer.epoch()
    else:
        assert peer.epoch() == EVERYTHING


def test_a_shard_that_was_begun_and_does_not_come_is_gone_on_with_later(server: ShardServer, tmp_path: Path) -> None:
    peer = Peer(server, tmp_path / "shards", cache_mb=0, shuffle_buffer=1)
    *blocks, last = islice(peer.reader().blocks(), 26)
    faults = server.faults[f"train%20{last.state['position']['shard']}"] = [(503, {})]
    seen = Counter(caption for block in blocks for caption in block.captions)
    assert seen + peer.epoch(peer.reader(last.state)) == EVERYTHING and len(peer.words) == 1
    faults.append((503, {}))
    rest = peer.epoch(peer.reader(last.state_after(1)))
    assert seen + rest == EVERYTHING, "the block is another one: none of it was taken"
    for begun in (1, 2):  # it is left again in the first block of the others, or after that
        faults.append((503, {}))
        *others, last_other = islice(peer.reader(last.state).blocks(), begun)
        some = Counter(caption for block in others for caption in block.captions)
        assert seen + some + peer.epoch(peer.reader(json.loads(json.dumps(last_other.state)))) == EVERYTHING
        rest = peer.epoch(peer.reader(last_other.state_after(1)))
        assert seen + some + Counter(last_other.captions) + rest == EVERYTHING
    faults += 3 * [(503, {})]  # it is left out then, and whole in the next epoch
    next_epoch = takewhile(lambda block: block.epoch < 2, peer.reader(last.state).blocks())
    assert Counter(caption for block in next_epoch if block.epoch for caption in block.captions) == EVERYTHING


def test_a_connection_that_is_cut_goes_on_where_it_was(peer: Peer, server: ShardServer) -> None:
    server.faults["train%201"] = ["cut", "cut"]
    assert peer.epoch() == EVERYTHING
    assert peer.words == []
    ranges = [entry for entry in server.fetched() if "train%201" in entry]
    assert len(ranges) == 3
    assert all("bytes=" in entry for entry in ranges[1:])


@pytest.mark.parametrize("status", [503, 500, 429, 404, 403])
def test_a_shard_that_fails_once_comes_later(peer: Peer, server: ShardServer, status: int) -> None:
    server.faults["train%202"] = [(status, {})]
    assert peer.epoch() == EVERYTHING
    assert len(peer.words) == 1
    assert peer.words[0].startswith("cannot fetch the shard data/train 2.parquet: ")
    assert str(status) in peer.words[0]
    assert peer.remedies[0].startswith("takes another one")


def test_a_server_that_asks_for_a_pause_gets_it(peer: Peer, server: ShardServer) -> None:
    server.faults["train"] = [(429, {"Retry-After": "7"}), (503, {"Retry-After": "100000"})]
    assert peer.epoch() == EVERYTHING
    assert peer.pauses == [7.0, LONGEST_WAIT]
    assert peer.remedies[0] == "takes another one in 7 s"


def test_a_server_that_asks_for_no_pause_is_not_asked_without_end(peer: Peer, server: ShardServer) -> None:
    """A pause of 0, and a time that has passed by this machine's clock."""
    server.faults["train"] = [(503, {"Retry-After": "0"}), (503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})] * 2
    assert peer.epoch() == EVERYTHING
    assert peer.pauses == [1, 2, 4, 8]


def test_pauses_in_headers() -> None:
    assert seconds_to_wait("3") == 3
    assert seconds_to_wait("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert seconds_to_wait("Wed, 21 Oct 2115 07:28:00 GMT") == LONGEST_WAIT
    assert [seconds_to_wait(text) for text in (None, "soon", "nan", "")] == [None] * 4


def test_a_shard_that_never_comes_costs_no_other(peer: Peer, server: ShardServer) -> None:
    server.faults["train%203"] = [(404, {})] * 9
    assert peer.epoch() == EVERYTHING - Counter(f"row {number}" for number in range(60, 80))
    assert [words.split(": ")[1] for words in peer.words[:3]] == ["it is not there (404)"] * 3
    assert [remedy.endswith("left out of this epoch") for remedy in peer.remedies[:3]] == [False, False, True]


def test_a_transfer_that_stalls_is_left_for_another_shard(peer: Peer, server: ShardServer) -> None:
    server.faults["train%200"] = ["stall"]
    assert peer.epoch(peer.reader(patience=0.3)) == EVERYTHING
    assert peer.words == ["cannot fetch the shard data/train 0.parquet: nothing came for 0.3 s"]


@pytest.mark.parametrize(
    ("index", "fault", "words"),
    [
        ("index.json", "endless", r"more than \d,\d{3} bytes came"),
        ("index.json", "huge", r"it has 2,147,483,648 bytes, and may have \d,\d{3}"),
        ("index.txt", "endless", "more than 67,108,864 bytes came"),
        ("index.txt", "huge", "it has 2,147,483,648 bytes, and may have 1,073,741,824"),
    ],
)
def test_no_more_is_taken_than_was_announced_or_may_be(
    server: ShardServer, tmp_path: Path, index: str, fault: str, words: str
) -> None:
    """By the size in the index, by the server's own, and by the bound of all."""
    (server.folder / "index.txt").write_text("\n".join(NAMES))
    peer = Peer(server, tmp_path / "shards", location=f"{server.url}/{index}")
    server.faults["train%202"] = [fault]
    assert peer.epoch() == EVERYTHING
    (told,) = peer.words
    assert re.fullmatch(rf"cannot fetch the shard data/train 2.parquet: {words}", told)
    assert len(list((tmp_path / "shards").glob("*.shard"))) == 4 and not list((tmp_path / "shards").glob("*.part"))


@pytest.mark.debian
def test_what_is_asked_for_over_https_is_not_taken_over_http(server: ShardServer, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with (
        ShardServer(server.folder, tls) as safe,
        httpx2.Client(verify=ssl.create_default_context(cafile=certificate)) as http,
    ):
        safe.faults["moved"] = [(302, {"Location": f"{server.url}/index.json"})]
        assert fetch(Request(http, f"{safe.url}/index.json"), io.BytesIO()).bytes > 0
        with pytest.raises(ShardProblem, match="hands on to an http:// address"):
            fetch(Request(http, f"{safe.url}/moved"), io.BytesIO())


def test_an_index_without_end_is_one_line(peer: Peer, server: ShardServer) -> None:
    server.faults["index"] = ["endless"]
    with pytest.raises(UsageError, match="more than 33,554,432 bytes came"):
        Peer(server, peer.cache, location=f"{server.url}/index.json").reader()


def test_an_index_as_deep_as_a_well_is_one_line(peer: Peer, server: ShardServer) -> None:
    (server.folder / "index.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="it has no shards"):
        Peer(server, peer.cache, location=f"{server.url}/index.json").reader()


def test_damage_on_the_way_is_found_and_not_kept(peer: Peer, server: ShardServer) -> None:
    server.faults["train%200"] = ["damage"]
    assert peer.epoch() == EVERYTHING
    assert "its SHA-256 is another one" in peer.words[0]
    server.log.clear()
    assert peer.epoch() == EVERYTHING
    assert server.fetched() == []


def test_a_restart_downloads_nothing(peer: Peer, server: ShardServer) -> None:
    """Not even the list, when the server is gone."""
    first = peer.reader()
    whole = [block for block, _ in zip(first.blocks(), range(8), strict=False)]
    state = whole[1].state
    server.log.clear()
    server.faults["index"] = [(503, {})]
    second = peer.reader(state=state)
    for block, again in zip(whole[1:], second.blocks(), strict=False):
        assert block.captions == again.captions
    assert server.fetched() == []
    assert "the list of the last time serves" in peer.words[0]


def test_nothing_that_works_is_one_line(peer: Peer, server: ShardServer) -> None:
    server.faults["data"] = [(503, {})] * 99
    with pytest.raises(
        TTError, match=r"cannot read the data set shards: data/train .*503.*check the network"
    ) as caught:
        next(peer.reader().blocks())
    assert "\n" not in str(caught.value)
    assert peer.pauses == [1, 2, 4, 8]


def test_a_list_that_never_comes_is_one_line(peer: Peer, server: ShardServer) -> None:
    server.faults["index"] = [(503, {"Retry-After": "2"})] * 99
    with pytest.raises(TTError, match=r"cannot read the data set shards: the server answered \(503\)"):
        peer.reader()
    assert peer.pauses == [2, 2, 4, 8]
    assert peer.words[0] == "cannot list the shards of shards: the server answered (503)"


@pytest.mark.parametrize("status", [401, 404])
def test_a_list_that_is_refused_is_said_at_once(peer: Peer, server: ShardServer, status: int) -> None:
    server.faults[""] = [(status, {})] * 99
    with pytest.raises(UsageError, match=f"it has no index.json or SHA256SUMS: .*{status}"):
        peer.reader()
    assert peer.pauses == []


def test_nobody_there_is_one_line(peer: Peer, server: ShardServer) -> None:
    peer.run = peer.run.replaced({"data.location": "http://127.0.0.1:9"})
    with pytest.raises(TTError, match="cannot read the data set shards: the connection failed") as caught:
        peer.reader()
    assert "\n" not in str(caught.value)


def test_a_subset_is_there_or_refused(peer: Peer, server: ShardServer) -> None:
    from tt_cli.data.stream.subset import subset_examples

    run = peer.run.replaced({"data.subset": 30})
    assert len({example.caption for example in subset_examples(run)}) == 30
    with pytest.raises(TTError, match="has fewer"):
        subset_examples(run.replaced({"data.subset": 99}))
    server.faults["train"] = [(503, {})]
    with pytest.raises(TTError, match="503"):
        subset_examples(run)
