#!/usr/bin/env python3
"""Counts what makes the package hard to walk through, and holds each count to its limit.

    scripts/house.py            a table: count, limit
    scripts/house.py --json     one JSON object
    scripts/house.py --check    exit code 1 where a limit is passed

Typer's commands may have as many parameters as they have flags; other functions bundle theirs.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "package_lines": 49_103,
    "most_files_in_a_folder": 15,
    "repeated_file_names": 6,
    "repeated_class_names": 8,
    "functions_with_nine_parameters": 0,
    "lint_exceptions": 0,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def repeated(names: Iterator[str]) -> int:
    """Count the names that occur more than once."""
    return sum(count > 1 for count in Counter(names).values())


def parameters(function: Function) -> int:
    """Count a function's parameters, without self or cls."""
    named = function.args.posonlyargs + function.args.args
    return len(named) + len(function.args.kwonlyargs) - bool(named and named[0].arg in ("self", "cls"))


def is_command(function: Function) -> bool:
    """Tell whether a function is a Typer command: its parameters are `Annotated` options."""
    annotated = [argument for argument in function.args.args if "Annotated" in ast.dump(argument)]
    return bool(annotated)


def counts(package: Path, configuration: Path) -> dict[str, int]:
    """Count all that is limited, below `package` and in the import-linter's `configuration`."""
    sources = {
        path: path.read_text(encoding="utf-8") for path in package.rglob("*.py") if "node_modules" not in path.parts
    }
    nodes = [node for text in sources.values() for node in ast.walk(ast.parse(text))]
    linter = tomllib.loads(configuration.read_text(encoding="utf-8"))["tool"]["importlinter"]
    return {
        "package_lines": sum(text.count("\n") for text in sources.values()),
        "most_files_in_a_folder": max(Counter(path.parent for path in sources).values()),
        "repeated_file_names": repeated(path.name for path in sources if not path.name.startswith("__")),
        "repeated_class_names": repeated(node.name for node in nodes if isinstance(node, ast.ClassDef)),
        "functions_with_nine_parameters": sum(
            parameters(node) >= 9 and not is_command(node) for node in nodes if isinstance(node, Function)
        ),
        "lint_exceptions": sum(len(contract.get("ignore_imports", ())) for contract in linter["contracts"]),
    }


def main() -> int:
    """Print the counts; exit code 1 with --check where one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    args = parser.parse_args()
    found = counts(ROOT / "tt_cli", ROOT / "pyproject.toml")
    if args.json:
        print(json.dumps(found))
    else:
        for name, count in found.items():
            print(f"{name:<32}{count:>8,}  of {LIMITS[name]:,}")
    over = [name for name, count in found.items() if count > LIMITS[name]]
    if args.check and over:
        print(f"house: over the limit: {', '.join(over)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
