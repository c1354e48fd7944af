"""`tt site export`: the page as files, from a history as an auxiliary peer records it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Tt
from task.test_digits import RUN as DIGITS

from tests.web.recorded import RUN, TABLES, write_history
from tt_cli.errors import TTError, UsageError
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import FILE, HistoryWriter, database_url
from tt_cli.memory.answer_tables import Tables
from tt_cli.run import folders
from tt_cli.task import task_of
from tt_cli.web.index_html import STATIC
from tt_cli.web.queries import Answers
from tt_cli.web.site_export import MARK, Exported, export


def exported(source: Path, out: Path) -> Exported:
    reader = HistoryReader(database_url(source))
    try:
        answers = Answers(reader, RUN, "emoji", tables=TABLES)
        return export(answers, source / "pictures", out)
    finally:
        reader.close()


def answer(out: Path, name: str) -> Any:
    return json.loads((out / "api" / f"{name}.json").read_text())


def test_every_answer_is_a_file_and_the_page_knows(tmp_path: Path) -> None:
    write_history(tmp_path / "run", steps=25)
    out = tmp_path / "deep" / "site"
    written = exported(tmp_path / "run", out)
    assert written.step == 25 and written.pictures == 1 and written.files == len([*out.rglob("*.*")])
    assert answer(out, "history")["step"] == list(range(1, 26)) == answer(out, "history-0")["step"]
    assert answer(out, "snapshot")["epoch"] == 25
    assert answer(out, "leaderboard")["rows"][0]["user"] == "<b>ada</b>"
    assert {file.name for file in STATIC.iterdir()} <= {file.name for file in out.iterdir()}
    for name in ("run", "gpt2-large"):
        assert answer(out, f"calculator-{name}") == json.loads(json.dumps(TABLES.table(name)))
    page = (out / "index.html").read_text()
    assert '<meta name="tt-static" content="1">' in page and "tt join emoji" in page
    (checkpoint,) = answer(out, "checkpoints")["rows"]  # one picture of two is not there any more
    assert [picture["url"] for picture in checkpoint["pictures"]] == ["pictures/25-0.png"]
    assert (out / "pictures/25-0.png").read_bytes() == b"picture"
    assert out.stat().st_mode & 0o777 == 0o755
    for notebook in answer(out, "run")["join"]["notebooks"]:
        assert "emoji" in (out / notebook).read_text()


def test_a_run_of_another_kind_is_exported_without_what_draws(tmp_path: Path) -> None:
    write_history(tmp_path / "run", steps=3)
    reader, out = HistoryReader(database_url(tmp_path / "run")), tmp_path / "site"
    answers = Answers(reader, DIGITS, "digits", tables=TABLES)
    export(answers, tmp_path, out)
    assert answer(out, "run")["described"] == {"kind": "digits"}
    assert not (out / "api/calculator-run.json").exists()  # the coordinator has told nothing yet
    store = HistoryWriter(database_url(tmp_path / "run"), RUN.identity)
    store.put("calculator", json.dumps(Tables(DIGITS, "sums", task_of).table("run")), time.time())
    store.close()
    export(answers, tmp_path, out)
    reader.close()
    own = answer(out, "calculator-run")
    assert (own["title"], own["command"], own["parameters"]) == ("run digits", "tt calc digits", 2515)
    assert [file.name for file in (out / "notebooks").iterdir()] == ["join.ipynb"]
    assert '<section id="samples" class="wide" aria-labelledby="h-samples" hidden>' in (out / "index.html").read_text()


def test_an_earlier_export_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_history(tmp_path / "run", steps=3)
    out = tmp_path / "site"
    exported(tmp_path / "run", out)
    (out / "api" / "left-over.json").write_text("{}")
    write_history(tmp_path / "run", steps=4)
    assert exported(tmp_path / "run", out).step == 4
    assert not (out / "api" / "left-over.json").exists()
    assert sorted(file.name for file in tmp_path.iterdir() if file.name.startswith(".")) == []


def test_what_is_no_export_is_left_alone(tmp_path: Path) -> None:
    write_history(tmp_path / "run", steps=3)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"a")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "photos", tmp_path / "file"):
        with pytest.raises(UsageError, match="no earlier export"):
            exported(tmp_path / "run", out)
    assert [file.name for file in (tmp_path / "photos").iterdir()] == ["a.jpg"]


def test_a_failure_leaves_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_history(tmp_path / "run", steps=3)
    out = tmp_path / "site"
    exported(tmp_path / "run", out)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("tt_cli.web.site_export.shutil.copyfile", full)
        with pytest.raises(TTError, match=r"cannot write .*site: No space left on device"):
            exported(tmp_path / "run", out)
    assert answer(out, "snapshot")["epoch"] == 3 and (out / MARK).is_file()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_the_command(here: Tt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tt_cli.web.queries.Tables", lambda run, name: TABLES)
    nothing = here("site", "export", "emoji", "site")
    assert nothing.returncode == 1
    file = folders.run_folder(RUN) / FILE
    assert nothing.stderr == f"tt: nothing of run emoji is recorded in {file}: `tt aux-peer emoji` records it\n"
    mistyped = here("site", "export", "emoji", "site", "--database", "sqlite:///histroy.db")
    assert mistyped.returncode == 1 and "recorded in histroy.db: " in mistyped.stderr
    assert list(tmp_path.glob("histroy.db*")) == []
    write_history(folders.run_folder(RUN), steps=5)
    done = here("site", "export", "emoji", "site")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'site'}: step 5, 1 picture, ")
    told = json.loads(here("site", "export", "emoji", "site", "--json").stdout)
    assert told["step"] == 5 and told["folder"] == str(tmp_path / "site")
    wrong = here("site", "export", "emoji", ".")
    assert wrong.returncode == 2 and "no earlier export" in wrong.stderr and "Traceback" not in wrong.stderr
    write_history(tmp_path / "elsewhere", steps=7)
    monkeypatch.setenv("TT_DATABASE", database_url(tmp_path / "elsewhere"))  # as the aux peer was told
    assert here("site", "export", "emoji", "site").stdout.startswith(f"{tmp_path / 'site'}: step 7, ")
