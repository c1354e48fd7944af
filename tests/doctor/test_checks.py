"""What `tt doctor` says of a machine: each check alone, with what it should find made for it."""

from __future__ import annotations

import resource
import socket
import sys
import tomllib
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from testbed.greeter import listening

from tt_cli.doctor import checks, torch_probe
from tt_cli.doctor.checks import Asked, Check
from tt_cli.errors import TTError, UsageError
from tt_cli.peer.device import Hardware

ROOT = Path(__file__).parents[2]


def asked(**changes: object) -> Asked:
    usual: dict[str, object] = {
        "run": None,
        "name": "emoji",
        "peers": [],
        "host": "127.0.0.1",
        "port": 0,
        "device": None,
        "login": lambda: "anna",
        "member": lambda: None,
        "limits": lambda: None,
    }
    return Asked(**{**usual, **changes})  # type: ignore[arg-type]


def test_the_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, low, high in checks.RANGES:
        wanted = f"{package}>={low}" + (f",<{high}" if high else "")
        assert wanted in project["dependencies"]
    low, high = (".".join(map(str, version)) for version in checks.PYTHON)
    assert project["requires-python"] == f">={low},<{high}"
    assert checks.versions().verdict == "pass"


@pytest.mark.parametrize(
    ("version", "fix"), [("2.4.1", "pip install 'numpy>=1.26,<2.4'"), ("1.25.9", "pip install 'numpy>=1.26,<2.4'")]
)
def test_a_library_that_breaks_averaging_fails(version: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checks.metadata.version
    monkeypatch.setattr(checks.metadata, "version", lambda name: version if name == "numpy" else found(name))
    assert checks.versions() == Check("versions", "fail", f"numpy {version} will not work", fix)


def test_a_library_that_is_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise checks.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "version", missing)
    check = checks.versions()
    assert check.verdict == "fail" and check.words.startswith("no torch, no hivemind")


def pretend_python(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that does something else."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("exec sleep 60", "torch did not answer within 0 s: the GPU's driver may hang"),
        ("kill -9 $$", "the process that loads torch ended without an answer"),
        ("echo nonsense", "the process that loads torch ended without an answer"),
        ('echo a library\\\'s words; echo \'{"error": "ImportError: libcudart"}\'', "ImportError: libcudart"),
    ],
)
def test_a_torch_that_hangs_or_breaks_fails(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_python(tmp_path, body, monkeypatch)
    monkeypatch.setattr(checks, "PROBE_SECONDS", 0.3 if "sleep" in body else 30.0)
    (check,) = checks.gpu(checks.probe(None, None))
    assert (check.verdict, check.words) == ("fail", said)
    assert check.fix


RTX = {"name": "RTX 4090", "free": 23 * 2**30, "total": 24 * 2**30, "fault": ""}
P100 = {"name": "P100", "free": 0, "total": 0, "fault": "torch 2.13 has no kernels for it: pip install torch"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"gpus": [RTX], "driver": "560.3"}, [("pass", "RTX 4090 with 23.0 GiB of 24.0 GiB free, driver 560.3")]),
        ({"gpus": [P100, RTX]}, [("warning", "P100: torch 2.13 has no"), ("pass", "RTX 4090 with 23.0")]),
        ({"gpus": [P100]}, [("fail", "P100: torch 2.13 has no kernels for it")]),
        ({"gpu_error": "a driver's words"}, [("fail", "torch cannot use it: a driver's words")]),
        ({"hidden": "there is a driver: update it"}, [("warning", "there is a driver")]),
        ({}, [("warning", "none: the CPU trains")]),
    ],
)
def test_what_trains(found: dict[str, object], expected: list[tuple[str, str]]) -> None:
    checked = list(checks.gpu({"gpus": [], "gpu_error": "", "hidden": "", "driver": "", **found}))
    lines = [check for check in checked if check.name == "GPU"]
    assert [check.verdict for check in lines] == [verdict for verdict, _ in expected]
    assert all(
        check.words.startswith(words) and check.fix != "" or check.verdict == "pass"
        for check, (_, words) in zip(lines, expected, strict=True)
    )
    assert [check.name for check in checked if check.name != "GPU"] == ["compiler"] * (RTX in found.get("gpus", []))


def test_a_gpu_s_kernels_need_a_compiler_and_python_s_headers(tmp_path: Path) -> None:
    check = checks.compiler(None, str(tmp_path))
    assert check.verdict == "warning" and check.words.startswith("no C compiler and no Python.h: ")
    assert "python3-dev" in check.fix
    (tmp_path / "Python.h").touch()
    assert checks.compiler(None, str(tmp_path)).words.startswith("no C compiler: ")
    assert checks.compiler("/usr/bin/gcc", str(tmp_path)).verdict == "pass"


def test_the_first_bad_gpu_does_not_hide_the_good_ones() -> None:
    """The first has no kernels in this torch."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda device: f"GPU {device.index}",
        get_device_capability=lambda device: (6, 0) if device.index == 0 else (8, 9),
        get_arch_list=lambda: ["sm_75", "sm_89"],
        mem_get_info=lambda device: (3, 4),
    )

    def try_out(device: torch.device, dtype: torch.dtype) -> None:
        if device.index == 0:
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    hardware = Hardware(cuda=cuda, hip_version=None, driver=lambda: "580.1", try_out=try_out)
    found = torch_probe.main(None, "", hardware)
    first, second = found["gpus"]
    assert "no kernels for its compute capability 6.0" in first["fault"]
    assert second == {"name": "GPU 1", "free": 3, "total": 4, "fault": ""}
    assert (found["driver"], found["hidden"]) == ("580.1", "")


def test_a_device_that_is_not_there_fails_without_a_run_too() -> None:
    (check,) = checks.memory(torch_probe.main("nonsense", ""))
    expected = ("device", "fail", "--device nonsense: no such device", "give cpu, cuda, cuda:N, mps or xpu")
    assert check == Check(*expected)  # type: ignore[arg-type]
    assert not list(checks.memory(torch_probe.main("cpu", "")))


def test_a_run_that_does_not_fit_fails_with_what_would_make_it_fit() -> None:
    (check,) = checks.memory({"refusal": "it needs 40 GiB of RAM, and 8.0 GiB are free: close other programs"})
    assert check == Check("memory", "fail", "it needs 40 GiB of RAM, and 8.0 GiB are free", "close other programs")
    assert [one.verdict for one in checks.memory({"needs": "it takes 1 GiB"})] == ["pass"]


def test_disk_and_shared_memory_against_what_a_run_keeps_there(tmp_path: Path) -> None:
    for state, verdict in ((10**15, "fail"), (1000, "pass")):
        assert checks.disk(tmp_path, state).verdict == verdict
        assert checks.shared_memory(tmp_path, state).verdict == verdict
    assert "--shm-size" in checks.shared_memory(tmp_path, 10**15).fix
    assert checks.shared_memory(tmp_path / "missing", 1).verdict == "fail"


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, verdict in ((1024, "warning"), (1 << 20, "pass"), (resource.RLIM_INFINITY, "pass")):
        monkeypatch.setattr(resource, "getrlimit", lambda which, most=most: (256, most))
        assert checks.open_files().verdict == verdict


@pytest.mark.parametrize(
    ("ahead", "verdict", "words"),
    [
        (0.0, "pass", "agrees"),
        (1.4, "pass", "agrees"),
        (-1.4, "pass", "agrees"),
        (3.0, "warning", "2.0 s ahead"),
        (-2.0, "warning", "1.8 s behind"),
        (60.0, "fail", "59.0 s ahead; peers ignore one that is 3 s off"),
        (-60.0, "fail", "59.8 s behind"),
    ],
)
def test_the_clock_against_a_server_s(ahead: float, verdict: str, words: str) -> None:
    """A way of 0.2 s, and a date without fractions."""
    now = 1_000_000.0
    check = checks.clock(formatdate(now, usegmt=True), now + ahead, now + ahead + 0.2)
    assert check.verdict == verdict and words in check.words


def test_a_server_without_a_date_tells_nothing() -> None:
    for date in ("", "yesterday"):
        assert checks.clock(date, 0.0, 0.0).verdict == "warning"


def test_a_hub_that_does_not_answer_or_must_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [check.verdict for check in checks.hub_and_clock("http://127.0.0.1:9")] == ["warning", "warning"]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hub, clock = checks.hub_and_clock("http://127.0.0.1:9")
    assert (hub.verdict, clock.verdict) == ("warning", "warning") and "refused" in hub.words
    for proxy, words in (("socks5://127.0.0.1:9", "'socksio' package is not installed"), ("a://b:9", "Unknown scheme")):
        monkeypatch.setenv("ALL_PROXY", proxy)
        assert words in next(checks.hub_and_clock("http://203.0.113.7:9")).words


def test_an_account_that_the_run_does_not_admit_fails() -> None:
    def nobody() -> None:
        raise UsageError("the run admits members of acme only, and nobody is logged in here: run `tt login`")

    assert checks.account(asked()).words == "logged in as anna"
    assert checks.account(asked(login=lambda: None)).verdict == "pass"
    check = checks.account(asked(member=nobody))
    assert (check.verdict, check.fix) == ("fail", "run `tt login`")


def test_a_limit_that_nothing_can_watch_fails() -> None:
    def refuse() -> None:
        raise TTError("--idle-only: the desktop cannot be seen: leave it out")

    check = checks.limits(asked(limits=refuse))
    assert check == Check("limits", "fail", "--idle-only: the desktop cannot be seen", "leave it out")
    assert checks.limits(asked()).verdict == "pass"


def test_ports_and_addresses_are_really_tried() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(4)
        number = taken.getsockname()[1]
        check = checks.port("127.0.0.1", number)
        assert check.verdict == "fail" and "Address already in use" in check.words
    with listening() as alive:
        dead = "/ip4/127.0.0.1/tcp/9/p2p/Qm"
        assert checks.reachable([alive], "emoji").verdict == "pass"
        both = checks.reachable([dead, alive], "emoji")
        assert both.verdict == "warning" and f"{dead}: Connection refused" in both.words
        assert checks.reachable([dead], "emoji").verdict == "fail"
        assert checks.reachable(["/ip4/127.0.0.1/udp/9/p2p/Qm"], "emoji").verdict == "fail"
    assert checks.port("127.0.0.1", number).verdict == "pass"
    assert checks.port("127.0.0.1", 0).verdict == "pass"
    assert "tt aux-peer emoji" in checks.reachable([], "emoji").fix
