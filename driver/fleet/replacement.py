"""Where a rollout worker can start, and how often one that was lost starts again.

Why a process ended shows at once, whether its host did only later. So a loss is judged when the
worker is about to start again: then its host has answered, or is gone.
"""

from collections.abc import Mapping

from driver.accounting.awake_clock import AwakeClock
from driver.accounting.restarts import RestartLimit
from driver.config.sections.placement import PlacementConfig
from driver.errors import RunError
from driver.fleet.fleet_worker import FleetEvents, Worker
from driver.fleet.rooms import LOOK_S, NOTICED_S, Rooms, RoomState
from services.process.driver_lease import LEASE_S

PAUSE_S = LEASE_S - 10.0
"""A driver that was paused for so long finds processes that have ended themselves."""
WAKING_S = 60.0
"""After its pause, in which it notices that."""


def ended_in_pause(clock: AwakeClock) -> bool:
    """Whether a process that is missed now ended itself while this driver was paused."""
    return clock.woke_lately(PAUSE_S, WAKING_S)


class WorkersLost(RunError):
    """Rollout workers failed more often than the run allows."""


class NoRoomLeft(WorkersLost):
    """Every rollout worker was lost, and the cluster has no room for another one."""

    exit_code = 3


class Replacement:
    """Judges the losses of one fleet, and finds places for its workers."""

    def __init__(
        self,
        placement: PlacementConfig,
        rooms: Rooms,
        clock: AwakeClock,
        events: FleetEvents,
        workers: Mapping[str, Worker],
    ):
        """Args:
        clock: of deadlines.
        workers: of the fleet, by name, at every moment.
        """
        self._placement = placement
        self._rooms = rooms
        self._clock = clock
        self._events = events
        self._workers = workers
        self._limit = RestartLimit(placement.worker_restarts)
        self._roomless_since: float | None = None
        """Since when every worker waits for room."""
        self.restarts = 0
        """Of all workers, lost hosts included."""

    def place_for(self, worker: Worker) -> RoomState | None:
        """Where a worker can start now; None while its host has not answered, or it has no room.

        Raises:
            WorkersLost: if workers were lost too often lately.
        """
        if self._placement.mode == "colocated":
            return RoomState()
        state = self._rooms.state(worker.room)
        if state.problem is None and worker.place.node:
            return None
        if worker.loss is not None:
            self._judge_loss(worker, worker.loss, state)
        if not state.problem:
            return state
        said, worker.waits_for = worker.waits_for, state.problem
        worker.retry_at = self._clock.now() + LOOK_S
        if not said:
            ready = sum(one.takes_leases for one in self._workers.values())
            self._events.warn(
                f"{worker.name} waits for room ({worker.waits_for}); the run has "
                f"{ready} of {len(self._workers)} workers"
            )
        return None

    def count(self, worker: Worker) -> None:
        """Counts a process that has to be replaced."""
        worker.restarts += 1
        self.restarts += 1

    def check_room(self) -> None:
        """Ends the run where no worker is left and no room comes.

        Raises:
            NoRoomLeft: with what is waited for.
        """
        now, workers = self._clock.now(), self._workers.values()
        if not workers or not all(worker.waits_for for worker in workers):
            self._roomless_since = None
            return
        self._roomless_since = now if self._roomless_since is None else self._roomless_since
        allowed_s = self._placement.resources_timeout_s + NOTICED_S
        if now - self._roomless_since > allowed_s:
            raise NoRoomLeft(
                f"no rollout worker is left, and none has had room for {allowed_s:g} s "
                f"(placement.resources_timeout_s, and {NOTICED_S:g} s in which Ray notices that a "
                f"host is gone): {self.waiting_for_room()}"
            )

    def waiting_for_room(self) -> str:
        """Which workers wait for room, and why; empty where none does."""
        waiting = [worker for worker in self._workers.values() if worker.waits_for]
        return "; ".join(f"{one.name} waits for room ({one.waits_for})" for one in waiting)

    def release_suspects(self, worker: Worker, *, guilty: bool) -> bool:
        """Lets others have the groups that a lost worker was at.

        Args:
            guilty: whether one of them may have ended it, since its host is there.

        Returns:
            whether it is known that one of them did.
        """
        suspects, worker.suspects = worker.suspects, []
        explained = bool(suspects and guilty) and self._events.killed(suspects, worker.last_error)
        if suspects:
            self._events.void([lease.group_id for lease in suspects], True)
        return explained

    def _judge_loss(self, worker: Worker, error: RunError, state: RoomState) -> None:
        """Counts a lost process, or the loss of its host: once, whatever ran there.

        Raises:
            WorkersLost: if there were too many lately.
        """
        worker.loss = None
        self.count(worker)
        there, place = state.is_same_life(worker.place), worker.place
        paused = ended_in_pause(self._clock)
        explained = self.release_suspects(worker, guilty=there and not paused)
        what = "failed" if there else f"was lost with its host {place.host}"
        if paused:
            what, count = "ended while this driver was paused", 0
        elif explained or worker.excused:
            count = 0
        else:
            count = self._limit.count_end(
                place.host, place.node, self._clock.now(), host_is_there=there
            )
        if count > self._limit.allowed:
            raise WorkersLost(
                f"{worker.name} {what} and placement.worker_restarts={self._limit.allowed} is used "
                f"up: {worker.last_error}",
                details=error.details or str(error),
            ) from error
        counted = f", restart {count} of {self._limit.allowed}" * bool(count)
        self._events.warn(f"{worker.name} {what}{counted}: {worker.last_error}")
