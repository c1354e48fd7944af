"""Members that lie: what they say instead of what the protocol has them say, to whom."""

from __future__ import annotations

import random
from typing import Any

from hivemind.p2p import PeerID
from simulation.network import Lie, Node

METHODS = ("rpc_aggregate_part", "rpc_settle", "rpc_fetch_average", "rpc_audit", "rpc_join_group", "rpc_accuse")


def liar(how: str) -> Lie:
    """A liar of a kind, drawn from a seed: "noise 17"."""
    kind, _, seed = how.partition(" ")
    return KINDS[kind](random.Random(seed))


def _some(entropy: random.Random) -> tuple[set[str], float]:
    """The methods about which one lies (questions and answers), and how often."""
    methods = [method + end for method in METHODS for end in ("", "!")]
    return set(entropy.sample(methods, entropy.randint(1, 4))), entropy.choice([0.1, 0.5, 1.0])


def noise(entropy: random.Random) -> Lie:
    """Turns bytes of what it says over."""
    methods, often = _some(entropy)

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method not in methods or entropy.random() >= often:
            return message
        said = bytearray(message.SerializeToString())
        for _ in range(entropy.randint(1, 4) if said else 0):
            said[entropy.randrange(len(said))] ^= entropy.randrange(1, 256)
        try:
            return type(message).FromString(bytes(said))
        except Exception:  # no message at all
            return None

    return lie


def mute(entropy: random.Random) -> Lie:
    """Says nothing, to some."""
    methods, often = _some(entropy)

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        chosen = random.Random(f"{peer} {method} {often}").random() < often
        return None if method in methods and chosen else message

    return lie


def repeat(entropy: random.Random) -> Lie:
    """Says again what it said before."""
    methods, often = _some(entropy)
    said: dict[str, Any] = {}

    def lie(node: Node, peer: PeerID, method: str, message: Any) -> Any:
        before = said.setdefault(method, message)
        return before if method in methods and entropy.random() < often else message

    return lie


KINDS = {"noise": noise, "mute": mute, "repeat": repeat}
