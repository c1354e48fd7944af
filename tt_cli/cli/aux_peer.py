"""`tt aux-peer RUN`: keep a run alive from a machine without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tt_cli.cli.main import app
from tt_cli.cli.options import Announce, JsonEvents, Plain, Run, exclusive, network_setting, option, setting, switch
from tt_cli.errors import UsageError

if TYPE_CHECKING:
    from tt_cli.auxiliary.parts import Part
    from tt_cli.auxiliary.publisher import PublisherOptions
    from tt_cli.run import RunConfig
    from tt_cli.terminal.worker_screen import Screen

EVERY_STEPS = 100
EVERY_MINUTES = 30.0
EXAMPLES = """\
tt aux-peer emoji
tt aux-peer my-run.toml --port 31337 --announce /ip4/203.0.113.7/tcp/31337
tt aux-peer my-run.toml --authority --trusted-proxy 127.0.0.1
tt aux-peer emoji --web-port 80
tt aux-peer acme/my-run --publish --publish-every 60
tt aux-peer emoji --assist
tt aux-peer emoji --samples --samples-every 50 --prompt "red apple" --prompt owl
tt aux-peer emoji --json > events.jsonl"""

WEB, PUBLISHING, ASSISTANT = "Web page", "Publishing, to the run file's repository", "Assistant, averaging alone"
PICTURES, AUTHORITY = "Pictures along the way", "Authority"
tcp_port = partial(setting, "port", "N")


@app.command("aux-peer", epilog=EXAMPLES)
def aux_peer(
    run: Run,
    peer: Annotated[
        list[str] | None,
        option(
            "MULTIADDR",
            "another aux peer of this run, to keep one swarm together; default: the run file's initial peers",
            panel="Network",
        ),
    ] = None,
    host: Annotated[str, network_setting("host", "IP", "IPv4 address to listen on (default all)")] = "0.0.0.0",
    port: Annotated[int | None, network_setting("port", "N", "TCP port (default the run file's)")] = None,
    announce: Announce = None,
    database: Annotated[
        str,
        option(
            "URL",
            "where the run's history is kept: sqlite:///FILE or postgresql://HOST/NAME; with a password rather in "
            "TT_DATABASE, for others can read a command line; default: a SQLite file in the run's folder",
        ),
    ] = "",
    web_port: Annotated[
        int | None, tcp_port("its TCP port (default 8471, the next free one where that is taken)", WEB)
    ] = None,
    no_web: Annotated[bool, switch("--no-web", "serve none", WEB)] = False,
    publish: Annotated[
        bool,
        switch(
            "--publish",
            "put checkpoints on the Hub, or say why not; without a flag they go there where somebody is logged in",
            PUBLISHING,
        ),
    ] = False,
    no_publish: Annotated[bool, switch("--no-publish", "leave them on this machine", PUBLISHING)] = False,
    publish_every: Annotated[
        float,
        option(
            "MINUTES",
            f"at most one in so many (default {EVERY_MINUTES:g}); the run's last step at once",
            PUBLISHING,
            min=1,
            max=10080,
        ),
    ] = EVERY_MINUTES,
    assist: Annotated[
        bool,
        switch(
            "--assist",
            "start it at once: peers in client mode need no others. It takes part in averaging without training, and "
            "starts by itself once all trainers are in client mode",
            ASSISTANT,
        ),
    ] = False,
    no_assist: Annotated[bool, switch("--no-assist", "never", ASSISTANT)] = False,
    assist_port: Annotated[
        int | None, tcp_port("its TCP port (default: the one after the aux peer's)", ASSISTANT)
    ] = None,
    samples: Annotated[
        bool, switch("--samples", "measure the held-out loss, and draw or write, for the web page", PICTURES)
    ] = False,
    samples_every: Annotated[
        int | None, option("STEPS", f"global steps in between (default {EVERY_STEPS})", PICTURES, min=1, max=10**9)
    ] = None,
    prompt: Annotated[
        list[str] | None,
        option("TEXT", "draw this (may be given several times; default: some that suit the run's data)", PICTURES),
    ] = None,
    authority: Annotated[
        bool, switch("--authority", "also serve the run's authority, as `tt authority serve` does", AUTHORITY)
    ] = False,
    authority_port: Annotated[int, tcp_port("its TCP port (default 8470)", AUTHORITY)] = 8470,
    trusted_proxy: Annotated[
        str, option("IP", "believe X-Forwarded-For from this address, of your HTTPS proxy", "Network")
    ] = "",
    json: JsonEvents = False,
    plain: Plain = False,
) -> None:
    """Supervise an auxiliary peer's process until the user ends it."""
    from tt_cli.auth.authority.authority_server import ServeOptions
    from tt_cli.auth.peer_admission import admission
    from tt_cli.auxiliary.evaluator_process import SamplesOptions, checked_prompts
    from tt_cli.auxiliary.parts import AUTHORITY, EVALUATOR, PUBLISHER, WEB_PAGE
    from tt_cli.auxiliary.standby import Standby
    from tt_cli.auxiliary.web_process import WebOptions
    from tt_cli.database import Database
    from tt_cli.history.writer import DATABASE, database_url
    from tt_cli.monitor.views import swarm_view
    from tt_cli.run import folders, load_run, name_for_others
    from tt_cli.run.initial_peers import checked_peers
    from tt_cli.supervisor.control import Control
    from tt_cli.supervisor.household.limits import HouseholdLimits
    from tt_cli.supervisor.peer_state import PeerState
    from tt_cli.supervisor.slot import AUX, claim_slot, identity_name
    from tt_cli.supervisor.supervise import signals_raised, supervise
    from tt_cli.supervisor.worker_process import Worker
    from tt_cli.terminal.worker_screen import Screen

    exclusive(json=json, plain=plain)
    exclusive(publish=publish, no_publish=no_publish)
    exclusive(assist=assist, no_assist=no_assist)
    config = load_run(run)
    if authority:
        _check_authority(config, run)
    history = database or os.environ.get(DATABASE, "")
    named = Database(database_url(folders.run_folder(config), history), "it")  # what is wrong is said at once
    if named.file is not None and not named.file.parent.is_dir():
        raise UsageError(f"--database: there is no folder {named.file.parent}")
    if assist_port is not None and no_assist:
        raise UsageError("--assist-port: there is no assistant with --no-assist")
    drawing = None
    if samples:
        drawing = SamplesOptions(config.to_toml(), samples_every or EVERY_STEPS, checked_prompts(config, prompt or []))
    elif prompt or samples_every:
        raise UsageError("--prompt and --samples-every: add --samples, which switches evaluation on")
    publishing, unpublished = (None, "") if no_publish else _publishing(config, publish, 60.0 * publish_every)
    name = name_for_others(run, config)
    page = WebOptions(config.to_toml(), name, host, web_port, trusted_proxy)
    options: dict[str, Any] = {
        "run": config.to_toml(),
        "initial_peers": checked_peers(peer or []) or list(config.peers.initial),
        "host": host,
        "port": config.peers.coordinator_port if port is None else port,
        "announce": announce or [],
    }
    slot = claim_slot(folders.run_folder(config), AUX)
    status = PeerState(run=run, identity=config.identity, role="aux", total_steps=config.schedule.total_steps)
    serving = ServeOptions(run=config.to_toml(), host=host, port=authority_port, trusted_proxy=trusted_proxy)

    def start() -> Worker:
        admitted.check()
        options["user"] = admitted.user
        worker = Worker("tt_cli.auxiliary.coordinator", options, slot.log, {DATABASE: history})
        admitted.attach(worker.leave)
        return worker

    def beside(part: Part, log: str, opts: object) -> AbstractContextManager[object]:
        return nullcontext() if opts is None else part.watched(vars(opts), slot.folder / log, screen.show, history)

    def assistant() -> AbstractContextManager[None]:
        return _assistant(config, options, assist_port, slot.folder / "assistant.log", screen)

    with (
        signals_raised(),
        Control(slot, status, HouseholdLimits(), by_hand=sys.stdin.isatty()) as control,
        Screen(f"tt aux-peer {run}", status, join_run=name, plain=plain, json=json, draw_swarm=swarm_view) as screen,
        beside(WEB_PAGE, "web.log", None if no_web else page),
        beside(EVALUATOR, "evaluator.log", drawing),
        beside(PUBLISHER, "publisher.log", publishing),
        beside(AUTHORITY, "authority.log", serving if authority else None),
        admission(config, identity_name(slot), screen.tell, here=True, addresses=lambda: status.addresses) as admitted,
        assistant() if assist else nullcontext(),
        Standby(config, screen.show, assistant) as standby,
    ):
        if unpublished:
            screen.tell(unpublished, "info")
        supervise(start, screen.show if assist or no_assist else standby.show, control)
        admitted.check()


def _publishing(config: RunConfig, asked: bool, seconds: float) -> tuple[PublisherOptions | None, str]:
    """The publisher's task, None without one; and a line about what could be and is not."""
    from tt_cli.auth.account import token_source
    from tt_cli.auxiliary.publisher import PublisherOptions

    repository = config.checkpoints.repository
    if repository is None:
        if not asked:
            return None, ""
        raise UsageError('--publish: the run file names no repository: add [checkpoints] repository = "OWNER/NAME"')
    if token_source() is None:
        fix = "nobody is logged in here: `tt login` with a token that may write there, or set HF_TOKEN"
        if asked:
            raise UsageError(f"--publish: {fix}")
        return None, f"checkpoints stay on this machine and do not go to {repository}: {fix}"
    return PublisherOptions(config.to_toml(), seconds), ""


@contextmanager
def _assistant(
    config: RunConfig, beside: dict[str, Any], port: int | None, log: Path, screen: Screen
) -> Iterator[None]:
    """The assistant, with a pass of its own where the run asks for one. beside: the coordinator's options."""
    from tt_cli.auth.peer_admission import admission
    from tt_cli.auxiliary import parts

    options = parts.assistant_options(beside, port)

    def tell(line: str, level: str) -> None:
        screen.tell(f"assistant: {line}", level)

    with (
        admission(config, parts.ASSISTANT_KEY, tell, here=True) as admitted,
        parts.ASSISTANT.watched({**options, "user": admitted.user}, log, screen.show) as part,
    ):
        admitted.attach(part.leave)
        yield


def _check_authority(config: RunConfig, name: str) -> None:
    """Before anything is started: this machine's authority is the one that the run file names."""
    from tt_cli.auth.authority.authority_folder import AuthorityFolder

    if config.membership.authority_key is None:
        raise UsageError(f"--authority: the run file names none; `tt authority init {name}` prints what it needs")
    AuthorityFolder(config).checked()
