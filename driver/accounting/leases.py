"""The prompts of a run: which come next, which are out, and in which single state each group ended.

A group is one index of the endless `DataOrder`; its id is made from that index, so that a resumed
run leases the same groups under the same ids. An index is in one of five places:

    not leased yet -> out with a worker -> held by the learner -> ended
                          |      ^
                          v      |
                   waits to be leased again --prompt set aside--> ended

A group whose prompt is set aside or skipped when its turn comes ends without a lease. All indices
below the cursor that are in none of the middle places have ended.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import Any

from driver.accounting.curriculum import Curriculum
from driver.errors import RunError
from services.trajectories.data_order import DataOrder, group_id_at, index_of
from services.wire.messages import Lease


class LedgerError(RuntimeError):
    """The accounting of groups or seconds does not add up: a bug in this program."""


class TrajectoryState(enum.Enum):
    """The one state in which a group ends."""

    TRAINED = "trained"
    DROPPED_STALE = "dropped_stale"
    DROPPED_ZERO_VARIANCE = "dropped_zero_variance"
    DROPPED_TRUNCATED = "dropped_truncated"
    """All completions that were scored had been cut by length, under `truncated: mask`."""
    DROPPED_ERROR = "dropped_error"
    SET_ASIDE = "set_aside"
    """Never delivered: its prompt has ended two workers (`quarantine.py`)."""
    SKIPPED = "skipped"
    """Never leased: its prompt is skipped for a while (`curriculum.py`)."""
    DUPLICATE = "duplicate"
    """A further delivery of a group that had one already."""


class LeaseState(enum.Enum):
    """How a lease ended."""

    DONE = "done"
    """Its group reached the learner."""
    RETURNED = "returned"
    """Given back, unfinished: its worker was drained, or the run stopped."""
    EXPIRED = "expired"
    """Taken away from a worker that was lost or too slow."""


class NoPromptLeft(RunError):
    """Every prompt of the training set is set aside."""


class LeaseTable:
    """The data cursor, the leases that are out, and how every lease and every group ended."""

    def __init__(
        self,
        order: DataOrder,
        *,
        set_aside: Mapping[int, object] | None = None,
        curriculum: Curriculum | None = None,
    ):
        """Args:
        order: of the training prompts.
        set_aside: positions of prompts that are not leased; may grow later.
        curriculum: which groups are skipped.
        """
        self.order = order
        self._curriculum = curriculum
        self._set_aside = {} if set_aside is None else set_aside
        self._cursor = 0
        self._out: dict[int, int] = {}
        """Attempt by index, of leases with workers."""
        self._held: dict[int, int] = {}
        """Of groups that the learner has and that have not ended."""
        self._returned: dict[int, int] = {}
        """Of groups to be leased again, the attempt that is due."""
        self._granted = 0
        self._leases = dict.fromkeys(LeaseState, 0)
        self._totals = dict.fromkeys(TrajectoryState, 0)
        self._recent: dict[TrajectoryState, list[str]] = {state: [] for state in TrajectoryState}

    @property
    def cursor(self) -> int:
        """The first index that was never leased."""
        return self._cursor

    @property
    def out(self) -> int:
        """Leases with workers."""
        return len(self._out)

    @property
    def outstanding(self) -> int:
        """Groups that are with workers or with the learner, and have not ended."""
        return len(self._out) + len(self._held)

    @property
    def totals(self) -> dict[str, int]:
        """Deliveries of the whole run by state."""
        return {state.value: count for state, count in self._totals.items()}

    @property
    def lease_totals(self) -> dict[str, int]:
        """Leases of this process's life by how they ended, and those that are `out`."""
        return {state.value: n for state, n in self._leases.items()} | {"out": len(self._out)}

    def grant_leases(self, count: int, min_policy_version: int = 0) -> list[Lease]:
        """Leases the next groups: first what came back unfinished, then new prompts, in order.

        Groups of prompts that are set aside or skipped end here, and the next one takes their
        place.

        Args:
            min_policy_version: oldest version that they may be sampled under.

        Raises:
            NoPromptLeft: if every prompt is set aside.
        """
        self._end_set_aside()
        again = sorted(self._returned)[:count]
        attempts = {index: self._returned.pop(index) for index in again}
        while len(attempts) < count:
            index, self._cursor = self._cursor, self._cursor + 1
            if self._is_skipped(index):
                self._record_end(index, TrajectoryState.SKIPPED)
            elif self._is_set_aside(index):
                self._record_end(index, TrajectoryState.SET_ASIDE)
            else:
                attempts[index] = 0
        self._out.update(attempts)
        self._granted += len(attempts)
        return [self._lease(i, attempt, min_policy_version) for i, attempt in attempts.items()]

    def write_decisions(self) -> None:
        """Writes down which groups are skipped, before a worker gets the others."""
        if self._curriculum is not None:
            self._curriculum.write_decisions(self._cursor)

    def _end_set_aside(self) -> None:
        """Ends the groups that wait to be leased again and whose prompt is set aside."""
        if len(self._set_aside) >= self.order.count:
            raise NoPromptLeft(
                f"each of the {self.order.count} prompts of data.train has ended "
                "two workers and is set aside (quarantine.json): look for what they have in "
                "common, such as a scorer that ends its worker or a worker that lacks memory"
            )
        for index in filter(self._is_set_aside, sorted(self._returned)):
            del self._returned[index]
            self._record_end(index, TrajectoryState.SET_ASIDE)

    def _is_set_aside(self, index: int) -> bool:
        if not self._set_aside:
            return False
        return self.order.prompt_at(index)[1] in self._set_aside

    def _is_skipped(self, index: int) -> bool:
        return self._curriculum is not None and self._curriculum.skips(index)

    def _record_end(self, index: int, state: TrajectoryState) -> None:
        self._totals[state] += 1
        self._recent[state].append(group_id_at(index))

    def return_leases(self, group_ids: Iterable[str], how: LeaseState) -> int:
        """Takes leases back that are out, to be granted again first; returns how many were."""
        indices = [index for index in map(index_of, group_ids) if index in self._out]
        for index in indices:
            self._returned[index] = self._out.pop(index) + 1
        self._leases[how] += len(indices)
        return len(indices)

    def mark_held(self, group_id: str) -> bool:
        """Notes that the learner has a group; False if it was known, or has ended.

        Raises:
            LedgerError: if the group was never leased.
        """
        index = self._known(group_id, "reached the learner")
        if index in self._out:
            self._held[index] = self._out.pop(index)
            self._leases[LeaseState.DONE] += 1
            return True
        if index in self._returned:
            self._held[index] = self._returned.pop(index)
            return True
        return False

    def is_held(self, group_id: str) -> bool:
        """Whether the learner has the group, and it has not ended."""
        return index_of(group_id) in self._held

    def adopt_groups(self, group_ids: Iterable[str]) -> None:
        """Adds groups that the learner still holds and that are newer than this restored table.

        Earlier indices that this table never leased wait to be leased again.
        """
        for index in sorted(index for index in map(index_of, group_ids) if index is not None):
            while self._cursor <= index:
                if self._is_skipped(self._cursor):
                    self._record_end(self._cursor, TrajectoryState.SKIPPED)
                else:
                    self._returned[self._cursor] = 1
                self._cursor += 1
            if index in self._returned:
                self._held[index] = self._returned.pop(index)

    def end_group(self, group_id: str, state: TrajectoryState) -> TrajectoryState:
        """Notes what became of one delivery of a group.

        Returns:
            The state noted: DUPLICATE for every delivery after the one that ended the group.

        Raises:
            LedgerError: if this group was never leased.
        """
        index = self._known(group_id, f"ended as {state.value}")
        if state is not TrajectoryState.DUPLICATE:
            self.mark_held(group_id)
            if index in self._held:
                del self._held[index]
            else:
                state = TrajectoryState.DUPLICATE
        self._record_end(index, state)
        return state

    def check_conservation(self) -> None:
        """Holds the laws of conservation, of groups and of leases.

        Raises:
            LedgerError: with all the numbers.
        """
        ended = sum(self._totals.values()) - self._totals[TrajectoryState.DUPLICATE]
        places = (ended, len(self._out), len(self._held), len(self._returned))
        if sum(places) != self._cursor:
            raise LedgerError(
                f"{self._cursor} groups were leased, but {ended} ended, {places[1]} are out, "
                f"{places[2]} lie with the learner and {places[3]} wait to be leased again: "
                f"{sum(places)} in all"
            )
        accounted = sum(self._leases.values()) + len(self._out)
        if accounted != self._granted:
            raise LedgerError(
                f"{self._granted} leases were granted, but {accounted} are accounted for: "
                f"{self.lease_totals}"
            )

    def take_ended_groups(self) -> dict[str, list[str]]:
        """Group ids by state since the last call; empty states are left out."""
        recent = {state.value: ids for state, ids in self._recent.items() if ids}
        self._recent = {state: [] for state in TrajectoryState}
        return recent

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values."""
        taken = {index: attempt + 1 for index, attempt in {**self._out, **self._held}.items()}
        return {
            **_order_state(self.order),
            "cursor": self._cursor,
            "unfinished": sorted({**self._returned, **taken}.items()),
            "totals": self.totals,
        }

    def names_of(self, group_ids: Iterable[str]) -> dict[str, str]:
        """The name of each group's source by its id; nothing where there is a single source."""
        indices = ((group_id, index_of(group_id)) for group_id in group_ids)
        if not self.order.is_mixed:
            return {}
        return {i: self.order.source_at(index).name for i, index in indices if index is not None}

    @classmethod
    def restore(
        cls,
        state: Mapping[str, Any],
        order: DataOrder,
        *,
        set_aside: Mapping[int, object] | None = None,
        curriculum: Curriculum | None = None,
    ) -> "LeaseTable":
        """The table of a checkpoint; what was out when it was written is leased again first.

        Raises:
            ValueError: if seed, data or weights are not those of the checkpoint, since the order
                of the prompts would be another one.
        """
        wanted = _order_state(order)
        for name in ("seed", "prompt_count", "mixture"):
            before, now = state.get(name), wanted.get(name)
            if before != now:
                raise ValueError(
                    f"the checkpoint was made with {name}={before}, this run has {name}={now}: "
                    "resume with the same data, weights and seed, or start a new run"
                )
        table = cls(order, set_aside=set_aside, curriculum=curriculum)
        table._cursor = state["cursor"]
        table._returned = {index: attempt for index, attempt in state["unfinished"]}
        table._totals = {s: state["totals"].get(s.value, 0) for s in TrajectoryState}
        table.check_conservation()
        return table

    def _known(self, group_id: str, what: str) -> int:
        index = index_of(group_id)
        if index is None or index >= self._cursor:
            raise LedgerError(
                f"group {group_id} {what} but was never leased: the next new group is "
                f"{group_id_at(self._cursor)}"
            )
        return index

    def _lease(self, index: int, attempt: int, min_policy_version: int) -> Lease:
        epoch, position = self.order.prompt_at(index)
        return Lease(
            group_id=group_id_at(index),
            attempt=attempt,
            epoch=epoch,
            position=position,
            min_policy_version=min_policy_version,
        )


def _order_state(order: DataOrder) -> dict[str, Any]:
    """What a checkpoint keeps of the order; `mixture` where there are several sources."""
    mixture = {"mixture": order.mixture()} if order.is_mixed else {}
    return {"seed": order.seed, "prompt_count": order.count, **mixture}
