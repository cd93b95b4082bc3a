"""A TCP proxy that mistreats what passes, between real endpoints; its rules may change at any time.

TCP keeps the bytes of one connection in order, so what a network can still reorder is the data of
different connections: `late_s` holds each connection's pieces back by times of its own.
"""

import asyncio
import collections
import contextlib
import dataclasses
import math
import random
import socket
import struct
import threading

PIECE_BYTES = 16 * 1024
LOOK_S = 0.02
"""How often a connection that stalls looks whether its rule has changed."""
DOWN, UP = "down", "up"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What becomes of one connection's bytes in one direction; offsets count from its start."""

    cut_after: int | None = None
    """Both ends are reset when so many bytes have passed."""
    stall_after: int | None = None
    """Nothing passes for `stall_s` once so many bytes have."""
    stall_s: float = math.inf
    bytes_per_s: float = math.inf
    late_s: float = 0.0
    """Each piece is delivered up to so much later than it came, order kept."""
    flip_at: int | None = None
    """One bit of this byte is flipped."""


class FaultProxy:
    """Listens from construction to `close`; a context manager.

    `down` (from the target) and `up` (to it) hold for every connection, unless `of_connection`
    has a rule for its number, counted from 0, and direction. `refusing` resets new connections.
    """

    def __init__(self, target_port: int, *, down: Rule = Rule(), up: Rule = Rule(), seed: int = 0):
        self.target_port = target_port
        self.down, self.up = down, up
        self.of_connection: dict[tuple[int, str], Rule] = {}
        self.refusing = False
        self.connections = 0
        self.faults = 0
        """Cuts, stalls, flips and refusals so far."""
        self.deliveries: list[int] = []
        """Numbers of the connections whose pieces reached the client, in order."""
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)
        self._thread.start()

    def heal(self) -> None:
        """Lets everything pass from now on."""
        self.down = self.up = Rule()
        self.of_connection, self.refusing = {}, False

    def close(self) -> None:
        """Resets every connection and stops listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stop = asyncio.Event()
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, sock=self._listener)
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        ends = [writer]
        try:
            if self.refusing:
                self.faults += 1
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            ends.append(far_writer)
            await asyncio.wait(
                [
                    asyncio.create_task(self._pump(number, DOWN, far_reader, writer)),
                    asyncio.create_task(self._pump(number, UP, reader, far_writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        except (OSError, asyncio.CancelledError):
            pass  # nobody listens there, or the proxy closes
        finally:
            for end in ends:
                _reset(end)

    def _rule(self, number: int, direction: str) -> Rule:
        everywhere = self.down if direction == DOWN else self.up
        return self.of_connection.get((number, direction), everywhere)

    async def _pump(self, number: int, direction: str, source, sink) -> None:
        """Passes bytes on until either end closes or the rule cuts the connection."""
        passed, stalled = 0, False
        late: collections.deque[tuple[float, bytes]] = collections.deque()
        more = asyncio.Event()
        delivering = asyncio.create_task(self._deliver(number, direction, late, more, sink))
        try:
            while data := await source.read(PIECE_BYTES):
                rule = self._rule(number, direction)
                if not stalled and rule.stall_after is not None and passed >= rule.stall_after:
                    stalled = True
                    await self._stall(number, direction)
                    rule = self._rule(number, direction)
                data = self._change(rule, passed, data)
                passed += len(data)
                due = self._loop.time() + self._random.random() * rule.late_s
                late.append((max(due, late[-1][0]) if late else due, data))
                more.set()
                if rule.cut_after is not None and passed >= rule.cut_after:
                    while late:
                        await asyncio.sleep(LOOK_S / 10)
                    return
                await asyncio.sleep(len(data) / rule.bytes_per_s)
            while late:
                await asyncio.sleep(LOOK_S / 10)
        except OSError:
            pass
        finally:
            delivering.cancel()

    def _change(self, rule: Rule, passed: int, data: bytes) -> bytes:
        """The part of a piece that passes, with the bit flipped that is due."""
        if rule.cut_after is not None and passed + len(data) >= rule.cut_after:
            self.faults += 1
            data = data[: max(0, rule.cut_after - passed)]
        if rule.flip_at is not None and passed <= rule.flip_at < passed + len(data):
            self.faults += 1
            wrong = bytearray(data)
            wrong[rule.flip_at - passed] ^= 0x10
            data = bytes(wrong)
        return data

    async def _stall(self, number: int, direction: str) -> None:
        self.faults += 1
        end = self._loop.time() + self._rule(number, direction).stall_s
        while self._loop.time() < end and self._rule(number, direction).stall_after is not None:
            await asyncio.sleep(LOOK_S)

    async def _deliver(self, number: int, direction: str, late, more, sink) -> None:
        with contextlib.suppress(OSError):
            while True:
                await more.wait()
                more.clear()
                while late:
                    due, data = late[0]
                    await asyncio.sleep(due - self._loop.time())
                    sink.write(data)
                    await sink.drain()
                    if direction == DOWN:
                        self.deliveries.append(number)
                    late.popleft()
        late.clear()


def _reset(end: asyncio.StreamWriter) -> None:
    """Closes with RST, as a crashed host or a firewall does; what is on its way is lost."""
    with contextlib.suppress(OSError):
        end.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    end.transport.abort()
