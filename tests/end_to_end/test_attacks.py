"""Every row of scripts/bench attacks's table, at a small size: what an attacker does changes nothing for the others.

Attacks inside a round are made in real rounds over libp2p, where no swarm is needed. Lies about oneself and strangers
come one after the other to one swarm that goes on training meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from end_to_end.attacked_round import Nodes, mean_of
from swarm.rounds import Member, Outcome
from testbed.attacks.gradients import GRADIENTS
from testbed.attacks.rounds import ROUNDS

from tt_cli.swarm.allreduce.result import late_of
from tt_cli.swarm.audit.work import FEWEST, NOTHING, UNLIKE_ALL, WorkAudits
from tt_cli.swarm.compression import gradient_buffer

HONEST = 4
LATE, ENDLESS, HUGE, UNLIKE = "slow-loris peer", "endless stream", "1e30", "two-faced reducer"
LATER = "lying reducer", "evasive reducer", "false leader", "weight never published"  # in no round by itself
REFUSED = [name for name in ROUNDS if name not in (LATE, ENDLESS, HUGE, UNLIKE, *LATER)]
TOGETHER = "steady bias"  # of one alone nothing sticks out: see test_centered_clip.py
WORKLESS = {"noise x1": UNLIKE_ALL, "zero work": NOTHING}
CLIPPED = [HUGE, *(name for name in GRADIENTS if name not in (TOGETHER, *WORKLESS))]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Four for honest members and one for whoever attacks."""
    with Nodes(HONEST + 1, tmp_path_factory.mktemp("nodes")) as started:
        yield started


def error(outcome: Outcome, members: list[Member]) -> float:
    """Of the average beside the mean of these members."""
    right = mean_of(members)
    return float((outcome.average.double() - right).norm() / right.norm())


def own_shares_error(outcome: Outcome, members: list[Member]) -> float:
    """As `error`, of what honest members reduced: the attacker's own share is for the audits."""
    allreduce = outcome.allreduce
    honest = [part for part in allreduce.parts if allreduce.reducers[part.reducer] != members[-1].peer]
    right, found = (values.double() for values in (mean_of(members[:-1]), outcome.average))
    chosen = torch.cat([torch.arange(part.start, min(part.stop, len(right))) for part in honest])
    return float((found[chosen] - right[chosen]).norm() / right[chosen].norm())


def assert_alike(outcomes: list[Outcome]) -> None:
    assert len(outcomes) == HONEST
    for outcome in outcomes:
        assert outcome.store.hashes == outcomes[0].store.hashes
        assert bool(torch.isfinite(outcome.average).all())


@pytest.mark.promise(
    "A malformed or impossible contribution is refused by every member, and its sender named",
    also="tests/swarm/test_allreduce.py",
)
@pytest.mark.parametrize("attack", REFUSED)
def test_what_must_be_refused_is_refused_and_its_sender_named(nodes: Nodes, attack: str) -> None:
    outcomes, members = nodes.round(attack, HONEST)
    named = [outcome.allreduce.rejected for outcome in outcomes]
    assert [list(each) for each in named] == [[str(members[-1].peer)]] * HONEST, named
    assert_alike(outcomes)
    assert own_shares_error(outcomes[0], members) < 0.02


@pytest.mark.promise(
    "Who signs unlike averages is proven guilty by its signatures, and nobody steps with either",
    also="tests/swarm/test_allreduce.py",
)
def test_who_signs_unlike_averages_is_proven_guilty_by_whoever_it_is_and_nobody_steps(nodes: Nodes) -> None:
    outcomes, members = nodes.round(UNLIKE, HONEST)
    liar = str(members[-1].peer)
    assert [list(outcome.commit.proofs) for outcome in outcomes] == [[liar]] * HONEST
    assert all(outcome.commit.dropped for outcome in outcomes)


@pytest.mark.promise(
    "An endless stream costs the others nothing, and its sender is named", also="tests/swarm/test_allreduce.py"
)
@pytest.mark.parametrize("attack", ["", ENDLESS])
def test_more_than_was_asked_for_is_not_read_and_its_sender_named(nodes: Nodes, attack: str) -> None:
    outcomes, members = nodes.round(attack, HONEST)
    assert_alike(outcomes)
    assert not any(outcome.allreduce.failed for outcome in outcomes)
    named = [list(outcome.allreduce.rejected) for outcome in outcomes]
    assert named == [[str(members[-1].peer)] if attack else []] * HONEST, named
    assert error(outcomes[0], members) < 0.02


@pytest.mark.promise(
    "Centered clipping bounds what a poisoned gradient does to the average", also="tests/swarm/test_centered_clip.py"
)
@pytest.mark.parametrize("attack", CLIPPED)
def test_a_poisoned_gradient_moves_the_average_little_and_is_told(nodes: Nodes, attack: str) -> None:
    outcomes, members = nodes.round(attack, HONEST)
    assert_alike(outcomes)
    assert [list(outcome.allreduce.reducer.clipped) for outcome in outcomes] == [[str(members[-1].peer)]] * HONEST
    assert own_shares_error(outcomes[0], members) < 0.3


@pytest.mark.promise(
    "Who sends zeros or noise in place of a gradient is named by all that reduce it", also="tests/swarm/test_work.py"
)
@pytest.mark.parametrize("attack", WORKLESS)
def test_who_does_no_work_is_named_within_ten_rounds(nodes: Nodes, attack: str) -> None:
    audits, named = [WorkAudits() for _ in range(HONEST)], list[dict[str, str]]()
    for _ in range(FEWEST):
        assert not any(named)
        outcomes, members = nodes.round(attack, HONEST)
        named = [audit.look(outcome.allreduce.reducer) for audit, outcome in zip(audits, outcomes, strict=True)]
    assert named == [{str(members[-1].peer): WORKLESS[attack]}] * HONEST


@pytest.mark.promise("A slow-loris sender is left out of the round")
def test_who_is_always_just_in_time_is_left_out(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buffer, "PART_ELEMENTS", 2**14)  # many parts: time to waste
    outcomes, members = nodes.round(LATE, HONEST, patience=6.0, hurry=0.5)  # on a busy machine too
    late = str(members[-1].peer)
    assert_alike(outcomes)
    assert all("took more than" in outcome.allreduce.rejected[late] for outcome in outcomes)


@pytest.mark.promise(
    "Who delays a round within the time-outs is measured by all others", also="tests/swarm/test_stragglers.py"
)
@pytest.mark.parametrize("variant", [1, 2], ids=["averages", "settling"])
def test_who_holds_others_up_within_their_patience_is_measured_by_all_of_them(nodes: Nodes, variant: int) -> None:
    outcomes, members = nodes.round(LATE, HONEST, variant, patience=18.0, hurry=1 / 3)  # on a busy machine too
    slow = str(members[-1].peer)
    assert_alike(outcomes)
    for outcome in outcomes:
        assert not outcome.allreduce.failed and not outcome.allreduce.rejected, "patience is not used up"
        late = late_of(outcome.commit)
        assert all(seconds < 0.8 * late[slow] for one, seconds in late.items() if one != slow), late
