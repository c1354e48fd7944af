"""The web page's answers: as their description says, thinned and bounded, cached, and safe to show."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import nbformat
import numpy as np
import pytest
import schemathesis
from history.test_store import add_steps, made, seen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from schemathesis import GenerationMode
from swarm.made import record

from tests.web.recorded import TABLES
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter, database_url
from tt_cli.run import load_run
from tt_cli.swarm.records.snapshot import take_snapshot
from tt_cli.web import live_updates, schemas
from tt_cli.web import web_app as room
from tt_cli.web.index_html import STATIC
from tt_cli.web.live_updates import BEGIN, LiveUpdates
from tt_cli.web.notebooks import NAMES, notebook
from tt_cli.web.queries import Answers
from tt_cli.web.run_facts import run_facts
from tt_cli.web.step_columns import kept
from tt_cli.web.web_app import make_app

RUN = load_run("emoji")
PEER = record("a", user="<b>ada</b>", client_mode=True, samples_per_second=4.0, loss=2.5, time=1000.0)
AUX = record("aux", role="aux", samples_per_second=0.0, epoch=2, time=1000.0)
SNAPSHOT = take_snapshot(RUN, [PEER, AUX], None, 1005.0).to_json()
del SNAPSHOT["history"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a history of a few steps."""
    folder = tmp_path_factory.mktemp("web")
    store = HistoryWriter(database_url(folder), RUN.identity)
    for step in range(1, 6):
        store.record_step(made(step, words=f"round {step}"), [seen("a", 10 * step, "<b>ada</b>")], 100)
        store.record_activity(1000.0 + 30 * step, step, step, 10.0, [], 100)
    store.put("snapshot", json.dumps(SNAPSHOT), 1005.0)
    store.put("model", json.dumps({"parameters": 1000, "effective": 3000}), 1005.0)
    store.put("addresses", json.dumps(["/ip4/127.0.0.1/tcp/1/p2p/x", "/ip4/203.0.113.7/tcp/1/p2p/x"]), 1005.0)
    store.add_checkpoint(5, 1005.0, "d" * 64, 1000)
    store.add_pictures(5, [("a red apple", "5-0.png"), ("an owl, drawn on another server", "5-1.png")])
    store.tell_part("publisher", "waits")
    store.close()
    (folder / "pictures").mkdir()
    (folder / "pictures" / "5-0.png").write_bytes(b"picture")
    yield folder


def answers_in(folder: Path, now: float = 1010.0) -> Answers:
    return Answers(HistoryReader(database_url(folder)), RUN, "emoji", lambda: now, TABLES)


def asked(answers: Answers, folder: Path, *paths: str, **headers: str) -> list[httpx2.Response]:
    """What is answered to one request after the other."""

    async def ask() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(make_app(answers, folder / "pictures"), raise_app_exceptions=False)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", headers=named) as http:
            return [await http.get(path) for path in paths]

    return asyncio.run(ask())


OPERATIONS = [
    *("/api/run", "/api/snapshot", "/api/history", "/api/activity", "/api/leaderboard", "/api/peers"),
    *("/api/checkpoints", "/api/rounds", "/api/figures", "/api/calculator", "/metrics", "/health"),
]
OF_TRAINERS = 'tt_peer_samples_per_second{of="least"} 4.0', 'tt_peer_lag{of="most"} 0.0', "tt_aux_peers 1.0"
WITH_PARAMETERS = ("/api/history", "/api/activity", "/api/leaderboard", "/api/calculator")


def test_all_that_it_does_is_tested(filled: Path) -> None:
    assert list(make_app(answers_in(filled), filled).openapi()["paths"]) == OPERATIONS


@pytest.mark.slow
@pytest.mark.parametrize("state", ["filled", "empty"])
@pytest.mark.parametrize(
    ("path", "mode"),
    [
        (path, mode)
        for path in OPERATIONS
        for mode in GenerationMode
        if path in WITH_PARAMETERS or mode is GenerationMode.POSITIVE
    ],
)
def test_it_does_what_its_description_says(
    filled: Path, tmp_path: Path, state: str, path: str, mode: GenerationMode
) -> None:
    """Whatever is asked: no crash, no answer that the description does not know, none of another form."""
    folder = filled if state == "filled" else tmp_path
    if state == "empty":
        HistoryWriter(database_url(folder), RUN.identity).close()
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(answers_in(folder), folder / "pictures"))
    schema.config.checks.not_a_server_error.expected_statuses = ["2xx", "3xx", "4xx", "503"]

    @settings(
        max_examples=settings().max_examples // 7 if path in WITH_PARAMETERS else 2,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path]["GET"].as_strategy(generation_mode=mode))
    def try_it(case: schemathesis.Case) -> None:
        case.call_and_validate()

    try_it()


def test_the_calculator_knows_its_models_alone(filled: Path) -> None:
    """What a visitor names is never looked for: no file, no repository."""
    run, bert, *others = asked(
        answers_in(filled),
        filled,
        *("/api/calculator", "/api/calculator?model=bert-base"),
        *(f"/api/calculator?model={name}" for name in ("emoji", "/etc/passwd", "a/b", "run.toml", "")),
    )
    assert run.json()["name"] == "run" and run.json()["command"] == "tt calc emoji"
    assert bert.json()["title"] == "BERT base" and bert.json()["models"] == run.json()["models"]
    assert {answer.status_code for answer in others} == {404}
    assert others[0].json() == {"detail": "no such model"}


def test_what_it_answers(filled: Path) -> None:
    run, snapshot, board, day, points, made_pictures, figures = (
        answer.json()
        for answer in asked(
            answers_in(filled),
            filled,
            *("/api/run", "/api/snapshot", "/api/leaderboard", "/api/leaderboard?window=day"),
            *("/api/history?points=10&first=2&last=4", "/api/checkpoints", "/api/figures"),
        )
    )
    assert run["join"]["commands"] == ["tt join emoji --peer /ip4/203.0.113.7/tcp/1/p2p/x"]
    assert (run["title"], run["model"]["effective"], run["model"]["image_tokens"]) == (RUN.run.description, 3000, 64)
    assert snapshot == {**SNAPSHOT, "age_s": 5.0}
    assert [(row["user"], row["samples"], row["share"]) for row in board["rows"]] == [("<b>ada</b>", 50, 1.0)]
    assert day["window"] == "day" and len(day["rows"]) == 1
    assert (points["step"], points["last_step"], points["total"]) == ([2, 3, 4], 5, 5)
    assert made_pictures["rows"][0]["pictures"] == [{"prompt": "a red apple", "url": "pictures/5-0.png"}]
    assert {"label": "peers now that nobody can dial", "value": 1, "unit": "peers"} in figures["devices"]


def test_a_language_models_run_has_no_pictures(filled: Path) -> None:
    words = load_run("words")
    answers = Answers(HistoryReader(database_url(filled)), words, "my words.toml", tables=TABLES)
    run, figures, own, draws, page = asked(
        answers, filled, "/api/run", "/api/figures", "/api/calculator", "/notebooks/infer.ipynb", "/"
    )
    sizes = {"layers": 6, "dim": 192, "heads": 6, "text_tokens": 256, "image_tokens": None, "vocabulary": 512}
    assert sizes.items() <= run.json()["model"].items() and "pixels" not in run.json()["data"]
    schemas.Run.model_validate(run.json())
    assert {figure["label"] for figure in figures.json()["streaming"]} == {"data set", "examples computed so far"}
    assert run.json()["described"] == {"kind": "causal_lm", "model": "6 layers of width 192, 6 heads"}
    assert (own.status_code, draws.status_code) == (503, 404) and "one picture" not in figures.text
    store = HistoryWriter(database_url(filled), RUN.identity)
    store.put("calculator", json.dumps({**TABLES.table("run"), "command": "tt calc its-own-name"}), 1005.0)
    store.close()
    own, gpt2 = asked(answers, filled, "/api/calculator", "/api/calculator?model=gpt2-large")
    assert (own.json()["command"], gpt2.json()["command"]) == ("tt calc 'my words.toml'", "tt calc gpt2-large")
    assert "What it writes" in page.text
    assert "What it draws" not in page.text and "codes once" not in page.text
    run, page = asked(answers_in(filled), filled, "/api/run", "/")
    pictures = page.text
    assert "described" not in run.json()
    assert '<section id="samples" class="wide" aria-labelledby="h-samples">' in pictures and "codes once" in pictures


def test_answers_are_compressed_known_again_and_safe(filled: Path) -> None:
    answers = answers_in(filled)
    first = asked(answers, filled, "/api/run", accept_encoding="gzip")[0]
    assert first.headers["content-encoding"] == "gzip" and first.headers["cache-control"] == "no-cache"
    again = asked(answers, filled, "/api/run", if_none_match=first.headers["etag"])[0]
    assert (again.status_code, again.content) == (304, b"")
    plain = asked(answers, filled, "/api/run", accept_encoding="gzip;q=0")[0]
    assert "content-encoding" not in plain.headers and plain.json() == first.json()
    for answer in (first, again, *asked(answers, filled, "/", "/health", "/nothing", "/api/history?points=x")):
        for name, value in room.HEADERS.items():
            assert answer.headers[name] == value


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip, deflate, br, zstd", "br"),
        ("br;q=0.5, gzip", "gzip"),
        ("br;q=0, gzip;q=0.1", "gzip"),
        ("*", "br"),
        ("*;q=0.2, br;q=0", "gzip"),
        ("GZIP", "gzip"),
        ("deflate", None),
        ("br;q=0, *;q=0", None),
        ("identity, br;q=0.5", None),
        ("br;q=5, gzip;q=x, ;;;", None),
        ("", None),
    ],
)
def test_the_coding_is_the_one_that_the_client_likes_best(filled: Path, accepted: str, coding: str | None) -> None:
    answers = answers_in(filled)
    plain = asked(answers, filled, *(paths := ("/api/run", "/", "/page.js")), accept_encoding="identity")
    for answer, alike in zip(asked(answers, filled, *paths, accept_encoding=accepted), plain, strict=True):
        assert answer.headers.get("content-encoding") == coding
        assert "Accept-Encoding" in answer.headers["vary"]
        assert answer.content == alike.content and answer.headers["etag"] == alike.headers["etag"]
        assert (int(answer.headers["content-length"]) < 0.6 * len(answer.content)) == (coding is not None)


def test_the_pages_files(filled: Path) -> None:
    script, style, page, whole, missing = asked(
        answers_in(filled), filled, "/page.js", "/page.css", "/", "/index.html", "/page.py"
    )
    assert "javascript" in script.headers["content-type"] and style.headers["content-type"].startswith("text/css")
    assert script.content == (STATIC / "page.js").read_bytes()
    assert page.text == whole.text and "tt join emoji" in page.text
    assert (missing.status_code, missing.json()) == (404, {"detail": "no such file"})
    again = asked(answers_in(filled), filled, "/page.js", if_none_match=script.headers["etag"])[0]
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_and_its_pictures(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "STATIC", tmp_path)
    page, picture, *others = asked(
        answers_in(filled),
        filled,
        *("/", "/pictures/5-0.png", "/pictures/6-0.png", "/pictures/..%2fhistory.db", "/pictures/.5-0.png"),
        *("/../history.db", "/%2e%2e/history.db", "/index.html"),
    )
    assert page.text.startswith("The page has not been built") and page.headers["content-type"].startswith("text/plain")
    assert picture.content == b"picture" and picture.headers["content-type"] == "image/png"
    assert [answer.status_code for answer in others] == [404] * 6


def test_notebooks_have_the_run_in_them(filled: Path) -> None:
    join, draw, other = asked(
        answers_in(filled), filled, "/notebooks/join.ipynb", "/notebooks/infer.ipynb", "/notebooks/..%2fhistory.db"
    )
    assert other.status_code == 404
    assert join.headers["content-disposition"] == 'attachment; filename="join.ipynb"'
    for answer in (join, draw):
        assert answer.headers["content-type"] == "application/x-ipynb+json"
        notebook = nbformat.reads(answer.text, as_version=4)
        nbformat.validate(notebook)
        parameters: dict[str, Any] = {}
        exec(next(cell.source for cell in notebook.cells if cell.cell_type == "code"), parameters)
        assert (parameters["RUN"], parameters["PEERS"]) == ("emoji", ["/ip4/203.0.113.7/tcp/1/p2p/x"])


@pytest.mark.parametrize("name", ['x"+y', "org/repo-1", "my run \N{PARTY POPPER}.toml"])
def test_a_name_stays_text_in_a_notebook(name: str) -> None:
    facts = run_facts(RUN, name, {}, [])
    for filename in NAMES:
        parameters: dict[str, Any] = {}
        exec("".join(json.loads(notebook(filename, facts))["cells"][1]["source"]), parameters)
        assert (parameters["RUN"], parameters["PEERS"]) == (name, [])


def test_a_history_that_does_not_answer(tmp_path: Path) -> None:
    """No tables, and then no folder: one line for everybody, and no word of where the database is."""
    for folder in (tmp_path, tmp_path / "missing"):
        answers = answers_in(folder)
        found = asked(answers, folder, *OPERATIONS)
        assert [answer.status_code for answer in found] == [503] * 9 + [200, 200, 503]  # the calculator needs none
        assert found[0].json() == {"detail": "the run's history does not answer at the moment"}
        assert found[0].headers["retry-after"] == "5" and "tt_database_up 0.0" in found[-2].text
        assert found[-1].json()["problems"] == ["the run's history cannot be read and written"]


def test_health_and_metrics(filled: Path) -> None:
    for now, status in ((1010.0, 200), (1066.0, 503)):
        answer = asked(answers_in(filled, now), filled, "/health")[0]
        assert answer.status_code == status
    assert answer.json()["problems"] == ["the coordinator takes no snapshots: the last one 61 s ago"]
    assert [part["name"] for part in answer.json()["parts"]] == ["publisher"]
    text = asked(answers_in(filled), filled, "/metrics")[0].text
    for line in ("tt_step 5.0", "tt_loss 2.5", "tt_recorded_steps 5.0", "tt_snapshot_age_seconds 5.0", *OF_TRAINERS):
        assert re.search(rf"^{re.escape(line)}$", text, re.MULTILINE), text


def test_what_many_ask_at_once_is_looked_at_once(filled: Path) -> None:
    """Of health too, which writes into the database."""
    times = itertools.count(1010)
    answers = Answers(HistoryReader(database_url(filled)), RUN, "emoji", lambda: float(next(times)), TABLES)
    for path in ("/health", "/metrics", "/api/snapshot"):
        told = {answer.content for answer in asked(answers, filled, *[path] * 10)}
        assert len(told) < 10, "all are told anew"


class Counting(HistoryReader):
    looks = 0

    def activity(self) -> list[tuple[float, int, float]]:
        self.looks += 1
        return super().activity()


def test_whatever_is_asked_of_the_activity_it_is_read_once(tmp_path: Path) -> None:
    """After a year that takes a fifth of a second, and anybody can ask for any number of points."""
    store = HistoryWriter(database_url(tmp_path), RUN.identity)
    reader = Counting(database_url(tmp_path))
    (none,) = asked(Answers(reader, RUN, "emoji", tables=TABLES), tmp_path, "/api/activity")
    assert none.json() == {"time": [], "trainers": [], "samples_per_second": []}
    for step in range(1, 31):
        store.record_activity(1000.0 + step, step, step, 10.0 * step, [], 100)
    store.close()
    reader.looks, paths = 0, ("points=10", "points=14", "points=14&since=1024", "since=1030")
    told = asked(Answers(reader, RUN, "emoji", tables=TABLES), tmp_path, *(f"/api/activity?{path}" for path in paths))
    thirds = [2.0, 5.0, 8.0, 11.0, 14.0, 17.0, 20.0, 23.0, 26.0, 29.0]
    means = [thirds, thirds, [25.0, 26.0, 27.0, 28.0, 29.0, 30.0], []]
    assert [answer.json()["trainers"] for answer in told] == means and reader.looks == 1
    assert told[0].json()["time"][:2] == [1001.0, 1004.0] and told[0].json()["samples_per_second"][0] == 20.0


def test_new_steps_are_seen_and_those_taken_back_are_gone(tmp_path: Path) -> None:
    store, answers = HistoryWriter(database_url(tmp_path), RUN.identity), answers_in(tmp_path)
    store.record_step(made(1), [], 100)
    store.record_step(made(2), [], 100)
    assert answers.steps(10)["step"] == [1, 2]
    store.record_step(made(3), [], 100)
    store.go_back(1, 9)
    answers.history._looked_at = -1e9  # as a second later
    assert answers.steps(10)["step"] == [1]
    store.close()


def test_a_step_is_told_to_all_who_follow_whoever_asked_for_the_history_meanwhile(tmp_path: Path) -> None:
    store, answers = HistoryWriter(database_url(tmp_path), RUN.identity), answers_in(tmp_path)
    live = LiveUpdates(answers)

    def told() -> list[int]:
        answers.history._looked_at = -1e9  # as a second later
        return [json.loads(text.split("data: ")[1])["step"] for text in (m.plain.decode() for m in live._changes())]

    store.record_step(made(1), [], 100)
    assert told() == [1], "whoever begins is told the newest"
    for step in (2, 3):
        store.record_step(made(step), [], 100)
    answers.history._looked_at = -1e9
    assert answers.steps(10)["step"] == [1, 2, 3]
    assert told() == [2, 3] and told() == []
    store.go_back(1, 9)
    assert told() == [1]
    store.close()


def test_who_begins_misses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the one that came after its history was read, nor one that comes while it is told that."""
    monkeypatch.setattr(live_updates, "LOOK_SECONDS", 0.01)
    store, answers = HistoryWriter(database_url(tmp_path), RUN.identity), answers_in(tmp_path)
    live = LiveUpdates(answers)

    async def followed() -> list[int]:
        store.record_step(made(1), [], 100)
        async with contextlib.aclosing(live.messages()) as messages:
            await anext(messages)
            store.record_step(made(2), [], 100)
            answers.history._looked_at = -1e9  # as a second later
            while not live._sent:
                await asyncio.sleep(0.01)
            texts = [(await anext(messages)).plain.decode() for _ in range(2)]
        return [json.loads(text.split("data: ")[1])["step"] for text in texts]

    assert asyncio.run(followed()) == [1, 2]
    store.close()


def test_of_many_who_come_at_once_one_looks(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all do who had the page open while its server began anew."""
    monkeypatch.setattr(live_updates, "LOOK_SECONDS", 3600.0)
    looks = itertools.count(1010)
    live = LiveUpdates(Answers(HistoryReader(database_url(filled)), RUN, "emoji", lambda: float(next(looks)), TABLES))

    async def begin() -> None:
        async with contextlib.AsyncExitStack() as open_pages:
            for _ in range(2):
                pages = [live.messages() for _ in range(20)]
                for page in pages:
                    await open_pages.enter_async_context(contextlib.aclosing(page))
                assert {message.plain for message in await asyncio.gather(*map(anext, pages))} == {BEGIN.plain}
            assert live.clients.total() == 40

    asyncio.run(begin())
    assert not live.clients and next(looks) == 1011


def test_who_comes_late_learns_how_old_the_snapshot_is(filled: Path) -> None:
    now = [1010.0]
    live = LiveUpdates(Answers(HistoryReader(database_url(filled)), RUN, "emoji", lambda: now[0], TABLES))

    async def first() -> list[str]:
        """What a page is told as it begins to follow."""
        async with contextlib.aclosing(live.messages()) as messages:
            return [(await anext(messages)).plain.decode() for _ in range(2)]

    for now[0], age in ((1010.0, 5.0), (4605.0, 3600.0)):
        assert json.loads(asyncio.run(first())[1].split("data: ")[1])["age_s"] == age


@given(arrays.arrays(np.float64, st.integers(4, 300), elements=st.floats(-1e39, 1e39)), st.integers(4, 100))
def test_thinning_keeps_both_ends_and_all_extremes_of_the_loss(loss: Any, points: int) -> None:
    found = kept(loss, points)
    assert len(found) <= points and list(found) == sorted(set(found))
    assert found[0] == 0 and found[-1] == len(loss) - 1
    assert loss[found].min() == loss.min() and loss[found].max() == loss.max()


@pytest.mark.slow
def test_a_hundred_thousand_steps_are_thinned_at_once(tmp_path: Path) -> None:
    HistoryWriter(database_url(tmp_path), RUN.identity).close()
    add_steps(database_url(tmp_path), 100_000)
    answers = answers_in(tmp_path)
    assert answers.steps(1000)["total"] == 100_000
    started = time.perf_counter()
    assert len(list(HistoryReader(database_url(tmp_path)).steps_after(0, 100_000))) == 100_000
    all_of_them, started = time.perf_counter() - started, time.perf_counter()
    for first in range(10):
        found = answers.steps(1000, first=first)
    assert time.perf_counter() - started < all_of_them, "ten answers take less than to read all once"
    assert len(found["step"]) <= 1000 and (found["step"][0], found["step"][-1]) == (9, 100_000)
