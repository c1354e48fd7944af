"""The authority as a server: `tt authority serve`, and a part that `tt aux-peer --authority` supervises.

Behind a proxy, the address that counts for the limits is taken from X-Forwarded-For, when the proxy's own address is
named; without that the header means nothing, for anyone can write it.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from tt_cli.auth.authority.authority_folder import AuthorityFolder, AuthoritySettings, SigningKey
from tt_cli.auth.authority.issuer import MOST_PEERS, PASS_SECONDS, Authority
from tt_cli.auth.authority.member_store import MemberStore
from tt_cli.errors import TTError, UsageError
from tt_cli.identity.rate_limit import address_key
from tt_cli.run import RunConfig
from tt_cli.supervisor.events import Log
from tt_cli.supervisor.http_server import HttpOptions, HttpServer

PORT = 8470
MOST_OF_ADDRESS = 64  # connections: of many users behind one router


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server's process. run: TOML text. trusted_proxy: IP address whose X-Forwarded-For is believed."""

    run: str
    host: str = "0.0.0.0"
    port: int = PORT
    trusted_proxy: str = ""
    pass_seconds: float = PASS_SECONDS
    most_peers: int = MOST_PEERS

    def __post_init__(self) -> None:
        """Raises UsageError: by "*", a network or a name, everybody would be believed, or nobody."""
        if self.trusted_proxy and address_key(self.trusted_proxy) == address_key(None):
            raise UsageError("--trusted-proxy: must be an IP address, such as 127.0.0.1")


def open_store(folder: AuthorityFolder) -> MemberStore:
    """The database of this authority. Raises TTError when it has been lost: bans would be forgotten silently."""
    store = MemberStore(folder.database_url())
    if not store.founded:
        store.close()
        raise TTError(
            "the authority's keys are here and its database is empty: restore it with `tt authority restore`, or "
            "begin without members and bans with `tt authority init --new-database`"
        )
    return store


def found(run: RunConfig, database: str = "") -> AuthorityFolder:
    """Make a run's authority: its folder, its first key, its database.

    Raises UsageError where there is one, or where the run file names one.
    """
    folder = AuthorityFolder(run)
    if folder.exists:
        raise UsageError(f"{folder.file} exists: this run's authority has its key already")
    if run.membership.authority_key is not None:
        raise folder.missing()
    if database:
        MemberStore(database).close()  # a wrong URL is said before anything is made
    folder.write(AuthoritySettings(database=database, keys=(SigningKey(),)))
    found_database(folder)
    return folder


def found_database(folder: AuthorityFolder) -> None:
    """Make the tables; what is there stays."""
    with closing(MemberStore(folder.database_url())) as store:
        store.found(time.time())


def open_authority(run: RunConfig, *, pass_seconds: float = PASS_SECONDS, most_peers: int = MOST_PEERS) -> Authority:
    """The authority in this run's folder, made where there is none yet. Raises TTError."""
    folder = AuthorityFolder(run)
    if not folder.exists:
        found(run)
    return Authority(run, folder, open_store(folder), pass_seconds=pass_seconds, most_peers=most_peers)


class AuthorityServer(HttpServer):
    """The HTTP server of one authority."""

    def __init__(self, options: ServeOptions, port_flag: str = "--port"):
        from tt_cli.auth.authority.http_api import make_app

        run = RunConfig.from_toml(options.run, "the run file")
        self.authority = open_authority(run, pass_seconds=options.pass_seconds, most_peers=options.most_peers)
        # What the Hub's client logs, and each request's line, would be noise in an organiser's log.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        proxy = options.trusted_proxy
        where = HttpOptions(options.host, options.port, port_flag, each=MOST_OF_ADDRESS, trusted_proxy=proxy)
        super().__init__(make_app(self.authority), where)

    def run(self, until: threading.Event | None = None) -> None:
        """Serve; see HttpServer."""
        with closing(self.authority.store):
            super().run(until)


def main(options: dict[str, Any], emit: Any, orders: Any) -> None:
    """The worker process: serve until it is asked to leave. See tt_cli.supervisor.reporter.run_worker."""
    server = AuthorityServer(ServeOptions(**options), "--authority-port")
    emit(Log(f"the authority listens on port {server.port}; its key is {server.authority.facts().authority_key}"))
    server.run(orders.leave)
