"""A local HTTP server that stands for a judge: it takes its time, and can fail in every usual way.

The body of a request is `ACTION NUMBER`. `ok 0.5` answers 0.5; `429 0.5` and any other status of
three digits answers with that status, `busy 0.5` with 429 the first time and 0.5 from then on;
`stall` never answers, `drop` closes the connection, and `cut` closes it in the middle of an answer.
"""

import asyncio
import threading
from types import TracebackType
from typing import Self

_REASONS = {200: "OK", 429: "Too Many Requests", 500: "Internal Server Error"}


class JudgeServer:
    """Serves from a thread of its own while it is entered."""

    def __init__(self, delay_s: float = 0.0):
        """Args:
        delay_s: before each answer.
        """
        self.port = 0
        self.requests = 0
        """Taken so far."""
        self.most_at_once = 0
        """Most requests that waited for their answer at one time."""
        self._delay_s = delay_s
        self._waiting = 0
        self._busy: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(
                    line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:-2]
                )
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                self.requests += 1
                if not await self._answer(body.decode(), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, body: str, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        action, _, number = body.partition(" ")
        self._waiting += 1
        self.most_at_once = max(self.most_at_once, self._waiting)
        try:
            await asyncio.sleep(self._delay_s if action != "stall" else 1e9)
        finally:
            self._waiting -= 1
        if action == "drop":
            return False
        status = int(action) if action.isdigit() else 200
        if action == "busy" and body not in self._busy:
            self._busy.add(body)
            status = 429
        text = number.encode() if status == 200 else b"no"
        length = len(text) + (10 if action == "cut" else 0)
        line = f"HTTP/1.1 {status} {_REASONS.get(status, 'Other')}"
        writer.write(f"{line}\r\nContent-Length: {length}\r\n\r\n".encode() + text)
        await writer.drain()
        return action != "cut"
