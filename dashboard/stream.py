"""Server-sent events for many viewers: each event is encoded once, and no viewer waits for another.

A viewer has a bounded queue of references to encoded events. If it reads too slowly, its queue is
full and it is disconnected; a page that reconnects receives the current state.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from services.wire.strict_json import encode

QUEUE_EVENTS = 32
"""Events that a viewer may be behind."""
MAX_VIEWERS = 400
COMMENT_S = 10.0
"""Between two comments to a page while there are no events."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

_COMMENT = b": \n\n"


class TooManyViewers(RuntimeError):
    """The limit of viewers is reached; the message names it."""


class Viewer:
    """One open page."""

    def __init__(self, queue_events: int):
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(queue_events)
        """None ends the stream after the events before it."""
        self.task: asyncio.Task[None] | None = None
        """The task that writes to the page."""
        self.abort: Callable[[], None] = lambda: None
        """Ends the connection and discards its buffer."""

    def drop(self) -> None:
        """Disconnects it at once."""
        if self.task is not None:
            self.task.cancel()
        self.abort()


class Hub:
    """Sends each event to all viewers; used from one event loop."""

    def __init__(self, *, queue_events: int = QUEUE_EVENTS, max_viewers: int = MAX_VIEWERS):
        self._queue_events = queue_events
        self._max_viewers = max_viewers
        self._viewers: set[Viewer] = set()
        self._last_id = 0
        self._closed = False
        self.dropped = 0
        """Viewers disconnected for being too slow, since the start."""
        self.encoded = 0
        """Events encoded since the start."""

    @property
    def viewers(self) -> int:
        """Number of open pages."""
        return len(self._viewers)

    def event(self, kind: str, data: Any) -> bytes:
        """One encoded event."""
        self._last_id += 1
        self.encoded += 1
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self._last_id, kind.encode(), encode(data))

    def publish(self, kind: str, data: Any) -> None:
        """Sends an event to every viewer, without waiting."""
        if self._viewers:
            self._send(self.event(kind, data))

    def close(self) -> None:
        """Ends every stream after its queued events, and those of later viewers."""
        self._closed = True
        self._send(None)

    def join(self, first: Iterable[bytes] = ()) -> Viewer:
        """Adds a viewer, which first receives these events.

        Raises:
            TooManyViewers: if the limit is reached.
        """
        if len(self._viewers) >= self._max_viewers:
            raise TooManyViewers(
                f"{len(self._viewers)} pages are open, which is the limit: close some"
            )
        viewer = Viewer(self._queue_events)
        for event in (*first, *([None] if self._closed else [])):
            viewer.queue.put_nowait(event)
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Removes a viewer."""
        self._viewers.discard(viewer)

    def _send(self, event: bytes | None) -> None:
        for viewer in tuple(self._viewers):
            try:
                viewer.queue.put_nowait(event)
            except asyncio.QueueFull:
                self.dropped += 1
                self._viewers.discard(viewer)
                viewer.drop()


class EventStream:
    """The answer to one viewer, as an ASGI application: from joining to leaving."""

    def __init__(self, hub: Hub, viewer: Viewer, comment_s: float = COMMENT_S):
        self._hub = hub
        self._viewer = viewer
        self._comment_s = comment_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the viewer leaves or is disconnected."""
        # dashboard/server.py provides `abort`; other servers do not.
        self._viewer.abort = scope.get("state", {}).get("abort", self._viewer.abort)
        writing = asyncio.create_task(self._write(send))
        self._viewer.task = writing
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.leave(self._viewer)
            for task in (writing, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while True:
            try:
                event = await asyncio.wait_for(self._viewer.queue.get(), self._comment_s)
            except TimeoutError:
                event = _COMMENT
            more = event is not None
            await send({"type": "http.response.body", "body": event or b"", "more_body": more})
            if not more:
                return


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
