"""The worker's one record of a lease, from its arrival until the learner has answered."""

import dataclasses

from services.wire.messages import Group, Lease


@dataclasses.dataclass(eq=False)
class LeasedGroup:
    """A lease, and the group that it becomes; the same object in every thread that works on it.

    Two leases of one group are two records, so what was begun for the first is never taken for
    the second, even where both have the same attempt.
    """

    lease: Lease
    order_number: int = 0
    """Of the orders that brought it."""
    begun: bool = False
    """Its prompt is in the engine, or was."""
    cancelled: bool = False
    """No process waits for it any more: each thread drops it at the next point where it may."""
    group: Group | None = None
    """Set when all completions are scored."""
    notes: tuple[dict[str, str], ...] = ()
    """What scorers say of its completions, by scorer; set with the group."""
