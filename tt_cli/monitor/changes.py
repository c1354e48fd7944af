"""Lines of the monitor's log: what happened between two snapshots, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from tt_cli.monitor.scene import pause_words, peer_name, standing
from tt_cli.swarm.records.snapshot import PeerView, SwarmSnapshot
from tt_cli.terminal.format import clean, loss_value, plural, short_digest

NAMED = 4
"""Of many peers to which the same happened."""
FAR_BEHIND = 2  # steps; one is nothing: peers step one after the other


def changes(before: SwarmSnapshot, after: SwarmSnapshot) -> list[str]:
    """One line for each thing that happened; all text from peers is clean."""
    old, new = ({peer.peer_id: peer for peer in swarm.peers} for swarm in (before, after))
    stayed = [(old[peer_id], peer) for peer_id, peer in new.items() if peer_id in old]
    return [
        *_told("joined", [peer for peer_id, peer in new.items() if peer_id not in old], after),
        *_told("left", [peer for peer_id, peer in old.items() if peer_id not in new], after),
        *_steps(before, after),
        *_pause(before, after),
        *_rounds(stayed, after),
        *_standing(stayed, after),
    ]


def first_words(snapshot: SwarmSnapshot) -> str:
    """The log's first line."""
    helpers = sum(peer.role == "aux" for peer in snapshot.peers)
    loss = f", loss {loss_value(snapshot.loss)}" if snapshot.loss is not None else ""
    who = plural(snapshot.trainers, "trainer") + (f" and {plural(helpers, 'aux peer')}" if helpers else "")
    return f"watching {who} at step {snapshot.epoch:,}{loss}"


def names(peers: Sequence[PeerView], swarm: SwarmSnapshot) -> str:
    """ada …9A2r1C, bob …77b0aa and 3 others."""
    called = [peer_name(peer, swarm) for peer in peers]
    if len(called) > NAMED:
        called = [*called[: NAMED - 1], f"{len(called) - NAMED + 1} others"]
    return " and ".join(filter(None, (", ".join(called[:-1]), called[-1])))


def _told(what: str, peers: Sequence[PeerView], swarm: SwarmSnapshot) -> list[str]:
    return [f"{names(peers, swarm)} {what}"] if peers else []


def _steps(before: SwarmSnapshot, after: SwarmSnapshot) -> list[str]:
    if after.epoch < before.epoch:
        return [f"the run went back from step {before.epoch:,} to step {after.epoch:,}"]
    if after.epoch == before.epoch:
        return []
    loss = f": loss {loss_value(after.loss)}" if after.loss is not None else ""
    if after.epoch == before.epoch + 1:
        return [f"step {after.epoch:,} made{loss}"]
    return [f"steps {before.epoch + 1:,} to {after.epoch:,} made{loss}"]


def _pause(before: SwarmSnapshot, after: SwarmSnapshot) -> list[str]:
    return [pause_words(after) or "the organiser lets the run go on"] if after.paused != before.paused else []


def _rounds(stayed: Sequence[tuple[PeerView, PeerView]], swarm: SwarmSnapshot) -> list[str]:
    """Rounds that were no ordinary ones, as those say who were in them."""
    said: dict[str, list[PeerView]] = {}
    for old, peer in stayed:
        words = clean(peer.round)
        if words and peer.round != old.round and not (words.startswith("step ") and " made " in words):
            said.setdefault(words, []).append(peer)
    return [f"{words} (so {names(peers, swarm)})" for words, peers in said.items()]


def _standing(stayed: Sequence[tuple[PeerView, PeerView]], swarm: SwarmSnapshot) -> list[str]:
    """Lines about peers that fell behind or caught up, differ or agree again, are accused or clipped."""
    happened: dict[str, list[PeerView]] = {}
    for old, peer in stayed:
        if peer.role != "trainer":
            pass  # it takes the state only now and then
        elif peer.lag >= FAR_BEHIND > old.lag:
            happened.setdefault(f"fell {plural(peer.lag, 'step')} behind", []).append(peer)
        elif peer.lag == 0 and old.lag >= FAR_BEHIND:
            happened.setdefault("caught up", []).append(peer)
        differs = [bool(state.digest) and not state.in_agreement for state in (old, peer)]
        if differs == [False, True]:
            happened.setdefault(f"came to another state than most: {short_digest(peer.digest)}", []).append(peer)
        elif differs == [True, False] and peer.in_agreement:
            happened.setdefault("agrees with most again", []).append(peer)
        for words in standing(peer, swarm.trainers):
            if words not in standing(old, swarm.trainers):
                happened.setdefault(f"{words}, most say", []).append(peer)
    return [f"{names(peers, swarm)} {words}" for words, peers in happened.items()]
