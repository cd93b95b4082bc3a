"""Viewers of the event stream, as many as wanted, in one process of their own.

    python -m benchmarks.dashboard.viewer_process URL VIEWERS ASLEEP

Each opens the page as a browser does: what the page fetches at its start, and then the stream, to
which it listens until this process ends. Those that are asleep read nothing. The view token comes
on stdin. It prints one JSON line a second: events received and viewers that were dropped.
"""

import asyncio
import json
import sys
import urllib.parse

PAGE = ("/", "/api/run", "/api/catalog", "/api/history?points=600", "/api/judgement")
SMALL_BUFFER = 4096
"""Bytes that the kernel keeps for a viewer that reads nothing."""


class Count:
    """What all viewers together have seen."""

    def __init__(self):
        self.events = self.bytes = self.listening = self.dropped = 0


async def fetch(host: str, port: int, path: str, token: str) -> None:
    """One request; the answer is read and thrown away."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(_request(host, path, token, "close"))
    await writer.drain()
    while await reader.read(1 << 16):
        pass
    writer.close()


async def view(host: str, port: int, token: str, count: Count, *, asleep: bool) -> None:
    """One viewer."""
    for path in PAGE:
        await fetch(host, port, path, token)
    limit = SMALL_BUFFER if asleep else 1 << 16
    reader, writer = await asyncio.open_connection(host, port, limit=limit)
    writer.write(_request(host, "/api/stream", token, "keep-alive"))
    await writer.drain()
    count.listening += 1
    if asleep:
        await asyncio.Event().wait()
    while data := await reader.read(1 << 16):
        count.bytes += len(data)
        count.events += data.count(b"\nevent:") + data.startswith(b"event:")
    count.dropped += 1


def _request(host: str, path: str, token: str, connection: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {token}"]
    lines += ["Accept-Encoding: gzip", f"Connection: {connection}", "", ""]
    return "\r\n".join(lines).encode()


async def main(url: str, viewers: int, asleep: int, token: str) -> None:
    """Listens until it is killed."""
    at = urllib.parse.urlsplit(url)
    assert at.hostname is not None and at.port is not None
    count = Count()
    tasks = [
        asyncio.create_task(view(at.hostname, at.port, token, count, asleep=one < asleep))
        for one in range(viewers)
    ]
    while True:
        await asyncio.sleep(1)
        failed = [str(task.exception()) for task in tasks if task.done() and task.exception()]
        print(json.dumps(vars(count) | {"failed": failed[:3]}), flush=True)


if __name__ == "__main__":
    where, how_many, of_them_asleep = sys.argv[1:]
    asyncio.run(main(where, int(how_many), int(of_them_asleep), sys.stdin.readline().strip()))
