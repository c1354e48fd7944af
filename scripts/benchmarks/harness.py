"""The harness of all benchmarks: flags, the machine, turns, a table or one JSON object.

A benchmark is a module of this folder. Its docstring says what is measured, how, and which keys come out; --help shows
it. The module has

    measure(args) -> dict    all figures by key, as JSON knows them; args: `quick` and flags of its own
    arguments(parser)        flags of its own, where it has some; defaults that --quick changes are set in `measure`
    QUICK                    the words for --quick

The harness imports the standard library alone: some benchmarks run where little more than torch is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from scripts.benchmarks import stored

Figure = TypeVar("Figure")
FOLDER = Path(__file__).parent
ROOT = stored.ROOT
NO_BENCHMARKS = ("__init__", "__main__", "harness", "process_figures", "simulated_peers", "stored")
VECTORS = {"avx512_bf16": "AVX-512 with bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}
NO_RECORD = 3  # exit code
ONE_THREAD = (
    "clipping",
    "codec",
    "convergence",
    "data",
    "local_steps",
    "workless",
)  # of libraries that read it when they are loaded


def names() -> list[str]:
    """All benchmarks."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NO_BENCHMARKS)


def run(name: str, argv: list[str], file: Path = stored.FILE) -> None:
    """One benchmark with its command line: prints a table, or with --json an object. file: of stored figures."""
    if name in ONE_THREAD:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    module = importlib.import_module(f"scripts.benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"{module.QUICK}: under a minute")
    words = f"add the figures to {stored.FILE.relative_to(ROOT)}, with commit, machine and date"
    parser.add_argument("--record", action="store_true", help=words)
    words = f"--quick, and name each figure {stored.DRIFT} times as large or small as in the newest record of a machine"
    words += f" alike; exit code 1 where there is one, {NO_RECORD} without such a record"
    parser.add_argument("--compare", action="store_true", help=words)
    if hasattr(module, "arguments"):
        module.arguments(parser)
    flags = [word for word in argv if word not in ("--json", "--record", "--compare")]
    args = parser.parse_args(argv)
    if args.compare and not args.quick:
        args.quick, flags = True, ["--quick", *flags]
    options = " ".join(flags)
    before = stored.last(file, name, options, machine()) if args.compare else None
    if args.compare and before is None:
        print(f"{name}: no record of {options} on a machine like this", file=sys.stderr)
        sys.exit(NO_RECORD)
    source = stored.checked_out() if args.record else {}
    figures = json.loads(json.dumps(module.measure(args)))
    shown = {"machine": machine(), **figures}
    print(json.dumps(shown, ensure_ascii=False) if args.json else table(shown))
    if args.record:
        stored.append(file, name, options, {**source, "machine": machine(), "figures": figures})
    if before and (lines := stored.drifted(before["figures"], figures)):
        print(f"{name}: unlike {before['id']} of {before['date']}:", *lines, sep="\n  ", file=sys.stderr)
        sys.exit(1)


def machine() -> str:
    """Processor with its instructions, or GPU, cores; Python, and torch where it is installed."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    vectors = [name for flag, name in VECTORS.items() if flag in facts.get("flags", "").split()]
    kind = f"family {facts.get('cpu family')}, model {facts.get('model')}"  # clouds name all generations alike
    words = f"{facts.get('model name', platform.machine())} ({kind}), {' '.join(vectors[:1])}, {os.cpu_count()} cores"
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        words = f"{torch.cuda.get_device_name()}, {words}"
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{words}; Python {platform.python_version()}, torch {metadata.version('torch')}"
    return f"{words}; Python {platform.python_version()}"


def progress(label: str, figures: Any) -> None:
    """Tell on standard error what is measured so far: a whole run may take an hour."""
    print(f"{label}: {json.dumps(figures)}", file=sys.stderr, flush=True)


def in_turns(sides: Mapping[str, Callable[[], Figure]], turns: int) -> dict[str, list[Figure]]:
    """Figures of each side, measured in turns so that what disturbs the machine meets all; a first turn warms up."""
    figures: dict[str, list[Figure]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, measured in sides.items():
            figure = measured()
            if turn:
                figures[name].append(figure)
    return figures


def printed_by(module: str, *arguments: object, given: str = "") -> dict[str, Any]:
    """The JSON that a program prints last. Ends the benchmark where it fails; what it says of that is to be seen."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[2:])} ended with exit code {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def cpu_time(work: Callable[[], object]) -> float:
    """CPU seconds of this process for it."""
    began = time.process_time()
    work()
    return time.process_time() - began


def table(figures: Mapping[str, Any], indent: str = "") -> str:
    """Figures for a person: a line each; lists of rows, and mappings of alike rows, as columns."""
    width = max((len(str(key)) for key, value in figures.items() if not _rows(value)), default=0)
    lines = []
    for key, value in figures.items():
        if rows := _rows(value):
            lines += [f"{indent}{key}:", _columns(rows, indent + "  ")]
        elif isinstance(value, Mapping):
            lines += [f"{indent}{key}:", table(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key!s:{width}}  {_shown(value)}")
    return "\n".join(lines)


def _rows(value: Any) -> list[dict[str, Any]]:
    """The rows that a value has, if it is a table."""
    if isinstance(value, Mapping) and len(value) > 1:
        inner = list(value.values())
        if all(isinstance(row, Mapping) and row.keys() == inner[0].keys() for row in inner):
            return [{"": name, **row} for name, row in value.items()]
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        return [dict(row) for row in value]
    return []


def _columns(rows: list[dict[str, Any]], indent: str) -> str:
    """Rows under their keys; numbers to the right."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([_shown(row.get(key)) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = [any(isinstance(row.get(key), str) for row in rows) or not key for key in keys]

    def line(row: list[str]) -> str:
        aligned = zip(row, widths, words, strict=True)
        return "  ".join(f"{cell:{'<' if left else '>'}{width}}" for cell, width, left in aligned).rstrip()

    return "\n".join(indent + line(row) for row in cells)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return " ".join(map(_shown, value))
    return str(value)
