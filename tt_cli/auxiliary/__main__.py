"""`python -m tt_cli.auxiliary`: the auxiliary peer's process that a supervisor starts."""

import sys

from tt_cli.auxiliary.coordinator import main
from tt_cli.supervisor.reporter import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(main))
