"""`python -m tt_cli.supervisor MODULE DESCRIPTOR OPTIONS`: a worker process, which is the `main` of that module."""

import importlib
import sys

from tt_cli.supervisor.reporter import run_worker

if __name__ == "__main__":
    run_worker(importlib.import_module(sys.argv.pop(1)).main)
