"""Calls in a process of its own: what libraries read when they are imported is read there anew, once for all calls."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

Call = Callable[..., "Future[Any]"]


@contextmanager
def spawned(environment: Mapping[str, str]) -> Iterator[Call]:
    """`call(function, *arguments)` begins a call of a test module's function there; its exceptions come here."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_enter, initargs=(dict(environment),)) as pool:
        yield pool.submit


def _enter(environment: dict[str, str]) -> None:
    os.environ.update(environment)
