"""The run's web page beside an auxiliary peer: a process of its own, that knows the database and nothing else."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tt_cli.auxiliary.parts import remove_quietly, run_of
from tt_cli.history.reader import HistoryReader
from tt_cli.history.writer import PICTURES
from tt_cli.run import folders
from tt_cli.supervisor.events import Emit, Log
from tt_cli.supervisor.http_server import HttpOptions, HttpServer
from tt_cli.supervisor.reporter import Orders

PORT = 8471
MORE_PORTS = 8
MOST_CONNECTIONS = 3000
MOST_OF_ADDRESS = MOST_CONNECTIONS // 8


@dataclass(frozen=True)
class WebOptions:
    """Options of the process, beside the run (TOML text). The database's URL is in the environment.

    name: how people join the run, such as "emoji". port: None for the usual one, or one of the next where another
    auxiliary peer of this machine has that. trusted_proxy: whose X-Forwarded-For is believed.
    """

    run: str
    name: str
    host: str = "0.0.0.0"
    port: int | None = None
    trusted_proxy: str = ""


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """The worker process: serve until it is asked to leave."""
    from tt_cli.web.queries import Answers
    from tt_cli.web.web_app import make_app

    opts, (run, database) = WebOptions(**options), run_of(options)
    folder = folders.run_folder(run)
    reader = HistoryReader(database)
    answers = Answers(reader, run, opts.name)
    app = make_app(answers, folder / PICTURES)
    port, more_ports = (PORT, MORE_PORTS) if opts.port is None else (opts.port, 0)
    grace_seconds = 1  # live updates have no end of their own
    where = HttpOptions(
        opts.host, port, "--web-port", more_ports, MOST_CONNECTIONS, grace_seconds, opts.trusted_proxy, MOST_OF_ADDRESS
    )
    server = HttpServer(app, where)
    host = f"[{opts.host}]" if ":" in opts.host else opts.host
    url = f"http://{'localhost' if opts.host in ('0.0.0.0', '::') else host}:{server.port}"
    emit(Log(f"the web page is at {url}/"))
    with suppress(OSError):  # for `tt monitor` on this machine, which does without it too
        (folder / "page").write_text(f"{url}\n", encoding="utf-8")
    server.run(orders.leave)
    remove_quietly(folder / "page")
    reader.close()
