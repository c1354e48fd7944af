"""With whom a trainer averages, when others stay away or send what must be refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from peer.states import small_run
from swarm.made import SteppedClock, record

from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.allreduce.round_plan import leader_of
from tt_cli.swarm.collaboration import Collaboration
from tt_cli.swarm.participants import selector as company_room
from tt_cli.swarm.participants import stragglers
from tt_cli.swarm.participants.selector import ParticipantSelector
from tt_cli.swarm.records.publisher import SwarmState

HERE, RUN = (5, "aa"), small_run(**{"swarm.matchmaking_time": 15.0})


def company(*others: str, guilty: tuple[str, ...] = ()) -> ParticipantSelector:
    board: Any = SimpleNamespace(told=None, trainers=lambda: frozenset({"me", *others}))
    return ParticipantSelector("me", board, lambda: guilty)


def view(*peer_ids: str, time: float = 1000.0, **changes: object) -> SwarmState:
    return SwarmState.of([record(peer_id, time=time, **changes) for peer_id in ("me", *peer_ids)])


def test_ones_own_claim_is_bounded_by_what_the_others_were_told() -> None:
    board: Any = SimpleNamespace(told=record("me", samples=100, time=1000.0), trainers=lambda: frozenset("b"))
    mine = ParticipantSelector("me", board, lambda: (), clock=SteppedClock(1000.0))
    allowed = mine.plan(view("b", samples=500), *HERE).allowed
    assert 100 < allowed["me"] < 500 < allowed["b"]
    board.told = None
    assert "me" not in mine.plan(view("b", samples=500), *HERE).allowed


def test_two_that_refuse_each_other_do_not_both_step_alone() -> None:
    """Nor does one that refuses all others: it is likelier wrong itself."""
    for others in (("b",), ("b", "c")):
        mine = company(*others)
        mine.ended(RoundResult(rejected=dict.fromkeys(others, "sent nonsense")), (), (), 5)
        found = mine.plan(view(*others), *HERE)
        assert found.members == {"me"} and not found.enough
        mine.forgive()
        assert mine.plan(view(*others), *HERE).enough, "they are tried again"


def test_a_majority_goes_on_without_whom_it_refuses() -> None:
    mine = company("b", "c")
    mine.ended(RoundResult(rejected={"c": "sent nonsense"}), (), (), 5)
    found = mine.plan(view("b", "c"), *HERE)
    assert found.members == {"me", "b"} and found.enough


PHANTOMS = tuple(f"phantom {number}" for number in range(9))


def test_trainers_that_nobody_met_do_not_count_for_who_has_met_others() -> None:
    mine, seen = company("b", "c", *PHANTOMS), view("b", "c", *PHANTOMS, vote=True)
    assert mine.plan(seen, *HERE).swarm == 11 and not mine.plan(seen, *HERE).steps
    mine.ended(RoundResult(problem="they did not come"), PHANTOMS, seen.records, 5)
    assert mine.plan(seen, *HERE).newcomer
    mine.stepped(5, RoundResult(complete=True, voting=frozenset({"me", "b", "c"})))
    found = mine.plan(seen, *HERE)
    assert found.swarm == 3 and found.enough and found.members == {"me", "b", "c"}
    assert found.steps and not found.newcomer and found.leader in {"me", "b", "c"}
    mine.ended(RoundResult(rejected={"b": "sent nonsense", "c": "sent nonsense"}), (), seen.records, 5)
    assert not mine.plan(seen, *HERE).enough, "whom it met counts, whatever it holds against it"


def test_who_began_anew_counts_those_with_whom_it_voted_before_from_its_first_step_on() -> None:
    """Two that began anew and have met a third would be enough for each other, of four."""
    mine, seen = company("b", "c", "d"), view("b", "c", "d", vote=True)
    mine.before = frozenset({"me", "c", "gone"})
    assert mine.plan(seen, *HERE).newcomer
    mine.stepped(5, RoundResult(complete=True, voting=frozenset({"me", "b"})))
    assert mine.plan(seen, *HERE).swarm == 3 and not mine.plan(seen, *HERE).newcomer


def test_a_newcomer_counts_those_who_vote_and_does_not_go_alone() -> None:
    mine = company("b", "c", "d")
    beginning = mine.plan(view("b", "c", "d"), *HERE)
    assert beginning.swarm == 4 and not (beginning.newcomer or beginning.steps), "nobody votes yet"
    voting = SwarmState.of([record("me"), record("b", vote=True), record("c", vote=True), record("d")])
    found = mine.plan(voting, *HERE)
    assert found.swarm == 2 and found.newcomer and found.enough and found.leader in {"b", "c"}
    assert mine.plan(voting, *HERE, {"b", "c"}).swarm == 4, "as if nobody voted, where all who do hand out false states"
    mine.ended(RoundResult(rejected=dict.fromkeys("bcd", "sent nonsense")), (), (), 5)
    assert not mine.plan(voting, *HERE).enough


def test_nobody_leads_whom_one_has_not_met() -> None:
    mine = company("b", *PHANTOMS)
    mine.stepped(5, RoundResult(complete=True, voting=frozenset({"me", "b"})))
    led = {mine.plan(view("b", *PHANTOMS, epoch=5, digest=f"{n:02x}"), 5, f"{n:02x}").leader for n in range(20)}
    assert led == {"me", "b"}


def test_phantoms_leave_nobody_out() -> None:
    mine = company("b", "c", *PHANTOMS)
    mine.stepped(5, RoundResult(complete=True, voting=frozenset({"me", "b", "c"})))
    seen = SwarmState.of([record("me"), record("b"), record("c"), *(record(one, slow=["c"]) for one in PHANTOMS)])
    mine.ended(RoundResult(), PHANTOMS, seen.records, 5)
    assert mine.plan(seen, *HERE).members >= {"me", "b", "c"}


def test_against_whom_there_is_a_proof_does_not_count() -> None:
    mine = company("b", guilty=("b",))
    found = mine.plan(view("b"), *HERE)
    assert found.members == {"me"} and found.enough
    mine.forgive()
    assert mine.plan(view("b"), *HERE).members == {"me"}


def test_a_leader_that_never_comes_is_not_asked_every_time() -> None:
    dead = leader_of("5_aa", ("a", "b", "me"))
    mine, asked, living = company("a", "b"), 0, dict[str, Any].fromkeys({"me", "a", "b"} - {dead}, {})
    for number in range(40):
        seen = view("a", "b", time=1000.0 + number)
        found = mine.plan(seen, *HERE)
        assert found.enough
        if found.leader == dead:
            asked += 1
            mine.ended(RoundResult(problem="no group"), {dead}, seen.records, 5)
        else:
            mine.ended(RoundResult(complete=True, members=living), (), seen.records, 5)
    assert asked == 6


def test_nobody_waits_for_ever_for_one_that_stays_a_step_behind() -> None:
    mine = company("b")
    waits = 0
    for number in range(30):
        behind = SwarmState.of([record("me"), record("b", epoch=4, time=1000.0 + number)])
        if late := mine.late(behind, *HERE):
            waits += 1
            mine.no_shows.strike(record.peer_id for record in late)
        mine.ended(RoundResult(complete=True, members={"me": {}}), (), behind.records, 5)
    assert waits <= 6


FOUR: dict[str, dict[str, Any]] = {one: {"samples": 80} for one in ("me", "b", "c", "slow")}


def among_four(clock: SteppedClock) -> ParticipantSelector:
    board: Any = SimpleNamespace(told=None, trainers=lambda: frozenset(FOUR))
    return ParticipantSelector("me", board, lambda: (), patience=2.0, clock=clock)


def test_who_holds_the_others_up_is_named_for_some_steps() -> None:
    clock = SteppedClock()
    mine = among_four(clock)
    for epoch in range(1, stragglers.OFTEN + 1):
        result = RoundResult(complete=True, members=FOUR, late={"slow": 30.0})
        mine.ended(result, (), (), epoch)
        clock.now += 40.0
        found = mine.stepped(epoch, result, computing=10.0)
        assert bool(found) == (epoch == stragglers.OFTEN)
    assert set(found) == {"slow"} == set(mine.slow)
    mine.stepped(epoch + stragglers.FIRST_STEPS + 1, RoundResult.alone("me", 80, 1.0))
    assert not mine.slow, "it may come again"


@pytest.mark.parametrize("all_late", [False, True], ids=["one", "all: this peer is quick"])
@pytest.mark.parametrize("comes_after", [14, 99], ids=["comes just in time", "comes too late"])
def test_who_stays_a_step_behind_until_just_before_a_round_is_named_too(comes_after: int, all_late: bool) -> None:
    clock = SteppedClock()
    mine = among_four(clock)
    board, result = mine._board, RoundResult(complete=True, members=FOUR)

    def fresh_view() -> SwarmState:
        clock.now += 1.0
        late = ("b", "c", "slow") if all_late else ("slow",)
        behind = dict.fromkeys(late if clock.now < began + comes_after else (), 4)
        return SwarmState.of(record(one, epoch=behind.get(one, 5), time=clock.now) for one in result.members)

    board.fresh_view = fresh_view
    step: Any = SimpleNamespace(board=board, clock=clock, run=RUN, _closing=False, _selector=mine)
    step.state = SimpleNamespace(position=HERE)
    for epoch in range(1, stragglers.OFTEN + 1):
        began = clock.now
        Collaboration._wait_for_late(step, began)
        mine.ended(result, (), (), epoch)
        clock.now += 5.0
        mine.stepped(epoch, result)
    assert set(mine.slow) == (set() if all_late else {"slow"})
    mine.plan(SwarmState.of(record(one, slow=["slow"]) for one in ("me", "b", "c")), *HERE)
    assert not mine.late(SwarmState.of([record("me"), record("b"), record("slow", epoch=4, time=clock.now)]), *HERE)


def test_nobody_is_blamed_while_the_swarm_computes_all_the_time() -> None:
    """A slow line costs nothing where its rounds end before the next step's samples are there."""
    clock = SteppedClock()
    mine = among_four(clock)
    for epoch in range(1, 9):
        result = RoundResult(complete=True, members=FOUR, late={"slow": 30.0})
        mine.ended(result, (), (), epoch)
        clock.now += 40.0
        assert not mine.stepped(epoch, result, computing=39.0)


def test_a_line_that_fails_with_most_of_the_others_blames_none_of_them() -> None:
    mine = ParticipantSelector("me", SimpleNamespace(told=None, trainers=frozenset), lambda: (), patience=0.0)  # type: ignore[arg-type]
    failed = RoundResult(
        members=dict.fromkeys(("me", "b", "c", "d"), {}), failed={"b": "x", "c": "x"}, seconds={"commit": 9.0}
    )
    for epoch in range(1, 9):
        mine.ended(failed, (), (), epoch)
        assert not mine.stepped(epoch, failed)


@pytest.mark.parametrize(
    ("saying", "mine_too", "left_out"),
    [(("b", "c"), False, False), (("b", "c"), True, True), (("b", "c", "d"), False, True), ((), True, False)],
)
def test_who_is_slow_is_left_out_if_most_say_so(saying: tuple[str, ...], mine_too: bool, left_out: bool) -> None:
    mine = company("b", "c", "d", "e")
    mine.slow = {"e": 10} if mine_too else {}
    records = [record(one, slow=["e"] if one in saying else []) for one in ("me", "b", "c", "d", "e")]
    found = mine.plan(SwarmState.of(records), *HERE)
    assert found.members == {"me", "b", "c", "d"} | (set() if left_out else {"e"})
    assert mine.shunned == ({"e"} if left_out else set())


def test_trainers_that_do_not_exist_do_not_keep_others_from_a_quorum_with_one_users_passes() -> None:
    """In a closed run: seven trainers, four of one user, of which none ever comes."""
    here = {"me": "me", "b": "b", "c": "c"} | {f"phantom{number}": "mallory" for number in range(4)}
    seen = SwarmState.of([record(peer, user=user, pass_text="pass") for peer, user in here.items()])
    mine = company(*here.keys() - {"me"})
    plan = mine.plan(seen, *HERE)
    assert plan.swarm == 4
    come = replace(plan, members=frozenset({"me", "b", "c"}))
    assert come.enough and not replace(come, members=frozenset({"me", "b"})).enough
    assert not replace(come, members=frozenset({"me", "phantom0", "phantom1", "phantom2", "phantom3"})).enough


def test_never_so_many_are_left_out_that_nobody_could_step() -> None:
    """And nobody is by its own word."""
    mine = company("b", "c", "d")
    records = [record(one, slow=["c", "d", one]) for one in ("me", "b", "c", "d")]
    mine.slow = {"c": 10, "d": 10}
    found = mine.plan(SwarmState.of(records), *HERE)
    assert len(found.members) == 3 and found.enough


def test_never_so_many_users_are_left_out_that_nobody_could_step_however_many_passes_one_has() -> None:
    here = {"me": "me", "b": "b", "c": "c"} | {f"pass{number}": "one user" for number in range(4)}
    records = [record(peer, user=user, pass_text="pass", slow=["b", "c"]) for peer, user in here.items()]
    mine = company(*here.keys() - {"me"})
    mine.slow = {"b": 10, "c": 10}
    found = mine.plan(SwarmState.of(records), *HERE)
    assert len(found.members) == 6 and found.enough


def test_who_claims_to_be_ahead_takes_nobodys_place() -> None:
    """A step ahead others may be rightly; nobody who is two steps ahead has a reason to come."""
    mine = company("b", "c", "d")
    records = [record("me"), record("b"), record("c", epoch=HERE[0] + 1), record("d", epoch=10**9)]
    found = mine.plan(SwarmState.of(records), *HERE)
    assert found.members == {"me", "b"} and found.welcome == {"me", "b", "c"}


def test_a_proof_is_shown_to_whoever_does_not_say_that_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, list[str]]] = []
    board: Any = SimpleNamespace(told=None, trainers=lambda: frozenset({"me", "b", "c", "liar"}))
    mine = ParticipantSelector("me", board, lambda: ["liar"], show=shown.append)
    records = [record("me", accused=["liar"]), record("b", accused=["liar"]), record("c"), record("liar")]
    found = mine.plan(SwarmState.of(records), *HERE)
    assert found.members == {"me", "b", "c"} and found.swarm == 3
    assert shown == [{"liar": ["c"]}]
    mine.plan(SwarmState.of(records), *HERE)
    assert len(shown) == 1, "not all the time"
    monkeypatch.setattr(company_room, "SHOW_SECONDS", 0.0)
    mine.plan(SwarmState.of(records), *HERE)
    assert len(shown) == 2
    mine.plan(SwarmState.of([*records[:2], record("liar")]), *HERE)
    assert len(shown) == 2, "all have it"


def test_peers_in_client_mode_try_the_only_one_that_they_can_reach_again() -> None:
    """Though it did not come before: nothing else would ever bring it back."""
    mine = company("a", "b")
    records = [record("me", client_mode=True), record("b", client_mode=True), record("a")]
    seen = SwarmState.of(records)
    assert not mine.plan(seen, *HERE).lacking
    for _ in range(2):
        mine.ended(RoundResult(problem="no group"), {"a"}, seen.records, 5)
    found = mine.plan(seen, *HERE)
    assert found.enough and found.lacking == "in client mode, for a trainer that accepts connections"
    mine.forgive()
    assert not mine.plan(seen, *HERE).lacking


def test_who_leaves_audits_unanswered_is_named_for_longer_each_time() -> None:
    mine, silent = company("b", "c", "liar"), RoundResult(complete=True, doubts={"liar": "did not show its inputs"})
    mine.stepped(4, silent)
    assert not mine.slow, "once may be a busy machine"
    for epoch, until in ((5, 15), (16, 36), (37, 77)):
        mine.stepped(epoch, silent)
        assert mine.slow == {"liar": until}
    for _ in range(99):
        mine.stepped(100, silent)
    assert mine.slow == {"liar": 100 + stragglers.MOST_STEPS}
    mine.stepped(101 + stragglers.REMEMBERED, silent)
    assert not mine.slow, "long ago"


def test_nobody_is_left_out_until_a_step_that_the_run_was_taken_back_from() -> None:
    """Which may be thousands of steps away again. Who is proven guilty stays out."""
    mine, silent = company("b", "c", "d", guilty=("d",)), RoundResult(complete=True, doubts={"c": "hides its inputs"})
    for epoch in (4999, 5000):
        mine.stepped(epoch, silent)
    mine.ended(RoundResult(rejected={"b": "sent nonsense"}), (), (), 5000)
    assert mine.plan(view("b", "c", "d"), *HERE).members == {"me", "c"} and mine.slow == {"c": 5010}
    mine.went_back()
    assert mine.plan(view("b", "c", "d"), *HERE).members == {"me", "b", "c"} and not mine.slow
    mine.stepped(6, silent)
    assert not mine.slow, "nor is it known any more who was silent once"


def test_rounds_that_fail_for_long_are_led_by_one_after_the_other_for_all_alike() -> None:
    """Until then the state says who leads: whoever failed once is as likely right as wrong."""
    names, leaders = ["me", "b", "c"], [dict[float, str](), dict[float, str]()]
    for found, late in zip(leaders, (0.0, 9.0), strict=True):
        clock = SteppedClock()
        board: Any = SimpleNamespace(told=None, trainers=lambda: frozenset(names))
        mine = ParticipantSelector("me", board, lambda: (), turn=10.0, clock=clock)
        first = mine.plan(view("b", "c"), *HERE).leader
        assert first == leader_of("5_aa", tuple(names))
        clock.now += late
        mine.ended(RoundResult(problem="it broke"), (), (), 5)
        clock.now += 9.0
        assert mine.plan(view("b", "c"), *HERE).leader == first
        clock.now += 31.0 - late
        for _ in range(40):
            clock.now += 5.0
            found[clock.now] = mine.plan(view("b", "c"), *HERE).leader
        moved = SwarmState.of([record(one, epoch=6, digest="bb") for one in names])
        assert mine.plan(moved, 6, "bb").leader == leader_of("6_bb", tuple(names))
    assert leaders[0] == leaders[1] and set(leaders[0].values()) == set(names)
