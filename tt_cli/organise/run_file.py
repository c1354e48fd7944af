"""A run file that a person goes on editing: every field is there, in words of the trade, with what it means.

What it means stands where the field is declared, in `run.sections`.
"""

from __future__ import annotations

import inspect

from tt_cli.run import RunConfig
from tt_cli.run.toml import toml_value


def commented(run: RunConfig, notes: str) -> str:
    """TOML that reads back as `run`. notes: lines for the top."""
    lines = [f"# {line}".rstrip() for line in notes.splitlines()]
    for table, part in run:
        fields = type(part).model_fields
        untrained = {name for name, field in fields.items() if field.json_schema_extra is not None}
        mark = "* " if untrained == set(fields) else ""
        about = inspect.cleandoc(type(part).__doc__ or "").partition("\n\n")[0]
        lines += ["", *(f"# {line}" for line in f"{mark}{about}".splitlines()), f"[{table}]"]
        for name, value in part:
            meaning = fields[name].description or ""
            if name in untrained and not mark:
                meaning = f"* {meaning}".rstrip()
            shown = f"# {name} = {toml_value((fields[name].examples or ['…'])[0])}"
            if value is not None:
                shown = f"{name} = {toml_value(value)}"
            lines.append(f"{shown} # {meaning}" if meaning else shown)
    return "\n".join(lines) + "\n"
