"""What members voted for in a round that came to nothing is repeated, and nothing else becomes of its state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hivemind.proto import averaging_pb2, runtime_pb2
from swarm.rounds import NAME, PEERS, SIGNERS, Member, Outcome, run_round

from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import MISSING
from tt_cli.swarm.allreduce.commit import DENIED, CommitProtocol
from tt_cli.swarm.allreduce.messages import SignedVote
from tt_cli.swarm.allreduce.part_fetch import answer
from tt_cli.swarm.allreduce.result import RoundResult, outcome_of
from tt_cli.swarm.allreduce.votes import locked_by, most_say
from tt_cli.swarm.ballot import packed, unpacked
from tt_cli.swarm.compression.gradient_buffer import NOBODY

Average = tuple[tuple[int, ...], bytes]  # cut, hash
ONE, OTHER = ((1, 1), bytes(31) + b"1"), ((2, 1), bytes(31) + b"2")


def vote(peer: int, attempt: int, average: Average) -> SignedVote:
    shares, whole = average
    return SignedVote(NAME, str(peer), attempt, shares, (whole,))


@pytest.mark.parametrize(
    ("votes", "liars", "repeated"),
    [
        ([], 0, None),
        ([(0, 1, ONE)], 0, ONE),
        ([(0, 1, ONE)], 1, None),
        ([(0, 1, ONE), (0, 2, ONE), (0, 2, ONE)], 1, None),
        ([(0, 1, ONE), (1, 1, ONE)], 1, ONE),
        ([(0, 1, ONE), (8, 1, ONE)], 1, None),  # who is in no group may be anybody
        ([(0, 1, ONE), (1, 2, OTHER)], 0, OTHER),
        ([(0, 1, ONE), (1, 1, ONE), (2, 2, OTHER)], 0, OTHER),
        ([(0, 1, ONE), (1, 1, ONE), (2, 1, OTHER)], 0, ONE),
        ([(0, 1, ONE), (1, 1, ONE), (2, 8, OTHER)], 1, ONE),
        ([(0, 8, ONE), (1, 1, ONE), (2, 2, OTHER), (3, 3, OTHER)], 1, OTHER),
        ([(0, 1, ONE), (1, 1, ONE), (0, 2, OTHER), (1, 2, OTHER)], 1, OTHER),
        ([(0, 1, ONE), (1, 1, ONE), (2, 1, ONE), (3, 9, OTHER), (4, 9, OTHER)], 2, ONE),
    ],
)
def test_a_group_repeats_what_more_voted_for_than_may_lie(
    votes: list[tuple[int, int, Average]], liars: int, repeated: Average | None
) -> None:
    members, shown = dict.fromkeys(map(str, range(5)), 1), [vote(*each) for each in votes]
    for some in (shown, shown[::-1]):
        found = locked_by(some, members, liars)
        assert (found and (found.shares, found.average)) == repeated


def test_the_peers_of_one_user_are_one_of_those_who_may_lie() -> None:
    votes = [vote(0, 1, ONE), vote(1, 1, ONE)]
    assert locked_by(votes, {"0": Fraction(1, 2), "1": Fraction(1, 2), "2": 1, "3": 1}, 1) is None
    assert locked_by(votes, dict.fromkeys("0123", 1), 1)


@pytest.mark.parametrize(
    ("said", "most"), [([7, 1, 1, 1], 1), ([0, 1, 1], 1), ([7, 0, 0], 0), ([1, 1, 0, 0], 0), ([2, 2, 2, 0, 9], 2)]
)
def test_one_member_alone_says_nothing_of_how_many_may_lie(said: list[int], most: int) -> None:
    numbers = {str(peer): number for peer, number in enumerate(said)}
    assert most_say(numbers, dict.fromkeys(numbers, 1)) == most
    users = dict.fromkeys("xyz", 1) | dict.fromkeys("abcd", Fraction(1, 4))
    assert most_say(dict.fromkeys("xyz", 0) | dict.fromkeys("abcd", 9), users) == 0, "of one user"


class Deaf(Member):
    """One that gets all averages and votes, and hears of nobody's precommit."""

    cut = {"rpc_precommit": PEERS}


class Again(Member):
    """The same member in the next round. before: its outcome of the first one, None for who was not in that.

    claims: numbers of those who said in their joins that they had voted in it. begun_again: its process ended since.
    """

    begun_again = False

    def __init__(
        self,
        number: int,
        locked: bytes,
        shares: tuple[int, ...],
        before: Outcome | None = None,
        claims: tuple[int, ...] = (),
    ):
        super().__init__(number)
        self.locked, self.shares, self.before, self.claims = locked, shares, before, claims

    def prepare(self) -> None:
        super().prepare()
        made = self.allreduce
        store = self.store = self.before.store if self.before and not self.begun_again else self.store
        name = replace(NAME, group_id=bytes(32))
        claims = frozenset(str(PEERS[number]) for number in self.claims)
        group = replace(made.group, name=name, shares=self.shares, locked=self.locked, attempt=2, claims=claims)
        self.allreduce = self.allreduce_type(group, SIGNERS[self.number], made._local, made.weight, store, "mean")
        before = self.before and self.before.commit.last_vote()
        before = unpacked(packed(before)) if before and self.begun_again else before
        self.commit = self.commit_type(self.allreduce, {"samples": 0, "loss": 0.0}, before)

    async def rpc_fetch_average(self, message: runtime_pb2.ExpertInfo) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        _, parts = wire.PARTS_REQUEST.read(message)
        async for part in answer(self.store, parts, self.commit.holds):
            yield part


@pytest.fixture
def dropped() -> list[Outcome]:
    """Of three members that made an average, precommitted it, and did not hear that of each other."""
    outcomes = run_round(*map(Deaf, range(3)))
    assert all(outcome.commit.dropped for outcome in outcomes)
    assert locks(outcomes) == {outcomes[0].commit.last_vote().average} and locks(outcomes) != {b""}
    return outcomes


def locks(outcomes: list[Outcome]) -> set[bytes]:
    """What their next joins say."""
    return {outcome.commit.last_vote().lock.average for outcome in outcomes}


def repeat(dropped: list[Outcome], *numbers: int) -> list[Outcome]:
    """The next round, of those of the first one and of others."""
    locked, shares = dropped[0].commit.last_vote().average, dropped[0].store.shares
    before = dict(enumerate(dropped))
    return run_round(*(Again(number, locked, shares, before.get(number)) for number in numbers))


def results(outcomes: list[Outcome]) -> list[RoundResult]:
    return [outcome_of(outcome.commit, 1.0, {}, frozenset(), {}) for outcome in outcomes]


def test_the_next_group_steps_with_the_average_for_which_its_members_voted(dropped: list[Outcome]) -> None:
    first = dropped[0].store.buffer.dump()
    outcomes = repeat(dropped, 0, 1, 2, 3)
    assert not any(outcome.commit.dropped for outcome in outcomes)
    assert {bytes(outcome.store.buffer.dump()) for outcome in outcomes} == {bytes(first)}
    assert all(part.reducer == NOBODY for part in outcomes[0].allreduce.parts)
    last = outcomes[3]
    assert last.commit.repaired == len(last.store.hashes), "all of it was fetched from those who had it"
    assert [int(outcome.allreduce.traffic[0]) for outcome in outcomes] == [0] * 4, "nobody sent a gradient"
    assert len(last.commit.last_vote().shown) == 4 and locks(outcomes) == locks(dropped)


def test_gradients_count_for_those_who_gave_them_and_no_others(dropped: list[Outcome]) -> None:
    outcomes = results(repeat(dropped, 0, 1, 3))
    assert [result.given for result in outcomes] == [True, True, False]
    assert [said["samples"] for said in outcomes[2].members.values()] == [10, 20, 0]
    assert {result.share for result in outcomes} == {None} and not outcomes[0].failed


class BegunAgain(Again):
    begun_again = True


def test_who_began_again_since_votes_as_it_did_and_fetches_what_it_lost(dropped: list[Outcome]) -> None:
    locked, shares = dropped[0].commit.last_vote().average, dropped[0].store.shares
    kinds = (Again, BegunAgain, BegunAgain)
    outcomes = run_round(*(kind(n, locked, shares, dropped[n], (0, 1, 2)) for n, kind in enumerate(kinds)))
    assert {bytes(outcome.store.buffer.dump()) for outcome in outcomes} == {bytes(dropped[0].store.buffer.dump())}
    found = results(outcomes)
    assert [result.given for result in found] == [True, False, False], "what it held then is gone"
    assert [result.complete for result in found] == [True] * 3 and not any(result.rejected for result in found)
    assert [said["samples"] for said in found[0].members.values()] == [10, 20, 70]


class Boaster(Again):
    """Says that it has voted, and hears others' votes in vain."""

    class Voteless(CommitProtocol):
        def _vote(self) -> None: ...

    commit_type = Voteless


def test_who_says_that_it_voted_and_has_no_vote_is_named(dropped: list[Outcome]) -> None:
    locked, shares = dropped[0].commit.last_vote().average, dropped[0].store.shares
    honest = [Again(number, locked, shares, dropped[number], (0, 1, 3)) for number in (0, 1)]
    outcomes = results(run_round(*honest, Boaster(3, locked, shares, None, (0, 1, 3))))
    assert outcomes[0].complete and outcomes[0].rejected == outcomes[1].rejected == {str(PEERS[3]): DENIED}


def test_what_one_lacks_it_fetches(dropped: list[Outcome]) -> None:
    dropped[1].store.hashes[0] = MISSING
    outcomes = repeat(dropped, 0, 1, 2)
    assert not any(outcome.commit.dropped for outcome in outcomes)
    assert [outcome.commit.repaired for outcome in outcomes] == [0, 1, 0]


def test_what_nobody_has_is_no_step_and_stays_what_they_voted_for(dropped: list[Outcome]) -> None:
    for outcome in dropped:
        outcome.store.hashes[0] = MISSING
    outcomes = repeat(dropped, 0, 1, 2)
    assert all(outcome.commit.dropped and not outcome.commit.precommitted for outcome in outcomes)
    assert {outcome.commit.last_vote().average for outcome in outcomes} == locks(dropped), "who has it may need it"
    assert outcomes[0].commit.asked == {*map(str, PEERS[1:3])}, "all have said that they lack it"


def test_who_hears_too_few_has_asked_nobody_whether_they_have_it(dropped: list[Outcome]) -> None:
    locked, shares = dropped[0].commit.last_vote().average, dropped[0].store.shares
    lone = Again(3, locked, shares)
    lone.cut = {"rpc_settle": PEERS[1:3]}
    others = [Again(number, locked, shares, dropped[number]) for number in range(3)]
    others[1].cut = others[2].cut = {"rpc_settle": PEERS[3:]}
    *heard, unheard = run_round(*others, lone)
    assert not any(outcome.commit.dropped for outcome in heard)
    assert unheard.commit.dropped and unheard.commit.last_vote().average == locked
    assert unheard.store.missing() and not unheard.commit.asked


def test_who_voted_for_something_else_takes_what_the_group_repeats(dropped: list[Outcome]) -> None:
    locked, shares = dropped[0].commit.last_vote().average, dropped[0].store.shares
    dropped[2].store.open(shares)  # another round
    outcomes = run_round(*(Again(n, locked, shares, dropped[n] if n < 2 else None) for n in range(3)))
    assert not any(outcome.commit.dropped for outcome in outcomes)
    assert outcomes[2].commit.origin is None and outcomes[0].commit.origin is dropped[0].commit
    assert outcomes[0].commit.voting == {*map(str, PEERS[:3])}


class Forger(Member):
    """A reducer that sends other averages than it made, with a signature that is none: nobody could prove it."""

    def prepare(self) -> None:
        super().prepare()
        self.reduce_to(torch.neg)

    async def rpc_aggregate_part(self, stream: Any, context: Any) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context):
            message.peer_id = message.peer_id and message.peer_id[:-1] + b"?"
            yield message

    async def rpc_settle(self, message: runtime_pb2.ExpertInfo, context: Any) -> runtime_pb2.ExpertInfo:
        raise ConnectionError("it says nothing more")


def test_what_its_reducer_did_not_sign_is_not_repeated() -> None:
    honest = [Member(number) for number in range(3)]
    for member in honest:
        member.cut = {"rpc_settle": PEERS[3:]}
    *outcomes, _ = run_round(*honest, Forger(3))
    assert all(outcome.commit.dropped for outcome in outcomes) and locks(outcomes) == {b""}
