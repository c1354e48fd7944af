"""A peer's last vote, and its file: who starts again tells the next group of it, as if it had not ended.

The file is written in the averager's process before that precommits, and read before the process is forked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from hivemind.utils import get_logger

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES, AverageBuffer
from tt_cli.swarm.allreduce.commit import CommitProtocol, LastVote
from tt_cli.swarm.clock import loop_time

logger = get_logger(__name__)

LOST = "had not the average on which it was locked"


class Ballot:
    """The last vote of one peer, on its disk. path: of the file."""

    def __init__(self, path: Path):
        self._path, self._kept = path, b""

    def read(self) -> LastVote:
        """The vote that was kept; none where there is no file, or one that cannot be read."""
        try:
            return unpacked(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning(f"the last vote cannot be read from {self._path}: {error}")
        return LastVote()

    def keep(self, vote: LastVote) -> None:
        """Write it down; where that fails this process alone knows it.

        It is not forced to the disk, so a power cut may lose it: the round would wait for that.
        """
        if (content := packed(vote)) == self._kept:
            return
        try:
            atomic_write(self._path, content, mode=PRIVATE, durable=False)
            self._kept = content
        except OSError as error:
            logger.warning(f"the last vote cannot be written to {self._path}: {error}")


class OwnVotes:
    """The vote of this peer in its last round, of which its next joins from the same state tell. last: that vote.

    store: the last average. client_mode: nobody can ask this peer for parts of it. now: Unix time.
    """

    def __init__(self, ballot: Ballot, store: AverageBuffer, client_mode: bool, now: Callable[[], float]):
        self._ballot, self._store, self._client_mode = ballot, store, client_mode
        self.last, self._now, self._began = ballot.read(), now, now()
        self._stuck = b"", math.inf  # what is repeated, and since when it is known that nobody here has all of it

    def from_state(self, state_key: str) -> LastVote:
        """The last one, if it was cast in a round from this state; else one for nothing.

        A process that crashed may have been in later attempts: their numbers are below the second in which this began.
        """
        last = self.last if self.last.state_key == state_key else LastVote(state_key)
        return replace(last, attempt=max(last.attempt, int(min(self._began, self._now()))))

    def keep(self, vote: LastVote) -> None:
        """Say this of its votes from now on, whatever becomes of the process."""
        self.last = vote
        self._ballot.keep(vote)

    def after(self, commit: CommitProtocol, trainers: Collection[str]) -> bool:
        """Keep what this peer voted for in a round that ended for the next one from its state; True if anything.

        trainers: peer ids of those with a voice.
        """
        group, now = commit.allreduce.group, loop_time()
        vote = commit.last_vote()
        last = self.from_state(vote.state_key)
        if vote.shown or (vote.votes and not last.shown):
            last = vote
        self.last = replace(last, attempt=group.attempt)
        lacks = commit.dropped and bool(self._store.missing())
        if group.locked and lacks:
            commit.allreduce.failed |= dict.fromkeys(group.claims - {str(group.me)}, LOST)
        if last.lock.average == group.locked != b"" and (lacks or (commit.dropped and self._client_mode)):
            average, since = self._stuck
            self._stuck = group.locked, min(since, now) if average == group.locked else now
            # nobody that answered has all of it, or can have it from here; who did not answer may have made it a step,
            # and be cut off for a while
            mute = {*map(str, group.members)} - {*map(str, commit.listening)} | {str(group.me)}
            away = commit.voting.intersection(trainers) - commit.asked - mute
            if now >= self._stuck[1] + (group.longest if away else 0.0):
                self.keep(LastVote(vote.state_key, group.attempt))
        return bool(self.last.votes)


def packed(vote: LastVote) -> bytes:
    """The content of the file."""
    votes, members = b"".join(vote.votes), tuple(sorted(vote.voting))
    return wire.LAST_VOTE.pack((vote.state_key, vote.attempt, vote.shares, votes, vote.said, members, vote.shown))


def unpacked(content: bytes) -> LastVote:
    """The vote in a file. Raises ValueError for any other file."""
    state_key, attempt, shares, joined, said, voting, shown = wire.LAST_VOTE.read(content)
    votes = tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))
    return LastVote(state_key, attempt, shares, votes, said, frozenset(voting), shown)
