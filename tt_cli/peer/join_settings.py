"""Settings of `tt join`: flags over the settings file over defaults, each with where it came from.

The file is ~/.config/tt/config.toml (or below $XDG_CONFIG_HOME): a table [join] with the flags' names, and tables such
as [join.emoji] for what is different in one run.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from tt_cli.errors import UsageError
from tt_cli.memory import parse_size
from tt_cli.peer.sinks import check_sink
from tt_cli.run import check_multiaddr
from tt_cli.run.sections import Section
from tt_cli.run.toml import parse_toml, wrong_value
from tt_cli.supervisor.household.hours import Hours
from tt_cli.supervisor.household.limits import HoursLimit, HouseholdLimit, IdleLimit, Origin, TemperatureLimit
from tt_cli.supervisor.household.sensors import NoDesktopSensor, desktop_sensor, gpu_thermometer

LIMITS = ("hours", "max_gpu_temp", "idle_only", "max_upload", "max_download", "memory", "gpu_memory")
"""Settings that `tt status` shows, in this order."""
ALWAYS = "always"
NAME_LENGTH = 40  # characters
DEVICE = re.compile(r"cpu|mps|(cuda|xpu)(?::([0-9]+))?")


def check_hours(text: str) -> str:
    """Ranges of hours, or "always". Raises ValueError."""
    if text != ALWAYS:
        Hours.parse(text)
    return text


def check_size(text: str) -> str:
    """An amount of memory. Raises ValueError."""
    try:
        parse_size(text)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return text


def check_device(text: str) -> str:
    """A device's name, which need not be there. Raises ValueError."""
    if text and not DEVICE.fullmatch(text):
        raise ValueError("no such device: give cpu, cuda, cuda:N, mps or xpu")
    return text


def check_ipv4(text: str) -> str:
    """An IPv4 address of this machine, 0.0.0.0 for all. Raises ValueError."""
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise ValueError("must be an IPv4 address, such as 0.0.0.0") from None


def check_announced(text: str) -> str:
    """A multiaddr without a peer id: the daemon adds its own. Raises ValueError."""
    try:
        check_multiaddr(f"{text}/p2p/{'1' * 8}")
    except ValueError:
        text = ""
    if not text or "/p2p/" in text:
        raise ValueError("must look like /ip4/203.0.113.7/tcp/31337, without /p2p/")
    return text


def check_name(text: str) -> str:
    """A name for people to read. Raises ValueError."""
    name = " ".join(text.split())
    if not (1 <= len(name) <= NAME_LENGTH and name.isprintable()):
        raise ValueError(f"must be 1 to {NAME_LENGTH} printable characters")
    return name


class JoinSettings(Section):
    """The table [join] of the settings file. max_gpu_temp: °C. max_upload, max_download: Mbit/s."""

    name: Annotated[str, AfterValidator(check_name)] | None = None
    peer: list[Annotated[str, AfterValidator(check_multiaddr)]] | None = None
    device: Annotated[str, AfterValidator(check_device)] | None = None
    batch_size: int | None = Field(None, ge=1)
    threads: int | None = Field(None, ge=1)
    memory: Annotated[str, AfterValidator(check_size)] | None = None
    gpu_memory: Annotated[str, AfterValidator(check_size)] | None = None
    host: Annotated[str, AfterValidator(check_ipv4)] | None = None
    port: int | None = Field(None, ge=0, le=65535)
    announce: list[Annotated[str, AfterValidator(check_announced)]] | None = None
    client_mode: bool | None = None
    hours: Annotated[str, AfterValidator(check_hours)] | None = None
    max_gpu_temp: float | None = Field(None, ge=40, le=110)
    idle_only: bool | None = None
    max_upload: float | None = Field(None, gt=0)
    max_download: float | None = Field(None, gt=0)
    log_to: Annotated[str, AfterValidator(check_sink)] | None = None


def parse_setting(name: str, text: str) -> Any:
    """The value of one flag, checked as the settings file's. Raises ValueError that says what is allowed."""
    several = name in ("peer", "announce")
    try:
        checked = JoinSettings.model_validate({name: [text] if several else text}, strict=False)
    except ValidationError as error:
        raise ValueError(str(wrong_value(JoinSettings, error, "")).partition(" = ")[2]) from None
    value = getattr(checked, name)
    return value[0] if several else value


@dataclass(frozen=True)
class Settings:
    """The values that count, by field of JoinSettings, and where each came from: a flag, or the file."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a setting."""
        return self.values.get(name, default)

    def origins(self) -> list[Origin]:
        """The limits in force, as they were set."""
        return [self.origin(name) for name in LIMITS if self._limits(name)]

    def origin(self, name: str) -> Origin:
        """Name, value and source of one setting."""
        value = self.values[name]
        shown = "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
        return Origin(name, shown, self.sources[name])

    def household(self) -> list[HouseholdLimit]:
        """The limits that the supervisor watches. Raises UsageError for one that nothing here can watch."""
        limits: list[HouseholdLimit] = []
        if self._limits("hours"):
            limits.append(HoursLimit(Hours.parse(self.values["hours"]), self.origin("hours")))
        if self._limits("max_gpu_temp"):
            origin = self.origin("max_gpu_temp")
            limits.append(TemperatureLimit(self.values["max_gpu_temp"], gpu_thermometer(), origin))
        if self._limits("idle_only"):
            origin = self.origin("idle_only")
            try:
                limits.append(IdleLimit(desktop_sensor(), origin))
            except NoDesktopSensor as error:
                raise UsageError(f"{origin}: {error}: leave it out, or say when to work with --hours") from None
        return limits

    def _limits(self, name: str) -> bool:
        return self.values.get(name) not in (None, False) and (name, self.values[name]) != ("hours", ALWAYS)


def settings_file() -> Path:
    """Path of the settings file, which need not exist."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(folder) if os.path.isabs(folder) else Path(os.path.expanduser("~/.config"))) / "tt" / "config.toml"


def read_settings(flags: Mapping[str, Any], runs: Iterable[str], file: Path) -> Settings:
    """Flags that were given (not None), over `file` where it exists. runs: names by which the file may name this run.

    Raises UsageError for a file that cannot be read, an unknown key, or a wrong value.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    shown = str(file).replace(f"{os.path.expanduser('~')}/", "~/", 1)
    for part in _tables(file, shown, set(runs)):
        values |= part
        sources |= dict.fromkeys(part, shown)
    for name, value in flags.items():
        if value is not None and value != []:
            values[name] = value
            sources[name] = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
    return Settings(values, sources)


def _tables(file: Path, shown: str, runs: set[str]) -> list[dict[str, Any]]:
    """Tables of the file for these runs: for all of them, then for one."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the settings file {shown}: {reason}") from None
    content = parse_toml(text, shown)
    for name, table in content.items():
        if name != "join" or not isinstance(table, dict):
            raise UsageError(f"{shown}: {name}: no such table; allowed is [join]")
    join = content.get("join", {})
    of_runs = {name for name, part in join.items() if name not in JoinSettings.model_fields and isinstance(part, dict)}
    tables = [_checked({name: value for name, value in join.items() if name not in of_runs}, f"{shown} [join]")]
    # also those of other runs are checked: a mistake shows at once
    checked = {name: _checked(join[name], f'{shown} [join."{name}"]') for name in join if name in of_runs}
    return tables + [part for name, part in checked.items() if name in runs]


def _checked(table: dict[str, Any], origin: str) -> dict[str, Any]:
    try:
        return JoinSettings.model_validate(table).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise wrong_value(JoinSettings, error, origin) from None
