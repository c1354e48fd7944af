"""The file of a peer's last vote: who starts again tells the next group of it, as if it had not ended.

It is written in the averager's process before that precommits, and read before the process is forked.
"""

from __future__ import annotations

from pathlib import Path

from hivemind.utils import get_logger

from tt_cli.atomic_write import PRIVATE, atomic_write
from tt_cli.swarm import wire
from tt_cli.swarm.allreduce.average_buffer import HASH_BYTES
from tt_cli.swarm.allreduce.commit import LastVote

logger = get_logger(__name__)


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


def packed(vote: LastVote) -> bytes:
    """The content of the file."""
    votes, members = b"".join(vote.votes), tuple(sorted(vote.voting))
    return wire.LAST_VOTE.pack((vote.state_key, vote.attempt, vote.shares, votes, vote.said, members, vote.shown))


def unpacked(content: bytes) -> LastVote:
    """The vote in a file. Raises ValueError for any other file."""
    state_key, attempt, shares, joined, said, voting, shown = wire.LAST_VOTE.read(content)
    votes = tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))
    return LastVote(state_key, attempt, shares, votes, said, frozenset(voting), shown)
