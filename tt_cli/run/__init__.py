"""A run: its configuration, read from a built-in name, a file or a Hub repository."""

from tt_cli.identity.multiaddr import check_multiaddr
from tt_cli.run.run_config import CausalLmRun, DalleRun, RunConfig
from tt_cli.run.run_source import load_run, name_for_others

__all__ = ["CausalLmRun", "DalleRun", "RunConfig", "check_multiaddr", "load_run", "name_for_others"]
