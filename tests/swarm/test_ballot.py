"""A vote that is kept outlives its process, and counts as if that had not ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from swarm.made import SteppedClock
from swarm.rounds import Member, Outcome, run_round

from tt_cli.swarm.allreduce.average_buffer import AverageBuffer
from tt_cli.swarm.allreduce.commit import LastVote
from tt_cli.swarm.allreduce.messages import Lock, average_hash
from tt_cli.swarm.ballot import Ballot, OwnVotes, packed

VOTES = (bytes(15) + b"1", bytes(15) + b"2")
VOTE = LastVote("5_ab", 3, (1, 1), VOTES, {"samples": 8, "loss": 1.5}, frozenset({"a", "b"}), (b"one's", b"other's"))


def test_a_vote_is_read_as_it_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "trainer.vote"
    assert Ballot(path).read() == LastVote()
    ballot = Ballot(path)
    for vote in (VOTE, LastVote("6_cd"), replace(VOTE, state_key="7_ef")):
        ballot.keep(vote)
        assert Ballot(path).read() == vote
        assert vote.lock == Lock(0, vote.attempt, average_hash((1, 1), VOTES) if vote.shown else b"")
    assert path.stat().st_mode & 0o777 == 0o600


def test_who_begins_anew_was_in_later_attempts_than_any_that_it_may_have_forgotten(tmp_path: Path) -> None:
    """Two rounds from one state would else have one number, where all of a group were in the first and crashed."""
    clock, store = SteppedClock(1000.0), cast(AverageBuffer, None)
    votes = OwnVotes(Ballot(tmp_path / "a.vote"), store, False, clock)
    first = votes.from_state("5_ab")
    clock.now += 60
    assert votes.from_state("5_ab") == first == LastVote("5_ab", attempt=1000)
    Ballot(tmp_path / "a.vote").keep(replace(VOTE, attempt=1001))
    anew = OwnVotes(Ballot(tmp_path / "a.vote"), store, False, clock)
    assert anew.from_state("5_ab") == replace(VOTE, attempt=1060)
    clock.now -= 600  # set right: nobody would take it in for so long
    assert anew.from_state("6_cd").attempt <= clock.now


WHOLE = packed(VOTE)
DAMAGED = {"empty": b"", "words": b"vote", "cut off": WHOLE[:-1], "more": WHOLE + b"\0", "other": b"\x91\x01"}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_no_vote(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trainer.vote"
    path.write_bytes(content)
    assert Ballot(path).read() == LastVote()


def test_a_disk_that_takes_nothing_keeps_nobody_from_voting(tmp_path: Path) -> None:
    ballot = Ballot(tmp_path / "gone" / "trainer.vote")
    ballot.keep(VOTE)
    assert ballot.read() == LastVote()


class Killed(Member):
    """One whose process ends while it writes its vote down."""

    def prepare(self) -> None:
        super().prepare()
        self.commit._keep = self.end

    def end(self, vote: LastVote) -> None:
        raise ConnectionError("killed")

    async def take_part(self) -> Outcome:
        with pytest.raises(ConnectionError, match="killed"):
            await super().take_part()
        return Outcome(self.allreduce, self.commit, self.store)


def test_nobody_is_told_a_precommit_that_is_not_kept() -> None:
    kept: list[tuple[LastVote, dict[str, bytes]]] = []

    class Keeping(Member):
        def prepare(self) -> None:
            super().prepare()
            self.commit._keep = lambda vote: kept.append((vote, self.commit.precommits))

    *honest, killed = run_round(Keeping(0), Keeping(1), Killed(2))
    ended = str(killed.allreduce.me)
    for outcome in (*honest, killed):
        assert ended not in outcome.commit.precommits and len(outcome.commit.precommits) == 2
    assert len(kept) == len(honest) and all(str(vote.commit.me) not in told for vote, told in kept)
    assert {vote.lock.average for vote, _ in kept} == {honest[0].commit.last_vote().average}
