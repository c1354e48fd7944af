"""Start benchmarks by name: `scripts/bench`."""

from __future__ import annotations

import ast
import subprocess
import sys

from scripts.benchmarks import harness, stored


def main() -> None:
    """Name all benchmarks, run one, or all of them with the same flags, each in a process of its own."""
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("scripts/bench NAME [--quick] [--json] [--record] [--compare] [more: scripts/bench NAME --help]\n")
        for each in harness.names():
            docstring = ast.get_docstring(ast.parse((harness.FOLDER / f"{each}.py").read_text(encoding="utf-8"))) or ""
            print(f"  {each:14}{docstring.splitlines()[0]}")
        print(f"  {'all':14}One after the other.")
    elif name == "all":
        ended, recorded = {}, {record["bench"] for record in stored.records() if "from" not in record}
        for each in sorted(recorded) if "--compare" in flags else harness.names():
            print(f"== {each}", flush=True)
            command = [sys.executable, "-m", "scripts.benchmarks", each, *flags]
            ended[each] = subprocess.run(command, check=False).returncode
        if failed := [each for each, code in ended.items() if code not in (0, harness.NO_RECORD)]:
            sys.exit(f"scripts/bench: failed{' or drifted' * ('--compare' in flags)}: {', '.join(failed)}")
    elif name not in harness.names():
        print(f"scripts/bench: no benchmark {name}; there are {', '.join(harness.names())} and all", file=sys.stderr)
        sys.exit(2)
    else:
        harness.run(name, flags)


main()
