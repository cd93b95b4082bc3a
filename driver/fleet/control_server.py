"""What a running driver offers to clients that may change the number of its rollout workers.

Requests arrive in threads of the control service and are answered by the driver's own loop, which
alone starts and drains workers: `ControlBox` is the mailbox between them. `offer_control` opens the
service and leaves address and credentials in `<run>/control/` for as long as the run lasts;
`services.control.access.read_access` finds them.
"""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Iterator

from rollout_worker.config.rollout_config import WorkersConfig
from services.control import access as control_access
from services.control.messages import (
    Accepted,
    FleetStatus,
    NoSuchWorker,
    NotNow,
    OutOfBounds,
    ScalingPolicy,
    WorkerState,
)
from services.control.service import THREADS, control_service
from services.wire.host_port import join_address
from services.wire.reachable import is_any, is_loopback
from services.wire.server import Server
from services.wire.tls import RunAuthority

STOP_GRACE_S = 1.0
"""For an answer that is on its way when the run ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """A number of workers that is wanted."""

    target: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drain:
    """One worker is to go."""

    name: str


@dataclasses.dataclass(frozen=True)
class FleetRequest:
    """A wish that waits for its answer."""

    wish: Scale | Drain
    answer: concurrent.futures.Future[Accepted] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )

    def accept(self, target: int, current: int) -> None:
        """Answers with the number of workers that is wanted now, and of those that take leases."""
        self.answer.set_result(Accepted(target=target, current=current))

    def refuse(self, error: OutOfBounds | NoSuchWorker | NotNow) -> None:
        """Answers with the reason why not."""
        self.answer.set_exception(error)


def new_target(wish: Scale | Drain, fleet: FleetStatus) -> int:
    """Workers wanted once the wish is granted.

    Raises:
        OutOfBounds, NoSuchWorker, NotNow: naming the value, the rule and the way out.
    """
    if isinstance(wish, Scale):
        if not fleet.least <= wish.target <= fleet.most:
            raise OutOfBounds(
                f"{wish.target} rollout workers are not between rollout.workers.min={fleet.least} "
                f"and max={fleet.most} of this run: ask for a number within"
            )
        return wish.target
    states = {worker.name: worker.state for worker in fleet.workers}
    if wish.name not in states:
        raise NoSuchWorker(
            f"there is no rollout worker {wish.name!r}: the run has "
            f"{', '.join(sorted(states)) or 'none yet'}"
        )
    if states[wish.name] in (WorkerState.DRAINING, WorkerState.GONE):
        raise NotNow(f"{wish.name} is {states[wish.name].value} already")
    if fleet.target <= fleet.least:
        raise OutOfBounds(
            f"{wish.name} cannot go: {fleet.target - 1} rollout workers would be left, and "
            f"rollout.workers.min={fleet.least}: add one first"
        )
    return fleet.target - 1


class ControlBox:
    """The mailbox between the control service and the driver's loop."""

    def __init__(self, workers: WorkersConfig):
        """Starts empty; until `show_fleet` is called the fleet has no workers.

        Args:
            workers: `rollout.workers` of the run.
        """
        self._lock = threading.Lock()
        self._requests: list[FleetRequest] = []
        self._closed = ""
        self._fleet = FleetStatus(
            target=workers.at_start,
            least=workers.min,
            most=workers.max,
            policy=ScalingPolicy(workers.policy),
        )

    def take_requests(self) -> list[FleetRequest]:
        """Returns the requests that came since, in order; each must be answered at once.

        A request whose caller has stopped waiting is left out, and has no effect.
        """
        with self._lock:
            requests, self._requests = self._requests, []
        return [one for one in requests if one.answer.set_running_or_notify_cancel()]

    def show_fleet(self, fleet: FleetStatus) -> None:
        """Replaces what `fleet` says from now on."""
        with self._lock:
            self._fleet = fleet

    def close(self, reason: str) -> None:
        """Refuses every request, those that wait and those to come."""
        with self._lock:
            self._closed = reason
        for request in self.take_requests():
            request.refuse(NotNow(reason))

    def fleet(self) -> FleetStatus:
        """As last shown."""
        with self._lock:
            return self._fleet

    def scale(self, target: int, timeout_s: float) -> Accepted:
        """As `ControlHandler` says."""
        return self._ask(Scale(target=target), timeout_s)

    def drain(self, name: str, timeout_s: float) -> Accepted:
        """As `ControlHandler` says."""
        return self._ask(Drain(name=name), timeout_s)

    def _ask(self, wish: Scale | Drain, timeout_s: float) -> Accepted:
        request = FleetRequest(wish)
        with self._lock:
            if self._closed:
                raise NotNow(self._closed)
            new_target(wish, self._fleet)  # an impossible wish is refused at once
            self._requests.append(request)
        try:
            accepted = request.answer.result(timeout_s)
        except TimeoutError:
            effect = "nothing will be done" if request.answer.cancel() else "it may still act on it"
            raise TimeoutError(
                f"the driver was busy for {timeout_s:.3g} s and did not answer: {effect}; try again"
            ) from None
        with self._lock:  # the loop may not have shown its fleet since
            self._fleet = dataclasses.replace(self._fleet, target=accepted.target)
        return accepted


@contextlib.contextmanager
def offer_control(
    folder: pathlib.Path,
    authority: RunAuthority,
    box: ControlBox,
    *,
    bind_host: str,
    driver_host: str,
) -> Iterator[str]:
    """Serves the box, and keeps address and credentials in the run's folder, until the block ends.

    Args:
        folder: of the run.
        authority: of the run.
        box: the driver's loop answers its requests meanwhile.
        bind_host: `placement.bind_host`. Where it is neither loopback nor all addresses it is the
            learner's, and the driver listens on its own.
        driver_host: address of this host within the cluster.

    Yields:
        The address to dial.

    Raises:
        PortUnavailable: if nothing can be listened on.
    """
    everywhere = is_any(bind_host)
    host = bind_host if everywhere or is_loopback(bind_host) else driver_host
    server = Server(authority.issue("driver"), [control_service(box)], host=host, threads=THREADS)
    try:
        address = join_address(driver_host, server.port) if everywhere else server.address
        control_access.write_access(folder, address, authority.issue("control"))
        yield address
    finally:
        box.close("the run is ending")
        control_access.remove_access(folder)
        server.stop(STOP_GRACE_S)
