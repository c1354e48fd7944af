"""The card of a run's repository on the Hub: what it is, how to join, how to draw, which checkpoints are there.

The list of checkpoints stands between two marks; the rest is written once, and its organiser may edit it there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tt_cli.run.checkpoint_names import name_of
from tt_cli.run.run_config import RunConfig
from tt_cli.run.run_source import RUN_FILE

# Kinds whose models `tt infer` uses: for what, how the Hub calls that, and a prompt.
USES = {
    "dalle": ("draw", "text-to-image", "a red apple"),
    "causal_lm": ("write", "text-generation", "Once upon a time"),
}
BEGIN, END = "<!-- checkpoints -->", "<!-- end of checkpoints -->"


def card(run: RunConfig, published: Mapping[int, float | None] | None = None) -> str:
    """Markdown with the Hub's metadata. published: see `with_checkpoints`."""
    name = run.checkpoints.repository or RUN_FILE
    does, pipeline, prompt = USES.get(run.kind, ("", "", ""))
    lines = ["---", "library_name: tt", *([f"pipeline_tag: {pipeline}"] if pipeline else [])]
    lines += ["tags:", "- collaborative-training"]
    if run.data.source == "hub" and not run.data.name.startswith("/"):
        lines += ["datasets:", f"- {json.dumps(run.data.name)}"]
    lines += ["---", "", f"# {run.run.name}", "", run.run.description, ""]
    lines += ["## Join", "", "With a GPU at home, or with patience and a CPU:", ""]
    lines += ["```", "pip install tt-cli", *(["tt login"] if _closed(run) else []), f"tt join {name}", "```", ""]
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
        lines += ["", "## Checkpoints", "", BEGIN, END]
    return with_checkpoints("\n".join(lines) + "\n", run, published or {})


def with_checkpoints(text: str, run: RunConfig, published: Mapping[int, float | None]) -> str:
    """A card with this list: step to loss, None where nobody wrote it down. A card without the marks stays as it is."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        return text
    lines = ["None is published yet."]
    if published:
        lines = [
            f"Each with the optimizer's state and the run file inside; of {run.schedule.total_steps:,} steps.",
            "",
            "| step | loss | file |",
            "|---|---|---|",
        ]
        for step, loss in sorted(published.items(), reverse=True):
            lines.append(f"| {step:,} | {'' if loss is None else f'{loss:.4f}'} | `{name_of(step)}` |")
    return "\n".join([before + begin, *lines, end + after])


def _closed(run: RunConfig) -> bool:
    return run.membership.kind == "organisation"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
