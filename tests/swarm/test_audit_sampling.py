"""What a member looks at after a round: by chance, and what looks wrong first."""

from __future__ import annotations

import random

from swarm.rounds import PEERS
from swarm.test_audit import honest_round, lying_round

from tt_cli.swarm.audit import sampling
from tt_cli.swarm.audit.sampling import LEAST, AuditSampler, unlike


class NoChance(random.Random):
    """Never audits by chance."""

    def random(self) -> float:
        return 1.0 - 1e-9

    def randrange(self, *bounds: int) -> int:
        return 0


def test_no_part_of_an_honest_round_looks_wrong() -> None:
    """Whatever the weights of the members: the lightest has a thirteenth of all samples."""
    for outcome in honest_round():
        others = [peer for peer in PEERS if peer != outcome.allreduce.me]
        for _ in range(5):
            assert unlike(outcome.allreduce, others) == []


def test_the_parts_of_a_lying_reducer_look_wrong_to_everybody() -> None:
    for outcome in lying_round():
        allreduce = outcome.allreduce
        others = [peer for peer in PEERS if peer != allreduce.me]
        if allreduce.me == PEERS[2]:
            continue
        looks = [unlike(allreduce, others) for _ in range(40)]  # at one part of each, some of which are small
        found = {place for look in looks for place in look}
        assert {reducer for reducer, _ in found} == {PEERS[2]}
        assert {place for _, place in found} <= set(range(len(allreduce.parts_of(PEERS[2]))))
        assert sum(bool(look) for look in looks) > len(looks) / 4


def test_what_looks_wrong_is_looked_at_at_once_and_costs_no_more_than_was_saved() -> None:
    """Without chance: what is left is what was saved, and half of a round's chance with each round."""

    allreduce, picker, rounds = lying_round()[0].allreduce, AuditSampler(NoChance(0)), 400
    picked = [picker.pick(allreduce) for _ in range(rounds)]
    assert [place[0] for place in picked[:3] if place] == [PEERS[2]] * 3
    assert {place[0] for place in picked if place} == {PEERS[2]}
    most = sampling.SAVED + rounds * sampling._chance(allreduce) / 2
    assert most - 1 <= sum(place is not None for place in picked) <= most


def test_what_is_left_unanswered_costs_nothing_and_what_else_looks_wrong_has_its_turn() -> None:
    allreduce, picker = lying_round()[0].allreduce, AuditSampler(NoChance(0))
    for _ in range(400):
        place = picker.pick(allreduce)
        assert place and place[0] == PEERS[2], "in every round"
        assert picker.pick(allreduce, {PEERS[2]}) is None


def test_by_chance_every_part_of_the_others_is_looked_at() -> None:
    allreduce, picker = honest_round()[0].allreduce, AuditSampler()
    rounds = 1200
    picked = [place for place in (picker.pick(allreduce) for _ in range(rounds)) if place]
    assert {reducer for reducer, _ in picked} == set(PEERS) - {allreduce.me}
    assert len({*picked}) == sum(len(allreduce.parts_of(peer)) for peer in PEERS if peer != allreduce.me)
    share = len(picked) / rounds
    assert abs(share - sampling._chance(allreduce)) < 0.1 and share >= LEAST - 0.1


def test_who_gave_nothing_looks_by_chance_alone() -> None:
    """An assistant has no gradient of its own to compare with."""
    allreduce = lying_round()[0].allreduce
    allreduce.weight = 0.0
    assert unlike(allreduce, PEERS[1:]) == []
