"""One shard over HTTP: gone on with after a cut, given up when it only drips, checked, and every failure in words.

Notable:
- a transfer that was cut goes on from the byte where it stopped, as long as each try brings something;
- who sends less than LEAST_RATE over a window of `patience` seconds is left: a slow line is better used for another
  shard from the same place than for waiting on one that will never come;
- what is not the announced length or SHA-256 is not kept;
- no more is taken than was announced, and nothing that announces more than it may have.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from tt_cli.errors import TTError, first_line

PATIENCE = 20.0  # seconds without a byte, and of the window that a rate is measured over
LEAST_RATE = 2_000  # bytes a second
CUTS = 5  # in one transfer
MOST_BYTES = 1 << 30  # of a shard
MOST_UNANNOUNCED = 64 << 20  # bytes of an answer that does not tell its length
LONGEST_WAIT = 600.0  # seconds that a server's Retry-After is honoured for


class ShardProblem(TTError):
    """A shard, or the list of them, did not come.

    lasting: to ask again will not help soon. wait: seconds that the server asks to be left alone for.
    """

    def __init__(self, words: str, *, lasting: bool = False, wait: float | None = None) -> None:
        super().__init__(words)
        self.lasting, self.wait = lasting, wait


@dataclass(frozen=True)
class Request:
    """An HTTP request for a shard. bytes, sha256 (hex): those that it must have, where they are known. most: bytes."""

    client: Any  # of httpx2
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    patience: float = PATIENCE
    bytes: int | None = None
    sha256: str | None = None
    most: int = MOST_BYTES


@dataclass(frozen=True)
class Received:
    """The content that a transfer brought."""

    bytes: int
    sha256: str  # hex


def fetch(request: Request, target: BinaryIO, on_size: Callable[[int], None] = lambda size: None) -> Received:
    """Write what a request brings to `target`, from its beginning. on_size: told the size beforehand.

    Raises ShardProblem in words that go after "cannot fetch NAME: ", and OSError of `target`.
    """
    transfer = _Transfer(request, target, on_size)
    for _ in range(CUTS + 1):
        if transfer.go_on():
            return transfer.received()
    raise ShardProblem(f"the connection was cut {CUTS + 1} times")


def problem_of(answer: Any) -> ShardProblem:
    """Words for an answer that is none. answer: of httpx2."""
    status = answer.status_code
    if status in (408, 429) or status >= 500:
        what = "asks to come back later" if status == 429 else "answered"
        return ShardProblem(f"the server {what} ({status})", wait=seconds_to_wait(answer.headers.get("Retry-After")))
    if status in (401, 403):
        return ShardProblem(f"the server refuses access ({status})", lasting=True)
    reason = f"it is not there ({status})" if status in (404, 410) else f"the server answered {status}"
    return ShardProblem(reason, lasting=True)


def seconds_to_wait(retry_after: str | None) -> float | None:
    """A Retry-After header, in seconds or as a date; at most LONGEST_WAIT."""
    seconds = math.nan
    with suppress(ValueError):
        seconds = parsedate_to_datetime(retry_after or "").timestamp() - time.time()
    with suppress(ValueError):
        seconds = float(retry_after or "")
    return None if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_WAIT)


class _Transfer:
    """The state of one transfer over several connections."""

    def __init__(self, request: Request, target: BinaryIO, on_size: Callable[[int], None]) -> None:
        self._request, self._target, self._on_size = request, target, on_size
        self._bytes, self._digest = 0, hashlib.sha256()
        self._bytes_announced: int | None = None
        self._most = 0  # bytes of this answer
        self._version: str | None = None
        self._sha256 = request.sha256  # else what the Hub tells of large files

    def received(self) -> Received:
        """What came, checked. Raises ShardProblem."""
        expected, digest = self._request.bytes, self._digest.hexdigest()
        if expected not in (None, self._bytes):
            raise ShardProblem(f"{self._bytes:,} bytes came, and it should have {expected:,}")
        if self._sha256 not in (None, digest):
            raise ShardProblem("what came is damaged: its SHA-256 is another one than it should be")
        return Received(self._bytes, digest)

    def go_on(self) -> bool:
        """One connection's part; False where it was cut after something came."""
        import httpx2

        request, before = self._request, self._bytes
        headers = {**request.headers, "Accept-Encoding": "identity"}
        if before:
            headers["Range"] = f"bytes={before}-"
            if self._version:
                headers["If-Range"] = self._version
        options = {"headers": headers, "timeout": request.patience, "follow_redirects": True}
        try:
            with request.client.stream("GET", request.url, **options) as answer:
                self._begin(answer)
                self._receive(answer)
        except httpx2.TimeoutException as error:
            raise ShardProblem(f"nothing came for {request.patience:g} s") from error
        except (httpx2.TransportError, ConnectionError) as error:  # the Hub's client may be told to stay offline
            if self._bytes > before:
                return False
            raise ShardProblem(f"the connection failed ({first_line(error)})") from error
        except httpx2.HTTPError as error:
            raise ShardProblem(first_line(error)) from error
        whole = self._bytes_announced is None or self._bytes >= self._bytes_announced
        if not whole and self._bytes == before:
            raise ShardProblem("the connection was cut")
        return whole

    def _begin(self, answer: Any) -> None:
        if answer.status_code not in (200, 206):
            raise problem_of(answer)
        steps = (*answer.history, answer)
        if self._request.url.startswith("https:") and any(step.url.scheme != "https" for step in steps):
            raise ShardProblem("the server hands on to an http:// address, unprotected on its way", lasting=True)
        length = answer.headers.get("Content-Length", "")
        if answer.status_code == 200:  # all of it, even where the rest was asked for
            self._target.seek(0)
            self._target.truncate()
            self._bytes, self._digest = 0, hashlib.sha256()
            announced = int(length) if length.isdigit() else None
            most = self._request.most if self._request.bytes is None else min(self._request.bytes, self._request.most)
            self._most = min(most, MOST_UNANNOUNCED) if announced is None else announced
            if self._most > most:
                raise ShardProblem(f"it has {announced:,} bytes, and may have {most:,}", lasting=True)
            if announced is not None and announced != self._bytes_announced:
                self._on_size(announced)
            self._bytes_announced = announced
        tag = answer.headers.get("ETag", "W/")  # a weak one does not tell bytes apart
        self._version = answer.headers.get("Last-Modified") if tag.startswith("W/") else tag
        for response in steps:
            digest = response.headers.get("X-Linked-ETag", "").strip('"')
            if len(digest) == 64 and self._request.sha256 is None:
                self._sha256 = digest

    def _receive(self, answer: Any) -> None:
        began, received = time.monotonic(), 0
        for piece in answer.iter_raw():
            if self._bytes + len(piece) > self._most:
                raise ShardProblem(f"more than {self._most:,} bytes came", lasting=True)
            self._target.write(piece)
            self._digest.update(piece)
            self._bytes += len(piece)
            received += len(piece)
            if (now := time.monotonic()) - began > self._request.patience:
                if received < LEAST_RATE * (now - began):
                    raise ShardProblem(f"only {received:,} bytes came in {now - began:.1f} s")
                began, received = now, 0
