"""Scenarios: the kinds of schedules, each of what goes wrong together, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """What may go wrong, at most. loss, twice: see `Line`. cuts, crashes, stops, slow, clients: how many of them.
    stalls: stops of a machine, or a process of it, so many. cut_seconds: of a cut, at most. moments: cuts that begin
    with a certain message of the protocol. deaths: crashes and hangs that do. methods: of these messages, None for all.
    newest: who crashes begins again from its newest state.

    seconds: until all faults are over; least_seconds: of one. skew: seconds. liars: how members may lie, less than a
    third of them. users: in a closed run, of so many users, one of whom has all other peers; then one user lies, with
    all of them. phantoms: trainers that do not exist, of which somebody writes records to the end, at most. waits:
    members compute nothing while a round has their gradient, as with local steps. orders: of the organiser, to pause,
    to go back, or that somebody is banned; then each member has a user of its own. auxiliaries: peers of which so many
    are there, through which members join. keepers: DHT nodes are real ones, which keep each other's records. apart:
    cuts last for longer than members remember each other.
    """

    loss: float = 0.0
    twice: float = 0.0
    cuts: int = 0
    cut_seconds: float = 5.0
    moments: int = 0
    deaths: int = 0
    methods: tuple[str, ...] | None = None
    crashes: int = 0
    newest: bool = False
    stops: int = 0
    stalls: int = 0
    slow: int = 0
    clients: int = 0
    skew: float = 0.0
    liars: tuple[str, ...] = ()
    phantoms: int = 0
    orders: int = 0
    auxiliaries: int = 0
    keepers: bool = False
    apart: bool = False
    users: tuple[int, ...] = ()
    aggregation: str = "mean"
    waits: bool = False
    sizes: tuple[int, ...] = (3, 3, 4, 4, 5, 5, 6, 8)
    seconds: float = 10.0
    least_seconds: float = 0.05


SCENARIOS = {
    "calm": Scenario(),
    "lossy": Scenario(loss=0.01, twice=0.05),
    "crash": Scenario(crashes=2, clients=1),
    "homes": Scenario(loss=0.002, crashes=1, cuts=1, stops=1, clients=8, sizes=(7, 7, 10)),
    "restart": Scenario(crashes=4, cuts=1, sizes=(3, 3, 4, 5)),
    "partition": Scenario(cuts=2),
    "split": Scenario(loss=0.03, cuts=12, cut_seconds=0.4, sizes=(3, 3, 4, 5)),
    "moment": Scenario(moments=3, sizes=(3, 3, 4, 5)),
    "long": Scenario(cuts=1, cut_seconds=80.0, least_seconds=60.0, seconds=100.0, sizes=(2, 3)),
    "hang": Scenario(stops=2, slow=2, skew=2.0),
    "everything": Scenario(loss=0.005, twice=0.02, cuts=1, crashes=1, stops=1, slow=1, clients=1, skew=2.0),
    "local steps": Scenario(loss=0.005, cuts=1, crashes=1, stops=1, slow=1, clients=1, waits=True),
    "stall": Scenario(stalls=8, crashes=2, cuts=2, clients=1, loss=0.001, sizes=(2, 3, 4, 4, 5), seconds=45.0),
    "pair": Scenario(loss=0.005, cuts=1, crashes=1, stops=1, sizes=(2,)),
    "liar": Scenario(liars=("noise", "mute", "repeat", "broken"), aggregation="centered_clip", sizes=(4, 5, 6, 7)),
    "donor": Scenario(liars=("donor",), crashes=3, sizes=(4, 5, 6)),
    "liar of two": Scenario(liars=("noise", "mute", "repeat", "broken", "unsigned"), sizes=(2,)),
    "large": Scenario(loss=0.001, crashes=2, cuts=1, sizes=(16, 32, 64)),
    "leader": Scenario(liars=("leader",), sizes=(3, 4, 4, 5, 6, 7)),
    "wrong": Scenario(liars=("wrong", "wrong", "evasive", "unsigned"), aggregation="centered_clip", sizes=(4, 5, 6)),
    "two-faced": Scenario(liars=("two-faced", "double"), aggregation="centered_clip", sizes=(4, 5, 6)),
    "locks": Scenario(
        liars=("locks", "locks", "two-faced", "double"), moments=4, aggregation="centered_clip", sizes=(4, 5, 6, 7)
    ),
    "precommit": Scenario(
        liars=("locks", "two-faced", "double", "leader", "hoarder"),
        moments=4,
        deaths=2,
        methods=("rpc_settle!", "rpc_precommit", "rpc_precommit!", "rpc_join_group!"),
        aggregation="centered_clip",
        sizes=(4, 4, 4, 5, 7),
    ),
    "orders": Scenario(loss=0.002, cuts=1, crashes=2, stalls=2, clients=1, orders=3, seconds=20.0),
    "keepers": Scenario(
        stalls=6, crashes=2, cuts=2, clients=1, loss=0.002, sizes=(3, 4, 5, 6, 8), seconds=35.0, keepers=True
    ),
    "lying keeper": Scenario(
        liars=("dht-noise", "dht-mute", "dht-repeat", "hider", "unfit", "inventor", "two-voiced"),
        crashes=2,
        newest=True,
        cuts=1,
        clients=1,
        loss=0.001,
        sizes=(4, 5, 6),
        seconds=25.0,
        keepers=True,
    ),
    "apart": Scenario(
        cuts=1,
        cut_seconds=80.0,
        least_seconds=60.0,
        seconds=100.0,
        crashes=1,
        sizes=(4, 4, 5, 6),
        keepers=True,
        apart=True,
    ),
    "auxiliary": Scenario(
        stalls=4,
        crashes=4,
        cuts=1,
        clients=1,
        loss=0.001,
        sizes=(2, 3, 4, 5),
        seconds=40.0,
        auxiliaries=2,
        keepers=True,
    ),
    "auxiliary orders": Scenario(
        stalls=2, crashes=2, cuts=1, clients=1, orders=3, sizes=(2, 3, 4), seconds=30.0, auxiliaries=1, keepers=True
    ),
    "lying home": Scenario(
        liars=("two-faced", "double", "locks", "leader", "mute", "wrong", "noise"),
        clients=8,
        aggregation="centered_clip",
        sizes=(4, 4, 5, 7),
    ),
    "users": Scenario(loss=0.005, cuts=1, moments=2, crashes=2, users=(3, 3, 4, 5), sizes=(5, 6, 7, 8)),
    "lying user": Scenario(
        users=(4, 4, 5),
        liars=("noise", "mute", "wrong", "two-faced", "double", "locks", "leader", "evasive"),
        moments=2,
        aggregation="centered_clip",
        sizes=(6, 7, 8),
    ),
    "phantoms": Scenario(phantoms=12, crashes=1, loss=0.001, sizes=(2, 3, 4, 5)),
    "reducer": Scenario(deaths=4, clients=1, loss=0.001, sizes=(3, 3, 4, 4, 5, 6, 8)),
    "ballot": Scenario(moments=3, cuts=1, crashes=3, newest=True, sizes=(4, 4, 5)),
    "backup": Scenario(
        deaths=3,
        liars=("noise", "mute", "repeat", "broken", "unsigned", "wrong", "two-faced"),
        aggregation="centered_clip",
        sizes=(4, 5, 6, 7),
    ),
}
