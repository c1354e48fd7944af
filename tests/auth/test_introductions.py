"""Whom the authority names to those who get a pass: of each user one peer, drawn by chance, where it said itself."""

from __future__ import annotations

from collections.abc import Sequence

from auth.peers import START

from tt_cli.auth.authority.introductions import MOST_NAMED, Introductions
from tt_cli.identity.passes import Notice, Pass

LIFE = 3600.0


class Door:
    """An authority's introductions, and who comes for a pass."""

    def __init__(self) -> None:
        self.introductions, self.now, self.banned = Introductions(), START, frozenset[str]()

    def told(self, user: str, peer: int, *places: str) -> Sequence[str]:
        """What this peer of a user hears, which says that it is there."""
        held = Pass(user, name(peer), "run", self.now, self.now + LIFE)
        notice = Notice("run", 1, self.now, self.banned, frozenset(), "", None)
        return self.introductions.of(held, places, notice)


def name(peer: int) -> str:
    return "QmSomePeer" + "".join("abcdefghij"[int(digit)] for digit in str(peer))


def place(peer: int, host: int = 1) -> str:
    return f"/ip4/203.0.113.{host}/tcp/31337/p2p/{name(peer)}"


def test_where_a_member_said_to_be_is_told_until_its_pass_ends() -> None:
    door = Door()
    assert door.told("ada", 1, place(1), place(1, 2)) == [], "nobody is told of itself"
    beyond = (f"/ip4/203.0.113.2/{way}/p2p/{name(2)}" for way in ("tcp/1/madeup", "udp/1/quic-v1", "udp/1"))
    by_bob = place(1, 66), f"/tcp/p2p/{name(2)}", *beyond, place(2)
    assert door.told("bob", 2, *by_bob) == [place(1), place(1, 2)], "nobody speaks for another peer"
    told = set(door.told("carla", 3))
    assert told == {place(1), place(1, 2), place(2)}, "with others libp2p's daemon does not start, or late"
    door.told("ada", 1)
    assert door.told("carla", 3) == [place(2)], "who says nothing any more accepts no connections"
    door.now += LIFE
    assert door.told("carla", 3) == []


def test_nobody_is_led_to_the_banned() -> None:
    door = Door()
    for peer, user in enumerate(("ada", "Bob")):
        door.told(user, peer, place(peer))
    door.banned = frozenset({"bob"})
    assert door.told("carla", 3) == [place(0)]


def test_one_peer_of_each_user_is_named_drawn_by_chance() -> None:
    door, users = Door(), 2 * MOST_NAMED
    for peer in range(users):
        door.told(f"user-{peer}", peer, place(peer))
        door.told("MALLORY" if peer % 2 else "mallory", users + peer, place(users + peer))
    named = [door.told("newcomer", 99) for _ in range(300)]
    assert {len(one) for one in named} == {MOST_NAMED}
    assert {address for one in named for address in one} == {place(peer) for peer in range(2 * users)}
    hers = {place(peer) for peer in range(users, 2 * users)}
    assert max(len(hers & set(one)) for one in named) == 1
