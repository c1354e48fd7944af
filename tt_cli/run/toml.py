"""TOML in and out, and what a person got wrong in it as one line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tt_cli.errors import UsageError, nearest

_EXPECTED = {
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "list_type": "must be a list",
    "model_attributes_type": "must be a table",
    "model_type": "must be a table",
    "string_type": 'must be text in "quotes"',
    "string_too_short": "must not be empty",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entry",
    "literal_error": "must be {expected}",
}


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """Parse TOML; raises UsageError with the file, the line and what is wrong there."""
    try:
        content = tomllib.loads(text.removeprefix("\ufeff"))  # which editors of Windows put there
        json.dumps(content, default=str)  # it reads longer numbers in hexadecimal, and no message could name them
        return content
    except tomllib.TOMLDecodeError as error:
        what, _, place = str(error).rpartition(" (at ")
        place = place.rstrip(")")
        if place == "end of document":
            place = f"line {text.count(chr(10)) + 1}, at the end"
        raise UsageError(f"{origin}, {place}: {what[:1].lower()}{what[1:]}") from None
    except RecursionError:
        raise UsageError(f"{origin}: too many brackets inside brackets") from None
    except ValueError:  # from Python's int() and str()
        raise UsageError(f"{origin}: a number of more digits than Python reads") from None


def toml_value(value: str | bool | int | float | list[Any]) -> str:
    """Write one value as TOML: as JSON, but for DEL in a text, which TOML wants escaped too."""
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def wrong_value(model: type[BaseModel], error: ValidationError, origin: str, order: Sequence[str] = ()) -> UsageError:
    """Turn pydantic's findings into one line: file, key, value, what is allowed. order: of tables in the file."""
    places = {name: place for place, name in enumerate(order)}
    findings = sorted(
        error.errors(include_url=False), key=lambda found: places.get(str(*found["loc"][:1]), len(places))
    )
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return UsageError(f"{origin}: {_finding(model, findings[0])}{more}")


def _finding(model: type[BaseModel], finding: ErrorDetails) -> str:
    location, part = _place(model, finding["loc"])
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "missing":
        return f"{key}: missing"
    if kind == "extra_forbidden":
        names = sorted(part.model_fields)
        otherwise = f"update tt where the file is of a newer one; allowed are {', '.join(names)}"
        return f"{key}: no such key; {nearest(str(location[-1]), names, otherwise)}"
    if kind == "union_tag_invalid":  # a table of one of several kinds, which its name tells
        return f"{key}.name = {_input(context['tag'])}: must be {context['expected_tags'].replace(', ', ' or ')}"
    if kind == "value_error" and isinstance(finding["input"], dict):
        # A check over several fields: its message starts with the field's own name.
        return f"{key}.{context['error']}".lstrip(".")
    if kind == "value_error":
        what = str(context["error"])
    elif kind in _EXPECTED:
        what = _EXPECTED[kind].format(**context)
    else:
        what = finding["msg"]
    return f"{key} = {_input(finding['input'])}: {what}"


def _place(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], type[BaseModel]]:
    """A location as a person wrote it, and the part that it is in; pydantic's has a tag where parts are of kinds."""
    if len(location) < 2 or location[0] not in model.model_fields:
        return location, model
    annotation = model.model_fields[str(location[0])].annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    parts = [kind for kind in kinds if issubclass(kind, BaseModel)]
    if len(parts) > 1:
        part = next(part for part in parts if location[1] in get_args(part.model_fields["name"].annotation))
        return (location[0], *location[2:]), part
    return location, parts[0] if parts else model


def _input(value: Any) -> str:
    shown = toml_value(value) if isinstance(value, (str, bool, int, float, list)) else type(value).__name__
    shown = re.sub(r"\s+", " ", shown)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
