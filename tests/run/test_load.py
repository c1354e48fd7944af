"""Where a run is read from: by name, from a file, from the Hub; and what is said when it is not there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_standin import HubStandin
from testbed.spawned import python

import tt_cli
from tt_cli.errors import UsageError
from tt_cli.run import load_run, name_for_others

SOURCE = Path(tt_cli.__file__).parent


@pytest.mark.slow
def test_builtin_runs_are_found_in_an_installed_package(tmp_path: Path) -> None:
    """The layout of the wheel: pyproject.toml puts configs/ into tt_cli/run/builtin, the notebooks and what
    `tt explain` reads into tt_cli/docs."""
    shutil.copytree(SOURCE, tmp_path / "site" / "tt_cli", ignore=shutil.ignore_patterns("__pycache__", "builtin"))
    builtin = tmp_path / "site" / "tt_cli" / "run" / "builtin"
    shutil.copytree(SOURCE.parent / "configs", builtin)
    shutil.copytree(SOURCE.parent / "docs" / "notebooks", tmp_path / "site/tt_cli/docs/notebooks")
    shutil.copyfile(SOURCE.parent / "docs" / "troubleshooting.md", tmp_path / "site/tt_cli/docs/troubleshooting.md")
    code = (
        "import tt_cli; from tt_cli.run import load_run; print(tt_cli.__file__, load_run('emoji').identity); "
        "from tt_cli.terminal.troubleshooting import documentation; print(documentation())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True, check=True
    )
    site = tmp_path / "site" / "tt_cli"
    assert found.stdout.split() == [f"{site}/__init__.py", load_run("emoji").identity, f"{site}/docs"]


def test_an_unknown_name_is_met_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no run is called 'emojy'; did you mean 'emoji'\? Built in are dalle, e"):
        load_run("emojy")
    with pytest.raises(UsageError, match=r"no run is called 'zzz'; built in are .*; else give a \.toml file"):
        load_run("zzz")


def test_a_file_is_read_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text(load_run("emoji").replaced({"run.name": "mine"}).to_toml())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine.toml", "./mine.toml", str(tmp_path / "mine.toml"), "~/mine.toml"):
        assert load_run(name).run.name == "mine"


def test_files_that_cannot_be_read_are_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the run file \S+/no\.toml: No such file"):
        load_run(str(tmp_path / "no.toml"))
    with pytest.raises(UsageError, match=r"cannot read the run file .*: Is a directory"):
        load_run(str(tmp_path))
    with pytest.raises(UsageError, match=r"cannot read the run file ~nobody-here/run\.toml: No such file"):
        load_run("~nobody-here/run.toml")
    with pytest.raises(UsageError, match=r"no run is called 'aaa.*'; built in are"):
        load_run("a" * 300)
    latin = tmp_path / "latin.toml"
    latin.write_bytes("[run]\nname = 'café'\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.toml, line 2: not UTF-8 text"):
        load_run(str(latin))
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    with pytest.raises(UsageError, match=r"large\.toml: over 1 MiB"):
        load_run(str(large))
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(re.sub(r"\bdim = \d+", "dim = 'wide'", load_run("emoji").to_toml()))
    with pytest.raises(UsageError, match=r'wrong\.toml: model\.dim = "wide": must be a whole number'):
        load_run(str(wrong))


ASK_THE_HUB = """
import json, sys
from tt_cli.errors import TTError
from tt_cli.run import load_run, name_for_others
for name in sys.argv[1:]:
    try:
        answer = [0, load_run(name).identity]
    except TTError as error:
        answer = [error.exit_code, str(error)]
    print(json.dumps(answer), flush=True)
"""


def ask_the_hub(environment: dict[str, str], *names: str) -> list[list[object]]:
    found = python(ASK_THE_HUB, *names, env=environment)
    found.check_returncode()
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.slow
def test_a_run_is_read_from_the_hub_and_kept(hub: HubStandin, tmp_path: Path) -> None:
    run = load_run("emoji").replaced({"run.name": "shared"})
    hub.put("model", "acme/shared", {"run.toml": run.to_toml(), "README.md": "# A run"})
    environment = hub.environment(tmp_path)
    assert ask_the_hub(environment, "acme/shared") == [[0, run.identity]]

    newer = run.replaced({"model.dim": run.model.dim * 2})
    hub.put("model", "acme/shared", {"run.toml": newer.to_toml()})
    assert ask_the_hub(environment, "acme/shared") == [[0, newer.identity]]

    hub.fault("/api/models/", status=503)  # the Hub is down: the copy kept here serves
    assert ask_the_hub(environment, "acme/shared") == [[0, newer.identity]]


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_line(hub: HubStandin, tmp_path: Path) -> None:
    hub.put("model", "acme/empty", {"README.md": "nothing"})
    hub.put("model", "acme/gated", {"run.toml": ""}, access="gated")
    hub.put("model", "acme/hidden", {"run.toml": ""}, access="forbidden")
    hub.put("model", "acme/wrong", {"run.toml": "[run]\nname = 3\n"})
    hub.put("model", "acme/down", {"run.toml": ""})
    hub.fault("acme/down", status=503)
    names = ["acme/none", "acme/empty", "acme/gated", "acme/hidden", "acme/wrong", "acme/down", "a--b/c"]
    answers = ask_the_hub(hub.environment(tmp_path), *names)
    assert [code for code, _ in answers] == [2, 2, 2, 2, 2, 1, 2]
    said = [str(text) for _, text in answers]
    assert not any("\n" in line for line in said)
    assert said[0].endswith("no such repository, or it is private; check the name or run `tt login`")
    assert said[1] == "cannot fetch run.toml of acme/empty: the repository has no such file; check the name"
    assert "ask for access on its page on the Hub" in said[2]
    assert "the Hub refuses access (403); run `tt login`" in said[3]
    assert said[4].startswith('run.toml of acme/wrong: run.name = 3: must be text in "quotes"')
    assert said[5].endswith("the Hub answered 503; try again later")
    assert "that is no name of a Hub repository" in said[6]


@pytest.mark.slow
def test_an_unreachable_hub_is_said_at_once(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    [[code, said]] = ask_the_hub(environment, "acme/shared")
    assert code == 1
    assert str(said).startswith("cannot fetch run.toml of acme/shared: the Hugging Face Hub cannot be reached (")


def test_others_are_told_a_name_that_means_something_to_them(tmp_path: Path) -> None:
    run, file = load_run("emoji"), tmp_path / "mine.toml"
    file.write_text(run.to_toml())
    published = run.replaced({"checkpoints.repository": "org/mine"})
    assert [name_for_others(name, run) for name in ("emoji", "org/run", str(file))] == ["emoji", "org/run", "mine.toml"]
    assert [name_for_others(name, published) for name in ("emoji", str(file))] == ["emoji", "org/mine"]
