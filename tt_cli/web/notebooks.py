"""The notebooks of docs/ with a run in their cell of parameters, for those who have no computer at hand."""

from __future__ import annotations

import json
import shlex
from typing import Any

from tt_cli.terminal.troubleshooting import documentation

NAMES = ("join.ipynb", "infer.ipynb")  # the second draws
CONTENT_TYPE = "application/x-ipynb+json"
_RUN = ('os.environ.get("TT_NOTEBOOK_RUN", "emoji")', 'os.environ.get("TT_NOTEBOOK_RUN", {!r})')
_PEERS = ('os.environ.get("TT_NOTEBOOK_PEERS", "")', 'os.environ.get("TT_NOTEBOOK_PEERS", {!r})')


def notebook(filename: str, facts: dict[str, Any]) -> bytes:
    """One of NAMES as a file for this run. facts: the answer of /api/run, of which the `tt join` command is taken."""
    name, *peers = _joined(facts["join"]["commands"][0])
    content = json.loads((documentation() / "notebooks" / filename).read_text(encoding="utf-8"))
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            text = "".join(cell["source"])
            for (before, after), value in ((_RUN, name), (_PEERS, " ".join(peers))):
                text = text.replace(before, after.format(value))
            cell["source"] = text.splitlines(keepends=True)
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _joined(command: str) -> list[str]:
    """The run's name and the addresses in a `tt join` command."""
    words = shlex.split(command)
    return [words[2], *(words[place + 1] for place, word in enumerate(words) if word == "--peer")]
