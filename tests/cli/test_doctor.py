"""`tt doctor` as a person types it, with the real torch of this machine and a stand-in for the Hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Tt
from hub_standin import HubStandin
from testbed.greeter import listening


@pytest.mark.slow
def test_a_machine_and_a_run(tt: Tt, hub: HubStandin, tmp_path: Path) -> None:
    hub.add_user("hf_good", "ada")
    with listening() as peer:
        env = {**hub.environment(tmp_path), "HF_TOKEN": "hf_good"}
        answer = tt("doctor", "emoji", "--json", "--device", "cpu", "--peer", peer, env=env)
    told = json.loads(answer.stdout)
    checks = {check["name"]: check for check in told["checks"]}
    expected = ["versions", "GPU", "memory", "disk", "shared memory", "open files", "Hub", "clock", "account", "limits"]
    assert list(checks) == [*expected, "port", "swarm"]
    for name in ("versions", "memory", "Hub", "clock", "account", "limits", "port", "swarm"):
        assert checks[name]["verdict"] == "pass", checks[name]
    assert checks["account"]["words"] == "logged in as ada"
    failed = [check for check in told["checks"] if check["verdict"] == "fail"]
    assert (told["ok"], answer.returncode) == (not failed, 1 if failed else 0)


def test_a_failure_is_named_with_its_fix(here: Tt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho \'{"error": "no torch for this test"}\'\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    peer = "/ip4/127.0.0.1/tcp/9/p2p/QmSY4bsZLR2qXhvXRG9hyVZaPEzvsSMBhLPWE6ruGyb7Q8"
    answer = here("doctor", "emoji", "--device", "cpu", "--peer", peer)
    assert answer.returncode == 1
    assert f"fail    swarm: at 0 of 1 known addresses a peer answers; {peer}: Connection refused\n" in answer.stdout
    assert "        → check the address, that its aux peer runs, and that no firewall is between\n" in answer.stdout
