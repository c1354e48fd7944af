"""What donor and taker say to each other: nothing of it is taken on trust, on either side."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import AsyncIterator  # noqa: UP035 - hivemind looks at the name of the annotation

import msgpack
import pytest
import torch
from hivemind.p2p import P2PContext
from hivemind.proto import runtime_pb2
from hypothesis import given
from hypothesis import strategies as st
from swarm.conftest import Libp2p
from swarm.handing import RUN, Network, assert_is, copy_of, over_libp2p, state, take

from tt_cli.checkpoint.hash_tree import StateTree
from tt_cli.swarm import wire
from tt_cli.swarm.network.failures import printable
from tt_cli.swarm.state import client as taker_room
from tt_cli.swarm.state.client import NoState, request_of
from tt_cli.swarm.state.server import StateServer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time between two attempts than for people."""
    monkeypatch.setattr(taker_room, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(taker_room, "RESUME_SECONDS", 0.3)


class Answers(StateServer):
    """A donor that answers with whatever it was given."""

    def __init__(self, *messages: bytes):
        super().__init__(None, None, None, None)  # type: ignore[arg-type]
        self.messages = messages

    async def rpc_state_chunks(
        self, requests: AsyncIterator[runtime_pb2.ExpertInfo], context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertInfo]:
        for number, message in enumerate(self.messages):
            yield runtime_pb2.ExpertInfo(serialized_info=message)
            if number == 0:
                await anext(requests)  # of the manifest
            elif number == 1 and message == HELD:
                await anext(requests, None)
        with suppress(TimeoutError):  # what is on its way when a donor hangs up is lost
            async with asyncio.timeout(0.5 if self.messages else 0.0):
                async for _ in requests:
                    pass


Answers.__name__ = StateServer.__name__  # the name under which libp2p knows the service
MANIFEST = state().tree().manifest()
HELD = msgpack.packb(["held", b"\x3f", b"\0", []])  # all six chunks, and none given away
LATER = StateTree.of(RUN, 5, {"other": torch.ones(3)}, {}).manifest()


NOT_TAKEN = [
    ([], "it did not answer"),
    ([b""], "no answer of a donor"),
    ([b"\xc1noise"], "no answer of a donor"),
    ([msgpack.packb([1, 2])], "no answer of a donor"),
    ([msgpack.packb(["manifest", MANIFEST, 1])], "no answer of a donor"),
    ([msgpack.packb(["manifest", MANIFEST[:-1]])], "leaves"),
    ([msgpack.packb(["manifest", bytes(2**21 + 1)])], "no answer of a donor"),
    ([msgpack.packb(["manifest", bytes(2**21 + 2**11)])], "no answer of a donor"),
    ([msgpack.packb(["manifest", LATER])], "other tensors than this model's"),
    ([msgpack.packb(["chunk", 0, b"x"])], "a chunk before the manifest"),
    ([msgpack.packb(["refused", "no\x1b[2J", []])], r"it refuses: no \[2J"),
    ([msgpack.packb(["refused", "no", ["x" * 129]])], "no answer of a donor"),
    ([msgpack.packb(["refused", "no", ["x"] * 17])], "no answer of a donor"),
    ([msgpack.packb(["refused", "no", ["x\x1b[2J"]])], "no answer of a donor"),
    ([msgpack.packb(["manifest", MANIFEST])], "left off with 6 chunks to go"),
    ([msgpack.packb(["manifest", MANIFEST]), HELD], "left off with 6 chunks to go"),
    ([msgpack.packb(["manifest", MANIFEST]), HELD, msgpack.packb(["chunk", 1, b""])], "something else"),
    ([msgpack.packb(["manifest", MANIFEST]), HELD, msgpack.packb(["chunk", 0, b""])], r"bias\[0\] is not what"),
    ([msgpack.packb(["manifest", MANIFEST]), msgpack.packb(["chunk", 0, b""])], "something else"),
    ([msgpack.packb(["manifest", MANIFEST]), msgpack.packb(["manifest", MANIFEST])], "something else"),
    ([msgpack.packb(["manifest", MANIFEST]), msgpack.packb(["held", b"", b"", []])], "than what it holds"),
    ([msgpack.packb(["manifest", MANIFEST]), HELD, HELD], "left off with 6 chunks to go"),
    ([msgpack.packb(["manifest", MANIFEST]), msgpack.packb(["held", bytes(8193), b"", []])], "no answer of a donor"),
]


@pytest.mark.parametrize(("messages", "words"), NOT_TAKEN, ids=[words for _, words in NOT_TAKEN])
def test_no_answer_is_taken_on_trust(messages: list[bytes], words: str, libp2p: Libp2p) -> None:
    @over_libp2p
    async def run(net: Network) -> None:
        await net.node(state(), Answers(*messages))
        with pytest.raises(NoState, match=words) as error:
            await net.taker().take()
        assert str(error.value).isprintable()

    run(libp2p)


@pytest.fixture
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request for all chunks."""
    monkeypatch.setattr(taker_room, "LEAST_AHEAD", 16)


@pytest.mark.usefixtures("all_at_once")
@over_libp2p
async def test_more_chunks_than_were_asked_for_change_nothing(net: Network) -> None:
    tree, (_, buffer) = state().tree(), copy_of(state())
    chunks = [msgpack.packb(["chunk", i, buffer.read(*tree.place(i))]) for i in range(len(tree))]
    await net.node(state(), Answers(msgpack.packb(["manifest", MANIFEST]), HELD, *chunks, chunks[0]))
    assert_is(await take(net.taker()), state())


@given(st.sets(st.integers(0, 3000)))
def test_a_request_is_what_was_asked_for(chunks: set[int]) -> None:
    digest, runs, hands_on = wire.STATE_REQUEST.read(request_of("ab" * 32, sorted(chunks), True))
    assert digest == "ab" * 32 and hands_on
    assert [i for first, end in zip(runs[::2], runs[1::2], strict=True) for i in range(first, end)] == sorted(chunks)


def test_a_long_request_is_not_read() -> None:
    with pytest.raises(wire.MalformedMessage):
        wire.STATE_REQUEST.read(request_of("", range(0, 2**20, 2)))


@pytest.mark.parametrize("runs", [[2, 1], [1, 1], [1], [-1, 2], [1, 2**32], [0, True]])
def test_runs_that_cannot_be_are_refused(runs: list[int]) -> None:
    with pytest.raises(wire.MalformedMessage):
        wire.STATE_REQUEST.read(msgpack.packb(["ab" * 32, runs, False]))


def test_what_a_donor_says_cannot_move_the_cursor() -> None:
    assert printable("no\x1b[2J\n\tstate\u202e yet") == "no [2J state yet"
    assert len(printable("x" * 10_000)) == 200
