"""Where rooms lie, with a Ray cluster that is made up and hosts that are real sockets."""

import socket
import types

import pytest

from driver.fleet import rooms as rooms_module
from driver.fleet.rooms import FRESH_S, RayRooms, Room
from tests.deadlines import wait_until


@pytest.fixture
def host():
    """A port that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def cluster(monkeypatch, host):
    """One node, whose manager is that port, with the only bundle."""
    node = {
        "NodeID": "1f",
        "Alive": True,
        "NodeManagerAddress": "127.0.0.1",
        "NodeManagerPort": host.getsockname()[1],
    }
    client = types.SimpleNamespace(ray=types.SimpleNamespace(is_connected=lambda: False))
    fake = types.SimpleNamespace(nodes=lambda: [node], util=types.SimpleNamespace(client=client))
    table = {"bundles_to_node_id": {0: "1f"}, "bundles": {0: {"CPU": 1.0}}}
    monkeypatch.setattr(rooms_module, "ray", fake)
    monkeypatch.setattr(rooms_module, "placement_group_table", lambda group: table)
    monkeypatch.setattr(rooms_module, "DIAL_PAUSE_S", 0.0)
    return node


def answer(rooms: RayRooms, room: Room) -> str:
    """What comes of a dial."""
    seen: list[str | None] = [rooms.state(room).problem]

    def known() -> bool:
        seen.append(rooms.state(room).problem)
        return seen[-1] is not None

    wait_until(known, "an answer")
    return seen[-1] or ""


def test_a_host_is_there_while_it_answers_and_gone_after(cluster, host):
    rooms, room = RayRooms(), Room(None, 0, shared=False)  # pyright: ignore[reportArgumentType]
    assert answer(rooms, room) == ""
    host.close()
    assert answer(rooms, room) == "127.0.0.1 does not answer"


def test_an_old_answer_is_none_any_more_F02(cluster, host, monkeypatch):
    """The first look of a run may lie hours before the next."""
    now = [1000.0]
    monkeypatch.setattr(
        rooms_module, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: None)
    )
    rooms, room = RayRooms(), Room(None, 0, shared=False)  # pyright: ignore[reportArgumentType]
    assert rooms.state(room).problem is None
    (dial,) = [dial for _, dial in rooms._dials.values()]
    assert dial.result(60.0) is True
    host.close()
    now[0] += FRESH_S + 1.0
    assert rooms.state(room).problem is None, "it is dialled anew"
    assert answer(rooms, room) == "127.0.0.1 does not answer"


def test_a_bundle_without_a_host_has_no_room(cluster):
    cluster["Alive"] = False
    room = Room(None, 0, shared=False)  # pyright: ignore[reportArgumentType]
    assert RayRooms().state(room).problem == "no host of the Ray cluster has 1 CPU free"
