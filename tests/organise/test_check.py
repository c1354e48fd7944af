"""`tt check`: all that a run file names is opened, and what is wrong is named with its fix."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from conftest import Tt
from testbed.greeter import listening

from tt_cli.auth.authority.authority_server import AuthorityServer, ServeOptions
from tt_cli.doctor.checks import Check
from tt_cli.errors import TTError
from tt_cli.organise.questions import answered
from tt_cli.organise.recipe import make
from tt_cli.organise.run_check import authority, keys, look_over, within
from tt_cli.run import RunConfig, load_run


def found(name: str, *, step: bool = False, peers: tuple[str, ...] = ()) -> dict[str, Check]:
    return {check.name: check for check in look_over(name, peers=peers, device="cpu", step=step, members=(16, 20.0))}


def written(run: RunConfig, path: Path) -> str:
    path.write_text(run.to_toml())
    return str(path)


@pytest.mark.slow
def test_a_new_run_is_all_right_and_makes_a_step(here: Tt, tmp_path: Path) -> None:
    with listening() as aux:
        given = {"size": "tiny", "address": "127.0.0.1", "port": aux.split("/")[4]}
        make(answered("mine", given, lambda question, default: default), tmp_path / "mine")
        answer = here("check", "mine/run.toml", "--json", "--device", "cpu")
    told = json.loads(answer.stdout)
    assert (answer.returncode, told["ok"], answer.stderr) == (0, True, "")
    names = [check["name"] for check in told["checks"]]
    assert names == ["run file", "keys", "tokenizer", "data", "VQGAN", "model", "lines", "swarm", "step"]
    before, after = (float(part) for part in told["checks"][-1]["words"].split("its loss went from ")[1].split(" to "))
    assert after < before


@pytest.mark.slow
def test_an_inner_step_is_made_where_the_run_has_local_steps(tmp_path: Path) -> None:
    settings = {"optimizer": {"name": "local"}, "schedule.peak_lr": 4e-3, "schedule.warmup_fraction": 0.0}
    step = found(written(load_run("emoji-demo").replaced(settings), tmp_path / "run.toml"), step=True)["step"]
    before, after = (float(part) for part in step.words.split("its loss went from ")[1].split(" to "))
    assert step.verdict == "pass" and after < before


def test_a_failure_is_a_line_with_its_fix(here: Tt, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(load_run("emoji").to_toml().replace("depth = 6", "depth = 0"))
    answer = here("check", "run.toml")
    assert answer.returncode == 1
    assert answer.stdout.startswith("✗ run file: run.toml: model.depth = 0: must be at least 1\n    → ")


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"tokenizer.name": "emojis"}, "tokenizer", "no built-in data set is called 'emojis'"),
        ({"tokenizer.vocab_size": 1000}, "tokenizer", "the tokenizer has ids up to 1023"),
        ({"data.name": "emojis"}, "data", "no built-in data set is called 'emojis'"),
        ({"vqgan.grid": 16}, "data", "do not fit the run file's [vqgan]"),
        ({"vqgan.codebook_size": 2048}, "VQGAN", "the VQGAN emoji has 1024"),
    ],
)
def test_what_cannot_be_opened_is_named(changes: dict[str, object], check: str, words: str, tmp_path: Path) -> None:
    checks = found(written(load_run("emoji").replaced(changes), tmp_path / "run.toml"), step=check == "data")
    assert checks[check].verdict == "fail" and words in f"{checks[check].words}; {checks[check].fix}"
    assert checks[check].fix
    if check == "data":
        assert checks["step"].verdict == "fail" and "not tried" in checks["step"].words


def test_a_run_of_an_organisation_that_nothing_guards_is_named(tmp_path: Path) -> None:
    changes = {"membership.kind": "organisation", "membership.organisation": "acme"}
    checks = found(written(load_run("emoji").replaced(changes), tmp_path / "run.toml"))
    assert checks["authority"].verdict == "warning" and "member or not" in checks["authority"].words


def test_peers_are_dialled() -> None:
    silent = "/ip4/127.0.0.1/tcp/9/p2p/QmSY4bsZLR2qXhvXRG9hyVZaPEzvsSMBhLPWE6ruGyb7Q8"
    assert "swarm" not in found("emoji")
    assert found("emoji", peers=(silent,))["swarm"].verdict == "fail"


def test_a_folder_is_looked_over_before_its_aux_peer_runs(tmp_path: Path) -> None:
    given = {"address": "127.0.0.1", "port": "9", "size": "tiny", "authority": "http://127.0.0.1:9"}
    made = make(answered("mine", {**given, "organisation": "acme"}, lambda _, default: default), tmp_path / "mine")
    file = str(made.folder / "run.toml")
    checks = found(file)
    for name in ("swarm", "authority"):
        assert checks[name].verdict == "warning"
        assert checks[name].fix.startswith("nothing, if it is not started yet, for its keys are in this folder; else ")
    assert found(file, peers=(made.address,))["swarm"].verdict == "fail", "one that is named should be there"
    (made.folder / "home").rename(tmp_path / "home")
    checks = found(file)
    assert (checks["swarm"].verdict, checks["authority"].verdict) == ("fail", "fail")


def test_keys_are_those_of_the_run_file(tmp_path: Path) -> None:
    given = {"address": "203.0.113.7", "size": "tiny"}
    made = make(answered("mine", given, lambda question, default: default), tmp_path / "mine")
    home, run = made.folder / "home" / "runs", made.run
    (home / run.identity / "page").write_text("http://localhost:8471\n")  # no secret of an aux peer that has run
    assert keys(run, home).words == f"the aux peer is {made.peer_id}"
    other = run.replaced({"model.dim": 256})
    moved = keys(other, home)
    assert moved.verdict == "fail" and moved.fix.endswith(f"mv {home}/{run.identity} {home}/{other.identity}")
    key = home / run.identity / "aux.key"
    elsewhere = run.replaced({"peers.initial": [made.address[:-4] + "AAAA"]})
    assert "peers.initial names another" in keys(elsewhere, home).words
    key.chmod(0o644)
    assert keys(run, home).fix == f"chmod -R go= {home}"
    key.write_bytes(b"no key")
    assert "is no key" in keys(run, home).words


def test_an_authority_must_sign_with_the_key_of_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"authority": "http://127.0.0.1:9", "size": "tiny"}
    made = make(answered("mine", given, lambda question, default: default), tmp_path / "mine")
    silent = authority(made.run)
    assert silent.verdict == "fail" and "cannot be reached" in silent.words and "--authority" in silent.fix
    monkeypatch.setenv("TT_HOME", str(made.folder / "home"))
    server = AuthorityServer(ServeOptions(made.run.to_toml(), "127.0.0.1", 0))
    serving = threading.Thread(target=server.run)
    serving.start()
    try:
        here = made.run.replaced({"membership.authority": f"http://127.0.0.1:{server.port}"})
        assert authority(here).verdict == "pass"
        wrong = authority(here.replaced({"membership.authority_key": "ed25519:" + "A" * 43}))
        assert wrong.verdict == "fail" and "does not say what it should" in wrong.words
        assert (
            "answered 404"
            in authority(here.replaced({"membership.authority": f"http://127.0.0.1:{server.port}/else"})).words
        )
    finally:
        server.stop()
        serving.join()


def test_what_never_comes_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(TTError, match=r"nothing came within 0 s"):
        within(0.05, never.wait)
    never.set()
    assert within(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)
