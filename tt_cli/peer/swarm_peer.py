"""A peer and its place in the swarm: what the trainer and the assistant set up alike, in the order that forks allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from tt_cli import __version__
from tt_cli.identity.passes import RollBack
from tt_cli.optim.kernels import implementation, warm_up
from tt_cli.peer.backup import Backups
from tt_cli.peer.published_states import newest_published, ways_back
from tt_cli.peer.trained_state import TrainedState
from tt_cli.run import RunConfig, folders
from tt_cli.run.initial_peers import peers_met
from tt_cli.supervisor.events import Choice, Emit, Listening
from tt_cli.swarm import hivemind_patches
from tt_cli.swarm.collaboration import About, Collaboration, NetworkAccess
from tt_cli.swarm.compression import linear8
from tt_cli.swarm.compression.codec import codec_of, self_test
from tt_cli.swarm.membership.admission import membership_at
from tt_cli.swarm.membership.orders import OrganiserOrders
from tt_cli.swarm.membership.rsa_identity import claim_identity
from tt_cli.swarm.network.bandwidth import BandwidthLimiter, UploadMeter
from tt_cli.swarm.network.dht_node import DHT, addresses_of, daemon_watched, stop_dht
from tt_cli.swarm.network.reachability import ListenOptions
from tt_cli.swarm.network.tcp_counters import acknowledged_bytes
from tt_cli.task.built_in_weights import start_from_built_in


@dataclass(frozen=True, kw_only=True)
class PeerOptions(ListenOptions):
    """Options that a command hands a peer's process. run: TOML text. max_upload, max_download: bits a second.

    identity: the name of its key file, "trainer-2"; else the first free one. from_built_in: begin with the weights that
    come with tt where there is no backup.
    """

    run: str
    initial_peers: list[str] = field(default_factory=list)
    max_upload: float | None = None
    max_download: float | None = None
    user: str = ""
    identity: str = ""
    from_built_in: bool = False


def prepare_arithmetic(run: RunConfig, emit: Emit) -> None:
    """Load and try the codec and the optimizer's kernels: the averager's process would, in the middle of a round."""
    hivemind_patches.apply()
    if run.sparse:
        emit(Choice("gradient codec", f"the largest {run.sparse} of each 4,096 elements", "as the run's file says"))
    elif run.swarm.compression == "linear8":
        kernels = linear8.implementation()
        emit(Choice("gradient codec", f"linear8, {kernels.name}", kernels.reason))
    warm_up(blockwise=run.swarm.compression == "blockwise8")
    arithmetic = implementation()
    emit(Choice("optimizer", arithmetic.name, arithmetic.reason))
    self_test(codec_of(run))


class SwarmPeer:
    """A peer's state, backups and identity, before it joins. model: with the run's first weights; it is not kept.

    met: multiaddrs of members through which it joins, too: one initial peer alone could show it what swarm it likes.
    """

    def __init__(self, run: RunConfig, opts: PeerOptions, role: str, model: nn.Module, emit: Emit):
        self.run, self.emit, self.folder = run, emit, folders.run_folder(run)
        self.backups = Backups(run, emit)
        backup, origin = self.backups.newest(), "own backup"
        if backup is None and opts.from_built_in:
            backup, origin = start_from_built_in(run), "built in; the rest of the schedule begins again"
        self.shared = TrainedState(run, model, backup, self.backups.newest)
        origin = origin if self.shared.epoch else "the run's first"
        emit(Choice("weights", f"step {self.shared.epoch}", origin))
        self.identity = claim_identity(self.folder, role, opts.identity)
        self.about = About(role=role, user=opts.user, version=__version__)
        self._caps = opts.max_upload, opts.max_download
        self.met = peers_met(self.folder) if opts.initial_peers else []  # who begins a swarm seeks nobody

    @contextmanager
    def taking_part(
        self,
        dht: DHT,
        initial_peers: Sequence[str],
        client_mode: bool = False,
        leave_steps: Callable[[RollBack], None] = lambda order: None,
        make: Callable[..., Collaboration] = Collaboration,
    ) -> Iterator[Collaboration]:
        """Take part in the swarm through a DHT node, which ends with that.

        leave_steps: called with an order to go back: what is kept of later steps must not count any more.
        """
        run, read_tree = self.run, self.shared.read_tree
        era = self.identity.path.with_suffix(".era")
        try:
            with daemon_watched(dht):
                addresses = [] if client_mode else addresses_of(dht)
                line = BandwidthLimiter(*self._caps, UploadMeter(partial(acknowledged_bytes, dht.pid)))
                self.emit(Listening(self.identity.peer_id, addresses, client_mode))
                collaboration = make(
                    run,
                    NetworkAccess(dht, self.identity, line, initial_peers, met=self.met),
                    self.shared,
                    self.about,
                    self.emit,
                    OrganiserOrders(membership_at(dht), era, partial(ways_back, run, read_tree), leave_steps),
                    published=partial(newest_published, run, read_tree) if run.checkpoints.repository else None,
                )
                with closing(collaboration):
                    yield collaboration
        finally:
            stop_dht(dht)
