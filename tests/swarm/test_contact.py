"""Who answers whom, between real DHT nodes; clocks that differ; and when a peer may take itself for the whole swarm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hivemind.dht.protocol
import pytest
from hivemind.dht import DHT, DHTNode
from swarm.made import SteppedClock
from testbed.greeter import listening

from tt_cli.errors import TTError
from tt_cli.identity import multiaddr
from tt_cli.run import load_run
from tt_cli.swarm.allreduce.round_plan import RoundPlan
from tt_cli.swarm.clock import Clock
from tt_cli.swarm.collaboration import Collaboration
from tt_cli.swarm.network import connectivity as room
from tt_cli.swarm.network.addresses import free_port
from tt_cli.swarm.network.connectivity import CUT_OFF, UNSEEN, Connectivity, ConnectivityMonitor
from tt_cli.swarm.network.dht_node import (
    START_SECONDS,
    NobodyAnswered,
    addresses_here,
    addresses_of,
    daemon_pid,
    start_dht,
    stop_dht,
)
from tt_cli.swarm.records.publisher import SwarmState, keep_in_touch

START = partial(start_dht, load_run("emoji"), None, host="127.0.0.1")
AHEAD = 100.0


@pytest.fixture
def start() -> Iterator[Callable[..., DHT]]:
    nodes: list[DHT] = []

    def start(*initial: str) -> DHT:
        nodes.append(START(initial_peers=initial))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.is_alive():
            stop_dht(node)


async def _forget(_: DHT, node: DHTNode) -> None:
    table = node.protocol.routing_table
    for peer in list(table.uid_to_peer_id):
        del table[peer]


async def _avoid(_: DHT, node: DHTNode) -> None:
    for peer in node.protocol.routing_table.peer_id_to_uid:
        node.blacklist.register_failure(peer)


async def _avoided(_: DHT, node: DHTNode) -> int:
    return len(node.blacklist.banned_peers)


async def _known(_: DHT, node: DHTNode) -> int:
    return len(node.protocol.routing_table.uid_to_peer_id)


async def _count(_: DHT, node: DHTNode, peers: Sequence[str]) -> int:
    return len(peers)


def test_a_node_takes_ids_of_more_peers_than_its_pipe_takes_at_once(start: Callable[..., DHT]) -> None:
    """As when more than 300 are kept in touch with: what came after them was never heard. From any thread, too."""
    node, peers = start(), [f"Qm{number:044d}" for number in range(2_000)]

    def ask(count: int) -> int:
        return int(node.run_coroutine(partial(_count, peers=peers[:count]), return_future=True).result(timeout=20.0))

    counts = range(100, 2_001, 50)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, counts)) == [*counts]
    node.shutdown()
    assert node.exitcode == 0, "it was asked to end, and heard that, too"


def test_who_is_on_the_same_machine_need_not_get_through_to_what_others_are_told(start: Callable[..., DHT]) -> None:
    port = free_port("127.0.0.1")
    one = START(initial_peers=[], port=port, announce=["/ip4/203.0.113.7/tcp/4242"])  # no machine has it
    try:
        assert addresses_of(one) == [f"/ip4/203.0.113.7/tcp/4242/p2p/{one.peer_id}"]
        assert addresses_here(one) == [f"/ip4/127.0.0.1/tcp/{port}/p2p/{one.peer_id}", *addresses_of(one)]
        beside = start(*addresses_here(one))
        assert ConnectivityMonitor(beside, []).ask([str(one.peer_id)]).answered == {str(one.peer_id)}
    finally:
        stop_dht(one)


def test_a_node_that_forgot_the_others_is_joined_to_them_again(start: Callable[..., DHT]) -> None:
    one = start()
    address = addresses_of(one)[0]
    two = start(address)
    third = start(address)
    contacts = ConnectivityMonitor(two, [address])
    found = contacts.ask([str(third.peer_id)])
    assert found.answered == found.asked == {str(one.peer_id), str(third.peer_id)}
    assert found.clock is not None and abs(found.clock) < 0.5
    assert contacts.met() == addresses_of(third), "beside the one that it joined through"
    assert not (found.cut_off or found.split) and found.alive

    two.run_coroutine(_forget)
    assert two.run_coroutine(_known) == 0
    contacts.ask(anew=True)
    assert two.run_coroutine(_known) == 2, "the third one's address was remembered"

    stop_dht(one)
    found = contacts.ask()
    assert found.split and not found.cut_off
    stop_dht(third)
    contacts.accompanied([str(third.peer_id)])
    assert contacts.ask().cut_off and contacts.why_not_alone() == CUT_OFF


def test_silent_initial_peers_keep_nobody_out(start: Callable[..., DHT], monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p's daemon dials one after the other, for 5 s each, and has to be up after 30 s."""
    first = start()
    with ExitStack() as stack:
        where = [stack.enter_context(listening(b"")) for _ in range(7)]
        assert START_SECONDS > 5.0 * (room.MOST_MET + 2), "also where those whom it met greet it, and say no more"
        second = start(*where, *addresses_of(first))
        assert second.run_coroutine(_known) == 1
        monkeypatch.setattr(multiaddr, "DIAL_SECONDS", 0.5)
        with pytest.raises(
            NobodyAnswered, match=r"no peer of run emoji-\S+ answered at (/\S+, ){4}…: check the address"
        ):
            start(*where)


def daemon_flags(node: DHT) -> list[bytes]:
    return Path(f"/proc/{daemon_pid(node)}/cmdline").read_bytes().split(b"\0")


def test_no_stranger_can_send_through_a_peer(start: Callable[..., DHT]) -> None:
    flags = daemon_flags(start())
    assert b"-relay=0" in flags and b"-autoRelay=0" in flags


def test_a_daemon_has_room_for_the_connections_of_a_large_swarm(start: Callable[..., DHT]) -> None:
    flags = daemon_flags(start())
    assert b"-connLo=1536" in flags and b"-connHi=2048" in flags


def test_a_clock_that_differs_is_told_at_the_start_and_measured_later(
    start: Callable[..., DHT], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = start()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(hivemind.dht.protocol, "get_dht_time", lambda: time.time() + AHEAD)
        other = start()
    address = addresses_of(other)[0]
    clock = ConnectivityMonitor(mine, [address]).ask().clock
    assert clock is not None and abs(clock + AHEAD) < 5.0, "this machine's is behind"
    with pytest.raises(TTError, match="clock differs from the others' by more than 3 s: set it by the network's time"):
        start(address)


class Answers(ConnectivityMonitor):
    """Without a DHT: `answer` is what pings tell, but for what they tell `first`."""

    def __init__(
        self, *initial: str, clock: Clock | None = None, met: Sequence[str] = (), banned: Set[str] = frozenset()
    ):
        super().__init__(None, initial, clock, met, lambda peer: peer in banned)  # type: ignore[arg-type]
        self.first: list[Connectivity] = []
        self.answer = answers()

    def ask(self, peers: Any = (), *, anew: bool = False) -> Connectivity:
        self.newest = self.first.pop(0) if self.first else self.answer
        return self.newest

    def heard(self, answer: Connectivity) -> None:
        """A moment ago, when something else asked."""
        self._began_at, self.newest = self._clock.monotonic(), answer


JOINED = "/ip4/10.0.0.1/tcp/1/p2p/aux"


class Node:
    """In the place of a DHT node: of those whom it pings, `alive` answer."""

    peer_id, alive = "me", frozenset[str]()

    def run_coroutine(self, ping: Any, return_future: bool) -> Any:
        there = [peer for peer in ping.keywords["known"] if peer in self.alive]
        pings = dict.fromkeys(there, 0.0), {peer: [f"/at/{peer}"] for peer in there}
        return SimpleNamespace(result=lambda timeout: pings)


def answers(*peers: str) -> Connectivity:
    return Connectivity(asked=frozenset({"aux", "a", "b"}), answered=frozenset(peers))


def test_who_was_joined_and_began_anew_is_found_without_being_asked_for(start: Callable[..., DHT]) -> None:
    first = start()
    joined = start(*addresses_of(first))
    joined.run_coroutine(_forget)
    first.run_coroutine(_forget)
    joined.run_coroutine(partial(keep_in_touch, peers=()))
    assert joined.run_coroutine(_known) == 1


def test_who_answers_a_ping_is_avoided_no_more(start: Callable[..., DHT]) -> None:
    first = start()
    joined = start(*addresses_of(first))
    joined.run_coroutine(_avoid)
    assert joined.run_coroutine(_avoided) == 1
    ConnectivityMonitor(joined, addresses_of(first)).ask()
    assert joined.run_coroutine(_avoided) == 0


def test_of_many_that_it_meets_in_weeks_a_peer_remembers_the_newest() -> None:
    node: Any = Node()
    contacts, gone = ConnectivityMonitor(node, [JOINED]), [f"gone-{number}" for number in range(3 * room.MOST_KNOWN)]
    for start in range(0, len(gone), 8):
        some = gone[start : start + 8]
        node.alive = frozenset(("aux", *some))
        contacts.accompanied(some)
        assert contacts.ask(some).answered == node.alive
    node.alive = frozenset(("anna", "ben"))
    found = contacts.ask(["anna"])
    assert found.answered == {"anna"} and len(found.asked) == room.MOST_KNOWN and "me" not in found.asked
    assert contacts.met() == ["/at/anna/p2p/anna"]
    contacts.accompanied(["ben"])
    assert contacts.ask().answered == {"anna", "ben"}, "without a record of theirs"
    assert contacts.why_not_alone() == UNSEEN.format("another trainer")


def test_only_who_joined_others_and_trained_with_some_is_cut_off() -> None:
    first = Answers()
    first.accompanied("a")
    assert not first.why_not_alone(), "where others come"
    alone = Answers(JOINED)
    assert not alone.why_not_alone(), "it never trained with others"
    joined = Answers(JOINED)
    joined.accompanied("a")
    assert joined.why_not_alone() == CUT_OFF == joined.why_not_alone()
    joined.answer = Connectivity(asked=frozenset("a"), unanswered=1)
    assert joined.why_not_alone() == CUT_OFF, "nobody knows"
    joined.answer = answers("aux")
    assert not joined.why_not_alone(), "the other one is gone"
    joined.answer = answers()
    assert not joined.why_not_alone(), "it was gone before the initial peers were"
    pair = Answers("/ip4/10.0.0.1/tcp/1/p2p/a")
    pair.accompanied("a")
    assert not pair.why_not_alone(parted=["a"]), "the only other one said goodbye"


def test_who_is_banned_is_not_waited_for_and_nobody_is_cut_off_for_its_silence() -> None:
    banned = set[str]()
    pair = Answers("/ip4/10.0.0.1/tcp/1/p2p/a", banned=banned)
    pair.accompanied("a")
    assert pair.why_not_alone() == CUT_OFF
    banned.add("a")
    assert not pair.why_not_alone()
    pair.accompanied("b")
    assert pair.why_not_alone() == CUT_OFF, "another one may be there still"


def test_who_begins_anew_waits_for_those_that_it_met_before_where_they_answer() -> None:
    """The initial peer began anew, too, and knows nobody yet: whoever joins through it sees no records."""
    begun = Answers(JOINED, met=["/ip4/10.0.0.2/tcp/1/p2p/a", JOINED])
    begun.answer = answers("aux", "a")
    assert begun.why_not_alone() == UNSEEN.format("another trainer")
    assert not begun.why_not_alone(seen=["a"]), "its record is there now"
    begun.answer = answers("aux")
    assert not begun.why_not_alone(), "it is gone"


def test_a_line_that_breaks_while_it_asks_does_not_make_the_others_gone() -> None:
    """The initial peer had answered when it broke, the others not yet: whoever asks again hears nobody."""
    broken = Answers(JOINED)
    broken.accompanied(["a", "b"])
    broken.first = [answers("aux")]
    assert broken.why_not_alone() == CUT_OFF
    broken.answer = answers("aux")
    assert not broken.why_not_alone(), "they are gone, twice"


def test_what_was_heard_a_moment_ago_is_no_second_answer() -> None:
    broken = Answers(JOINED)
    broken.accompanied(["a", "b"])
    broken.heard(answers("aux"))
    broken.first = [answers("aux")]
    assert broken.why_not_alone() == CUT_OFF


def test_who_is_answered_by_one_that_it_does_not_see_waits_for_it_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    contacts = Answers()
    contacts.accompanied(["a", "b"])
    contacts.answer = answers("a")
    assert contacts.why_not_alone() == "for the records of another trainer: they answer, and are not seen on the DHT"
    assert not contacts.why_not_alone(["a", "b"]), "their records say what they do"
    assert contacts.why_not_alone(["b"])
    contacts.answer = answers("aux")
    assert not contacts.why_not_alone()
    contacts.accompanied(["a"])
    contacts.answer = answers("a")
    assert contacts.why_not_alone()
    monkeypatch.setattr(room, "UNSEEN_SECONDS", 0.0)
    assert not contacts.why_not_alone(), "it answers and does not train"


def test_whose_clock_is_off_so_that_it_reads_no_records_makes_no_step_alone() -> None:
    clock = SteppedClock()
    contacts = Answers(clock=clock)
    contacts.accompanied("a")
    contacts.answer = replace(answers("a"), clock=-600.0)
    for _ in range(3):
        assert contacts.why_not_alone() == UNSEEN.format("another trainer")
        clock.now += 2 * room.UNSEEN_SECONDS
    contacts.answer = replace(answers("a"), clock=0.1)
    assert not contacts.why_not_alone(), "it answers and does not train"


@pytest.mark.parametrize(
    ("ahead", "clock"),
    [
        ({}, None),
        ({"a": 600.0}, 600.0),
        ({"a": -600.0, "aux": 0.5}, 0.5),
        ({"a": 600.0, "aux": 601.0}, 600.0),
        ({"a": -600.0, "aux": 0.5, "b": 600.0}, 0.5),
        ({"a": -600.0, "aux": 0.5, "b": 0.0, "c": -600.0}, 0.0),
    ],
)
def test_a_clock_with_which_half_of_the_others_agree_is_not_off(ahead: dict[str, float], clock: float | None) -> None:
    """Else one other whose clock is off, beside an auxiliary peer, would be waited for until it is set."""
    future = SimpleNamespace(result=lambda timeout: (ahead, {}))
    dht: Any = SimpleNamespace(peer_id="me", run_coroutine=lambda ping, return_future: future)
    assert ConnectivityMonitor(dht).ask(["a", "aux", "b", "c"]).clock == clock


def test_how_long_another_was_unseen_before_it_came_back_does_not_count() -> None:
    clock = SteppedClock()
    contacts = Answers(clock=clock)
    contacts.answer = answers("a")
    contacts.accompanied("a")
    assert contacts.why_not_alone()
    clock.now += 2 * room.UNSEEN_SECONDS
    contacts.accompanied("a")
    assert contacts.why_not_alone(), "a step alone would be in vain"
    clock.now += room.UNSEEN_SECONDS
    assert not contacts.why_not_alone(), "it answers and does not train"


class Returning:
    """A peer's view of the others, which changes while it asks whether it is alone: then it has this plan."""

    def __init__(self, plan: RoundPlan, behind: bool, why: str = "") -> None:
        self.board: Any = SimpleNamespace(view=None, parted=list, blind=False)
        self.contacts = SimpleNamespace(why_not_alone=lambda seen, parted: self.see() or why)
        self._then, self._is_behind = plan, behind

    def see(self) -> None:
        self.board.view = "them"

    def _plan(self, view: Any) -> RoundPlan:
        return self._then if view == "them" else RoundPlan("5_aa", frozenset("a"), "a", 1)

    def _behind(self, view: Any) -> bool:
        return self._is_behind and view == "them"

    def why_not_alone(self) -> str:
        me: Any = self
        return Collaboration._why_not_alone(me, SwarmState.of(()))


def test_who_comes_back_while_a_peer_asks_keeps_it_from_a_step_alone() -> None:
    """A process that hangs takes seconds not to answer."""
    alone, together = (RoundPlan("5_aa", frozenset(members), "a", len(members)) for members in ("a", "ab"))
    assert not Returning(alone, behind=False).why_not_alone()
    assert Returning(together, behind=False).why_not_alone() == "for trainers that are back"
    assert Returning(alone, behind=True).why_not_alone() == "for trainers that are back"
    few = RoundPlan("5_aa", frozenset("a"), "a", 3)
    assert Returning(few, behind=False).why_not_alone() == few.lacking
    assert Returning(together, behind=False, why=CUT_OFF).why_not_alone() == CUT_OFF


def test_whose_own_node_does_not_answer_makes_no_step_alone() -> None:
    """It may never have seen the others: its node may hang since it began."""
    me = Returning(RoundPlan("5_aa", frozenset("a"), "a", 1), behind=False)
    me.board.blind = True
    assert "does not answer" in me.why_not_alone()
    assert not Connectivity(frozenset("b"), unanswered=1).cut_off, "nobody was asked"
