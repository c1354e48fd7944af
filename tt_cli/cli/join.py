"""`tt join RUN`: train with the swarm on this machine."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any

import typer

from tt_cli.cli.main import app
from tt_cli.cli.options import (
    Announce,
    Device,
    JsonEvents,
    Plain,
    Run,
    exclusive,
    network_setting,
    network_switch,
    option,
    setting,
    switch,
)

HANDED_ON = ("host", "port", "announce", "client_mode", "device", "batch_size", "threads")  # as they are set
limit = partial(setting, panel="Limits")
EXAMPLES = """\
tt join emoji --peer /ip4/203.0.113.7/tcp/31337/p2p/Qm…
tt join emoji --new-swarm
tt join emoji --new-swarm --from-built-in
tt join org/run --name ada
tt join org/run --device cuda:1 --hours 23:00-07:00 --max-upload 8
tt join my-run.toml --client-mode --batch-size 8 --memory 8GB
tt join org/run --log-to tensorboard:curves

From another terminal, or cron: tt status, tt pause, tt resume, tt finish.
Flags may stand in ~/.config/tt/config.toml (or $XDG_CONFIG_HOME/tt/config.toml); a flag given here counts more:
  [join]
  hours = "mon-fri 22:00-07:00,sat-sun"
  max_upload = 8"""


@app.command(epilog=EXAMPLES)
def join(
    context: typer.Context,
    run: Run,
    peer: Annotated[
        list[str] | None,
        option(
            "MULTIADDR",
            "join through this peer (may be given several times); default: the run file's initial peers, else an "
            "aux peer of this run on this machine",
            panel="Network",
        ),
    ] = None,
    new_swarm: Annotated[
        bool, network_switch("--new-swarm", "start alone when no peer is known, and let others come")
    ] = False,
    host: Annotated[str | None, network_setting("host", "IP", "IPv4 address to listen on (default all)")] = None,
    port: Annotated[int | None, network_setting("port", "N", "TCP port (default any free one)")] = None,
    announce: Announce = None,
    client_mode: Annotated[
        bool | None,
        network_switch("--client-mode/--no-client-mode", "open no port: for machines that cannot be reached"),
    ] = None,
    device: Device = None,
    batch_size: Annotated[int | None, setting("batch_size", "N", "examples at a time; default: tried out")] = None,
    threads: Annotated[int | None, setting("threads", "N", "CPU threads for computing; default: all cores")] = None,
    seed: Annotated[
        int | None, option("SEED", "order of this peer's examples; default: its own, new each time", min=0)
    ] = None,
    name: Annotated[
        str | None,
        setting(
            "name",
            "NAME",
            "what others see instead of the end of your peer id, in a run without logins; marked as self-given",
        ),
    ] = None,
    from_built_in: Annotated[
        bool,
        switch(
            "--from-built-in", "begin with the weights that come with tt, unless there is a backup or a swarm's state"
        ),
    ] = False,
    send_token: Annotated[
        bool,
        switch(
            "--send-token",
            "prove who you are by sending your Hugging Face token to the run's authority, which could then read with "
            "it what you can read; never one that may write. Without this flag no token leaves this machine",
        ),
    ] = False,
    hours: Annotated[str | None, limit("hours", "RANGES", "work only then, e.g. 23:00-07:00 (or: always)")] = None,
    max_gpu_temp: Annotated[float | None, limit("max_gpu_temp", "C", "wait while the GPU is as hot as that")] = None,
    idle_only: Annotated[
        bool | None, switch("--idle-only/--no-idle-only", "work only while nobody uses the desktop", panel="Limits")
    ] = None,
    max_upload: Annotated[float | None, limit("max_upload", "MBIT", "send at most so many Mbit/s")] = None,
    max_download: Annotated[float | None, limit("max_download", "MBIT", "receive at most so many Mbit/s")] = None,
    memory: Annotated[str | None, limit("memory", "SIZE", "use at most so much RAM, e.g. 8GB")] = None,
    gpu_memory: Annotated[str | None, limit("gpu_memory", "SIZE", "the same of the GPU's memory")] = None,
    log_to: Annotated[
        str | None,
        setting(
            "log_to",
            "SINK",
            "write curves of every step to tensorboard[:DIR], wandb[:PROJECT] or trackio[:PROJECT]; default: nowhere",
            panel="Output",
        ),
    ] = None,
    json: JsonEvents = False,
    plain: Plain = False,
) -> None:
    """Supervise a peer process until the run is done or the user leaves."""
    from tt_cli.auth.peer_admission import admission
    from tt_cli.errors import UsageError
    from tt_cli.memory import parse_size
    from tt_cli.peer.join_settings import JoinSettings, read_settings, settings_file
    from tt_cli.peer.sinks import logged, open_sink
    from tt_cli.run import folders, load_run
    from tt_cli.run.initial_peers import initial_peers
    from tt_cli.supervisor.control import Control
    from tt_cli.supervisor.household.limits import HouseholdLimits
    from tt_cli.supervisor.peer_state import PeerState
    from tt_cli.supervisor.slot import TRAINER, claim_slot, identity_name
    from tt_cli.supervisor.supervise import signals_raised, supervise
    from tt_cli.supervisor.worker_process import Worker
    from tt_cli.terminal.worker_screen import Screen

    exclusive(json=json, plain=plain)
    config = load_run(run)
    flags = {name: value for name, value in context.params.items() if name in JoinSettings.model_fields and value != ()}
    mine = read_settings(flags, {run, config.run.name, config.identity}, settings_file())
    peers = initial_peers(config, mine.get("peer", []))
    if not peers and not new_swarm:
        raise UsageError(
            f"no peer of run {run} is known to join: give one with --peer MULTIADDR (the screen of "
            f"`tt aux-peer {run}` shows it), or begin a swarm of your own with --new-swarm"
        )
    if from_built_in:
        from tt_cli.task.built_in_weights import start_from_built_in

        start_from_built_in(config)  # where there are none, an error now
    limits = HouseholdLimits(mine.household())
    curves = open_sink(mine.get("log_to"), config) if mine.get("log_to") else None
    slot = claim_slot(folders.run_folder(config), TRAINER)
    steps = config.schedule.total_steps
    status = PeerState(run=run, identity=config.identity, total_steps=steps, limits=mine.origins())
    options: dict[str, Any] = {
        "run": config.to_toml(),
        "initial_peers": peers,
        "seed": seed,
        "identity": identity_name(slot),
        "from_built_in": from_built_in,
        **{name: value for name, value in mine.values.items() if name in HANDED_ON},
        **{name: 1e6 * value for name, value in mine.values.items() if name in ("max_upload", "max_download")},
    }
    options |= {name: parse_size(mine.values[name]) for name in ("memory", "gpu_memory") if name in mine.values}

    def reached() -> list[str]:
        return [] if status.state == "paused" else status.addresses

    def start() -> Worker:
        admitted.check()
        options["user"] = admitted.user or mine.get("name", "")
        # looked up anew: an aux peer on this machine may have another address by the time that a pause ends
        options["initial_peers"] = initial_peers(config, mine.get("peer", [])) or options["initial_peers"]
        worker = Worker("tt_cli.peer.trainer", options, slot.log)
        admitted.attach(worker.leave)
        return worker

    with (
        signals_raised(),
        Control(slot, status, limits, by_hand=sys.stdin.isatty()) as control,
        Screen(f"tt join {run}", status, plain=plain, json=json) as screen,
        admission(config, identity_name(slot), screen.tell, send_token=send_token, addresses=reached) as admitted,
        nullcontext(screen.show) if curves is None else logged(screen.show, curves) as show,
    ):
        supervise(start, show, control)
        admitted.check()
