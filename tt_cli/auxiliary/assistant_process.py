"""The assistant beside an auxiliary peer: a process of its own that takes part in the swarm's rounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tt_cli.supervisor.events import Event
from tt_cli.supervisor.side_process import SideProcess

ASSISTANT = "assistant"  # the name of its key file


@dataclass(frozen=True)
class AssistantOptions:
    """What is handed to the process (tt_cli.peer.assistant), beside the run (TOML text)."""

    run: str
    host: str
    port: int
    announce: list[str] = field(default_factory=list)
    user: str = ""


def assistant_part(options: AssistantOptions, log: Path, show: Callable[[Event], None]) -> SideProcess:
    """The assistant, watched; without it the rest goes on."""
    environment = {"OMP_NUM_THREADS": "1"}  # the coordinator beside it must answer in time
    return SideProcess(
        "the assistant", "tt_cli.peer.assistant", asdict(options), log, show, needed=False, environment=environment
    )


def port_beside(coordinator: int) -> int:
    """The port after the coordinator's; any free one where that has any."""
    return coordinator + 1 if 0 < coordinator < 65535 else 0


def announced_beside(announced: Sequence[str], port: int) -> list[str]:
    """The coordinator's announced addresses with the assistant's port; none where that is not known beforehand."""
    return [re.sub(r"/tcp/\d+", f"/tcp/{port}", address) for address in announced] if port else []
