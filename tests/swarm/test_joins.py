"""Signed joins: nobody but a member says what it is in a group, and nobody leads by its id."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from simulation.virtual import in_virtual_time
from swarm.joins import ENTRIES, NOW, entry_of, group_of, join_of, packed, rendezvous
from swarm.made import record
from swarm.rounds import PEERS, SIGNERS
from testbed.passes import Issuer

from tt_cli.run import load_run
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce import rendezvous as joining
from tt_cli.swarm.allreduce.messages import NotProven, SignedJoin, open_envelope
from tt_cli.swarm.allreduce.rendezvous import (
    ASKED_A_SECOND,
    POLL_SECONDS,
    SKEW,
    FalseGroup,
    group_id_of,
    join_in,
    joins_of,
    member_in,
    read_entry,
    read_join,
)
from tt_cli.swarm.allreduce.round_plan import RoundPlan, leader_of
from tt_cli.swarm.clock import loop_time
from tt_cli.swarm.membership.admission import Admission, NotAdmitted

OPEN = Admission(load_run("emoji"))
PATIENCE = 9.0


def joins(group: GroupInfo, me: int = 1) -> dict[PeerID, SignedJoin]:
    return joins_of(group, ENTRIES[me], PEERS[me], OPEN, open_envelope, PATIENCE)


def altered(entry: bytes, **changes: object) -> bytes:
    """With the signature that it had."""
    body, key, signature = wire.ENVELOPE.read(read_entry(entry)[0])
    join = replace(SignedJoin(*wire.JOIN.read(body)[1:]), **changes)  # type: ignore[arg-type] # by name
    changed = wire.JOIN.pack(("join", *vars(join).values()))  # type: ignore[arg-type] # the form's types
    return packed(wire.ENVELOPE.pack((changed, key, signature)))


def test_a_group_is_what_its_members_signed_whatever_the_leader_says_beside_it() -> None:
    group = group_of(0, 1, 2, m2=entry_of(2, listens=False))
    found = joins(group)
    assert {peer: join.listens for peer, join in found.items()} == dict(zip(PEERS, (True, True, False), strict=False))
    mode = packed(read_entry(ENTRIES[0])[0], mode=1)
    assert joins(group_of(0, 1, m0=mode))[PEERS[0]].listens, "hivemind's word for its mode counts nowhere"


FALSE: dict[str, tuple[GroupInfo, str]] = {
    "without this member": (group_of(0, 2), "without what this peer signed"),
    "with another word of this member's": (group_of(0, 1, m1=entry_of(1)), "without what this peer signed"),
    "with this member's word altered": (
        group_of(0, 1, m1=altered(ENTRIES[1], listens=False)),
        "without what this peer signed",
    ),
    "in which another is said not to listen": (
        group_of(0, 1, 2, m2=altered(ENTRIES[2], listens=False)),
        "joined with nonsense",
    ),
    "in which the leader signs for another": (
        group_of(0, 1, 2, m2=packed(join_of(listens=False).sign(SIGNERS[0]))),
        "it was signed by somebody else",
    ),
    "with nonsense": (group_of(0, 1, 2, m2=b"nonsense"), "joined with nonsense"),
    "of another run": (group_of(0, 1, 2, m2=entry_of(2, run="other-12345678")), "for another one"),
    "with a join of an earlier step": (group_of(0, 1, 2, m2=entry_of(2, state_key="4_abc")), "for another one"),
    "with a join for another leader": (group_of(0, 1, 2, m2=entry_of(2, leader=str(PEERS[3]))), "for another one"),
    "with a join of an earlier time": (
        group_of(0, 1, 2, m2=entry_of(2, time=NOW - 3 * (PATIENCE + SKEW) - 1)),
        "for another one",
    ),
    "in which one is there twice": (group_of(0, 1, 2, 2), "of other members than joins"),
    "with more joins than members": (replace(group_of(0, 1), gathered=tuple(ENTRIES[:3])), "than joins"),
    "with more members than joins": (replace(group_of(0, 1, 2), gathered=tuple(ENTRIES[:2])), "than joins"),
    "without its leader": (group_of(1, 2), "without itself"),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_group_that_no_honest_leader_hands_out_is_refused(name: str) -> None:
    group, words = FALSE[name]
    with pytest.raises(FalseGroup, match=words):
        joins(group)


def test_nobody_is_in_a_group_without_a_pass_that_counts() -> None:
    closed = Admission(Issuer().closed(load_run("emoji")))
    with pytest.raises(NotAdmitted, match="no member"):
        member_in(ENTRIES[0], PEERS[0], closed)
    with pytest.raises(NotAdmitted, match="no member"):
        joins_of(group_of(0, 1), ENTRIES[1], PEERS[1], closed, open_envelope, PATIENCE)


def test_a_groups_id_follows_from_all_joins_and_from_nothing_else() -> None:
    usual = group_id_of(ENTRIES)
    assert group_id_of(ENTRIES[::-1]) == usual and len(usual) == 32
    others = [ENTRIES[:3], [*ENTRIES, ENTRIES[0]], [*ENTRIES[:3], entry_of(3)], [*ENTRIES[:2], ENTRIES[2] + ENTRIES[3]]]
    assert len({usual, *map(group_id_of, others)}) == 5


def test_a_signature_is_verified_once() -> None:
    """Whatever votes are beside it, which would take memory with each."""
    entry = entry_of(3)
    before = read_join.cache_info()
    for votes in range(5):
        join_in(joining.entry_of(read_entry(entry)[0], [b"vote"] * votes), PEERS[3], open_envelope)
    after = read_join.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 4)
    with pytest.raises(NotProven):
        join_in(entry, PEERS[2], open_envelope)


def test_members_of_a_large_group_ask_its_leader_more_rarely() -> None:
    """A leader that is late would be asked a thousand times a second by a hundred."""

    async def seconds(members: int) -> float:
        point = rendezvous()
        point.plan = RoundPlan("5_aa", frozenset(map(str, range(members))), str(PEERS[1]))
        began = loop_time()
        for _ in range(5):
            assert [leader for leader, _ in await point.get_averagers("", only_active=True)] == PEERS[1:2]
        return loop_time() - began

    assert in_virtual_time(seconds(4)) == pytest.approx(4 * POLL_SECONDS)
    assert in_virtual_time(seconds(400)) == pytest.approx(4 * 400 / ASKED_A_SECOND)


MEMBERS = ("a", "b", "c", "d", "e")


def test_nobody_leads_by_its_id() -> None:
    """With five members each has a fifth of 256 states: 51, give or take four deviations."""
    led = Counter(leader_of(f"{step}_ab", MEMBERS) for step in range(256))
    assert led.keys() == set(MEMBERS) and all(25 < count < 77 for count in led.values())


def test_all_find_the_same_leader_among_those_who_accept_connections() -> None:
    records = [record(peer_id=name, client_mode=name == "a") for name in MEMBERS]
    (plan,) = {RoundPlan.of("5_aa", some, {}) for some in (records, records[::-1])}
    assert plan.leader == leader_of("5_aa", MEMBERS[1:]) and plan.members == set(MEMBERS)
    assert RoundPlan.of("5_aa", records[:1], {}).leader == ""


def test_who_have_met_unlike_members_seek_one_leader_in_every_second_turn() -> None:
    """Else each of two that lead by their own count could wait for the others for as long as both are there."""
    records = [record(peer_id=name, client_mode=name == "d") for name in "abcd"]
    counts = ({"a": 1, "b": 1, "d": 1}, {"a": 1, "c": 1, "d": 1}, dict.fromkeys("abcd", 1))
    leaders = set()
    for turn in range(40):
        led = {RoundPlan.of("5_aa", records, voices, turn, records).leader for voices in counts}
        assert len(led) == 1 or turn % 2 == 0
        leaders |= led if turn % 2 else set()
    assert leaders == set("abc")


def test_newcomers_seek_the_leader_that_those_seek_who_have_made_steps() -> None:
    records = [record(peer_id=name, vote=name in "ab") for name in MEMBERS]
    for step in range(32):
        veterans = RoundPlan.of(f"{step}_aa", records, dict.fromkeys(MEMBERS, 1))
        assert veterans.leader == RoundPlan.of(f"{step}_aa", records, {"a": 1, "b": 1}).leader


def test_nobody_leads_every_round_because_nobody_else_votes() -> None:
    records = [record(peer_id=name, vote=name == "a") for name in MEMBERS]
    assert {RoundPlan.of(f"{step}_aa", records, {}).leader for step in range(256)} == set(MEMBERS)
