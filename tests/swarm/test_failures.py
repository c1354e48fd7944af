"""Failures of hivemind's by their kinds: one short line each, no traceback, nothing that a peer smuggled in."""

from __future__ import annotations

import pytest
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PDaemonError, P2PHandlerError

from tt_cli.swarm.network.failures import LONGEST, classify


@pytest.mark.parametrize(
    ("failure", "what", "words"),
    [
        (
            RuntimeError("local time must be within 3 seconds of others(local: 1, peer: 2)"),
            "clock",
            "this machine's clock",
        ),
        (
            MatchmakingException("the round failed: only 1 of 3 trainers came"),
            "matchmaking",
            "only 1 of 3 trainers came",
        ),
        ("Averaging step failed: could not find a group", "matchmaking", "no group formed in time"),
        (MatchmakingException("Unable to run All-Reduce: BAD"), "matchmaking", "no group formed in time"),
        ("only 66.6 % of the average arrived (p1: connection reset)", "transfer", "only 66.6 % of the average arrived"),
        ("members hold unlike bytes of 2 parts of the average", "transfer", "members hold unlike bytes"),
        ("the round failed: [Errno 2] no such thing", "transfer", "the transfer broke"),
        (P2PDaemonError("failed to dial 12D3: no addresses"), "connection", "a connection to another peer broke"),
        (ConnectionResetError(104, "reset"), "connection", "a connection to another peer broke"),
        (P2PDaemonError("out of order"), "p2p daemon", "the p2p daemon of this peer does not answer"),
        ("no peer handed over a state that can be used (ben: it hung up)", "state", "no peer handed over a state"),
        ("nothing came for 180 s", "state", "nothing came for 180 s"),
        ("DHTNode is not answering", "DHT", "the DHT does not answer"),
        (TimeoutError(), "round", "there was no answer in time"),
        ("", "round", "there was no answer in time"),
        (P2PHandlerError("strange"), "round", "P2PHandlerError: strange"),
    ],
)
def test_a_failure_has_a_kind_and_plain_words(failure: BaseException | str, what: str, words: str) -> None:
    found = classify(failure, "round")
    assert found.what == what
    assert found.words.startswith(words), found.words
    assert found.remedy


def test_it_stays_one_short_line_of_printable_letters() -> None:
    found = classify("Traceback (most recent call last):\n  File \x1b[31m" + "x" * 1000)
    assert found.words.isprintable() and len(found.words) <= LONGEST
