"""A real authority's server in this process, and the supervisor's side of one peer of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from auth.peers import closed_run, pointed
from told import Told

from tt_cli.auth.authority.authority_server import AuthorityServer, ServeOptions
from tt_cli.auth.authority_client import AuthorityClient
from tt_cli.auth.pass_renewer import Addresses, PassRenewer
from tt_cli.identity.passes import Notice
from tt_cli.run import RunConfig, folders

LIFE = 0.8  # seconds of a pass


class Running:
    """A real authority's server in this process, for which a peer of this machine has had a pass."""

    def __init__(self, port: int = 0, life: float = LIFE, trusted_proxy: str = ""):
        run = closed_run()
        self.server = AuthorityServer(ServeOptions(run.to_toml(), "127.0.0.1", port, trusted_proxy, life))
        self.authority, self.port = self.server.authority, self.server.port
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = self.authority.folder.settings().line()
        self.run = pointed(run, self.url, self.key)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def notice(self) -> Notice:
        """What peers hear now."""
        return self.authority.store.notice(self.run.identity)

    def end(self) -> None:
        """Again is no harm."""
        self.server.stop()
        self._thread.join(240)
        assert not self._thread.is_alive()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def key_file(run: RunConfig) -> Path:
    return folders.run_folder(run) / "trainer.key"


def begun(
    running: Running,
    told: Told,
    user: str = "ada",
    run: RunConfig | None = None,
    addresses: Addresses = list,
    clock: Callable[[], float] = time.time,
) -> PassRenewer:
    """A keeper whose peer has a pass from before: this machine has no Hub to prove anything on."""
    run = run or running.run
    key = key_file(run) if user == "ada" else key_file(run).with_stem(f"trainer-{user}")
    client = AuthorityClient(run, key, told)
    if run.membership.closed:
        key.with_suffix(".pass").write_text(running.authority.issue_here(client.peer_id, user))
    keeper = PassRenewer(run, key, client, told, addresses=addresses, clock=clock)
    keeper.attach(lambda: told("the worker is asked to leave"))
    return keeper
