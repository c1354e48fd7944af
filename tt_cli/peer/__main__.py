"""`python -m tt_cli.peer`: the peer process that a supervisor starts."""

import sys

from tt_cli.peer.trainer import main
from tt_cli.supervisor.reporter import run_worker

if __name__ == "__main__":
    sys.exit(run_worker(main))
