"""Answers as bytes: made once for all who ask within a while, compressed once in each coding, with an ETag."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import brotli
from starlette.requests import Request
from starlette.responses import Response

MOST_ENTRIES = 64
COMPRESSED_FROM = 1000  # bytes
ANSWER_QUALITY = 4  # of Brotli: smaller than gzip's 6 in a sixth of its time; 5 takes five times as long for 5 % less
FILE_QUALITY = 11  # a quarter of a second for the page's script, once
IDENTITY = "identity"
CODINGS = ("br", "gzip")  # where a client takes both alike, the first

T = TypeVar("T")


class Representation:
    """The bytes of one answer; compressed when a coding is first asked for. Thread-safe."""

    def __init__(self, plain: bytes, quality: int = ANSWER_QUALITY):
        self.etag = f'W/"{hashlib.blake2b(plain, digest_size=12).hexdigest()}"'
        self._quality, self._lock = quality, threading.Lock()
        self._encoded = {IDENTITY: plain}

    @classmethod
    def of_json(cls, content: Any) -> Representation:
        """Encode plain data."""
        return cls(json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode())

    def __len__(self) -> int:
        return len(self._encoded[IDENTITY])

    def encoded(self, coding: str) -> bytes:
        """The bytes in one of CODINGS or IDENTITY."""
        with self._lock:
            if coding not in self._encoded:
                plain = self._encoded[IDENTITY]
                self._encoded[coding] = (
                    brotli.compress(plain, mode=brotli.MODE_TEXT, quality=self._quality)
                    if coding == "br"
                    else gzip.compress(plain, 6, mtime=0)
                )
            return self._encoded[coding]


class _Entry:
    """One answer, and until when it counts; whoever makes it anew holds the lock."""

    def __init__(self) -> None:
        self.lock, self.until = threading.Lock(), -float("inf")
        self.answer: Any


class ResponseCache:
    """The newest answers. Thread-safe: of many who ask the same at once, one works."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, seconds: float, make: Callable[[], T]) -> T:
        """The answer under `key`, made anew where it is older than this."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > MOST_ENTRIES:
                self._entries.popitem(last=False)
        with entry.lock:
            if time.monotonic() >= entry.until:
                entry.answer, entry.until = make(), time.monotonic() + seconds
            answer: T = entry.answer
            return answer


def respond(request: Request, answer: Representation, media_type: str = "application/json") -> Response:
    """The answer in a coding that the client takes, or that it has not changed."""
    headers = {"ETag": answer.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if answer.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    coding = accepted_coding(request, *CODINGS) if len(answer) >= COMPRESSED_FROM else IDENTITY
    if coding != IDENTITY:
        headers["Content-Encoding"] = coding
    return Response(answer.encoded(coding), media_type=media_type, headers=headers)


def accepted_coding(request: Request, *codings: str) -> str:
    """The one of `codings` that the client's Accept-Encoding likes best (RFC 9110, 12.5.3), or IDENTITY."""
    weights = {IDENTITY: 0.001}  # always acceptable, and anything that is named goes before it
    for offer in request.headers.get("accept-encoding", "").lower().replace(" ", "").split(","):
        coding, _, quality = offer.partition(";")
        well_formed = re.fullmatch(r"q=[01](\.\d{0,3})?", quality)
        weights[coding] = float(quality[2:]) if well_formed else float(not quality)
    weights[IDENTITY] = max(weights[IDENTITY], 0.0001)
    return max((*codings, IDENTITY), key=lambda coding: weights.get(coding, weights.get("*", 0.0)))
