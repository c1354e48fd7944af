"""A real authority's server in this process, and the supervisor's side of one peer of this machine."""

from __future__ import annotations

import threading
from pathlib import Path

from auth.peers import closed_run, pointed

from tt_cli.auth.authority import authority_server
from tt_cli.auth.authority_client import AuthorityClient
from tt_cli.auth.pass_renewer import PassRenewer
from tt_cli.identity.passes import Notice
from tt_cli.run import RunConfig, folders

LIFE = 0.8  # seconds of a pass
MOST = 30.0  # seconds that a test waits for what must come


class Running:
    """A real authority's server in this process, for which a peer of this machine has had a pass."""

    def __init__(self, port: int = 0, life: float = LIFE):
        run = closed_run()
        self.server = authority_server.AuthorityServer(
            authority_server.ServeOptions(run.to_toml(), "127.0.0.1", port, "", life)
        )
        self.authority, self.port = self.server.authority, self.server.port
        self.key = self.authority.folder.settings().line()
        self.run = pointed(run, f"http://127.0.0.1:{self.port}", self.key)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def notice(self) -> Notice:
        """What peers hear now."""
        return self.authority.store.notice(self.run.identity)

    def end(self) -> None:
        self.server.stop()
        self._thread.join(240)
        assert not self._thread.is_alive()


class Told:
    """What the keeper says, to be waited for."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._news = threading.Condition()
        self.refused = threading.Event()

    def __call__(self, line: str, level: str) -> None:
        with self._news:
            self.lines.append((line, level))
            self._news.notify_all()

    def count(self, words: str) -> int:
        return sum(words in line for line, _ in self.lines)

    def wait(self, words: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.count(words) > 0, MOST), self.lines


def key_file(run: RunConfig) -> Path:
    return folders.run_folder(run) / "trainer.key"


def begun(running: Running, told: Told, run: RunConfig | None = None) -> PassRenewer:
    """A keeper whose peer has a pass from before: this machine has no Hub to prove anything on."""
    run = run or running.run
    client = AuthorityClient(run, key_file(run), told)
    if run.membership.closed:
        text = running.authority.issue_here(client.peer_id, "ada")
        key_file(run).with_suffix(".pass").write_text(text)
    keeper = PassRenewer(run, key_file(run), client, told)
    keeper.attach(told.refused.set)
    return keeper
