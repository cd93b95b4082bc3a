"""The rollout workers of a run that goes on, asked of its driver, and the way to change them.

Calls block until the driver answers or their time is over: run them in a thread.
"""

import dataclasses
import enum
import pathlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from services.control.access import NoAccess, read_access
from services.control.client import ControlClient, ControlFailed
from services.control.messages import Accepted, Fleet, NoSuchWorker, NotNow, OutOfBounds

LOOK_S = 2.0
"""For the driver to say what it has; it never waits for anything to say it."""
CHANGE_S = 20.0
"""For the driver's loop to take up a change: it looks for them between two waits."""
_OTHER_NAMES = {"least": "min", "most": "max"}

T = TypeVar("T")


class Refusal(Exception):
    """Why a change is not made, with the HTTP status that says so."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class FleetLink:
    """Keeps one connection to the driver of a run, and opens another after a failure."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._client: ControlClient | None = None

    def look(self) -> dict[str, Any]:
        """The fleet as the page shows it; `available` is false with `why` where nobody answers."""
        try:
            return fleet_json(self._call(lambda client: client.fleet(LOOK_S)))
        except Refusal as refusal:
            return absent(str(refusal))

    def scale(self, target: int) -> Accepted:
        """Asks for so many workers; raises Refusal."""
        return self._call(lambda client: client.scale(target, CHANGE_S))

    def drain(self, name: str) -> Accepted:
        """Asks one worker to go; raises Refusal."""
        return self._call(lambda client: client.drain(name, CHANGE_S))

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    def _call(self, call: Callable[[ControlClient], T]) -> T:
        try:
            return call(self._connected())
        except NoAccess as error:
            raise Refusal(503, str(error)) from error
        except OutOfBounds as error:
            raise Refusal(422, str(error)) from error
        except NoSuchWorker as error:
            raise Refusal(404, str(error)) from error
        except NotNow as error:
            raise Refusal(409, str(error)) from error
        except (PermissionError, ControlFailed, TimeoutError) as error:
            self.close()  # the driver may be another one by now, at another address
            raise Refusal(504 if isinstance(error, TimeoutError) else 503, str(error)) from error

    def _connected(self) -> ControlClient:
        with self._lock:
            if self._client is None:
                self._client = ControlClient(*read_access(self._folder))
            return self._client


def fleet_json(fleet: Fleet) -> dict[str, Any]:
    """Every field of the message, enums by their value."""
    fields = [
        (field.name, _plain(getattr(fleet, field.name))) for field in dataclasses.fields(fleet)
    ]
    return {"available": True, "why": "", **{_OTHER_NAMES.get(k, k): one for k, one in fields}}


def absent(why: str) -> dict[str, Any]:
    """What stands for a fleet that nobody can tell of."""
    return {"available": False, "why": why, "workers": []}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value
