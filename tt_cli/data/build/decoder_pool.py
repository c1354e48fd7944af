"""Pictures decoded by worker processes, in the order in which they are asked for.

A worker process that a picture kills is replaced, and the picture is found by decoding those in question one at a time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tt_cli.data.build.journal import Place
from tt_cli.data.build.picture_decoding import Decoded, Undecodable, decode
from tt_cli.data.build.picture_sources import CaptionedPicture
from tt_cli.supervisor.processes import end_with

Chosen = tuple[Place, CaptionedPicture | None, str | Undecodable | None]
"""The place after a picture, the picture, and why it is left out without being decoded: None if it is not."""

Result = tuple[Place, CaptionedPicture | None, Decoded | Undecodable | str]
"""The place after a picture, the picture, and its pixels, or what is wrong with the file, or why it is left out."""

_Waiting = tuple[Place, CaptionedPicture | None, Decoded | Undecodable | str | Future[Decoded | Undecodable]]


class DecoderPool:
    """A context manager over `workers` processes that decode pictures to squares of `side` pixels."""

    def __init__(self, workers: int, side: int):
        self._workers, self._side = workers, side
        self._pool = self._new(workers)

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _new(workers: int) -> ProcessPoolExecutor:
        import multiprocessing

        # A server that has loaded what is needed forks the workers: it knows no threads and no GPU.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tt_cli.data.build.picture_decoding"])
        return ProcessPoolExecutor(workers, mp_context=context, initializer=end_with, initargs=(os.getpid(),))

    def __call__(self, chosen: Iterator[Chosen], ahead: int) -> Iterator[Result]:
        """The result of each picture; at most `ahead` of them are decoded before their turn."""
        waiting: deque[_Waiting] = deque()
        for place, picture, reason in chosen:
            waiting.append((place, picture, reason or self._submitted(picture)))
            if len(waiting) >= ahead:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _submitted(self, picture: CaptionedPicture | None) -> Future[Decoded | Undecodable]:
        assert picture is not None and picture.content is not None
        try:
            return self._pool.submit(decode, picture.content, self._side)
        except BrokenProcessPool as error:  # dealt with when a result is asked for
            failed: Future[Decoded | Undecodable] = Future()
            failed.set_exception(error)
            return failed

    def _next(self, waiting: deque[_Waiting]) -> Result:
        while True:
            place, picture, result = waiting[0]
            try:
                answer = result.result() if isinstance(result, Future) else result
            except BrokenProcessPool:
                self._replace(waiting)
                continue
            waiting.popleft()
            return place, picture, answer

    def _replace(self, waiting: deque[_Waiting]) -> None:
        """A process has died, and the pool with it: decode what is not done one at a time, to find who did it."""
        self._pool.shutdown(cancel_futures=True)
        alone = self._new(1)
        for index, (place, picture, result) in enumerate(waiting):
            if picture is None or picture.content is None or not isinstance(result, Future):
                continue
            if result.cancelled() or result.exception() is not None:
                try:
                    answer = alone.submit(decode, picture.content, self._side).result()
                except BrokenProcessPool:
                    answer = Undecodable("broken", "decoding it ends the process")
                    alone.shutdown()
                    alone = self._new(1)
                waiting[index] = (place, picture, answer)
        alone.shutdown()
        self._pool = self._new(self._workers)
