"""The showing of passes: one form, at both ends of every connection between peers, whatever is asked on it.

Every call and every stream begins with a frame: two bytes that say how long a pass follows, and the pass. A call that
shows one is answered with one. A service that remembers the caller's pass (`Admission`) takes an empty frame for it, so
calls show theirs once; streams are few, and always do. Nothing is served, and no answer to a call is read, before a
valid pass was seen for the peer id that libp2p proved. In an open run all frames are empty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.p2p import P2P, P2PHandlerError, PeerID

from tt_cli.identity.rate_limit import RateLimit
from tt_cli.swarm.membership.admission import MOST_PASSES, Admission, NotAdmitted, admits

REQUESTS, REQUESTS_AT_ONCE = 60.0, 600.0  # calls and streams of one peer: a second
REFUSED = "not admitted: "
UNKNOWN = f"{REFUSED}no pass was shown"
SIZE = 2  # bytes

Handler = Callable[[bytes, PeerID], Awaitable[bytes]]


class PassGuard:
    """Both ends of one node's connections.

    refused: told in which words another peer turned this one away. requests: how often one peer may ask.
    """

    def __init__(self, membership: Admission, refused: Callable[[str], None] = lambda words: None):
        self.membership, self._refused = membership, refused
        self.requests = RateLimit(REQUESTS_AT_ONCE, REQUESTS)
        self._shown: dict[tuple[PeerID, str], str] = {}  # peer and service → the pass that it was shown

    def guard_calls(self, p2p: P2P) -> None:
        """Guard the calls that others make and that this node makes, and the streams that it opens, from now on."""
        client, open_stream = p2p._client, p2p.call_binary_stream_handler
        add_handler, call = client.add_unary_handler, client.call_unary_handler

        async def add_unary_handler(name: str, handler: Handler, **more: Any) -> None:
            await add_handler(name, self.guarded(handler), **more)

        async def call_unary_handler(peer: PeerID, name: str, request: bytes) -> bytes:
            return await self.call(call, peer, name, request)

        async def call_binary_stream_handler(peer: PeerID, name: str) -> tuple[Any, Any, Any]:
            info, reader, writer = await open_stream(peer, name)
            writer.write(frame(self.membership.mine()))
            return info, reader, writer

        client.add_unary_handler, client.call_unary_handler = add_unary_handler, call_unary_handler
        p2p.call_binary_stream_handler = call_binary_stream_handler

    def guarded(self, handler: Handler) -> Handler:
        """The handler of a call, for members alone."""

        async def served(data: bytes, caller: PeerID) -> bytes:
            size = int.from_bytes(data[:SIZE], "big")
            text = data[SIZE : SIZE + size]
            self.admit(text, caller)
            return frame(self.membership.mine() if text else "") + await handler(data[SIZE + size :], caller)

        return served

    async def call(
        self, call: Callable[[PeerID, str, bytes], Awaitable[bytes]], peer: PeerID, name: str, request: bytes
    ) -> bytes:
        """The answer of another peer. Raises NotAdmitted when it is no member, and whatever `call` raises."""
        mine, service = self.membership.mine(), (peer, name.rpartition(".")[0])
        if self.membership.is_banned(str(peer)):
            raise NotAdmitted("it is banned")
        known = self._shown.get(service) == mine and admits(self.membership, None, str(peer))
        try:
            answer = await call(peer, name, frame("" if known else mine) + request)
        except P2PHandlerError as error:
            if known and UNKNOWN in str(error):  # it has forgotten, as after a restart
                self._shown.pop(service, None)  # or another call, which was refused too, has done so
                return await self.call(call, peer, name, request)
            if REFUSED in str(error):
                self._refused(str(error).split(REFUSED, 1)[1].rstrip("')\" "))
            raise
        size = int.from_bytes(answer[:SIZE], "big")
        self._admit(answer[SIZE : SIZE + size], peer)
        self._shown[service] = mine
        while len(self._shown) > MOST_PASSES:
            del self._shown[next(iter(self._shown))]
        return answer[SIZE + size :]

    async def admit_stream(self, reader: Any, caller: PeerID) -> None:
        """Read the frame with which a stream begins. Raises NotAdmitted or Crowded, whose words are for the caller."""
        self.admit(await reader.readexactly(int.from_bytes(await reader.readexactly(SIZE), "big")), caller)

    def admit(self, text: bytes, caller: PeerID) -> None:
        """Let a caller in. text: the pass that it shows, b"" for one shown before. Raises as `admit_stream`."""
        self.requests.charge(str(caller))
        try:
            self._admit(text, caller)
        except NotAdmitted as error:
            raise NotAdmitted(f"{REFUSED}{error}") from None

    def _admit(self, text: bytes, peer: PeerID) -> None:
        if text:
            self.membership.admit(text.decode("ascii", errors="replace"), str(peer))
        else:
            self.membership.admit_again(str(peer))


def frame(text: str) -> bytes:
    """A pass as calls and streams begin with it; "" where none is shown."""
    data = text.encode()
    return len(data).to_bytes(SIZE, "big") + data
