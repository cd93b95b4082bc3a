"""Serves the dashboard's application with uvicorn on a bound socket."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import threading
from asyncio import TimerHandle
from collections.abc import Callable, Iterator

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from dashboard.listener import BACKLOG
from dashboard.runs.run_follower import RunFollower

CHECK_S = 0.5
REQUEST_S = 20.0
"""Timeout for a request to arrive, head and body; slower clients are disconnected."""
DESCRIPTORS = 4096
"""File descriptors of the process, if the system allows it."""
ORPHAN_S = 60.0
"""A dashboard continues this long after its driver ended, so that viewers are notified."""

SEND_BYTES = 128 * 1024
"""Send buffer for a viewer; by default the kernel keeps up to 4 MB for one that does not read."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Protocol(H11Protocol):
    """Lets the application abort a connection whose reader has stopped.

    It also aborts one whose request does not arrive within REQUEST_S.
    """

    _late: TimerHandle | None = None

    def connection_made(self, transport) -> None:
        """Limits the number of connections and their buffers."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
            return
        self.app_state = {**self.app_state, "abort": transport.abort}
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Also watches the request's timeout."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Also cancels the request's timeout."""
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def _watch(self) -> None:
        """Starts the timeout of a request with its first byte, or with the connection."""
        if self._late is None and self._is_asked():
            self._late = self.loop.call_later(REQUEST_S, self.transport.abort)
        elif self._late is not None and not self._is_asked():
            self._late.cancel()
            self._late = None

    def _is_asked(self) -> bool:
        """Whether a request is incomplete; the first one begins with the connection."""
        state = self.conn.their_state
        begun = self.cycle is None or bool(self.conn.trailing_data[0])
        return state is h11.SEND_BODY or (state is h11.IDLE and begun)


def most_connections() -> int:
    """A number of connections with which descriptors do not run out.

    Without descriptors asyncio would log a traceback for each connection that it cannot accept,
    hundreds of thousands a minute, to the disk of the run.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return DESCRIPTORS if limit < 0 else max(limit // 4, limit - 2 * BACKLOG)


def _raise_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard < 0 else min(hard, DESCRIPTORS)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_no_flood(record: logging.LogRecord) -> bool:
    return "out of system resource" not in record.getMessage()


class DashboardServer(uvicorn.Server):
    """Publishes the last state of the run before it ends; run it from one thread."""

    def __init__(self, app: Starlette, follower: RunFollower):
        _raise_limit()
        logging.getLogger("asyncio").addFilter(_is_no_flood)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.access").disabled = True  # a request line may contain a token
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_Protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._follower = follower

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but a signal is not raised again after the server has ended, so that the
        caller can clean up.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in _SIGNALS}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the streams first."""
        await self._follower.close()
        await super().shutdown(sockets)

    def serve_on(self, listener: socket.socket, orphaned: "Orphaned | None" = None) -> None:
        """Serves until SIGINT, SIGTERM or `should_exit`, or until ORPHAN_S after the driver ended.

        Raises:
            Exception: the error that ended the task that polls the run.
        """
        asyncio.run(self._serve_on(listener, orphaned))
        if self._follower.failure is not None:
            raise self._follower.failure

    async def _serve_on(self, listener: socket.socket, orphaned: "Orphaned | None") -> None:
        watch = asyncio.create_task(self._end_with(orphaned))
        await self.serve([listener])
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    async def _end_with(self, orphaned: "Orphaned | None") -> None:
        loop, since = asyncio.get_running_loop(), None
        while True:
            if orphaned is not None and orphaned():
                since = loop.time() if since is None else since
                if orphaned.is_replaced() or loop.time() - since > ORPHAN_S:
                    self.should_exit = True
            if self._follower.failure is not None:
                self.should_exit = True
            await asyncio.sleep(CHECK_S)


class Orphaned:
    """Whether the driver that started this process has ended.

    Args:
        driver_pid: of the parent.
        token_file: a new driver of the same run replaces it.
        parent: returns the current parent's process id.
    """

    def __init__(self, driver_pid: int, token_file: os.PathLike[str], parent=os.getppid):
        self._driver_pid = driver_pid
        self._token_file = token_file
        self._parent: Callable[[], int] = parent
        self._mine = self._stamp()

    def __call__(self) -> bool:
        """Whether the parent is another process now."""
        return self._parent() != self._driver_pid

    def is_replaced(self) -> bool:
        """Whether another driver has taken over, which may need this port."""
        return self._stamp() != self._mine

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._token_file)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
