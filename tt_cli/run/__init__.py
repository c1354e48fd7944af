"""What a run is: its configuration, and where one is read from (built-in name, file, Hub repository)."""

from tt_cli.identity.multiaddr import check_multiaddr
from tt_cli.run.run_config import RunConfig
from tt_cli.run.run_source import load_run, name_for_others

__all__ = ["RunConfig", "check_multiaddr", "load_run", "name_for_others"]
