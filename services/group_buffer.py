"""Groups that have arrived and wait for the learner, each used at most once.

Delivery is at least once, so the buffer remembers every group it ever gave away. It also keeps
the two promises about where a group came from: its receipt is one that the learner issued, and
its version is within the staleness bound at the moment it is taken, time in the queue included.
"""

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence

from services.group_check import check_group, group_nbytes
from services.messages import Group, PushOutcome

NO_VERSION = -1
"""Stands for the current version before the first is issued."""


class StaleGroup(Exception):
    """The policy version is older than the staleness bound allows."""


class BufferFull(Exception):
    """The buffer is at its bound; groups must be taken before more can come."""


class UnknownReceipt(Exception):
    """The weight digest is not the one issued for the policy version."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What `take` gave away: these groups will not be seen again."""

    groups: tuple[Group, ...]
    """Within the staleness bound, in the order asked for."""
    dropped_stale: tuple[Group, ...]
    """Grew too old while they waited: for the books only, not to be trained on."""
    policy_version: int
    """Current version when they were taken; minus that of a group, this is its staleness."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferCounts:
    """Pushes by what became of them, and groups by where they are."""

    received: int = 0
    """All pushes: the sum of accepted, duplicate, stale, malformed, unknown_receipt and full."""
    accepted: int = 0
    duplicate: int = 0
    stale: int = 0
    """Refused at the door for their age."""
    malformed: int = 0
    unknown_receipt: int = 0
    full: int = 0
    taken: int = 0
    dropped_stale: int = 0
    """Accepted in time, too old when they were to be taken."""
    forgotten: int = 0
    """Accepted, and given up by `forget` before they were taken."""
    waiting: int = 0
    waiting_bytes: int = 0


class GroupBuffer:
    """The queue between trajectory service and learner; safe to use from any thread."""

    def __init__(
        self, run_id: str, *, capacity_groups: int, capacity_bytes: int, max_staleness: int
    ):
        """Starts empty, and refuses every group until a version is issued.

        Args:
            run_id: groups of other runs are malformed.
            capacity_groups: most groups that wait at a time, >= 1.
            capacity_bytes: most bytes of arrays that wait at a time, >= 1.
            max_staleness: oldest version accepted, in versions behind the current one, >= 0.
        """
        if capacity_groups < 1 or capacity_bytes < 1 or max_staleness < 0:
            raise ValueError(
                "capacity_groups and capacity_bytes must be at least 1 and max_staleness at "
                f"least 0, got {capacity_groups=}, {capacity_bytes=}, {max_staleness=}"
            )
        self.run_id = run_id
        self._capacity_groups = capacity_groups
        self._capacity_bytes = capacity_bytes
        self._max_staleness = max_staleness
        self._changed = threading.Condition()
        self._current_version = NO_VERSION
        self._issued: dict[int, str] = {}
        self._waiting: dict[str, Group] = {}
        self._waiting_bytes = 0
        self._consumed: set[str] = set()
        self._counts = BufferCounts()

    @property
    def current_version(self) -> int:
        """Newest issued version; NO_VERSION before the first."""
        with self._changed:
            return self._current_version

    def issue(self, policy_version: int, weight_digest: str) -> None:
        """Makes a published version the current one: its receipt is good from now on.

        Raises:
            ValueError: if the version does not rise.
        """
        with self._changed:
            if policy_version <= self._current_version:
                raise ValueError(
                    f"issued versions must rise from 0: got {policy_version} after "
                    f"{self._current_version}"
                )
            self._current_version = policy_version
            self._issued[policy_version] = weight_digest
            self._issued = {
                version: digest
                for version, digest in self._issued.items()
                if not self._is_stale(version)
            }

    def put(self, group: Group) -> PushOutcome:
        """Takes a group in, unless its key was here before, whatever the attempt.

        Raises:
            ValueError: if the group is malformed, or larger than the whole buffer.
            UnknownReceipt: if its version was never issued, or under another digest.
            StaleGroup: if its version is older than the bound.
            BufferFull: if there is no room now.
        """
        with self._changed:
            try:
                outcome = self._put(group)
            except (ValueError, UnknownReceipt, StaleGroup, BufferFull) as refusal:
                self._count(received=1, **{_COUNTED_AS[type(refusal)]: 1})
                raise
            self._count(received=1, **{outcome.value: 1})
            self._changed.notify_all()
            return outcome

    def put_duplicate(self, run_id: str, group_id: str) -> bool:
        """Whether this group was here before; counts the push as a duplicate if so.

        Lets the service answer from the header of a push, without reading the group.
        """
        with self._changed:
            known = run_id == self.run_id and self._knows(group_id)
            if known:
                self._count(received=1, duplicate=1)
            return known

    def put_malformed(self) -> None:
        """Counts a push that did not even yield a group."""
        with self._changed:
            self._count(received=1, malformed=1)

    def take(self, group_ids: Sequence[str], timeout_s: float) -> Taken:
        """Waits for these groups and gives them away; all of them, or none if time runs out.

        Args:
            group_ids: different from each other; their order is that of the result.
            timeout_s: how long to wait.

        Raises:
            TimeoutError: naming the groups that did not arrive; the others stay in the buffer.
            ValueError: if an id repeats, or its group is gone, already or meanwhile.
        """
        wanted = set(group_ids)
        if len(wanted) != len(group_ids):
            raise ValueError(f"group_ids must differ, got {list(group_ids)}")
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting.keys() >= wanted or not self._consumed.isdisjoint(wanted),
                timeout_s,
            )
            gone = [group_id for group_id in group_ids if group_id in self._consumed]
            if gone:
                raise ValueError(f"groups {gone} were taken or forgotten before")
            if not self._waiting.keys() >= wanted:
                missing = [group_id for group_id in group_ids if group_id not in self._waiting]
                raise TimeoutError(
                    f"waited {timeout_s:g} s for {len(group_ids)} groups; {len(missing)} did not "
                    f"arrive from the rollout workers: {missing}"
                )
            return self._give_away(group_ids)

    def admissible(self, max_groups: int) -> Taken:
        """Gives away up to so many groups in order of arrival, without waiting.

        Groups found too old on the way are dropped and do not count towards max_groups.
        """
        with self._changed:
            chosen: list[str] = []
            fresh = 0
            for group_id, group in self._waiting.items():
                if fresh == max_groups:
                    break
                chosen.append(group_id)
                fresh += not self._is_stale(group.policy_version)
            return self._give_away(chosen)

    def forget(self, group_ids: Iterable[str]) -> None:
        """Gives these groups up: those that wait are dropped, late arrivals are duplicates."""
        with self._changed:
            for group_id in group_ids:
                if group_id in self._waiting:
                    self._remove(group_id)
                    self._count(forgotten=1)
                self._consumed.add(group_id)
            self._changed.notify_all()

    def counts(self) -> BufferCounts:
        with self._changed:
            return dataclasses.replace(
                self._counts, waiting=len(self._waiting), waiting_bytes=self._waiting_bytes
            )

    def state(self) -> dict[str, list[str]]:
        """What a checkpoint must remember, as plain JSON data: the groups that are used up.

        Groups that still wait are not part of it: after a restart they are made again.
        """
        with self._changed:
            return {"consumed_group_ids": sorted(self._consumed)}

    def restore(self, state: Mapping[str, Sequence[str]]) -> None:
        """Continues from a `state`; what the buffer held before is dropped."""
        with self._changed:
            self._consumed = set(state["consumed_group_ids"])
            self._waiting.clear()
            self._waiting_bytes = 0

    def _put(self, group: Group) -> PushOutcome:
        check_group(group, self.run_id)
        nbytes = group_nbytes(group)
        if nbytes > self._capacity_bytes:
            raise ValueError(
                f"group {group.group_id!r} has {nbytes} bytes, and the whole buffer "
                f"{self._capacity_bytes}: raise the buffer's capacity or make groups smaller"
            )
        if self._knows(group.group_id):
            return PushOutcome.DUPLICATE
        self._check_origin(group)
        if (
            len(self._waiting) >= self._capacity_groups
            or self._waiting_bytes + nbytes > self._capacity_bytes
        ):
            raise BufferFull(
                f"no room for group {group.group_id!r} of {nbytes} bytes: {len(self._waiting)} of "
                f"{self._capacity_groups} groups and {self._waiting_bytes} of "
                f"{self._capacity_bytes} bytes wait"
            )
        self._waiting[group.group_id] = group
        self._waiting_bytes += nbytes
        return PushOutcome.ACCEPTED

    def _check_origin(self, group: Group) -> None:
        version = group.policy_version
        if self._is_stale(version):
            raise StaleGroup(
                f"group {group.group_id!r} was sampled under policy version {version}; the "
                f"current one is {self._current_version} and max_staleness {self._max_staleness}"
            )
        if self._issued.get(version) != group.weight_digest:
            raise UnknownReceipt(
                f"group {group.group_id!r} from {group.worker!r} names weight digest "
                f"{group.weight_digest!r} for policy version {version}, for which "
                f"{self._issued.get(version)!r} was issued"
            )

    def _is_stale(self, policy_version: int) -> bool:
        return self._current_version - policy_version > self._max_staleness

    def _knows(self, group_id: str) -> bool:
        return group_id in self._waiting or group_id in self._consumed

    def _give_away(self, group_ids: Iterable[str]) -> Taken:
        groups = [self._remove(group_id) for group_id in group_ids]
        self._consumed.update(group.group_id for group in groups)
        fresh = tuple(group for group in groups if not self._is_stale(group.policy_version))
        stale = tuple(group for group in groups if self._is_stale(group.policy_version))
        self._count(taken=len(fresh), dropped_stale=len(stale))
        return Taken(groups=fresh, dropped_stale=stale, policy_version=self._current_version)

    def _remove(self, group_id: str) -> Group:
        group = self._waiting.pop(group_id)
        self._waiting_bytes -= group_nbytes(group)
        return group

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
}
