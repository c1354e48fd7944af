"""Measure how a peer takes a state over from three donors, and what share of its line it uses.

Four peers in network namespaces of one machine: three that hold a synthetic state (500 MB) behind links of 100 Mbit/s,
and one that joins behind 300 Mbit/s, all with the services of real peers: DHT, signed records, donor and taker. The
state is taken twice: with all donors alive to the end, and with one of them SIGKILLed, with all its processes, when
half of the state has come. Every chunk is verified again afterwards.

- state_download_line_share: bytes of the state over what the joiner's link could have carried meanwhile;
- state_download_killed_line_share: the same with the donor killed, after which the donors' links bound it to 2/3;
- …_frames_share: bytes of frames that came in on the joiner's link instead, so with everything that came in vain.

Needs root and iproute2, 4 GiB of memory (--quick: 2 GiB).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from testbed.launched import Commands, Launched, tell
from testbed.namespaces import Network

from scripts.benchmarks.process_figures import family_cpu_seconds

DONORS, DONOR_MBIT, JOINER_MBIT = 3, 100, 300
STATE_BYTES, QUICK_BYTES = 500_000_000, 100_000_000
QUICK = "100 MB instead of 500"
TENSOR_ELEMENTS = 2_500_000  # 10 MB, a usual matrix
WAIT = 300.0


def shapes_of(size: int) -> dict[str, tuple[int, ...]]:
    """Tensors that are so many bytes together, roughly."""
    return {f"layer{index}.weight": (TENSOR_ELEMENTS,) for index in range(size // (4 * TENSOR_ELEMENTS))}


class Peer:
    """A DHT node, the averager's process and a signed record, without training. identity: of a new peer in `home`."""

    def __init__(self, home: Path, host: str, known: list[str], size: int):
        from tt_cli.checkpoint.hash_tree import StateTree
        from tt_cli.run import load_run
        from tt_cli.swarm.averager import Averager
        from tt_cli.swarm.membership.rsa_identity import claim_identity
        from tt_cli.swarm.network.dht_node import addresses_of, start_dht
        from tt_cli.swarm.records.publisher import PeerDirectory

        self.run = load_run("emoji")
        self.shapes = shapes_of(size)
        self.held: Any = None  # (manifest, buffer)
        self.identity = claim_identity(home, "trainer")
        self.dht = start_dht(self.run, self.identity, initial_peers=known, host=host)
        self.addresses = addresses_of(self.dht)
        read_tree = partial(StateTree.parse, identity=self.run.identity, shapes=self.shapes)
        self.averager = Averager(self.run, self.dht, self.identity, {}, source=lambda: self.held, read_tree=read_tree)
        self.board = PeerDirectory(self.run, self.dht, self.identity)
        self.board.start()

    def hold(self) -> None:
        """Make the state, the same for all, and sign it."""
        import torch

        from tt_cli.checkpoint.training_state import TrainingState
        from tt_cli.swarm.network.dht_node import dht_time
        from tt_cli.swarm.records.peer_record import PeerRecord
        from tt_cli.swarm.shared_memory import StateBuffer

        generator = torch.Generator().manual_seed(0)
        parameters = {name: torch.rand(shape, generator=generator) for name, shape in self.shapes.items()}
        state = TrainingState(7, parameters, {}, "", self.run.identity)
        tree, buffer = state.tree(), StateBuffer.new()
        state.write_into(tree, buffer.write)
        self.held = tree.manifest(), buffer
        facts = {"role": "trainer", "client_mode": False, "samples": 0, "samples_per_second": 1.0, "total_samples": 0}
        self.board.publish(
            PeerRecord.model_validate(
                {**facts, "peer_id": self.identity.peer_id, "epoch": 7, "digest": tree.digest, "time": dht_time()}
            )
        )
        self.board.fresh_view()

    def take(self) -> None:
        """Take the state over, telling how far it is, and verify it once more."""

        def told(received: int, total: int, donors: int) -> None:
            tell("progress", received=received, total=total, donors=donors)

        started = time.monotonic()
        taken = self.averager.take_state(None, WAIT, told)
        seconds = time.monotonic() - started
        with taken.chunks as chunks:
            tree = taken.tree
            tree.check(range(len(tree)), chunks)
            size = sum(tree.place(index)[1] for index in range(len(tree)))
            tell("taken", seconds=seconds, size=size, received=taken.received, donors=len(taken.donors))


def work(args: argparse.Namespace) -> None:
    """What one host runs."""
    from tt_cli.supervisor.reporter import die_with_parent, raise_file_limit

    die_with_parent()
    raise_file_limit()
    commands = Commands()
    peer = Peer(args.home, args.host, args.known, args.size)
    tell("listening", addresses=peer.addresses)
    if args.work == "donor":
        peer.hold()
        tell("holding")
        commands.ended.wait()
    else:
        peer.board.fresh_view()
        commands.go.wait()
        if not commands.ended.is_set():
            peer.take()
        commands.ended.wait()
    os._exit(0)  # its children die with it


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both downloads. Raises NoNetwork where there are no namespaces."""
    size = QUICK_BYTES if args.quick else STATE_BYTES
    with tempfile.TemporaryDirectory(prefix="state-download-") as scratch, Network(DONORS + 2) as network:
        network.limit(DONOR_MBIT, *network.hosts[:DONORS])
        network.limit(JOINER_MBIT, *network.hosts[DONORS:])
        peers: list[Launched] = []
        known: list[str] = []
        try:
            for number, host in enumerate(network.hosts):
                home = Path(scratch) / str(number)
                home.mkdir()
                kind = "donor" if number < DONORS else "joiner"
                more = [word for address in known for word in ("--known", address)]
                command = ["--work", kind, "--home", home, "--host", host.address, "--size", size, *more]
                with host.entered():
                    peers.append(Launched(f"{kind} {number}", "scripts.benchmarks.download", command, home / "log"))
                if number == 0:
                    peers[0].wait_for(lambda: peers[0].of("listening"), WAIT, "the DHT")
                    known = peers[0].of("listening")[0]["addresses"]
            for peer in peers:
                awaited = "holding" if peer in peers[:DONORS] else "listening"
                peer.wait_for(partial(peer.of, awaited), WAIT, awaited)
            whole = _download(network, peers, DONORS, None)
            killed = _download(network, peers, DONORS + 1, peers[1])
        finally:
            for peer in peers:
                peer.kill()
    return {
        "state_download_line_share": whole["share"],
        "state_download_frames_share": whole["frames_share"],
        "state_download_seconds": whole["seconds"],
        "state_download_killed_line_share": killed["share"],
        "state_download_killed_frames_share": killed["frames_share"],
        "state_download_killed_seconds": killed["seconds"],
        "state_download_killed_at": killed["killed_at"],
        "state_download_bytes": whole["size"],
        "state_download_cpu_seconds": whole["cpu"],
    }


def _download(network: Network, peers: list[Launched], number: int, victim: Launched | None) -> dict[str, Any]:
    """One joiner takes the state; the victim is killed when half of it has come."""
    joiner = peers[number]
    before, cpu = network.traffic()[number], _cpu(peers)
    joiner.go()
    killed_at = None
    if victim is not None:
        joiner.wait_for(lambda: any(2 * p["received"] > p["total"] for p in joiner.of("progress")), WAIT, "the half")
        last = joiner.of("progress")[-1]
        killed_at = last["received"] / last["total"]
        victim.kill()
    joiner.wait_for(lambda: joiner.of("taken"), WAIT, "the whole state")
    came = network.traffic()[number].since(before).received
    taken = joiner.of("taken")[0]
    line = JOINER_MBIT * 1e6 / 8 * taken["seconds"]
    return {
        **taken,
        "share": round(taken["size"] / line, 3),
        "frames_share": round(came / line, 3),
        "seconds": round(taken["seconds"], 2),
        "killed_at": killed_at,
        "cpu": round(_cpu(peers) - cpu, 1) if victim is None else None,
    }


def _cpu(peers: list[Launched]) -> float:
    """CPU seconds so far of all peers' processes."""
    return sum(family_cpu_seconds(peer.pid) for peer in peers if peer.running)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("work", "home", "host", "size"):
        parser.add_argument(f"--{name}", type={"home": Path, "size": int}.get(name, str))
    parser.add_argument("--known", action="append", default=[])
    work(parser.parse_args())
