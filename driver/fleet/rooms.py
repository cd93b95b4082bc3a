"""The places reserved for actors, and whether their hosts are there.

Ray learns of the death of a host 15 to 67 s late, and starts actors there meanwhile. So a host is
dialled before anything is started on it again.
"""

import concurrent.futures
import contextlib
import dataclasses
import socket
import time
from typing import Any, Protocol

import ray
import ray.util.client
from ray.util.placement_group import PlacementGroup, placement_group_table

DIAL_S = 2.0
"""How long a host may take to answer."""
DIALS, DIAL_PAUSE_S = 3, 1.0
"""How often it is dialled in a row before it counts as gone, and the time between."""
FRESH_S = 15.0
"""An answer to a dial that was begun earlier is none any more."""
QUIET_S = 15.0
"""How long a process may be silent before its host is dialled."""
LOOK_S = 1.0
"""Between two looks at a room."""
NOTICED_S = 90.0
"""After this long Ray has noticed the death of a host, and looks for another one."""


class Room:
    """A reserved place for one actor."""

    def __init__(self, group: PlacementGroup, bundle: int, *, shared: bool):
        """Args:
        shared: whether others have bundles in the same group, so that it must stay.
        """
        self.group = group
        self.bundle = bundle
        self.shared = shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoomState:
    """Where a room lies."""

    node: str = ""
    """Ray's id of one life of a host; empty where the room lies nowhere."""
    host: str = ""
    """Its address; empty where the room lies nowhere."""
    problem: str | None = None
    """Why nothing can be started there now; empty if something can, None while that is unknown."""

    def is_same_life(self, before: "RoomState") -> bool:
        """Whether the host where the room lay has been there since."""
        return not self.problem and self.node == before.node


class Rooms(Protocol):
    """Who knows where rooms lie."""

    def state(self, room: Room) -> RoomState:
        """Looks at a room; never waits for its host."""
        ...


class RayRooms:
    """Asks Ray for the places, and the hosts whether they are there."""

    def __init__(self):
        self._threads = concurrent.futures.ThreadPoolExecutor(8, thread_name_prefix="dial")
        self._dials: dict[tuple[str, int], tuple[float, concurrent.futures.Future[bool]]] = {}
        """When each was begun, and what became of it."""

    def state(self, room: Room) -> RoomState:
        """Looks at a room; its host is dialled meanwhile, and the next look has the answer."""
        table: dict[str, Any] = placement_group_table(room.group)
        node_id = table.get("bundles_to_node_id", {}).get(room.bundle, "")
        node = next((one for one in ray.nodes() if one["NodeID"] == node_id), None)
        if node is None or not node["Alive"]:
            asked = table.get("bundles", {}).get(room.bundle, {})
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
            return RoomState(problem=f"no host of the Ray cluster has {wanted or 'it'} free")
        host = node["NodeManagerAddress"]
        answers = self._answers((host, node["NodeManagerPort"]))
        problem = None if answers is None else "" if answers else f"{host} does not answer"
        return RoomState(node=node_id, host=host, problem=problem)

    def _answers(self, address: tuple[str, int]) -> bool | None:
        """The answer to a dial that has just ended, once; else None, and one is under way."""
        if ray.util.client.ray.is_connected():
            return True  # hosts need not be reached from where Ray's client runs
        now = time.monotonic()
        begun_s, dial = self._dials.get(address, (now, None))
        if dial is None or (dial.done() and now - begun_s > FRESH_S):
            self._dials[address] = now, self._threads.submit(_dial, address)
            return None
        if not dial.done():
            return None
        del self._dials[address]
        return dial.result()


def _dial(address: tuple[str, int]) -> bool:
    """Whether a host answers; one lost packet says nothing."""
    for _ in range(DIALS):
        with contextlib.suppress(OSError):
            socket.create_connection(address, DIAL_S).close()
            return True
        time.sleep(DIAL_PAUSE_S)
    return False
