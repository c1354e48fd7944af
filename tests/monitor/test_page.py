"""A run's page as a source, over real HTTP: what is taken from it, and what is not."""

from __future__ import annotations

import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from data.shard_server import ShardServer
from monitor.made import EVIL, snapshot, trainer, watch_of

from tt_cli.auth.authority_client import AuthorityConnection
from tt_cli.errors import UsageError
from tt_cli.monitor import page_client as pages
from tt_cli.monitor.page_client import Page, PageUnreachable, page_here
from tt_cli.run import RunConfig, load_run
from tt_cli.run.folders import run_folder

IDENTITY = "emoji-1a2b3c4d"
Serve = Callable[..., str]
NOW = {name: value for name, value in snapshot().to_json().items() if name != "history"} | {"age_s": 1.0}


def history(step: list[Any], loss: list[Any], **more: Any) -> dict[str, Any]:
    others = {name: [1] * len(step) for name in ("time", "peers", "samples_per_second")}
    return {"step": step, "loss": loss, **others, "last_step": step[-1], "total": len(step), **more}


def answers(**changes: Any) -> dict[str, Any]:
    """What a page answers, by the end of the path."""
    leader = {"user": "ada", "samples": 300, "seconds": 7200.0, "peers": 2, "share": 0.75, "last_seen": 1000.0}
    return {
        "snapshot": NOW,
        "history": history([1, 5], [6.0, 5.0]),
        "activity": {"time": [1.0, 31.0], "trainers": [1, 2.5], "samples_per_second": [10.0, 20.0]},
        "leaderboard": {"window": "ever", "rows": [leader]},
        "rounds": {"rows": [{"step": 2, "time": 2.0, "words": "later"}, {"step": 1, "time": 1.0, "words": "first"}]},
        **changes,
    }


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(answers) → the address of a page that answers so; bytes are sent as they are."""
    servers: list[ThreadingHTTPServer] = []

    def start(known: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                what = known.get(self.path.split("?")[0].removeprefix("/api/"))
                body = what if isinstance(what, bytes) else json.dumps(what).encode()
                self.send_response(404 if what is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_what_a_page_knows(serve: Serve) -> None:
    with closing(Page(serve(answers()), IDENTITY)) as page:
        now, past, rounds = page.snapshot(), page.past(), page.rounds()
    assert (now.epoch, now.peers[0].user, now.history) == (7, "anna", [])
    assert past.losses == {1: 6.0, 5: 5.0}
    assert [tuple(one) for one in past.activity] == [(1.0, 1, 10.0), (31.0, 2.5, 20.0)]
    (leader,) = past.leaders["ever"]
    assert (leader.user, leader.samples, leader.seconds, leader.share) == ("ada", 300, 7200.0, 0.75)
    assert rounds == [(1.0, "first"), (2.0, "later")]


def test_the_newest_steps_come_unthinned(serve: Serve) -> None:
    asked: list[str] = []

    class Noting(Page):
        def _get(self, what: str, **query: object) -> dict[str, Any]:
            asked.append(f"{what} {query}")
            return super()._get(what, **query)

    with closing(Noting(serve(answers(history=history([1, 9000], [6.0, 5.0]))), IDENTITY)) as page:
        page.past()
    assert asked[:2] == ["history {'points': 1000}", "history {'points': 1000, 'first': 8001}"]


def test_the_age_of_a_snapshot_does_not_hang_on_the_pages_clock(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.time, "time", lambda: 5000.0)
    now = {**NOW, "time": 10**9, "age_s": 30.0}
    with closing(Page(serve(answers(snapshot=now)), IDENTITY)) as page:
        assert page.snapshot().time == 4970.0


@pytest.mark.parametrize(
    ("what", "answer", "words"),
    [
        ("snapshot", None, "answered 404 to api/snapshot"),
        ("snapshot", b"<html>", "with no JSON: is it a run's page?"),
        ("snapshot", b"[" * 100_000, "with no JSON: is it a run's page?"),
        ("snapshot", [1], "with no object"),
        ("snapshot", {"epoch": 1}, "in another form: 'run': Field required"),
        ("snapshot", b'{"epoch": NaN}', "in another form"),
        ("snapshot", {**NOW, "samples_per_second": 1e300}, "in another form: 'samples_per_second'"),
        ("snapshot", {**NOW, "epoch": 10**30}, "in another form: 'epoch'"),
        ("snapshot", {**NOW, "eta_s": float("inf")}, "in another form: 'eta_s'"),
        ("history", history([1, 2], [1.0]), "its columns have unlike lengths"),
        ("history", history([1], [float("inf")]), "in another form: 'loss.0'"),
        ("history", history([-1], [1.0]), "in another form: 'step.0'"),
        ("history", history([0] * 30_000, [0.0] * 30_000), "should have at most 20000 items"),
        ("activity", {"time": [1], "trainers": ["many"], "samples_per_second": [1]}, "in another form: 'trainers.0'"),
        ("leaderboard", {"window": "x", "rows": [{"user": "ada", "samples": 1}]}, "in another form: 'rows.0.seconds'"),
        ("leaderboard", {"window": "day", "rows": {}}, "in another form: 'rows'"),
    ],
    ids=range(16),
)
def test_an_answer_of_another_form_is_one_line(serve: Serve, what: str, answer: Any, words: str) -> None:
    with closing(Page(serve(answers(**{what: answer})), IDENTITY)) as page, pytest.raises(PageUnreachable) as caught:
        page.snapshot() if what == "snapshot" else page.past()
    assert words in str(caught.value) and str(caught.value).isprintable()


def test_an_answer_without_end_is_not_read_to_its_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_ANSWER", 10_000)
    with (
        closing(Page(serve(answers(snapshot=b" " * 100_000)), IDENTITY)) as page,
        pytest.raises(PageUnreachable) as caught,
    ):
        page.snapshot()
    assert "answers api/snapshot without end" in str(caught.value)


def test_a_page_of_another_run(serve: Serve) -> None:
    with closing(Page(serve(answers()), "other-1")) as page, pytest.raises(UsageError, match="shows another run"):
        page.snapshot()


def test_nobody_listens() -> None:
    with closing(Page("http://127.0.0.1:9", IDENTITY)) as page, pytest.raises(PageUnreachable, match="does not answer"):
        page.snapshot()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8080", "ftp://a", "http://", "http://a:99999", "http://[::1", "http://a/?b"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="must be the address of a run's page"):
        Page(url, IDENTITY)


@pytest.mark.parametrize(
    ("left", "found"),
    [("http://127.0.0.1:8471\n", "http://127.0.0.1:8471"), (None, ""), ("", ""), ("rubbish\n", ""), (b"\xff\xfe", "")],
    ids=range(5),
)
def test_the_page_of_an_aux_peer_on_this_machine(left: str | bytes | None, found: str) -> None:
    run = load_run("emoji")
    if left is not None:
        (run_folder(run) / "page").write_bytes(left if isinstance(left, bytes) else left.encode())
    assert page_here(run) == found


def test_the_past_and_the_rounds_come_onto_the_screen(serve: Serve, tmp_path: Path) -> None:
    rounds = {"rows": [{"step": 1, "time": 1.0, "words": EVIL}]}
    url = serve(answers(rounds=rounds))
    with closing(Page(url, IDENTITY)) as page:
        watch = watch_of(page.snapshot, tmp_path, page=page)
        watch.look()
        watch.look_back()
    seen = watch.scene()
    assert seen.past_from == url.rstrip("/")
    assert list(seen.curve) == [(1, 6.0), (5, 5.0), (7, 3.214)]
    assert [words for _, words in seen.log] == ["?[2J?1m owned", "watching 1 trainer at step 7, loss 3.214"]
    assert [active.trainers for active in seen.activity] == [1, 2.5, 1]
    assert [leader.user for leader in seen.leaders["day"]] == ["ada"]


def test_a_page_that_fails_leaves_what_the_swarm_tells(serve: Serve, tmp_path: Path) -> None:
    with closing(Page(serve(answers(history=None)), IDENTITY)) as page:
        watch = watch_of(lambda: snapshot(peers=[trainer(user="ada")]), tmp_path, page=page)
        watch.look()
        watch.look_back()
    seen = watch.scene()
    assert "answered 404 to api/history" in seen.past_trouble
    assert [leader.user for leader in seen.leaders["ever"]] == ["ada"]


def test_a_packed_answer_is_not_unpacked(tmp_path: Path) -> None:
    """Kilobytes that stand for 64 megabytes, from a page and from an authority that were asked for plain bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1 << 6)) + packer.flush()
    for name in ("api/snapshot", "v1/notice"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(bomb)
    with ShardServer(tmp_path) as server:
        server.faults |= {"snapshot": ["packed"], "notice": ["packed"]}
        with closing(Page(server.url, IDENTITY)) as page, closing(AuthorityConnection(pointed_at(server.url))) as other:
            tracemalloc.start()
            with pytest.raises(PageUnreachable, match="answered api/snapshot with no JSON: is it a run's page"):
                page.snapshot()
            assert len(other.notice(0) or "") <= len(bomb)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
            tracemalloc.stop()


def pointed_at(authority: str) -> RunConfig:
    key = "ed25519:" + "A" * 43
    return load_run("emoji").replaced({"membership.authority": authority, "membership.authority_key": key})
