"""Arguments and flags that several commands take, and the parsers of their values."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tt_cli.errors import UsageError


def argument(metavar: str, help: str) -> Any:
    """A positional argument."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(metavar: str | None, help: str, panel: str | None = None, *, flag: str = "", **settings: Any) -> Any:
    """A flag with a value, called as its parameter or `flag`. `help` says the default in words.

    metavar: None for one of the choices that the parameter's type names.
    """
    return typer.Option(
        *flag.split(), metavar=metavar, help=help, rich_help_panel=panel, show_default=False, **settings
    )


def switch(flag: str, help: str, panel: str | None = None) -> Any:
    """A flag without a value."""
    return option("", help, panel, flag=flag)


def setting(key: str, metavar: str, help: str, panel: str | None = None) -> Any:
    """A flag that is checked as `key` of the settings file of `tt join` is."""

    def parse(text: str) -> Any:
        from tt_cli.peer.join_settings import parse_setting

        try:
            return parse_setting(key, text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return option(metavar, help, panel, parser=parse)


def exclusive(**flags: object) -> None:
    """Raise UsageError where more than one of the flags that exclude each other is given."""
    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value not in (None, False)]
    if len(given) > 1:
        raise UsageError(f"{given[1]}: not allowed with {given[0]}")


class OptionalValues(TyperCommand):
    """A command some of whose flags may lack their value, which is "" then: those whose metavar is [IN BRACKETS]."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give such flags an empty value where no value follows."""
        flags = {name for each in self.params for name in each.opts if (each.metavar or "").startswith("[")}
        for place, word in enumerate(args, 1):
            if word in flags and (place == len(args) or (args[place] != "-" and args[place].startswith("-"))):
                args[place - 1] = f"{word}="
        return super().parse_args(ctx, args)


network_setting = partial(setting, panel="Network")
network_switch = partial(switch, panel="Network")
output_switch = partial(switch, panel="Output")

TEXT_TEMPERATURE, TEXT_TOP_P = 0.8, 0.95  # with which language models write
Run = Annotated[str, argument("RUN", "built-in name, TOML file, or ORGANISATION/REPOSITORY")]
Announce = Annotated[
    list[str] | None, network_setting("announce", "MULTIADDR", "tell others this address, e.g. behind NAT")
]
Device = Annotated[str | None, setting("device", "DEVICE", "cpu, cuda, cuda:N, mps or xpu; default: a GPU that works")]
Json = Annotated[bool, switch("--json", "print one JSON object")]
Force = Annotated[bool, switch("--force", "replace what is there")]
JsonEvents = Annotated[bool, output_switch("--json", "print every event as a line of JSON")]
Plain = Annotated[bool, output_switch("--plain", "plain lines, as when not on a terminal")]
