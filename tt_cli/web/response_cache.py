"""Answers as bytes: encoded and compressed once for all who ask within a while, with an ETag."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

KEPT = 64
COMPRESSED_FROM = 1000  # bytes


@dataclass(frozen=True)
class Encoded:
    """An answer, plain and compressed. etag: of what it says."""

    plain: bytes
    compressed: bytes | None
    etag: str

    @classmethod
    def of(cls, content: Any) -> Encoded:
        """Encode plain data."""
        return cls.of_bytes(json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode())

    @classmethod
    def of_bytes(cls, plain: bytes) -> Encoded:
        """Of any text."""
        compressed = gzip.compress(plain, 6, mtime=0) if len(plain) >= COMPRESSED_FROM else None
        return cls(plain, compressed, f'W/"{hashlib.blake2b(plain, digest_size=12).hexdigest()}"')


class Cache:
    """The newest answers. Thread-safe: of many who ask the same at once, one works."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._kept: OrderedDict[Hashable, tuple[float, Encoded]] = OrderedDict()
        self._working: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, seconds: float, make: Callable[[], Encoded]) -> Encoded:
        """The answer that is kept under `key`, made anew where it is older than this."""
        with self._lock:
            working = self._working.setdefault(key, threading.Lock())
        try:
            with working:
                kept = self._kept.get(key)
                if kept is not None and self._clock() < kept[0] + seconds:
                    return kept[1]
                made = make()
                with self._lock:
                    self._kept[key] = self._clock(), made
                    self._kept.move_to_end(key)
                    while len(self._kept) > KEPT:
                        self._kept.popitem(last=False)
                return made
        finally:
            with self._lock:
                self._working.pop(key, None)


def respond(request: Request, encoded: Encoded, media_type: str = "application/json") -> Response:
    """The answer, or that it has not changed."""
    headers = {"ETag": encoded.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if encoded.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if encoded.compressed is not None and takes_gzip(request):
        headers["Content-Encoding"] = "gzip"
        return Response(encoded.compressed, media_type=media_type, headers=headers)
    return Response(encoded.plain, media_type=media_type, headers=headers)


def takes_gzip(request: Request) -> bool:
    """Whether the client says that it does."""
    offered = request.headers.get("accept-encoding", "").lower().replace(" ", "").split(",")
    return any(coding.split(";")[0] == "gzip" and not coding.endswith(";q=0") for coding in offered)
