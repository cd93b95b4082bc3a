"""Which worker takes which lease.

A lease goes to the worker that holds the fewest. One that must be alone, since a worker has died
over its group (`driver/accounting/quarantine.py`), waits for a worker that holds none, and that
worker takes nothing else until it has ended. While one waits, the worker with the fewest leases
gets no others, so that its turn comes.
"""

from collections.abc import Callable, Mapping, Sequence

from driver.fleet.fleet_worker import Worker
from services.wire.messages import Lease


class Dispatch:
    """The leases that are granted and not with a worker, and the rule by which they go to one."""

    def __init__(self, capacity: int, must_be_alone: Callable[[Lease], bool]):
        """Args:
        capacity: groups that one worker may hold.
        """
        self._capacity = capacity
        self._must_be_alone = must_be_alone
        self._waiting: list[Lease] = []

    def room(self, workers: Sequence[Worker]) -> int:
        """Leases that could be granted now."""
        held = _held(workers)
        free = sum(self._capacity - held[worker.name] for worker in self._shared(workers, held))
        return max(0, free - len(self._waiting))

    def assign(
        self, workers: Sequence[Worker], leases: Sequence[Lease]
    ) -> list[tuple[Worker, Lease]]:
        """Pairs these leases and those that wait with workers; the others wait on."""
        waiting, self._waiting = [*self._waiting, *leases], []
        held = _held(workers)
        pairs = []
        for alone in (True, False):
            for lease in [one for one in waiting if self._must_be_alone(one) is alone]:
                takers = workers if alone else self._shared(workers, held)
                most = 0 if alone else self._capacity - 1
                free = [worker for worker in takers if held[worker.name] <= most]
                if not free:
                    self._waiting.append(lease)
                    continue
                worker = min(free, key=lambda worker: held[worker.name])
                held[worker.name] += self._capacity + 1 if alone else 1
                pairs.append((worker, lease))
        return pairs

    def forget_waiting(self) -> None:
        """Drops the leases that wait; the caller has taken them back."""
        self._waiting.clear()

    def _shared(self, workers: Sequence[Worker], held: Mapping[str, int]) -> list[Worker]:
        """Workers that may take leases which need not be alone."""
        shared = [
            worker
            for worker in workers
            if held[worker.name] <= self._capacity
            and not any(self._must_be_alone(lease) for lease in worker.held_leases)
        ]
        if shared and any(map(self._must_be_alone, self._waiting)):
            shared.remove(min(shared, key=lambda worker: held[worker.name]))
        return shared


def _held(workers: Sequence[Worker]) -> dict[str, int]:
    return {worker.name: len(worker.leases) for worker in workers}
