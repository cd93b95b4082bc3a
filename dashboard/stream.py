"""Server-sent events for any number of viewers: each event is encoded once, and none waits for
anybody.

A viewer has a bounded queue of references to encoded events. One that reads too slowly finds its
queue full and is dropped, with what was on its way: a page that comes back gets the present state,
so nothing is worth keeping for it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from services.wire.strict_json import encode

QUEUE_EVENTS = 32
"""That a viewer may be behind."""
MAX_VIEWERS = 400
COMMENT_S = 10.0
"""Between two signs of life to a page, where nothing happens."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

_COMMENT = b": \n\n"


class TooManyViewers(RuntimeError):
    """No more can be served; the message says how many are."""


class Viewer:
    """One open page."""

    def __init__(self, queue_events: int):
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(queue_events)
        """None ends the stream after what stands before it."""
        self.task: asyncio.Task[None] | None = None
        """Writes to the page."""
        self.abort: Callable[[], None] = lambda: None
        """Ends the connection with whatever is buffered for it."""

    def drop(self) -> None:
        """Ends it at once."""
        if self.task is not None:
            self.task.cancel()
        self.abort()


class Hub:
    """Knows the viewers, and gives each event to all of them; used from one event loop."""

    def __init__(self, *, queue_events: int = QUEUE_EVENTS, max_viewers: int = MAX_VIEWERS):
        self._queue_events = queue_events
        self._max_viewers = max_viewers
        self._viewers: set[Viewer] = set()
        self._last_id = 0
        self._closed = False
        self.dropped = 0
        """Viewers that were too slow, since the start."""
        self.encoded = 0
        """Events that were encoded, since the start."""

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def event(self, kind: str, data: Any) -> bytes:
        """One event as it goes over the wire."""
        self._last_id += 1
        self.encoded += 1
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self._last_id, kind.encode(), encode(data))

    def publish(self, kind: str, data: Any) -> None:
        """Gives an event to every viewer there is; never waits."""
        if self._viewers:
            self._give(self.event(kind, data))

    def close(self) -> None:
        """Lets every viewer read what it has got, then ends its stream; also those to come."""
        self._closed = True
        self._give(None)

    def join(self, first: Iterable[bytes] = ()) -> Viewer:
        """Adds a viewer, which gets these events before all others.

        Raises:
            TooManyViewers: if there is no room.
        """
        if len(self._viewers) >= self._max_viewers:
            raise TooManyViewers(
                f"{len(self._viewers)} pages are open, and no more than {self._max_viewers} are "
                "served: close some"
            )
        viewer = Viewer(self._queue_events)
        for event in (*first, *([None] if self._closed else [])):
            viewer.queue.put_nowait(event)
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)

    def _give(self, event: bytes | None) -> None:
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
        # `abort` is put there by dashboard/server.py; other servers have none.
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
