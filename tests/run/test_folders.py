"""The folders of `tt`: where they are, who may read them, what is said when they cannot be made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tt_cli.errors import TTError
from tt_cli.run import folders, load_run


def test_home_is_tt_home_and_private(tt_home: Path) -> None:
    assert folders.home() == tt_home
    assert tt_home.stat().st_mode & 0o777 == 0o700


def test_home_is_in_the_persons_home_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders.home() == tmp_path / ".local" / "share" / "tt"
    assert folders.home().stat().st_mode & 0o777 == 0o700


def test_each_run_has_folders_of_its_own(tt_home: Path) -> None:
    run = load_run("emoji")
    assert folders.run_folder(run) == tt_home / "runs" / run.identity
    assert folders.checkpoints(run) == tt_home / "runs" / run.identity / "checkpoints"
    assert folders.checkpoints(run).is_dir()
    assert folders.run_folder(run.replaced({"model.dim": run.model.dim * 2})) != folders.run_folder(run)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/tt")):
        monkeypatch.setenv("TT_HOME", str(place))
        with pytest.raises(TTError) as error:
            folders.home()
        assert str(error.value).startswith(f"cannot make the folder {place}: ")
        assert str(error.value).endswith("set TT_HOME to a folder that you can write to")


def test_a_read_only_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the system says of a read-only mount. File modes mean nothing to root, who may run these tests.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(TTError, match=r"cannot write to the folder \S+: it is read-only for you; set TT_HOME"):
        folders.home()


def test_a_folder_that_is_nowhere_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TT_HOME", "~nobody-of-this-name/tt")
    with pytest.raises(TTError, match=r"^cannot tell where ~nobody-of-this-name/tt is; set TT_HOME to a folder"):
        folders.home()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("TT_HOME", "home")
    with pytest.raises(TTError, match=r"^cannot tell where home is; set TT_HOME to a folder"):
        folders.home()
