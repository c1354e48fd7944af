"""The authority beside an auxiliary peer: a process of its own, started again when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tt_cli.auth.authority.authority_server import ServeOptions
from tt_cli.supervisor.events import Event
from tt_cli.supervisor.side_process import SideProcess
from tt_cli.supervisor.worker_process import Worker


class AuthorityPart(SideProcess):
    """A context manager. On entering it listens, or TTError says why not; its end afterwards is told and mended."""

    def __init__(self, options: ServeOptions, log: Path, show: Callable[[Event], None]):
        start = partial(Worker, "tt_cli.auth.authority", asdict(options), log)
        super().__init__("the authority", start, show, needed=True)
