"""What workers tell, for the tests of their screens: single events with usual values, and a short life."""

from __future__ import annotations

from typing import Any

from monitor.made import snapshot, trainer

from tt_cli.supervisor import events as e

ID = "12D3KooWQwEw2y9KSEWsKbqcYQDtxHSbBqvzhdT6Sr2ncf9A2r1C"
LOOPBACK, LAN = f"/ip4/127.0.0.1/tcp/31337/p2p/{ID}", f"/ip4/192.168.1.20/tcp/31337/p2p/{ID}"
SIZES = [(80, 24), (200, 50), (40, 12), (20, 6)]
TITLES = ("tt join emoji", "emoji-1a2b3c4d")


def progress(at: float, **changes: Any) -> e.Progress:
    usual: dict[str, Any] = {
        "epoch": 11,
        "samples": 100,
        "target_samples": 256,
        "peers": 3,
        "my_samples": 5000,
        "my_samples_per_second": 12.14,
        "swarm_samples_per_second": 35.2,
        "my_share": 0.345,
        "eta": 4.4,
        "loss": 3.5,
        "bytes_sent": 12_100_000,
        "bytes_received": 33_400_000,
    }
    return e.Progress(**{**usual, **changes}, at=at)


def made(at: float, epoch: int, outcome: str = "committed", **changes: Any) -> e.Round:
    usual: dict[str, Any] = {
        "words": f"step {epoch} made with 2 others, 256 samples",
        "members": ["a", "b", "c"],
        "received": 1.0,
        "samples": 256,
        "seconds": {"matchmaking": 1.0, "averaging": 2.0, "optimizer": 0.5, "whole": 3.5},
    }
    return e.Round(epoch, outcome, **{**usual, **changes}, at=at)


def stepped(at: float, epoch: int, loss: float | None = 3.25) -> e.Step:
    return e.Step(epoch, loss, 0.01, 1.0, "3fa9c1d2aa55", at=at)


def swarm(epoch: int, peers: int = 2, **changes: Any) -> dict[str, Any]:
    """A snapshot as an auxiliary peer tells it."""
    crowd = [trainer(peer_id=f"QmWjTgY4Hjbz8pQ4kYN{i:05d}", epoch=epoch, round="", digest="aa") for i in range(peers)]
    usual = {"epoch": epoch, "samples_per_second": 24.0, "loss": 3.0, "digest": "aa", "trainers": peers, "peers": crowd}
    history = [(step, 9.0 / step, 0.0) for step in range(1, epoch)]
    return snapshot(**{**usual, "history": history, **changes}).to_json()


TRAINING: list[e.Event] = [
    e.Phase("starting", "joining the DHT", at=0.0),
    e.Choice("micro-batch", "16", "fastest of 4, 8, 16 on cpu", at=1.0),
    e.Listening(ID, [LOOPBACK, LAN], False, at=2.0),
    e.Phase("syncing", "taking over step 11", at=3.0),
    e.Synchronised(11, "QmWjTgY4Hjbz8pQ4kYNa2r1C", "77b0aa", 2.5, 34_000_000, chunks=33, at=5.5),
    e.Phase("training", "towards step 12", at=6.0),
    progress(7.0),
    e.Phase("averaging", "with 2 others", at=14.0),
    made(16.0, 12),
    stepped(16.4, 12),
    e.Contribution(12, 100, at=16.4),
    e.Phase("training", "towards step 13", at=16.5),
    progress(20.0, epoch=12, samples=90),
    made(26.0, 12, "failed", words="round repeated: no group formed in time", members=[], received=0.0),
    e.Trouble("matchmaking", "round repeated: no group formed in time", "it is sought again", at=26.0),
    made(30.0, 13, rejected={"QmWjTgY4Hjbz8pQ4kYNbadbad": "not finite"}),
    stepped(30.0, 13, None),
    progress(37.0, epoch=13, samples=90, eta=None),
    made(38.0, 14, "alone", members=["a"]),
    stepped(38.0, 14, 3.0),
    e.Saved(14, "/home/anna/step-00000014.safetensors", at=39.0),
    e.Log("2 records of another form were left out", "warning", at=40.0),
    e.Phase("leaving", "writing a backup", at=41.0),
    e.Finished("left", at=42.0),
]
