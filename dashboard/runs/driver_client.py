"""Asks the driver of a running run for its rollout workers, and for changes to them.

Calls block until the driver answers or a timeout: run them in a thread.
"""

import dataclasses
import enum
import pathlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from services.control.access import NoAccess, read_access
from services.control.client import ControlClient, ControlFailed
from services.control.messages import Accepted, FleetStatus, NoSuchWorker, NotNow, OutOfBounds

FLEET_S = 2.0
"""Timeout of a question about the fleet, which the driver answers at once."""
CHANGE_S = 20.0
"""Timeout of a change: the driver's loop accepts changes between two waits."""
_OTHER_NAMES = {"least": "min", "most": "max"}

T = TypeVar("T")


class Refusal(Exception):
    """Why a request to the driver failed, with the HTTP status for it."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class DriverClient:
    """Keeps one connection to the driver of a run, and reconnects after a failure."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._client: ControlClient | None = None

    def fleet(self) -> dict[str, Any]:
        """The document of /api/fleet; `available` is false, with `why`, without an answer."""
        try:
            return fleet_json(self._call(lambda client: client.fleet(FLEET_S)))
        except Refusal as refusal:
            return no_fleet(str(refusal))

    def scale(self, target: int) -> Accepted:
        """Requests a number of workers; raises Refusal."""
        return self._call(lambda client: client.scale(target, CHANGE_S))

    def drain(self, name: str) -> Accepted:
        """Requests that a worker is drained; raises Refusal."""
        return self._call(lambda client: client.drain(name, CHANGE_S))

    def close(self) -> None:
        """Closes the connection; the next call opens another one."""
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


def fleet_json(fleet: FleetStatus) -> dict[str, Any]:
    """Every field of the message, enums by their value."""
    fields = [
        (field.name, _plain(getattr(fleet, field.name))) for field in dataclasses.fields(fleet)
    ]
    return {"available": True, "why": "", **{_OTHER_NAMES.get(k, k): one for k, one in fields}}


def no_fleet(why: str) -> dict[str, Any]:
    """The document of /api/fleet while the driver does not answer."""
    return {"available": False, "why": why, "workers": []}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value
