"""What people get wrong before anything starts: one line, an exit code, nothing lost; in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Tt
from end_to_end.conftest import NOBODY, contents, one_line, tiny_run

from tt_cli.run import folders

# ---------------------------------------------------------------------------------------------- names and run files


@pytest.mark.parametrize(
    "arguments",
    [["join"], ["aux-peer"], ["monitor"], ["infer", "a red apple", "--run"], ["demo"]],
    ids=lambda arguments: arguments[0],
)
def test_an_unknown_run(arguments: list[str], here: Tt, tmp_path: Path) -> None:
    line = one_line(here(*arguments, "emoij"), 2)
    assert "no run is called 'emoij'; did you mean 'emoji'?" in line
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dim = 32", "dim = = 32", "run.toml, line "),
        ("beta1 = 0.9", "beta_1 = 0.9", "optimizer.beta_1: no such key; did you mean 'beta1'?"),
        ("dim = 32", 'dim = "big"', 'model.dim = "big": must be a whole number'),
        ("beta1 = 0.9", "beta1 = 1.5", "optimizer.beta1 = 1.5: must be below 1"),
    ],
    ids=["malformed", "wrong key", "wrong type", "out of range"],
)
@pytest.mark.parametrize("command", ["join", "aux-peer"])
def test_a_wrong_run_file(command: str, old: str, new: str, said: str, here: Tt, tmp_path: Path) -> None:
    text = tiny_run().to_toml()
    assert text.count(f"\n{old}\n") == 1
    file = tmp_path / "run.toml"
    file.write_text(text.replace(f"\n{old}\n", f"\n{new}\n"))
    before = contents(tmp_path)
    line = one_line(here(command, "run.toml"), 2)
    assert said in line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", [["join", "emoji"], ["demo"], ["data", "inspect", "."]], ids=" ".join)
def test_a_seed_below_nothing(command: list[str], here: Tt, tmp_path: Path) -> None:
    assert "--seed: -1: should be greater than or equal to 0" in one_line(here(*command, "--seed", "-1"), 2)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("name", ["~nobody-here/run.toml", f"/{'long' * 100}"])
def test_a_run_file_that_cannot_even_be_looked_for(name: str, here: Tt) -> None:
    """Its home is nobody's, or its name too long; a folder that is closed to this user is asked in the same way."""
    assert f"cannot read the run file {name}: " in one_line(here("join", name), 2)


def test_what_is_no_utf_8(here: Tt, tmp_path: Path) -> None:
    """A library finds it in a name, long after that was given; in a prompt that would be at the end."""
    (tmp_path / "caf\udce9.toml").write_text(tiny_run().to_toml())
    assert "what was given is not UTF-8 text" in one_line(here("aux-peer", "caf\udce9.toml", "--no-web"), 2)
    assert "--prompt: must be one line of text" in one_line(here("demo", "--prompt", "caf\udce9"), 2)


def test_a_name_that_is_too_long_for_a_file(here: Tt) -> None:
    assert "no run is called 'long" in one_line(here("join", "long" * 100), 2)
    assert here("status", "long" * 100).returncode == 3


def test_a_run_of_another_kind_or_without_a_checkpoint(here: Tt, tmp_path: Path) -> None:
    assert "run emoji is of kind dalle, and " in one_line(here("data", "tokenize", "emoji", "out"), 2)
    (tmp_path / "run.toml").write_text(tiny_run().to_toml())
    line = one_line(here("infer", "a red apple", "--run", "run.toml"), 1)
    assert line.endswith("or train one with `tt demo` or `tt join RUN --new-swarm`\n")  # the name in the file is no run


# ------------------------------------------------------------------------------------------------ addresses and ports


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["join", "emoji", "--peer", "nonsense"], "--peer nonsense: is no multiaddr"),
        (["aux-peer", "emoji", "--peer", "nonsense"], "--peer nonsense: is no multiaddr"),
        (["doctor", "--peer", "nonsense"], "--peer: which run's? Give RUN too"),
        (["monitor", "emoji", "--peer", "/ip4/1.2.3.4/tcp/80"], "--peer /ip4/1.2.3.4/tcp/80: is no multiaddr"),
        (["join", "emoji", "--host", "nonsense"], '--host: "nonsense": must be an IPv4 address'),
        (["aux-peer", "emoji", "--announce", "nonsense"], '--announce: "nonsense": must look like /ip4/'),
        (["aux-peer", "emoji", "--announce", NOBODY], "without /p2p/"),
        (["aux-peer", "emoji", "--port", "65536"], '--port: "65536": must be at most 65535'),
        (["join", "emoji", "--new-swarm", "--device", "gpu"], '--device: "gpu": no such device: give cpu, cuda, '),
        (["doctor", "--device", "cuda:x"], '--device: "cuda:x": no such device: give cpu, cuda, cuda:N, mps or xpu'),
        (["authority", "serve", "emoji", "--port", "65536"], '--port: "65536": must be at most 65535'),
        (["authority", "serve", "emoji", "--most-peers", "0"], "--most-peers: 0: should be greater than or equal to 1"),
        (["authority", "audit", "emoji", "--last", "9" * 20], f"--last: {'9' * 20}: should be less than or equal to"),
        (["join", "emoji"], "no peer of run emoji is known to join: give one with --peer"),
        (["monitor", "emoji"], "no peer of run emoji is known to ask: give one with --peer"),
    ],
)
def test_no_address_or_a_wrong_one(arguments: list[str], said: str, here: Tt) -> None:
    assert said in one_line(here(*arguments), 2)


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b"/ip4/127.0.0.1/tc"])
def test_a_damaged_address_file_is_no_address(damage: bytes, here: Tt, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tiny_run().to_toml())
    file = folders.run_folder(tiny_run()) / "address"
    file.write_bytes(damage)
    for command in ("join", "monitor"):
        assert "no peer of run run.toml is known" in one_line(here(command, "run.toml"), 2)
    assert file.read_bytes() == damage


# -------------------------------------------------------------------------------------------------- folders and disks


@pytest.mark.parametrize(
    "arguments",
    [["join", "emoji", "--peer", NOBODY, "--plain"], ["aux-peer", "emoji", "--plain"], ["infer", "a red apple"]],
    ids=lambda arguments: arguments[0],
)
def test_a_home_that_cannot_be_made(
    arguments: list[str], here: Tt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TT_HOME", str(tmp_path / "file" / "home"))
    line = one_line(here(*arguments), 1)
    assert f"cannot make the folder {tmp_path}/file/home" in line and "set TT_HOME to a folder" in line
    assert contents(tmp_path) == {tmp_path / "file": b"in the way"}


def test_a_demo_that_cannot_write(here: Tt, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    line = one_line(here("demo", "--out", "file/demo"), 1)
    assert f"cannot make the folder {tmp_path}/file/demo: Not a directory; name another with --out" in line
    assert contents(tmp_path) == {tmp_path / "file": b"in the way"}


def test_a_demo_never_writes_into_a_folder_in_use(here: Tt, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    before = contents(tmp_path)
    assert f"--out {tmp_path}/mine: is not empty; name a new folder" in one_line(here("demo", "--out", "mine"), 2)
    assert contents(tmp_path) == before
