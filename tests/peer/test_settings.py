"""The settings of `tt join`: flags over the file over defaults, and one line for what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tt_cli.errors import UsageError
from tt_cli.peer import join_settings as room
from tt_cli.peer.join_settings import JoinSettings, read_settings, settings_file
from tt_cli.supervisor.household.limits import HoursLimit, IdleLimit, TemperatureLimit
from tt_cli.supervisor.household.sensors import NoDesktopSensor, Sensor

FILE = """
[join]
name = "Ada  Lovelace "
hours = "23:00-07:00"
max_upload = 8
idle_only = true
memory = "8GB"
peer = ["/ip4/203.0.113.7/tcp/31337/p2p/QmSY4bsZLR2qXhvXRG9hyVZaPEzvsSMBhLPWE6ruGyb7Q8"]

[join.emoji]
hours = "mon-fri 22:00-06:00,sat-sun"
threads = 1

[join."org/run"]
batch_size = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def no_flags(**given: Any) -> dict[str, Any]:
    """What the command line leaves where nothing was given, and what was."""
    return {**dict.fromkeys(JoinSettings.model_fields), "peer": [], "announce": [], **given}


def test_flags_come_before_the_run_s_table_before_the_file_before_defaults(file: Path) -> None:
    file.write_text(FILE)
    mine = read_settings(no_flags(max_upload=2.5, idle_only=False), {"emoji", "emoji-1a2b3c4d"}, file)
    assert mine.get("name") == "Ada Lovelace"
    assert mine.get("hours") == "mon-fri 22:00-06:00,sat-sun"
    assert (mine.get("threads"), mine.get("batch_size"), mine.get("host", "0.0.0.0")) == (1, None, "0.0.0.0")
    assert mine.get("peer") == ["/ip4/203.0.113.7/tcp/31337/p2p/QmSY4bsZLR2qXhvXRG9hyVZaPEzvsSMBhLPWE6ruGyb7Q8"]
    assert [(one.name, one.value, one.source) for one in mine.origins()] == [
        ("hours", "mon-fri 22:00-06:00,sat-sun", str(file)),
        ("max_upload", "2.5", "--max-upload"),
        ("memory", "8GB", str(file)),
    ]
    assert mine.sources["idle_only"] == "--no-idle-only"


def test_without_a_file_there_are_flags_alone(file: Path) -> None:
    mine = read_settings(no_flags(max_gpu_temp=80.0), {"emoji"}, file)
    assert (mine.values, mine.sources) == ({"max_gpu_temp": 80.0}, {"max_gpu_temp": "--max-gpu-temp"})
    assert str(mine.origins()[0]) == "--max-gpu-temp 80"


def test_limits_are_made_of_what_counts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "desktop_sensor", lambda: Sensor("a test", lambda: 0.0))
    file.write_text(FILE)
    kinds = [type(one) for one in read_settings(no_flags(max_gpu_temp=80.0), {"other"}, file).household()]
    assert kinds == [HoursLimit, TemperatureLimit, IdleLimit]
    assert read_settings(no_flags(hours="always", idle_only=False), {"other"}, file).household() == []


def test_a_desktop_that_nothing_sees_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> Sensor:
        raise NoDesktopSensor("the Windows desktop cannot be seen from WSL")

    monkeypatch.setattr(room, "desktop_sensor", nothing)
    with pytest.raises(UsageError) as caught:
        read_settings(no_flags(idle_only=True), set(), file).household()
    assert str(caught.value) == (
        "--idle-only: the Windows desktop cannot be seen from WSL: leave it out, or say when to work with --hours"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[join]\nhour = '1'", "[join]: hour: no such key; did you mean 'hours'?"),
        ("[jion]\nhours = '1'", "jion: no such table; allowed is [join]"),
        ("hours = '1'", "hours: no such table; allowed is [join]"),
        ("join = 3", "join: no such table; allowed is [join]"),
        ("[join]\nhours = 'night'", "[join]: hours = \"night\": 'night' is no range of hours"),
        ("[join]\nhours = 23", '[join]: hours = 23: must be text in "quotes"'),
        ('[join]\nname = "a\\u001b[2Jb"', "must be 1 to 40 printable characters"),
        ("[join]\nmax_upload = 0", "[join]: max_upload = 0: must be above 0"),
        ("[join]\nmax_upload = '8'", '[join]: max_upload = "8": must be a number'),
        ("[join]\nmax_gpu_temp = 20", "[join]: max_gpu_temp = 20: must be at least 40"),
        ("[join]\nidle_only = 1", "[join]: idle_only = 1: must be true or false"),
        ("[join]\nmemory = 'much'", "[join]: memory = \"much\": 'much' is no amount of memory"),
        ("[join]\nbatch_size = 0", "[join]: batch_size = 0: must be at least 1"),
        ("[join]\npeer = ['x']", '[join]: peer[0] = "x": '),
        ("[join]\nhost = 'localhost'", '[join]: host = "localhost": must be an IPv4 address'),
        ("[join]\nannounce = ['/dns4/x']", "must look like /ip4/203.0.113.7/tcp/31337"),
        ("[join.other]\nhour = '1'", '[join."other"]: hour: no such key; did you mean'),
        ("[join", "line 1"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line(text: str, said: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_settings(no_flags(), {"emoji"}, file)
    assert said in str(caught.value) and str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(file: Path) -> None:
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        read_settings(no_flags(), set(), file)
    file.unlink()
    file.mkdir()
    with pytest.raises(UsageError, match="cannot read the settings file .*: Is a directory"):
        read_settings(no_flags(), set(), file)


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert settings_file() == tmp_path / "xdg" / "tt" / "config.toml"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", unset)
        assert settings_file() == tmp_path / ".config" / "tt" / "config.toml"
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text("[join]\nthreads = 0")
    with pytest.raises(UsageError, match=r"^~/.config/tt/config.toml \[join\]: threads = 0: must be at least 1"):
        read_settings(no_flags(), set(), settings_file())
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # in a container, of a user whom /etc/passwd does not name
    assert read_settings(no_flags(), set(), settings_file()).values == {}
