"""Virtual time: an event loop whose clock jumps to the next timer, and threads that are greenlets of it.

Everything of a schedule runs in one thread, in an order that follows from the seed alone: coroutines on the loop, and
the code that production runs in threads as greenlets, which give way only where they wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import heapq
import itertools
import math
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

import greenlet
from hivemind.p2p import PeerID

from tt_cli.supervisor.processes import release_freed_memory
from tt_cli.swarm.clock import Clock

EPOCH = 1000.0
TIMED = "hivemind.dht.protocol", "hivemind.dht.routing", "hivemind.dht.node", "hivemind.utils.timed_storage"
Value = TypeVar("Value")

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """What runs on one simulated machine until it crashes. stops: (from, to) in which it hangs, as by SIGSTOP."""

    def __init__(self, stops: list[tuple[float, float]]):
        self.stops, self.dead = stops, False
        self._tasks: list[asyncio.Task[Any]] = []  # in the order in which they began, some of them done
        self.most_tasks = 0  # that were not done at one time

    def began(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) > self.most_tasks:
            self._tasks = [task for task in self._tasks if not task.done()]
            self.most_tasks = max(self.most_tasks, len(self._tasks))

    def awake(self, when: float) -> float:
        """The time from which on it runs what was due at `when`."""
        for start, stop in () if self.dead else self.stops:
            if start <= when < stop:
                when = stop
        return when

    def kill(self, soon: int = 8) -> None:
        """End all of it; again and again, for `asyncio.wait_for` may miss that it was cancelled.

        soon: how often at once; later what hung, and hears of it when it would have gone on.
        """
        self.dead = True
        self._tasks = [task for task in self._tasks if not task.done()]
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            if soon:
                asyncio.get_running_loop().call_soon(self.kill, soon - 1)
            else:
                asyncio.get_running_loop().call_later(1.0, self.kill)

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a coroutine on this machine."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)


class Due(list[Any]):
    """A callback that is due now or later: in the place of asyncio's handles, which cost several times as much.

    [when, number, callback or None, its arguments, its context]
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[CALLBACK : ARGUMENTS + 1] = None, ()

    def cancelled(self) -> bool:
        return self[CALLBACK] is None


CALLBACK, ARGUMENTS = 2, 3  # places in a `Due`


class VirtualLoop(asyncio.BaseEventLoop):
    """Never waits: when nothing is ready, it is the time of the next timer. Executors run at once.

    Timers of one moment are due in the order in which they were set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = EPOCH
        self._timers: list[Due] = []
        self._set = itertools.count()

    def time(self) -> float:
        return self.now

    get_debug = bool  # asked for each future: False

    def _asyncgen_firstiter_hook(self, generator: Any) -> None:
        """Those that are left are ended by their finalizers."""

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while not self._stopping:
            while timers and timers[0][CALLBACK] is None:
                heapq.heappop(timers)
            if not ready:
                if not timers:
                    raise RuntimeError("nothing will ever happen again")
                self.now = max(self.now, timers[0][0])
            while timers and timers[0][0] <= self.now:
                ready.append(heapq.heappop(timers))
            for _ in range(len(ready)):
                _, _, callback, arguments, context = ready.popleft()
                if callback is not None:
                    try:
                        context.run(callback, *arguments)
                    except Exception as error:
                        self.call_exception_handler({"message": "a callback failed", "exception": error})

    def _write_to_self(self) -> None: ...

    def close(self) -> None:
        super().close()
        self._timers.clear()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None and process.stops and process.awake(self.now) > self.now:
            return self.call_at(self.now, callback, *args, context=context)
        due = Due((0.0, 0, callback, args, context or contextvars.copy_context()))
        self._ready.append(due)
        return due

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None and process.stops:
            when = process.awake(when)
        due = Due((when, next(self._set), callback, args, context or contextvars.copy_context()))
        heapq.heappush(self._timers, due)
        return due

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.began(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """In a thread that begins at once, and waits for nothing as a rule."""
        future, thread = self.create_future(), greenlet.greenlet(nothing if func is release_freed_memory else func)
        thread.gr_context = contextvars.copy_context()
        try:
            result = thread.switch(*args)
            if not thread.dead:
                return self.create_task(Thread.go_on(thread, result))
            future.set_result(result)
        except Exception as error:
            future.set_exception(error)
        return future


def in_virtual_time(work: Coroutine[Any, Any, Value]) -> Value:
    """Run it to its end on a loop of its own, and end whatever it began. Returns what it returns."""
    loop, patched = VirtualLoop(), contextlib.ExitStack()
    for module in TIMED:  # they take no clock
        patched.enter_context(mock.patch(f"{module}.get_dht_time", loop.time))
    patched.enter_context(mock.patch.object(PeerID, "__hash__", _steady_hash))
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.sleep(1.0))  # some may hang
        loop.close()
        asyncio.set_event_loop(None)
        patched.close()


def _steady_hash(peer: PeerID) -> int:
    """The same in every process, as hivemind pings initial peers in the order of a set."""
    return zlib.crc32(peer._bytes)


def nothing() -> None:
    """In the place of what frees a process's memory."""


def wait_on(awaited: Awaitable[Any]) -> Any:
    """Block this greenlet until it is done. Raises what it raises."""
    return greenlet.getcurrent().parent.switch(awaited)


class Thread:
    """In the place of `threading.Thread`: begun when it is made."""

    def __init__(self, target: Callable[[], None]):
        self.task = asyncio.get_running_loop().create_task(self._run(target))

    @staticmethod
    async def _run(target: Callable[[], None]) -> None:
        thread = greenlet.greenlet(target)
        thread.gr_context = contextvars.copy_context()
        await Thread.go_on(thread, thread.switch())

    @staticmethod
    async def go_on(thread: greenlet.greenlet, awaited: Any) -> Any:
        """Run one that waits for something, until its end. Returns what it returns."""
        while not thread.dead:
            try:
                result = await awaited
            except BaseException as error:
                awaited = thread.throw(error)
            else:
                awaited = thread.switch(result)
        return awaited

    def is_alive(self) -> bool:
        return not self.task.done()

    def join(self, timeout: float | None = None) -> None:
        wait_on(asyncio.wait({self.task}, timeout=timeout))


class Condition:
    """In the place of `threading.Condition`: nothing else runs between two waits, so there is no lock."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[bool], None] = {}

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            _wake(future, True)

    def wait(self, timeout: float | None = None) -> bool:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting[future] = None
        timer = loop.call_later(max(0.0, timeout), _wake, future, False) if timeout is not None else None
        try:
            return bool(wait_on(future))
        finally:
            self._waiting.pop(future, None)
            if timer is not None:
                timer.cancel()

    def wait_for(self, holds: Callable[[], Any], timeout: float | None = None) -> Any:
        loop = asyncio.get_running_loop()
        ends = loop.time() + (math.inf if timeout is None else timeout)
        while not (held := holds()) and loop.time() < ends:
            self.wait(None if math.isinf(ends) else ends - loop.time())
        return held


def _wake(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


class Answer:
    """In the place of hivemind's `MPFuture`: what a thread waits for, and a coroutine or a timer gives."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = False

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return isinstance(self._error, concurrent.futures.CancelledError)

    def cancel(self) -> bool:
        return not self._done and self._end(None, concurrent.futures.CancelledError())

    def set_result(self, result: Any) -> None:
        self._end(result, None)

    def set_exception(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, result: Any, error: BaseException | None) -> bool:
        self._result, self._error, self._done = result, error, True
        self._changed.notify_all()
        return True

    def result(self, timeout: float | None = None) -> Any:
        if not self._changed.wait_for(self.done, timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


class VirtualClock(Clock):
    """The clock of one machine. skew: seconds by which its Unix time is ahead."""

    def __init__(self, skew: float = 0.0):
        loop = asyncio.get_running_loop()
        self.monotonic = self.boottime = loop.time
        self.dht_time = lambda: loop.time() + skew
        self.condition = Condition

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        return Thread(target)

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        wait_on(asyncio.sleep(seconds))
