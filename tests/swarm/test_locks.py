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
from tt_cli.swarm.allreduce.commit import DENIED, UNHEARD, CommitProtocol
from tt_cli.swarm.allreduce.messages import Lock
from tt_cli.swarm.allreduce.part_fetch import answer
from tt_cli.swarm.allreduce.result import RoundResult, outcome_of
from tt_cli.swarm.allreduce.votes import locked_by
from tt_cli.swarm.ballot import packed, unpacked
from tt_cli.swarm.compression.gradient_buffer import NOBODY

ONE, OTHER = ((1, 1), bytes(31) + b"1"), ((2, 1), bytes(31) + b"2")
NONE = Lock(attempt=3)


def vote(attempt: int, average: tuple[tuple[int, ...], bytes], last: int = 9) -> Lock:
    return Lock(0, last, attempt, *average)


@pytest.mark.parametrize(
    ("locks", "liars", "repeated"),
    [
        ([NONE, NONE], 0, None),
        ([vote(1, ONE), NONE], 0, ONE),
        ([vote(1, ONE), NONE, NONE], 1, None),
        ([vote(1, ONE), vote(1, ONE), NONE], 1, ONE),
        ([vote(1, ONE), vote(2, OTHER)], 0, OTHER),
        ([vote(1, ONE), vote(1, ONE), vote(2, OTHER)], 0, OTHER),
        ([vote(1, ONE), vote(1, ONE), vote(1, OTHER)], 0, ONE),
        ([vote(1, ONE), vote(1, ONE), vote(8, OTHER)], 1, ONE),
        ([vote(8, ONE), vote(1, ONE), vote(2, OTHER), vote(3, OTHER)], 1, OTHER),
        ([vote(1, ONE), vote(1, ONE), vote(1, ONE), vote(9, OTHER), vote(9, OTHER)], 2, ONE),
    ],
)
def test_a_group_repeats_what_more_voted_for_than_may_lie(
    locks: list[Lock], liars: int, repeated: tuple[tuple[int, ...], bytes] | None
) -> None:
    members = {str(number): replace(lock, liars=liars * (number == 1)) for number, lock in enumerate(locks)}
    assert locked_by(members, dict.fromkeys(members, 1)) == repeated
    assert locked_by(dict(reversed(members.items())), dict.fromkeys(members, 1)) == repeated


def test_the_peers_of_one_user_are_one_of_those_who_may_lie() -> None:
    locks = {"a": vote(1, ONE), "b": vote(1, ONE), "c": replace(NONE, liars=1), "d": NONE}
    assert locked_by(locks, {"a": Fraction(1, 2), "b": Fraction(1, 2), "c": 1, "d": 1}) is None
    assert locked_by(locks, dict.fromkeys(locks, 1)) == ONE


class Deaf(Member):
    """One that gets all averages, and hears nobody's status."""

    cut = {"rpc_settle": PEERS}


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
    """Of three members that made an average, voted for it, and did not hear of each other."""
    outcomes = run_round(*map(Deaf, range(3)))
    assert all(outcome.commit.dropped for outcome in outcomes)
    assert len({outcome.commit.voted for outcome in outcomes}) == 1 and outcomes[0].commit.voted
    return outcomes


def repeat(dropped: list[Outcome], *numbers: int) -> list[Outcome]:
    """The next round, of those of the first one and of others."""
    locked, shares = dropped[0].commit.voted, dropped[0].store.shares
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
    assert len(last.commit.votes) == 4 and {outcome.commit.voted for outcome in outcomes} == {dropped[0].commit.voted}


def test_gradients_count_for_those_who_gave_them_and_no_others(dropped: list[Outcome]) -> None:
    outcomes = results(repeat(dropped, 0, 1, 3))
    assert [result.given for result in outcomes] == [True, True, False]
    assert [said["samples"] for said in outcomes[2].members.values()] == [10, 20, 0]
    assert {result.share for result in outcomes} == {None} and not outcomes[0].failed


class BegunAgain(Again):
    begun_again = True


def test_who_began_again_since_votes_as_it_did_and_fetches_what_it_lost(dropped: list[Outcome]) -> None:
    locked, shares = dropped[0].commit.voted, dropped[0].store.shares
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
    locked, shares = dropped[0].commit.voted, dropped[0].store.shares
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
    assert all(outcome.commit.dropped for outcome in outcomes)
    assert {outcome.commit.voted for outcome in outcomes} == {dropped[0].commit.voted}
    assert outcomes[0].commit.asked == {*map(str, PEERS[1:3])}, "all have said that they lack it"


def test_who_hears_too_few_has_asked_nobody_whether_they_have_it(dropped: list[Outcome]) -> None:
    locked, shares = dropped[0].commit.voted, dropped[0].store.shares
    lone = Again(3, locked, shares)
    lone.cut = {"rpc_settle": PEERS[1:3]}
    others = [Again(number, locked, shares, dropped[number]) for number in range(3)]
    others[1].cut = others[2].cut = {"rpc_settle": PEERS[3:]}
    *heard, unheard = run_round(*others, lone)
    assert not any(outcome.commit.dropped for outcome in heard)
    assert unheard.commit.dropped and unheard.commit.voted and unheard.store.missing() and not unheard.commit.asked


def test_who_voted_for_something_else_takes_what_the_group_repeats(dropped: list[Outcome]) -> None:
    locked, shares = dropped[0].commit.voted, dropped[0].store.shares
    dropped[2].store.open(shares)  # another round
    outcomes = run_round(*(Again(n, locked, shares, dropped[n] if n < 2 else None) for n in range(3)))
    assert not any(outcome.commit.dropped for outcome in outcomes)
    assert outcomes[2].commit.origin is None and outcomes[0].commit.origin is dropped[0].commit
    assert outcomes[0].commit.voting == {*map(str, PEERS[:3])}


def test_an_average_that_somebody_signed_otherwise_too_or_of_too_few_is_not_repeated(dropped: list[Outcome]) -> None:
    dropped[0].commit.proofs[str(PEERS[1])] = b"two signatures"
    dropped[1].commit.unsigned = {str(PEERS[2]): "used what 1 of 3 members sent"}
    dropped[2].commit.unsigned = {str(PEERS[1]): UNHEARD}
    assert [bool(outcome.commit.voted) for outcome in dropped] == [False, False, True]


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
    *honest, _ = run_round(*map(Deaf, range(3)), Forger(3))
    assert [(outcome.commit.dropped, outcome.commit.voted) for outcome in honest] == [(True, b"")] * 3
