"""Rounds in words, members that spoil them, and losses that jump."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm.made import record

from tt_cli.supervisor.events import Choice, Event, Log, Phase, Round, Step, Trouble
from tt_cli.swarm.allreduce.result import RoundResult
from tt_cli.swarm.audit.work import COPY, NOTHING
from tt_cli.swarm.participants.stragglers import Straggler
from tt_cli.swarm.records.publisher import SwarmState
from tt_cli.swarm.reporting.loss_spikes import CALM, LossSpikeDetector
from tt_cli.swarm.reporting.round_log import OFTEN, UNANSWERED, RoundLog
from tt_cli.swarm.shared_state import StepFacts

SECONDS = {"whole": 1.0}
FACTS = StepFacts(1e-3, 2.0)


def teller(*users: str, pass_text: str = "a pass") -> tuple[RoundLog, list[Event]]:
    """Of peer "p0" of "anna"; the others are "p1" … of `users`."""
    told: list[Event] = []
    facts = {"epoch": 0, "pass_text": pass_text}
    records = [record(f"p{number}", user=user, **facts) for number, user in enumerate(("anna", *users))]
    return RoundLog("p0", told.append, lambda: SwarmState.of(records)), told


def result(*members: str, **facts: object) -> RoundResult:
    return RoundResult(complete=True, members=dict.fromkeys(members, {}), received=1.0, **facts)  # type: ignore[arg-type]


def troubles(told: list[Event]) -> list[Trouble]:
    return [event for event in told if isinstance(event, Trouble) and event.what != "round"]


def words_of(told: list[Event]) -> str:
    (event,) = [event for event in told if isinstance(event, Round)]
    return event.words


def test_the_share_that_a_peer_reduces_is_told_with_its_reason_when_it_changes() -> None:
    tell, told = teller("ben")
    for share, upload in ((0.25, 0), (None, 9_000), (0.25, 10_400), (0.27, 11_000), (0.0, 9_000), (0.0, 8_000)):
        tell.reduced(share, upload)
    assert [(event.value, event.reason.split(",")[0]) for event in told if isinstance(event, Choice)] == [
        ("25%", "this line sends about 9.0 Mbit/s"),
        ("0%", "this line sends about 11.0 Mbit/s"),
    ]


def test_a_line_that_is_too_slow_is_told_when_it_begins_to_be() -> None:
    tell, told = teller("ben")
    for words in ("", "1 Mbit/s", "1.1 Mbit/s", "", "0.9 Mbit/s"):
        tell.slow_line(words)
    assert [event.message for event in told if isinstance(event, Log)] == ["1 Mbit/s", "0.9 Mbit/s"]


def test_a_step_says_with_whom() -> None:
    tell, told = teller("ben")
    tell.committed(5, result("p0", "p1"), 96, SECONDS)
    assert words_of(told) == "step 5 made with ben, 96 samples" == tell.last_round
    tell, told = teller("ben", "cleo", "dora")
    tell.committed(5, result("p0", "p1", "p2", "p3", repaired=2), 96, SECONDS)
    assert (
        words_of(told)
        == "step 5 made with ben, cleo and dora, 96 samples, 2 parts fetched from others than their reducers"
    )
    tell, told = teller("ben")
    tell.committed(5, result("p0", "p1", repaired=3, repeated=True), 96, SECONDS)
    assert words_of(told) == "step 5 made with ben, 96 samples, with the average for which members had voted before"
    tell, told = teller("ben", "cleo", "dora", "emil")
    tell.committed(5, result("p0", "p1", "p2", "p3", "p4"), 96, SECONDS)
    assert words_of(told) == "step 5 made with ben, cleo and 2 others, 96 samples"
    tell, told = teller()
    tell.committed(5, result("p0"), 96, SECONDS)
    assert words_of(told) == "step 5 made alone, 96 samples"


def test_a_name_for_which_no_pass_vouches_is_marked() -> None:
    tell, told = teller("ben", pass_text="")
    tell.committed(5, result("p0", "p1"), 96, SECONDS)
    assert words_of(told) == "step 5 made with ~ben, 96 samples"


def test_a_member_without_a_name_or_with_an_evil_one_is_still_one_line() -> None:
    tell, told = teller("", "c\x1b[2J\nleo")
    tell.committed(5, result("p0", "p1", "p2", "QmStranger"), 96, SECONDS)
    assert words_of(told) == "step 5 made with c [2J leo, …p1 and …ranger, 96 samples"


def test_a_repeated_round_says_whose_fault_it_was() -> None:
    tell, told = teller("ben", "cleo")
    problem = "only 66.6 % of the average arrived (p1: connection reset), and no member has the rest"
    tell.failed(5, result("p0", "p1", "p2", problem=problem, failed={"p1": "connection reset"}), frozenset(), 96, 0.0)
    assert words_of(told) == f"round repeated: {problem.replace('p1', 'ben')}"
    tell, told = teller("ben", "cleo")
    tell.failed(5, RoundResult(problem="no group"), frozenset({"p2"}), 96, time.monotonic())
    assert words_of(told) == "round repeated: cleo did not come (no group formed in time)"


def test_who_spoils_round_after_round_is_named_with_what_to_do() -> None:
    tell, told = teller("ben", "cleo")
    for _ in range(OFTEN):
        assert not troubles(told)
        tell.failed(5, result("p0", "p1", problem="gone", failed={"p1": "reset"}), frozenset(), 96, 0.0)
        tell.committed(5, result("p0", "p2"), 96, SECONDS)
    (trouble,) = troubles(told)
    assert trouble.words == f"ben spoiled 3 of the last {2 * OFTEN - 1} rounds: its parts did not come in time"
    assert "--client-mode" in trouble.remedy


def test_a_dropped_round_and_a_phase_that_is_new() -> None:
    tell, told = teller()
    tell.dropped(5, 6, 96, time.monotonic())
    assert words_of(told) == "the others made step 6 without this peer"
    tell.phase("training", "towards step 6")
    tell.phase("training", "towards step 6")
    assert len([event for event in told if isinstance(event, Phase)]) == 1


def test_a_jump_of_the_loss_is_told_beside_the_step() -> None:
    tell, told = teller()
    for epoch in range(1, CALM + 2):
        tell.step(epoch, 3.0, FACTS, "aa")
    tell.step(40, 9.0, FACTS, "aa")
    assert [event.epoch for event in told if isinstance(event, Step)][-1] == 40
    assert [e.message for e in told if isinstance(e, Log)] == ["step 40: the loss jumped to 9 from a usual 3"]


def test_a_spike_does_not_hide_the_next_one_and_a_new_level_becomes_usual() -> None:
    watch = LossSpikeDetector()
    assert not any(watch.look(4.0 + 0.02 * (step % 3)) for step in range(60))
    assert watch.look(6.0) and watch.look(6.0)
    spikes = sum(bool(watch.look(6.0)) for _ in range(200))
    assert spikes < 60, "what stays is not a spike any more"
    assert not watch.look(6.0)


def test_a_loss_that_is_no_number_is_told() -> None:
    assert LossSpikeDetector().look(float("nan")) == "the loss is nan"


@given(st.lists(st.floats(0.01, 0.99), min_size=20, max_size=60))
def test_a_loss_that_falls_is_no_spike(ratios: list[float]) -> None:
    watch, loss = LossSpikeDetector(), 7.0
    for ratio in ratios:
        assert not watch.look(loss)
        loss *= ratio


def clipped_rounds(tell: RoundLog, count: int, *peers: str) -> None:
    for epoch in range(count):
        tell.committed(epoch, result("p0", "p1", "p2", clipped=dict.fromkeys(peers, 0.8) | {"p2": 0.4}), 96, SECONDS)


def test_a_member_that_is_clipped_again_and_again_is_named_and_published() -> None:
    tell, told = teller("ben", "cleo")
    clipped_rounds(tell, OFTEN - 1, "p1")
    assert not tell.clipped and not troubles(told)
    clipped_rounds(tell, 1, "p1")
    (trouble,) = troubles(told)
    assert "ben spoiled 3 of the last 3 rounds" in trouble.words and "clipped" in trouble.words
    assert "the organiser" in trouble.remedy
    assert tell.clipped == ["p1"], "cleo was clipped in few parts"
    rounds = [event for event in told if isinstance(event, Round)]
    assert rounds[-1].clipped == {"p1": 0.8, "p2": 0.4}


def test_who_is_clipped_itself_hears_so_and_names_nobody() -> None:
    tell, told = teller("ben")
    clipped_rounds(tell, OFTEN, "p0")
    (trouble,) = troubles(told)
    assert trouble.words.startswith("this peer's gradient is unlike") and tell.clipped == []


def test_who_is_proven_guilty_is_told_once_and_published() -> None:
    tell, told = teller("ben")
    for epoch in range(3):
        tell.committed(epoch, result("p0", "p1", guilty=frozenset({"p1"})), 96, SECONDS)
    (trouble,) = troubles(told)
    assert "ben (p1) made a wrong average" in trouble.words and "accusations/" in trouble.remedy
    assert tell.accused == ["p1"]


def test_who_does_no_work_is_told_when_it_is_found_and_when_it_is_again() -> None:
    tell, told = teller("ben", "cleo")
    for found in ({"p1": COPY}, {"p1": COPY, "p2": NOTHING}, {}, {"p2": NOTHING}):
        tell.committed(1, result("p0", "p1", "p2", workless=found), 96, SECONDS)
    assert [trouble.words for trouble in troubles(told)] == [
        f"ben (p1) does no work: {COPY}",
        f"cleo (p2) does no work: {NOTHING}",
        f"cleo (p2) does no work: {NOTHING}",
    ]
    assert not tell.clipped and not tell.accused


TWO = [record("p0", epoch=0), record("p1", epoch=0)]
NOBODY_CAME = "its record names a step to which nobody came"


@pytest.mark.parametrize(
    ("view", "facts", "rounds", "who", "words"),
    [
        (SwarmState.of(TWO), {"doubts": {"p1": "silent"}}, UNANSWERED, "…p1", "left an audit without an answer"),
        (SwarmState.of([*TWO, record("p2", epoch=10**9)]), {}, OFTEN, "…p2", NOBODY_CAME),
        (replace(SwarmState.of(TWO), claiming=frozenset({"p2"})), {}, OFTEN, "…p2", NOBODY_CAME),
        (replace(SwarmState.of(TWO), boasting=frozenset({"p1"})), {}, OFTEN, "…p1", "claims work that nobody can have"),
    ],
    ids=["no answers", "far ahead", "beyond the run", "boasting"],
)
def test_who_does_so_in_round_after_round_is_named(
    view: SwarmState, facts: dict[str, object], rounds: int, who: str, words: str
) -> None:
    told: list[Event] = []
    tell = RoundLog("p0", told.append, lambda: view)
    for epoch in range(rounds):
        assert not troubles(told)
        tell.committed(epoch, result("p0", "p1", **facts), 64, SECONDS)
    (trouble,) = troubles(told)
    assert trouble.words.startswith(who) and words in trouble.words


def test_who_is_left_out_for_it_costs_too_much_is_told_with_the_figures() -> None:
    tell, told = teller("ben")
    tell.left_out({"p1": Straggler(cost=31.2, whole=43.0, share=0.1, steps=10)})
    (trouble,) = told
    assert isinstance(trouble, Trouble) and trouble.what == "member"
    assert trouble.words == (
        "ben held up the last steps by 31 of 43 s each, with 10 % of the samples: it is left out for 10 steps if most "
        "say so"
    )
