"""What Ray is asked for where a process of the run is started."""

import types
from typing import Any

import pytest

from driver.config.sections.placement import PlacementConfig
from driver.config.shell_switches import FIXED
from driver.fleet import launch
from driver.fleet.launch import Launcher
from driver.fleet.rooms import Room


@pytest.fixture
def asked(monkeypatch):
    """The options of each actor that is made."""
    options: list[dict[str, Any]] = []
    actor = types.SimpleNamespace(describe=types.SimpleNamespace(remote=lambda: None))

    def record(**given) -> object:
        options.append(given)
        return types.SimpleNamespace(remote=lambda spec: actor)

    fake = types.SimpleNamespace(remote=lambda kind: types.SimpleNamespace(options=record))
    monkeypatch.setattr(launch, "ray", fake)
    return options


def test_every_actor_gets_our_switches_and_leaves_the_end_of_its_children_to_them_N30_R15(asked):
    launcher = Launcher(PlacementConfig(platform="cpu"))
    spec: Any = types.SimpleNamespace(name="rollout-0")
    room = Room(None, 0, shared=True)  # pyright: ignore[reportArgumentType]
    launcher.start_learner(spec, room)
    launcher.start_worker(spec, room)
    for options in asked:
        variables = options["runtime_env"]["env_vars"]
        assert FIXED.items() <= variables.items()
        assert variables["RAY_kill_child_processes_on_worker_exit"] == "0"
    assert len(asked) == 2
