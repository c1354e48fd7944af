"""`python -m tt_cli.auth.authority`: the authority's process that a supervisor starts."""

import sys

from tt_cli.auth.authority.authority_server import main
from tt_cli.supervisor.reporter import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(main))
