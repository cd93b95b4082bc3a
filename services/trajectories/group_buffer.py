"""Groups that have arrived and wait for the learner, each used at most once.

Delivery is at least once, so the buffer remembers every group that was ever taken. It also checks
the origin of a group: its receipt is one that the learner issued, and its version is within the
staleness bound at the moment it is taken, time in the queue included.

A group is stored by `store` before it counts as accepted: the answer to the worker outlives this
process. After a restart the buffer may hold groups of versions that the learner has yet to make
again; they wait until it has.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from services.trajectories.buffer_records import BufferCounts, Taken, WaitingGroup
from services.trajectories.data_order import group_id_at, index_of
from services.trajectories.group_check import GroupRules, check_group, group_nbytes
from services.trajectories.group_report import GroupReport, report_of
from services.trajectories.id_set import IdSet, PlainIds
from services.trajectories.receipts import NotOpen, Receipts, StaleGroup, UnknownReceipt
from services.wire.messages import Group, PushOutcome

AHEAD = 1024
"""How far a new group may lie beyond the newest one that is used up or restored, in capacities of
the buffer. A driver has far less under way, but passes over prompts that are set aside; one that
resumes leases all groups up to the newest that waits."""
STORE_TIMEOUT_S = 60.0
"""How long a repeat waits for the group before it to be stored."""


class BufferFull(Exception):
    """The buffer is at its bound; groups must be taken before more can come."""


class NotStored(Exception):
    """The group could not be stored and was not accepted; it may be pushed again."""


def _discard(group: Group) -> None:
    """Stores nothing: a restart loses what waits."""


class GroupBuffer:
    """The queue between trajectory service and learner; safe to use from any thread."""

    def __init__(
        self,
        rules: GroupRules,
        *,
        capacity_groups: int,
        capacity_bytes: int,
        max_staleness: int,
        store: Callable[[Group], None] = _discard,
    ):
        """Starts empty, and refuses every group until a version is issued.

        Args:
            rules: of the run; groups that break them are malformed.
            capacity_groups: most groups that wait at a time, >= 1.
            capacity_bytes: most bytes of arrays that wait at a time, >= 1.
            max_staleness: oldest version accepted, in versions behind the current one, >= 0.
            store: makes a group durable; called without a lock, from several threads. What it
                raises as OSError refuses the group.
        """
        if min(capacity_groups, capacity_bytes) < 1 or max_staleness < 0:
            raise ValueError(
                "capacity_groups and capacity_bytes must be at least 1 and "
                f"max_staleness at least 0, got {capacity_groups=}, {capacity_bytes=}, "
                f"{max_staleness=}"
            )
        self._rules = rules
        self._newest_restored = -1
        """Highest index of the groups that the process before had accepted."""
        self._capacity_groups = capacity_groups
        self._capacity_bytes = capacity_bytes
        self._store = store
        self._changed = threading.Condition()
        self._receipts = Receipts(max_staleness)
        self._waiting: dict[str, WaitingGroup] = {}
        self._storing: dict[str, WaitingGroup] = {}
        """Valid, and being stored: they take up room, and cannot be taken yet."""
        self._held_bytes = 0
        self._consumed = IdSet()
        self._counts = BufferCounts()

    @property
    def current_version(self) -> int:
        """Newest issued version; NO_VERSION before the first."""
        with self._changed:
            return self._receipts.issued_version

    def issue(self, policy_version: int, weight_digest: str) -> tuple[str, ...]:
        """Makes a published version the current one: its receipt is valid from now on.

        Returns:
            Groups that waited with another receipt for this version, from before a restart: they
            are given up.

        Raises:
            ValueError: if the version does not rise.
        """
        with self._changed:
            self._receipts.issue(policy_version, weight_digest)
            self._changed.notify_all()
            return self._give_up(
                lambda group: (
                    group.policy_version == policy_version and group.weight_digest != weight_digest
                )
            )

    def advance(self, policy_version: int) -> None:
        """Records the version that the learner holds, which may not be issued yet.

        From now on staleness counts from this version.
        """
        with self._changed:
            self._receipts.advance(policy_version)
            self._changed.notify_all()

    def revoke(self, policy_version: int) -> tuple[str, ...]:
        """Withdraws this version and later ones, which were restored after a restart.

        Returns:
            Groups that waited for them: they are given up.
        """
        with self._changed:
            self._receipts.revoke(policy_version)
            return self._give_up(lambda group: group.policy_version >= policy_version)

    def put_group(self, group: Group) -> PushOutcome:
        """Accepts a group, unless one of its id was accepted before, under any attempt.

        Raises:
            ValueError: if the group is malformed, or larger than the whole buffer.
            UnknownReceipt: if its version was never issued, or under another digest.
            StaleGroup: if its version is older than the bound.
            BufferFull: if there is no room now.
            NotStored: if it could not be made durable.
            NotOpen: if the learner has no policy yet.
        """
        with self._changed:
            try:
                arriving = self._admit(group)
            except tuple(_COUNTED_AS) as refusal:
                self._count(received=1, **{_COUNTED_AS[type(refusal)]: 1})
                raise
            if arriving is None:
                self._count(received=1, duplicate=1)
                return PushOutcome.DUPLICATE
        stored = False
        try:
            self._store(group)
            stored = True
        except OSError as error:
            raise NotStored(f"group {group.group_id!r} is not accepted: {error}") from error
        finally:
            with self._changed:
                self._settle(arriving, stored)
        return PushOutcome.ACCEPTED

    def put_duplicate(self, run_id: str, group_id: str) -> bool:
        """Whether this group was accepted before; counts the push as a duplicate if so.

        Lets the service answer from the header of a push, without reading the group.
        """
        with self._changed:
            known = run_id == self._rules.run_id and self._knows(group_id)
            if known:
                self._count(received=1, duplicate=1)
            return known

    def put_malformed(self) -> None:
        """Counts a push that did not even yield a group."""
        with self._changed:
            self._count(received=1, malformed=1)

    def wait_for_groups(self, group_ids: Sequence[str], timeout_s: float) -> None:
        """Waits until these groups are there to be taken.

        Raises:
            TimeoutError: naming the groups that did not arrive, or whose version is yet to be
                made again.
            ValueError: if an id repeats, or its group is gone, already or meanwhile.
        """
        wanted = set(group_ids)
        if len(wanted) != len(group_ids):
            raise ValueError(f"group_ids must differ, got {list(group_ids)}")
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    all(map(self._is_ready, wanted)) or any(g in self._consumed for g in wanted)
                ),
                timeout_s,
            )
            gone = [group_id for group_id in group_ids if group_id in self._consumed]
            if gone:
                raise ValueError(f"groups {gone} were taken or forgotten before")
            missing = [group_id for group_id in group_ids if not self._is_ready(group_id)]
            if missing:
                raise TimeoutError(
                    f"waited {timeout_s:g} s for {len(group_ids)} groups; {len(missing)} did not "
                    f"arrive from the rollout workers: {missing}"
                )

    def take_groups(self, group_ids: Sequence[str], timeout_s: float) -> Taken:
        """Waits for these groups and removes them; all of them, or none if time runs out.

        Args:
            group_ids: different from each other; their order is that of the result.
            timeout_s: how long to wait.

        Raises:
            TimeoutError, ValueError: as `wait_for_groups` does; the groups stay in the buffer.
        """
        with self._changed:  # entered again by the wait, so that no thread comes between
            self.wait_for_groups(group_ids, timeout_s)
            return self._take_waiting(group_ids)

    def reports(self, group_ids: Iterable[str] | None = None) -> list[GroupReport]:
        """Sums up the groups that wait, in order of arrival.

        Args:
            group_ids: those asked for, where they wait; None for all.
        """
        wanted = None if group_ids is None else set(group_ids)
        with self._changed:
            return [
                waiting.report
                for group_id, waiting in self._waiting.items()
                if wanted is None or group_id in wanted
            ]

    def held(self) -> dict[str, Group]:
        """Every group that was accepted or is about to be, and is not used up; by group_id."""
        with self._changed:
            return {
                name: held.group for name, held in (*self._waiting.items(), *self._storing.items())
            }

    def forget(self, group_ids: Iterable[str]) -> None:
        """Gives these groups up: those that wait are dropped, late arrivals are duplicates."""
        with self._changed:
            for group_id in group_ids:
                if self._remove(group_id):
                    self._count(forgotten=1)
                self._consumed.add(group_id)
            self._changed.notify_all()

    def counts(self) -> BufferCounts:
        """Pushes by their outcome so far, and what waits now."""
        with self._changed:
            return dataclasses.replace(
                self._counts,
                waiting=len(self._waiting),
                waiting_bytes=sum(waiting.nbytes for waiting in self._waiting.values()),
            )

    def state(self) -> dict[str, PlainIds]:
        """What a checkpoint must remember, as plain JSON data: the groups that are used up.

        Groups that still wait are not in it: `store` has made them durable.
        """
        with self._changed:
            return {"consumed_group_ids": self._consumed.plain()}

    def restore(self, state: Mapping[str, PlainIds]) -> None:
        """Continues from a `state`; what the buffer held before is dropped."""
        with self._changed:
            self._consumed = IdSet(state["consumed_group_ids"])
            self._waiting.clear()
            self._held_bytes = sum(arriving.nbytes for arriving in self._storing.values())

    def restore_accepted(
        self, groups: Iterable[Group], issued: Mapping[int, str], policy_version: int
    ) -> None:
        """Restores what the process before had accepted and issued.

        Args:
            groups: in order of arrival; those that are used up already are passed over, and
                bounds do not hold for the others.
            issued: digest by version, later ones than the learner's included: their receipts are
                valid, and groups with them wait until the learner has reached them.
            policy_version: the learner's now.
        """
        with self._changed:
            self._receipts.restore_issued(issued, policy_version)
            for group in groups:
                index = index_of(group.group_id)
                self._newest_restored = max(self._newest_restored, -1 if index is None else index)
                if not self._knows(group.group_id):
                    waiting = WaitingGroup(group, report_of(group), group_nbytes(group))
                    self._waiting[group.group_id] = waiting
                    self._held_bytes += waiting.nbytes
                    self._count(restored=1)
            self._changed.notify_all()

    def _admit(self, group: Group) -> WaitingGroup | None:
        """Checks a group and reserves its room; None for one that was accepted before."""
        check_group(group, self._rules)
        arriving = WaitingGroup(group, report_of(group), group_nbytes(group))
        if arriving.nbytes > self._capacity_bytes:
            raise ValueError(
                f"group {group.group_id!r} has {arriving.nbytes} bytes, and the whole buffer "
                f"{self._capacity_bytes}: raise the buffer's capacity or make groups smaller"
            )
        if self._knows(group.group_id):
            return None
        self._check_ahead(group.group_id)
        self._receipts.check_group(group)
        held = len(self._waiting) + len(self._storing)
        if (
            held >= self._capacity_groups
            or self._held_bytes + arriving.nbytes > self._capacity_bytes
        ):
            raise BufferFull(
                f"no room for group {group.group_id!r} of {arriving.nbytes} bytes: {held} of "
                f"{self._capacity_groups} groups and {self._held_bytes} of "
                f"{self._capacity_bytes} bytes wait"
            )
        self._storing[group.group_id] = arriving
        self._held_bytes += arriving.nbytes
        return arriving

    def _check_ahead(self, group_id: str) -> None:
        """Raises ValueError for a group that no driver can have leased yet."""
        index = index_of(group_id)
        if self._rules.order is None or index is None:
            return
        newest = max(self._newest_restored, self._consumed.highest("g"))
        last = newest + AHEAD * self._capacity_groups
        if index > last:
            raise ValueError(
                f"group {group_id!r} lies beyond every group that can be leased now: the last one "
                f"is {group_id_at(last)}"
            )

    def _settle(self, arriving: WaitingGroup, stored: bool) -> None:
        """Moves a group from being stored to waiting, or drops it."""
        group_id = arriving.group.group_id
        del self._storing[group_id]
        if stored and group_id not in self._consumed:
            self._waiting[group_id] = arriving
            self._count(received=1, accepted=1)
        else:
            self._held_bytes -= arriving.nbytes
            given_up = {"accepted": 1, "forgotten": 1}
            self._count(received=1, **(given_up if stored else {"not_stored": 1}))
        self._changed.notify_all()

    def _is_ready(self, group_id: str) -> bool:
        waiting = self._waiting.get(group_id)
        return waiting is not None and self._receipts.is_reached(waiting.group.policy_version)

    def _knows(self, group_id: str) -> bool:
        """Whether a group was accepted before; waits for one that is being stored."""
        settled = self._changed.wait_for(lambda: group_id not in self._storing, STORE_TIMEOUT_S)
        if not settled:
            raise NotStored(
                f"group {group_id!r} was pushed before and is still being written to the learner's "
                f"disk after {STORE_TIMEOUT_S:g} s"
            )
        return group_id in self._waiting or group_id in self._consumed

    def _give_up(self, unfit: Callable[[Group], bool]) -> tuple[str, ...]:
        """Drops the waiting groups that are unfit; returns their ids."""
        ids = tuple(name for name, waiting in self._waiting.items() if unfit(waiting.group))
        for group_id in ids:
            self._remove(group_id)
        self._consumed.update(ids)
        self._count(disowned=len(ids))
        return ids

    def _take_waiting(self, group_ids: Iterable[str]) -> Taken:
        groups = [self._waiting[group_id].group for group_id in group_ids]
        for group in groups:
            self._remove(group.group_id)
        self._consumed.update(group.group_id for group in groups)
        fresh = tuple(
            group for group in groups if not self._receipts.is_stale(group.policy_version)
        )
        stale = tuple(group for group in groups if self._receipts.is_stale(group.policy_version))
        self._count(taken=len(fresh), dropped_stale=len(stale))
        return Taken(
            groups=fresh, dropped_stale=stale, policy_version=self._receipts.learner_version
        )

    def _remove(self, group_id: str) -> bool:
        waiting = self._waiting.pop(group_id, None)
        if waiting is not None:
            self._held_bytes -= waiting.nbytes
        return waiting is not None

    def _count(self, **more: int) -> None:
        self._counts = dataclasses.replace(
            self._counts,
            **{name: getattr(self._counts, name) + number for name, number in more.items()},
        )


_COUNTED_AS: Mapping[type[Exception], str] = {
    ValueError: "malformed",
    UnknownReceipt: "unknown_receipt",
    StaleGroup: "stale",
    BufferFull: "full",
    NotStored: "not_stored",
    NotOpen: "not_open",
}
