"""The card of a run's repository on the Hub: what it is, how to join and to draw, which checkpoints are there, by whom.

The lists stand between marks; the rest is written once, and its organiser may edit it there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from tt_cli.run.checkpoint_names import name_of
from tt_cli.run.run_config import RunConfig
from tt_cli.run.run_source import RUN_FILE

# Kinds whose models `tt infer` uses: for what, how the Hub calls that, and a prompt.
USES = {
    "dalle": ("draw", "text-to-image", "a red apple"),
    "causal_lm": ("write", "text-generation", "Once upon a time"),
}
MOST_NAMED = 200  # contributors
Shares = Sequence[tuple[str, int]]
"""(user, examples) of those who trained, most first."""


def card(run: RunConfig, published: Mapping[int, float | None] | None = None, by: Shares = ()) -> str:
    """Markdown with the Hub's metadata. published, by: see `with_lists`."""
    name = run.checkpoints.repository or RUN_FILE
    does, pipeline, prompt = USES.get(run.kind, ("", "", ""))
    lines = ["---", "library_name: tt", *([f"pipeline_tag: {pipeline}"] if pipeline else [])]
    lines += ["tags:", "- collaborative-training"]
    if run.data.source == "hub" and not run.data.name.startswith("/"):
        lines += ["datasets:", f"- {json.dumps(run.data.name)}"]
    lines += ["---", "", f"# {run.run.name}", "", run.run.description, ""]
    lines += ["## Join", "", "With a GPU at home, or with patience and a CPU, in a clone of tt's source:", ""]
    login = ["tt login"] if _closed(run) else []
    lines += ["```", f"pip install {run.package}", *login, f"tt join {name}", "```", ""]
    if _closed(run):
        lines += [f"It admits the members of {run.membership.organisation} on the Hub.", ""]
    if name == RUN_FILE:
        lines += [f"`{RUN_FILE}` is the run file; its organiser hands it out.", ""]
    lines += [f"## Watch and {does}" if does else "## Watch", "", "```", f"tt monitor {name}"]
    if run.checkpoints.repository and does:
        lines += [f'tt infer "{prompt}" --checkpoint {name}']
    lines += ["```", "", "## Facts", "", "| | |", "|---|---|"]
    facts = {
        "identity": run.identity,
        **run.described(),
        "data": run.data.name,
        "steps": f"{run.schedule.total_steps:,}, each of {run.swarm.target_batch_size:,} examples",
    }
    lines += [f"| {key} | {_cell(value)} |" for key, value in facts.items()]
    if run.checkpoints.repository:
        for mark in ("checkpoints", "contributors"):
            lines += ["", f"## {mark.title()}", "", f"<!-- {mark} -->", f"<!-- end of {mark} -->"]
    return with_lists("\n".join(lines) + "\n", run, published or {}, by)


def with_lists(text: str, run: RunConfig, published: Mapping[int, float | None], by: Shares | None) -> str:
    """A card with these lists: step to loss, None where nobody wrote it down; and who trained, None as it says already.

    A card without the marks of a list stays without it.
    """
    lists = {
        "checkpoints": _checkpoints(run, published),
        "contributors": None if by is None else _contributors(run, by),
    }
    for mark, lines in lists.items():
        before, begin, rest = text.partition(f"<!-- {mark} -->")
        _, end, after = rest.partition(f"<!-- end of {mark} -->")
        if end and lines is not None:
            text = "\n".join([before + begin, *lines, end + after])
    return text


def _checkpoints(run: RunConfig, published: Mapping[int, float | None]) -> list[str]:
    if not published:
        return ["None is published yet."]
    lines = [f"Each with the optimizer's state and the run file inside; of {run.schedule.total_steps:,} steps.", ""]
    lines += ["| step | loss | file |", "|---|---|---|"]
    for step, loss in sorted(published.items(), reverse=True):
        lines.append(f"| {step:,} | {'' if loss is None else f'{loss:.4f}'} | `{name_of(step)}` |")
    return lines


def _contributors(run: RunConfig, by: Shares) -> list[str]:
    if not by:
        return ["Nobody yet."]
    whose = "members" if _closed(run) else "those who took part, by the names that they gave themselves"
    lines = [f"Trained by {whose}; with how many examples each, as the auxiliary peers recorded it.", ""]
    lines += ["| name | examples |", "|---|---|"]
    # Without what ends a code, or begins a mark: a name may be the end of this list.
    lines += [f"| `{_cell(re.sub('`|<!--', ' ', name))}` | {examples:,} |" for name, examples in by[:MOST_NAMED]]
    return lines + [f"| and {len(by) - MOST_NAMED:,} others | |"] * (len(by) > MOST_NAMED)


def _closed(run: RunConfig) -> bool:
    return run.membership.kind == "organisation"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
