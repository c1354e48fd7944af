"""Checkpoints onto the Hub: the real client, in the publisher's own process, against the stand-in with its faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Self

import pytest
import torch
from hub_standin import HubStandin
from peer.states import small_run

from tt_cli.auxiliary.lease import LeaseFile
from tt_cli.auxiliary.publisher import PublisherOptions
from tt_cli.checkpoint.checkpoint_files import save
from tt_cli.checkpoint.training_state import TrainingState
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import HistoryWriter, MadeStep, database_url
from tt_cli.run import RunConfig, folders
from tt_cli.run.model_card import card
from tt_cli.supervisor.events import Log
from tt_cli.supervisor.worker_process import Worker

pytestmark = pytest.mark.slow

TINY = {"model.dim": 32, "model.depth": 2, "model.heads": 2, "model.dim_head": 16}
RUN = small_run(**TINY, **{"checkpoints.repository": "acme/run", "schedule.total_steps": 100})
WAIT = 120.0


def state(step: int, run: RunConfig = RUN) -> TrainingState:
    """A checkpoint's content, of a tensor that says which step it is."""
    return TrainingState(step, {"w": torch.full((8,), step)}, {"m": torch.zeros(8)}, run.to_toml(), run.identity)


def saved(step: int, run: RunConfig = RUN) -> Path:
    return save(folders.checkpoints(run), state(step, run), keep=5, spread=True)


class Publishing:
    """The publisher's process, which looks and tries again at once; ended at the end."""

    def __init__(
        self, hub: HubStandin, home: Path, token: str = "hf_write", every: float = 3600.0, run: RunConfig = RUN
    ):
        options = asdict(PublisherOptions(run.to_toml(), every=every, again=0.05, look=0.05))
        environment = {**hub.environment(home), **({"HF_TOKEN": token} if token else {})}
        self.worker = Worker("tt_cli.auxiliary.publisher", options, home / "publisher.log", environment)
        self.told: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.worker.kill()
        self.worker.wait(WAIT)

    def until(self, words: str) -> str:
        """The first line from now on with these words."""
        for event in self.worker.events(WAIT):
            if isinstance(event, Log):
                self.told.append(event.message)
                if words in event.message:
                    return event.message
        raise AssertionError(f"'{words}' was not told in {self.told}, {self.worker.log.read_text()}")


def until(true: Callable[[], object]) -> None:
    """Ask the stand-in until it is so."""
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def sent(hub: HubStandin, begin: str, part: str) -> int:
    return sum(line.startswith(begin) and part in line for line in hub.log())


@pytest.fixture
def writer(hub: HubStandin) -> HubStandin:
    hub.add_user("hf_write", "ada", {"acme": "write"}, role="write")
    return hub


def test_what_is_published_and_when(writer: HubStandin, tmp_path: Path) -> None:
    """One commit: checkpoint, run file, card with step and loss. The next waits for its time, the last does not.

    Such files are found in peer/test_published.py and draw/test_source.py.
    """
    url = database_url(folders.run_folder(RUN))
    store, reader = HistoryWriter(url, RUN.identity), HistoryReader(url)
    store.record_step(MadeStep(7, 0, 1.0, 2.5, 1, 1.0), [], 100)
    checkpoint = saved(7)
    with Publishing(writer, tmp_path) as publisher:
        assert publisher.until("is published").startswith("step 7 (")
        files = writer.files("acme/run")
        assert set(files) == {"run.toml", "README.md", "step-00000007.safetensors"}
        assert sent(writer, "POST", "/commit/") == 1
        text = files["README.md"].decode()
        assert "| 7 | 2.5000 | `step-00000007.safetensors` |" in text and "tt join acme/run" in text
        assert files["step-00000007.safetensors"] == checkpoint.read_bytes()
        assert RunConfig.from_toml(files["run.toml"].decode(), "run.toml") == RUN
        (row,) = reader.checkpoints()
        assert (row["step"], row["digest"], row["bytes"]) == (7, state(7).digest(), checkpoint.stat().st_size)
        assert row["url"].startswith(f"{writer.url}/acme/run/blob/")
        saved(8)
    saved(9)
    asked = sent(writer, "GET", "/api/models/acme/run")
    with Publishing(writer, tmp_path) as publisher:  # the repository says when the last one was
        until(lambda: sent(writer, "GET", "/api/models/acme/run") > asked)
        saved(100)
        publisher.until("step 100 (")
        assert set(writer.files("acme/run")) == {*files, "step-00000100.safetensors"}
        assert sent(writer, "POST", "/commit/") == 2
        until(lambda: [one["words"] for one in reader.parts()] == ["step 100 is in acme/run"])
    assert "hf_write" not in str(publisher.told) + (tmp_path / "publisher.log").read_text()
    assert not any((folders.run_folder(RUN) / "publishing").iterdir())


def test_faults_are_told_once_and_it_goes_on(writer: HubStandin, tmp_path: Path) -> None:
    saved(5)
    writer.fault("/commit/", status=503, times=3)
    writer.fault("/commit/", status=429)
    writer.fault("/commit/", status=-1)
    writer.fault("/commit/", status=412, times=2)
    with Publishing(writer, tmp_path) as publisher:
        publisher.until("step 5 (")
    told = [words.removeprefix("cannot publish step 5 in acme/run: ") for words in publisher.told[1:-1]]
    assert [words.partition(";")[0].partition(" (")[0] for words in told] == [
        "the Hub answered 503",
        "the Hub answered 429",
        "the Hugging Face Hub cannot be reached",
    ], told
    assert sent(writer, "POST", "/commit/") == 8 and sent(writer, "PUT", "/lfs/") == 1
    assert "step-00000005.safetensors" in writer.files("acme/run")


def test_killed_midway_it_goes_on_where_it_was(writer: HubStandin, tmp_path: Path) -> None:
    saved(5)
    writer.fault("/commit/", status=503, delay=60.0)
    with Publishing(writer, tmp_path) as publisher:
        until(lambda: sent(writer, "POST", "/commit/"))
        publisher.worker.kill()
    assert writer.files("acme/run") == {}, "whole or absent"
    with Publishing(writer, tmp_path) as publisher:
        publisher.until("step 5 (")
    assert sent(writer, "PUT", "/lfs/") == 1, "what has arrived is not sent again"


def test_a_commit_whose_answer_was_lost_is_not_made_again(writer: HubStandin, tmp_path: Path) -> None:
    saved(5)
    writer.fault("/commit/", status=-2)
    with Publishing(writer, tmp_path) as publisher:
        publisher.until("cannot be reached")
        publisher.until("step 5 (")
    assert sent(writer, "POST", "/commit/") == 1
    (row,) = HistoryReader(database_url(folders.run_folder(RUN))).checkpoints()
    assert row["step"] == 5 and row["url"].endswith("step-00000005.safetensors")


def test_some_are_kept_and_what_is_not_its_own_stays(writer: HubStandin, tmp_path: Path) -> None:
    mine = card(RUN).replace("## Join", "Hello from Ada.\n\n## Join")
    old = {f"step-{step:08d}.safetensors": f"{step}" for step in (1, 2, 30, 31, 32, 33, 34, 35)}
    others = {"notes.txt": "mine", "old/step-00000001.safetensors": "mine", "run.toml": f"# mine\n{RUN.to_toml()}"}
    writer.put("model", "acme/run", {**old, **others, "README.md": mine})
    saved(36)
    damaged = saved(40)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with Publishing(writer, tmp_path) as publisher:
        publisher.until("step 36 (")
    assert "not published: cannot read the checkpoint" in publisher.told[1] and len(publisher.told) == 3
    files = writer.files("acme/run")
    steps = sorted(int(name[5:13]) for name in files if name.startswith("step-"))
    assert steps == [1, 30, 32, 33, 34, 35, 36]
    assert {name: files[name].decode() for name in others} == others
    text = files["README.md"].decode()
    assert "Hello from Ada." in text and text.count("<!-- checkpoints -->") == 1 and "| 36 |  | `step-00000036" in text


def test_another_run_s_repository_is_left_alone(writer: HubStandin, tmp_path: Path) -> None:
    other = small_run(**TINY, **{"run.name": "other"})
    writer.put("model", "acme/run", {"run.toml": other.to_toml()})
    saved(5)
    with Publishing(writer, tmp_path) as publisher:
        words = publisher.until("cannot publish in acme/run")
    assert f"it holds the run {other.identity} already; name another" in words and "\n" not in words
    assert sent(writer, "POST", "") == 0


def test_it_waits_for_a_token_that_may_write(writer: HubStandin, tmp_path: Path) -> None:
    writer.add_user("hf_read", "ada", {"acme": "write"}, role="read")
    saved(5)
    token = tmp_path / "hf" / "token"
    token.parent.mkdir()
    with Publishing(writer, tmp_path, token="") as publisher:
        assert "`tt login`" in publisher.until("nobody is logged in here")
        token.write_text("hf_read")
        words = publisher.until("the Hub refuses access (403)")
        assert "a `tt login` with a token that may write there" in words and "hf_read" not in words
        token.write_text("hf_write")
        publisher.until("step 5 (")
    assert len(publisher.told) == 4


def test_what_the_organiser_took_back_leaves_the_hub(writer: HubStandin, tmp_path: Path) -> None:
    store = HistoryWriter(database_url(folders.run_folder(RUN)), RUN.identity)
    for step in range(10, 16):
        store.record_step(MadeStep(step, 0, 1.0, 2.5, 1, 1.0), [], 100)
    saved(11)
    with Publishing(writer, tmp_path, every=0.0) as publisher:
        publisher.until("step 11 (")
        taken_back = saved(15)
        publisher.until("step 15 (")
        taken_back.rename(taken_back.with_name(taken_back.name + ".before-order-1"))
        store.go_back(11, 1)
        publisher.until("the run is back at step 11")
        assert {name for name in writer.files("acme/run") if "step" in name} == {"step-00000011.safetensors"}
        saved(14)
        publisher.until("step 14 (")
    assert "step-00000014.safetensors" in writer.files("acme/run")


def test_of_two_orders_while_the_hub_was_away_both_are_followed(writer: HubStandin, tmp_path: Path) -> None:
    old = {f"step-{step:08d}.safetensors": "of before both orders" for step in (11, 14, 18)}
    writer.put("model", "acme/run", {"run.toml": RUN.to_toml(), **old})
    store = HistoryWriter(database_url(folders.run_folder(RUN)), RUN.identity)
    for era, last, back in ((0, 18, 11), (1, 16, 15)):  # the second takes back less
        for step in range(11, last + 1):
            store.record_step(MadeStep(step, era, 1.0, 2.5, 1, 1.0), [], 100)
        store.go_back(back, era + 1)
    saved(11)
    with Publishing(writer, tmp_path, every=0.0) as publisher:
        publisher.until("the run is back at step ")
    assert {name for name in writer.files("acme/run") if "step" in name} == {"step-00000011.safetensors"}


def test_an_order_is_followed_once_by_whoever_publishes(
    writer: HubStandin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that led ended before it had followed, and comes back when another one has and the run went on."""
    old = {f"step-{step:08d}.safetensors": "of before the order" for step in (11, 15)}
    writer.put("model", "acme/run", {"run.toml": RUN.to_toml(), **old})
    for machine, newest in (("second", 15), ("first", 16), ("third", 17)):
        monkeypatch.setenv("TT_HOME", str(tmp_path / machine))
        store = HistoryWriter(database_url(folders.run_folder(RUN)), RUN.identity)
        for era in (0, 1):
            for step in range(10 + 2 * era, newest + 1):
                store.record_step(MadeStep(step, era, 1.0, 2.5, 1, 1.0), [], 100)
            store.go_back(11, 1)
        made = saved(newest)
        with Publishing(writer, tmp_path, every=0.0) as publisher:
            publisher.until(f"step {newest} (")
        steps = {name for name in writer.files("acme/run") if "step" in name}
        assert steps == {f"step-{step:08d}.safetensors" for step in (11, *range(15, newest + 1))}
        assert ["at step 11" in line for line in publisher.told].count(True) == (machine == "second")
        assert writer.files("acme/run")[made.name] == made.read_bytes(), "no longer the bytes of before the order"


def test_another_one_that_leads_publishes_unless_it_does_not(writer: HubStandin, tmp_path: Path) -> None:
    lease = LeaseFile(folders.run_folder(RUN))
    lease.path.parent.mkdir(parents=True, exist_ok=True)
    url = database_url(folders.run_folder(RUN))
    HistoryWriter(url, RUN.identity)  # makes the tables that are read
    saved(7)
    lease.write("QmLeader", mine=False)
    with Publishing(writer, tmp_path) as publisher:
        until(lambda: sent(writer, "GET", "/api/models/acme/run"))
        reader = HistoryReader(url)
        until(lambda: [one["words"] for one in reader.parts()] == ["…Leader leads, and publishes"])
        assert not sent(writer, "POST", "/commit/")
        lease.write("QmSelf", mine=True)
        publisher.until("step 7 (")
    saved(8)
    lease.write("QmLeader", mine=False)
    with Publishing(writer, tmp_path, every=0.5) as publisher:  # the leader's next commit is overdue soon
        publisher.until("step 8 (")
