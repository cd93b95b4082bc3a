"""Requests to async scorers: many at once in one event loop of the process that runs scorers.

Each has a time limit of its own, at which it is cancelled while the others go on. What no time
limit ends, such as a call that blocks the loop, the parent ends by killing the process.

An error whose cause may be another request is marked doubtful, and the parent has it scored again
with nothing beside it: a lack of memory, descriptors or threads, and a time limit that was reached
while others kept the loop busy.

A copy of the process that a scorer forks would go on with the calls of all others, on the same
connections. It ends at the first point where the call that forked it waits, returns or raises.
"""

import asyncio
import errno
import functools
import json
import os
import selectors
import sys
import threading
import traceback
import typing
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

_TICK_S = 0.05
_MOST_LAG = 0.1
"""Share of a time limit that others may have kept the loop busy, for the limit to count."""
_THREADS = 4096
"""Of `asyncio.to_thread`: so many that calls which never return leave some for the others."""
_SHORTAGES = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.EADDRNOTAVAIL)
}


class _Replies(Protocol):
    def reply(self, message: dict) -> None: ...

    def keep_from_copies(self, fds: list[int]) -> None: ...


class _Answers(Protocol):
    async def score_async(self, line: bytes) -> dict[str, Any]: ...

    def after_reply(self, line: bytes) -> None: ...


class _Describes(Protocol):
    def describe(self, error: BaseException) -> str: ...


class ConcurrentRequests:
    """Answers requests to async scorers until there are no more."""

    def __init__(self, scorers: Mapping[str, _Answers], pipes: _Replies, guard: _Describes):
        self._scorers = scorers
        self._pipes = pipes
        self._guard = guard
        self._lag_s = 0.0
        """Time in which the loop could not turn, since the start."""
        self._pid = os.getpid()
        selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(selector)
        self._loop.set_task_factory(self._make_task)
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS))
        if isinstance(selector, selectors.EpollSelector):
            # A copy shares it, and would take away what the loop waits for.
            pipes.keep_from_copies([selector.fileno()])

    def run(self, lines: Iterable[bytes]) -> None:
        """Begins each request as it arrives; returns when the lines end."""
        asyncio.set_event_loop(self._loop)
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        self._loop.call_soon(self._tick, self._loop.time())
        self._loop.run_forever()

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._loop.call_soon_threadsafe(self._begin, line)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _begin(self, line: bytes) -> None:
        task = self._loop.create_task(self._answer(line))
        task.add_done_callback(lambda done: done.result())  # raises into the loop's log

    def _tick(self, due_s: float) -> None:
        now = self._loop.time()
        self._lag_s += now - due_s
        self._loop.call_at(now + _TICK_S, self._tick, now + _TICK_S)

    async def _answer(self, line: bytes) -> None:
        request = json.loads(line)
        timeout_s, lag_before_s = request["timeout_s"], self._lag_s
        end_s = self._loop.time() + timeout_s
        for name in request["scorers"]:
            task = self._loop.create_task(self._outcome(self._scorers[name], line))
            await asyncio.wait({task}, timeout=end_s - self._loop.time())
            late = not task.done() or self._loop.time() > end_s
            if late:
                task.cancel()
                await asyncio.wait({task}, timeout=_TICK_S)  # it may have something to count
                outcome = {
                    "error": f"no result within {timeout_s:g} s",
                    "late": True,
                    "doubtful": self._lag_s - lag_before_s > _MOST_LAG * timeout_s,
                }
            else:
                outcome = task.result()
            self._pipes.reply({"id": request["id"], "scorer": name} | outcome)
            self._scorers[name].after_reply(line)
            if late:
                return

    async def _outcome(self, scorer: _Answers, line: bytes) -> dict[str, Any]:
        try:
            return await _Steps(scorer.score_async(line), self._pid)
        # As in `Guard.call`: whatever it raises is the outcome for this request.
        except BaseException as error:
            return {
                "error": self._guard.describe(error),
                "late": False,
                "doubtful": is_shortage(error),
            }

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task:
        async def run() -> Any:
            return await _Steps(coroutine, self._pid)

        return asyncio.Task(run(), loop=loop, **options)


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is for want of what a process has a bound on."""
    seen: set[int] = set()
    left = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno in _SHORTAGES):
            return True
        if isinstance(one, RuntimeError) and "can't start new thread" in str(one):
            return True
        left += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return False


class _Steps:
    """A coroutine after each of whose steps a process ends that is not the original one."""

    def __init__(self, coroutine: Coroutine, pid: int):
        self._coroutine = coroutine
        self._pid = pid

    def __await__(self) -> typing.Generator[Any, Any, Any]:
        pid = self._pid
        step = functools.partial(self._coroutine.send, None)
        while True:
            try:
                awaited = step()
            except StopIteration as end:
                _end_copy(pid, None)
                return end.value
            except BaseException as error:
                _end_copy(pid, error)
                raise
            _end_copy(pid, None)
            try:
                step = functools.partial(self._coroutine.send, (yield awaited))
            except BaseException as error:  # travels on into the coroutine
                step = functools.partial(self._coroutine.throw, error)


def _end_copy(pid: int, error: BaseException | None) -> None:
    """Ends this process if it is not the one with this id, as Python would end it."""
    if os.getpid() == pid:
        return
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)  # what a regular end would tidy up belongs to the original
