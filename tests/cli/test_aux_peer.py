"""What `tt aux-peer` says of a database that cannot be, and of pictures and publishing that cannot be asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Tt
from end_to_end.conftest import one_line

from tt_cli.run import load_run


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "must be sqlite:///FILE or postgresql://"),
        ("mysql://ada:secret@example.org/x", "must be sqlite:///FILE or postgresql://"),
        ("sqlite:////missing/folder/x.db", "there is no folder /missing/folder"),
    ],
)
def test_a_database_that_cannot_be_is_one_line(url: str, words: str, here: Tt, monkeypatch: pytest.MonkeyPatch) -> None:
    given = here("aux-peer", "emoji", "--plain", "--database", url)
    monkeypatch.setenv("TT_DATABASE", url)
    for answer in (given, here("aux-peer", "emoji", "--plain")):
        assert words in one_line(answer, 2) and "secret" not in answer.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "owl"], "--prompt and --samples-every: add --samples"),
        (["--samples-every", "5"], "--prompt and --samples-every: add --samples"),
        (["--samples", "--samples-every", "0"], "--samples-every: 0: should be greater than or equal to 1"),
        (["--samples", "--samples-every", "often"], "--samples-every: often: should be a valid integer"),
        (["--samples", "--prompt", ""], "--prompt: must be one line of text"),
        (["--samples", "--prompt", "x" * 301], "--prompt: 301 characters are too many; at most 300"),
    ],
)
def test_samples_that_cannot_be_are_one_line(flags: list[str], words: str, here: Tt) -> None:
    answer = here("aux-peer", "emoji", "--plain", *flags)
    assert words in one_line(answer, 2) and answer.stdout == ""


@pytest.mark.parametrize(
    ("repository", "flags", "words"),
    [
        ("", ["--publish"], '--publish: the run file names no repository: add [checkpoints] repository = "OWNER/NAME"'),
        ("acme/run", ["--publish"], "--publish: nobody is logged in here: `tt login` with a token that may write"),
        ("acme/run", ["--publish", "--no-publish"], "--no-publish: not allowed with --publish"),
        ("acme/run", ["--publish-every", "0"], "--publish-every: 0: should be greater than or equal to 1"),
        ("acme/run", ["--publish-every", "nan"], "--publish-every: nan: should be"),
    ],
)
def test_publishing_that_cannot_be_is_one_line(
    repository: str, flags: list[str], words: str, here: Tt, tmp_path: Path
) -> None:
    run = load_run("emoji").replaced({"checkpoints.repository": repository or None})
    (tmp_path / "run.toml").write_text(run.to_toml())
    answer = here("aux-peer", "run.toml", "--plain", *flags)
    assert words in one_line(answer, 2) and answer.stdout == ""
