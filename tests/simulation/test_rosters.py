"""Of a large group the leader tells some members all joins, and they tell the others: whoever lies or hangs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from simulation.averager import SimulatedAverager
from simulation.lines import Lines
from simulation.machine import run_of
from simulation.network import Line, Network, Node
from simulation.rounds import LinedPeer, group_seconds
from simulation.virtual import in_virtual_time

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.rendezvous import RELAYS as ALL_TOLD
from tt_cli.swarm.allreduce.rendezvous import LeaderRendezvous
from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import RoundPlan

MEMBERS, RELAYS, PATIENCE = 8, 3, 8.0


class FewRelays(LeaderRendezvous):
    """As leader it tells few."""

    relays = RELAYS


class FewTold(SimulatedAverager):
    """Whose groups are large."""

    rendezvous_type = FewRelays


class Group:
    """Eight members, the first of whom leads. shown: by whom, to whom joins were told by others than the leader.

    lie: of the joins that a member tells, by its number; None for nothing. leads: of what the leader says.
    """

    def __init__(self, lie: Callable[[int, Any], Any], leads: Callable[[Any], Any] = lambda message: message):
        self.shown, self._lie, self._leads = list[tuple[int, int]](), lie, leads

    def _said(self, node: Node, peer: PeerID, method: str, message: Any) -> Any:
        if method == "rpc_join_group!" and len(message.gathered):
            return self._leads(message)
        if method != "rpc_roster!":
            return message
        self.shown.append((node.number, node.network.nodes[peer].number))
        return self._lie(node.number, message)

    async def round(self) -> tuple[list[RoundResult], float]:
        """What each has of it, and the seconds until all have the group."""
        times = {"swarm.averaging_timeout": 60.0, "swarm.matchmaking_time": 20.0, "swarm.next_chunk_timeout": PATIENCE}
        run, gradient = run_of(MEMBERS, "mean").replaced(times), {"weight": torch.ones(256)}
        network = Network(random.Random(0), Line(), (), {}, Lines({}))
        self.peers = [LinedPeer(network, number, run, gradient, FewTold) for number in range(MEMBERS)]
        for peer in self.peers:
            peer.averager._node.liar = self._said
        names = frozenset(peer.name for peer in self.peers)
        plan, began = RoundPlan("0_00", names, self.peers[0].name, MEMBERS), asyncio.get_running_loop().time()
        results = await asyncio.gather(*(peer.round(plan) for peer in self.peers))
        return results, max(peer.averager.began_at for peer in self.peers) - began


def honest(number: int, message: Any) -> Any:
    return message


def silent(number: int, message: Any) -> Any:
    return None if number else message


def of_others(number: int, message: Any) -> Any:
    """All of the joins but one, in whose place another one stands."""
    (entries,) = wire.ROSTER.read(message)
    return wire.ROSTER.message(((*entries[:-1], entries[0]),)) if number else message


def nonsense(number: int, message: Any) -> Any:
    return wire.RENEWED.message((True,)) if number else message


@pytest.mark.parametrize("lie", [honest, silent, of_others, nonsense])
def test_all_come_to_one_group_whatever_relays_say(lie: Callable[[int, Any], Any]) -> None:
    group = Group(lie)
    results, seconds = in_virtual_time(group.round())
    assert [result.problem for result in results] == [""] * MEMBERS
    assert len(results[0].members) == MEMBERS and seconds < PATIENCE
    tellers, told = {teller for teller, _ in group.shown}, {asker for _, asker in group.shown}
    assert len(told) == MEMBERS - 1 - RELAYS and len(tellers - {0}) == RELAYS
    assert (0 in tellers) == (lie is not honest), "the leader is asked last"


def test_a_group_of_which_nobody_knows_more_than_an_id_comes_to_nothing_in_time() -> None:
    def invented(message: Any) -> Any:
        message.gathered[:] = [bytes(32)] * len(message.gathered)
        return message

    results, _ = in_virtual_time(Group(honest, invented).round())
    assert all("nobody told who is in the group" in result.problem for result in results[1:])


def test_a_stranger_is_told_nothing() -> None:
    async def ask() -> list[str]:
        group, words = Group(honest), list[str]()
        await group.round()
        first, stranger = group.peers[0].averager, PeerID(b"stranger")
        group_id, _, _ = first._keys().formed[-1]
        for asked, asker in ((group_id, stranger), (bytes(32), first.peer_id)):
            try:
                await first._keys().entries(asked, asker)
            except (ValueError, TimeoutError) as error:
                words.append(str(error) or type(error).__name__)
        return words

    assert in_virtual_time(ask()) == ["not a member of this group", "TimeoutError"]


def test_a_group_forms_in_a_part_of_the_time_that_its_leader_alone_would_need() -> None:
    mbit = [0.1] * (ALL_TOLD + 1)
    alone, relayed = (in_virtual_time(group_seconds(mbit, kind)) for kind in (SimulatedAverager, FewTold))
    assert relayed < alone / 1.4
