"""A peer that computes no gradients and takes part in every round: what `tt aux-peer --assist` starts.

It holds the run's state, reduces its share of each average, makes each step as all others do, and hands the state to
who asks. Peers in client mode, such as notebooks, need others who accept connections: with an assistant they can train
where there is nobody else. It says nothing about which state is the swarm's: those who train do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tt_cli.errors import TTError
from tt_cli.model.allocator import keep_freed_memory
from tt_cli.peer.health.lifelines import Lifelines
from tt_cli.peer.health.watchdog import ObservedEmit, ProgressWatchdog
from tt_cli.peer.swarm_peer import PeerOptions, SwarmPeer, prepare_arithmetic
from tt_cli.run import RunConfig, folders
from tt_cli.run.initial_peers import peers_here
from tt_cli.supervisor.events import Emit, Event, Failure, Log, Phase, Round, Trouble
from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.supervisor.reporter import Orders
from tt_cli.swarm.collaboration import Collaboration
from tt_cli.swarm.network.dht_node import addresses_of, start_dht
from tt_cli.task import task_of

ROLE = "assistant"
LOOK_SECONDS = 1.0
FIRST_SECONDS, TOLD_SECONDS = 15.0, 60.0
ADDRESS_SECONDS = 120.0  # for the coordinator beside it to come up


def main(options: dict[str, Any], emit: Emit, orders: Orders) -> None:
    """Take part until it is asked to leave."""
    opts = PeerOptions(**{**options, "identity": ROLE})
    run = RunConfig.from_toml(opts.run, "the run file")
    emit = observed = ObservedEmit(report := AssistReport(emit))
    orders.hold = "it assists"  # the watch expects no micro-batches
    begin = orders.leave_at_once(before := list[Callable[[], object]]())
    prepare_arithmetic(run, emit)
    peer = SwarmPeer(run, opts, ROLE, task_of(run).new_model(), emit)  # its backups are written by the coordinator
    release_freed_memory()
    beside = _coordinator(run)
    dht = start_dht(run, peer.identity, initial_peers=beside, host=opts.host, port=opts.port, announce=opts.announce)
    with ExitStack() as closing:
        collaboration = closing.enter_context(peer.taking_part(dht, beside))
        before.append(collaboration.board.stop)
        keep_freed_memory()
        marker = peer.folder / "assistant-restarted-when-stuck"
        watchdog = closing.enter_context(ProgressWatchdog(run, collaboration, observed, orders, marker, lambda: None))
        collaboration.synchronise()
        begin()
        report.tell(Log(f"assists from step {collaboration.epoch}, at {', '.join(addresses_of(dht))}"))
        lifelines = Lifelines(collaboration.averager)
        while not orders.leave.wait(LOOK_SECONDS):
            collaboration.stand_by()
            collaboration.report()
            watchdog.check()
            lifelines.check()
            report.look(collaboration)


def _coordinator(run: RunConfig) -> list[str]:
    """The addresses that the coordinator on this machine has written."""
    deadline = time.monotonic() + ADDRESS_SECONDS
    while time.monotonic() < deadline:
        if addresses := peers_here(run):
            return addresses
        time.sleep(LOOK_SECONDS)
    file = folders.run_folder(run) / "address"
    raise TTError(f"the coordinator on this machine has not written its addresses to {file}")


class AssistReport:
    """Passes on what a person beside the aux peer should read, and sums the rest up. emit: takes the lines."""

    def __init__(self, emit: Emit):
        self._emit = emit
        self._rounds = self._told_rounds = 0
        self._due_at = float("inf")
        self._traffic: dict[str, int] = {}  # peer id → bytes that it has sent and received, by its own count
        self._moved, self._moved_by_all = 0, 0  # bytes, by this peer and by all who average, while they were seen

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, Failure):
            self._emit(event)
        elif isinstance(event, Round) and event.outcome == "committed":
            self._rounds += 1
        elif isinstance(event, Log) and event.level != "info":
            self.tell(event)
        elif isinstance(event, Trouble):
            self.tell(Log(event.words, "warning"))
        elif isinstance(event, Phase) and event.phase == "waiting" and event.reason.startswith("the organiser"):
            self.tell(Log(event.reason))

    def tell(self, line: Log) -> None:
        """Pass a line on, with who says it."""
        self._emit(Log(f"assistant: {line.message}", line.level))

    def look(self, collaboration: Collaboration) -> None:
        """Count the traffic of all who average, and tell now and then what this peer's part in it is."""
        records = [record for record in collaboration.board.view.records if record.averages]
        counts = {record.peer_id: record.bytes_sent + record.bytes_received for record in records}
        counts[collaboration.peer_id] = int(collaboration.averager.traffic.sum())
        since = {peer: self._traffic.get(peer, count) for peer, count in counts.items()}
        # who counts fewer than before was started anew
        moved = {peer: count - (since[peer] if count >= since[peer] else 0) for peer, count in counts.items()}
        self._traffic = counts
        self._moved += moved[collaboration.peer_id]
        self._moved_by_all += sum(moved.values())
        now = time.monotonic()
        if self._rounds and self._due_at == float("inf"):
            self._due_at = now + FIRST_SECONDS  # what the others say of their traffic comes a little late
        if self._rounds > self._told_rounds and now >= self._due_at:
            self._due_at, self._told_rounds = now + TOLD_SECONDS, self._rounds
            sent, received = (int(each) for each in collaboration.averager.traffic)
            share = self._moved / max(1, self._moved_by_all)
            self.tell(
                Log(
                    f"assisted {self._rounds:,} rounds, step {collaboration.epoch:,}: {sent / 1e6:,.1f} MB sent, "
                    f"{received / 1e6:,.1f} MB received, {share:.0%} of the swarm's traffic"
                )
            )
