"""The journal: the group buffer in memory and its write-ahead log on disk, kept consistent.

It records the groups that were accepted, the versions that were issued and the updates that were
begun. After a restart the learner continues from its checkpoint and this log: updates that the
process before had begun are repeated first (`replay`). A repeated version must have the digest that
it had; otherwise everything that was sampled or trained on the earlier one is given up.
"""

import dataclasses
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from learner.durable.frames import DamagedFile
from learner.durable.segment_file import NOTHING_OPEN, OpenWork, UpdateRecord
from learner.durable.spool import Spool, SpoolFailed
from services.process import failpoints
from services.trajectories.buffer_records import Taken
from services.trajectories.group_buffer import GroupBuffer
from services.trajectories.group_check import GroupRules
from services.trajectories.id_set import IdSet, PlainIds
from services.wire.messages import Group

log = logging.getLogger(__name__)

Replayed = Literal["equal", "different"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """An update that is in the log and may train."""

    taken: Taken
    is_replay: bool
    """Whether the process before had begun it."""
    unfit_ids: tuple[str, ...]
    """Its groups that are left out, since they cannot train."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnfitGroup:
    """An accepted group that cannot train, such as one from before a check was added."""

    group: Group
    reason: str


class Journal:
    """Owns the group buffer of a run and its spool; safe to use from any thread.

    `issue` is called by the thread that publishes, `begin` and `rotate` by the one that trains, and
    `prune` by the one that writes checkpoints.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        rules: GroupRules,
        *,
        capacity_groups: int,
        capacity_bytes: int,
        max_staleness: int,
        check_trainable: Callable[[Group], None],
    ):
        """Args:
            folder: of the spool.
            rules: of the groups of the run.
            capacity_groups, capacity_bytes, max_staleness: as GroupBuffer has them.
            check_trainable: raises ValueError, with the reason, for a group that would end the
                update in which it trains.

        Raises:
            DamagedFile: if the spool is of another run.
        """
        self._spool = Spool(folder, rules.run_id)
        self._folder = folder
        self._check_trainable = check_trainable
        self._max_staleness = max_staleness
        self.buffer = GroupBuffer(
            rules,
            capacity_groups=capacity_groups,
            capacity_bytes=capacity_bytes,
            max_staleness=max_staleness,
            store=self._spool.write_group,
        )
        self.set_aside: tuple[UnfitGroup, ...] = ()
        """Groups that the process before had accepted, and that cannot train."""
        self._left_out: set[str] = set()
        """Those of them that updates have, which are repeated without."""
        self._lock = threading.Lock()
        self._started = False
        self.repaired = ""
        """What `resume` cut off the end of the log, where a crash had left half a record."""
        self._pending: deque[UpdateRecord] = deque()
        """Updates to repeat, oldest first."""
        self._digests: dict[int, str] = {}
        """Digest of each issued version that may train, of this process or the one before."""
        self._replayed: dict[int, Replayed] = {}
        self._disowned: set[str] = set()
        self._unreported: list[str] = []
        """Those of `_disowned` that no report has named."""

    @property
    def problem(self) -> str:
        """Why the log cannot be written now; empty where it can."""
        return self._spool.problem

    def claim(self) -> None:
        """Waits until no other learner of the run writes, and keeps others away from then on.

        Raises:
            SpoolFailed: if another one is still there.
        """
        self._spool.claim()

    def start(self) -> None:
        """Begins the log of a new run; does nothing if it has begun already.

        Raises:
            ValueError: if the folder has a log: its groups would be lost.
            SpoolFailed: if it cannot be written, or another learner has it.
        """
        if self._started:
            return
        self._spool.claim()
        if not self._spool.is_new:
            raise ValueError(
                f"{self._folder} holds accepted groups of this run: go on with --resume, or choose "
                "another run.output_dir"
            )
        self._spool.rotate(0, lambda: NOTHING_OPEN)
        self._started = True

    def resume(
        self, step: int, policy_version: int, buffer_state: Mapping[str, PlainIds]
    ) -> OpenWork | None:
        """Continues from what was logged since a checkpoint.

        Args:
            step: of the checkpoint; 0 where there is none.
            policy_version: in that checkpoint.
            buffer_state: of its GroupBuffer.

        Returns:
            Updates to repeat and groups that wait; None where there was no spool. Groups that
            cannot train are in `set_aside`: updates are repeated without them.

        Raises:
            DamagedFile: naming file and byte, or the update that is missing.
            SpoolFailed: if it cannot be written, or another learner has it.
        """
        self._spool.claim()
        written = self._spool.read(step)
        self.buffer.restore(buffer_state)
        if written is None:
            self._spool.rotate(step, lambda: NOTHING_OPEN)
        else:
            self.repaired = self._spool.open_last()
        self._started = True
        if written is None:
            return None
        work = written.beyond(policy_version, IdSet(buffer_state["consumed_group_ids"]))
        _check_sequence(work.updates, policy_version, self._folder)
        work = self._without_unfit(work)
        self.buffer.restore_accepted(work.groups.values(), work.issued, policy_version)
        self._pending.extend(work.updates)
        self._digests = dict(work.issued)
        return work

    def covers(self, step: int) -> bool:
        """Whether the log holds everything since the checkpoint of that step."""
        return self._spool.covers(step)

    def begin(
        self,
        policy_version: int,
        group_ids: Sequence[str],
        dropped_ids: Sequence[str],
        timeout_s: float,
    ) -> Begun:
        """Waits for the groups of an update, logs it, and removes the groups from the buffer.

        Args:
            policy_version: the version that it will make.
            group_ids: in the order in which they will be packed; those that were given up with
                their version are left out.
            dropped_ids: groups that no update will ask for. An update may consist of them alone: it
                makes no version, and is repeated in its place all the same.
            timeout_s: bound of the wait for groups that have not arrived.

        Raises:
            TimeoutError, ValueError: as GroupBuffer.take_groups says; the buffer is unchanged.
            SpoolFailed: if it cannot be logged; the buffer is unchanged.
        """
        self.buffer.forget(dropped_ids)
        unfit = self._left_out.intersection(group_ids)
        with self._lock:
            left_out = self._disowned | unfit
        wanted = [group_id for group_id in group_ids if group_id not in left_out]
        self.buffer.wait_for_groups(wanted, timeout_s)
        update = UpdateRecord(
            policy_version=policy_version,
            group_ids=tuple(group_ids),
            dropped_ids=tuple(dropped_ids),
        )
        with self._lock:
            is_replay = bool(self._pending) and self._pending[0] == update
            if is_replay:
                self._pending.popleft()
            elif self._pending:
                self._abandon(policy_version)
        if not is_replay and (group_ids or dropped_ids):
            self._spool.write_update(update)
        failpoints.reach("learner.update")
        taken = self.buffer.take_groups(wanted, 0.0)
        return Begun(taken=taken, is_replay=is_replay, unfit_ids=tuple(sorted(unfit)))

    def issue(self, policy_version: int, digest: str) -> None:
        """Logs a version before workers can see it.

        If it was issued before with another digest, what depends on that one is given up.

        Raises:
            SpoolFailed: if it cannot be logged.
            ValueError: if versions do not rise.
        """
        with self._lock:
            before = self._digests.get(policy_version)
            if before != digest:
                self._spool.write_issued(policy_version, digest)
            if before is not None:
                self._replayed[policy_version] = "equal" if before == digest else "different"
            if before not in (None, digest):
                log.warning(
                    "policy version %d was repeated with digest %s, but had digest %s before: "
                    "what was sampled or trained on the earlier one is given up",
                    policy_version,
                    digest,
                    before,
                )
                self._abandon(policy_version + 1)
            self._digests[policy_version] = digest
            self._forget_before(policy_version - self._max_staleness)
            self._disown(self.buffer.issue(policy_version, digest))

    def digest_of(self, policy_version: int) -> str:
        """Digest of an issued version; empty if it is not issued yet."""
        with self._lock:
            return self._digests.get(policy_version, "")

    def replayed(self, policy_version: int) -> Replayed | None:
        """Whether a repeated version had the same digest; None for one that was not repeated."""
        with self._lock:
            return self._replayed.get(policy_version)

    def take_disowned(self) -> list[str]:
        """Groups given up since the last call because their version could not be repeated."""
        with self._lock:
            disowned, self._unreported = self._unreported, []
            return disowned

    def is_disowned(self, group_ids: Sequence[str]) -> bool:
        """Whether one of the groups was given up with its version."""
        with self._lock:
            return not self._disowned.isdisjoint(group_ids)

    def rotate(self, step: int, policy_version: int) -> None:
        """Begins the segment of a checkpoint, at the moment whose state that holds.

        It need not be on the disk: without it, a resume reads the segments before and this one. On
        a full disk the segment before stays in use, and `problem` says why.

        Args:
            step: of the checkpoint.
            policy_version: in that checkpoint.
        """

        def still_open() -> OpenWork:
            return OpenWork(
                issued=self._digests, updates=tuple(self._pending), groups=self.buffer.held()
            )

        with self._lock:
            self._forget_before(policy_version - self._max_staleness)
            try:
                self._spool.rotate(step, still_open)
            except SpoolFailed as error:
                log.warning("the spool continues in its earlier segment: %s", error)

    def prune(self, oldest_step: int | None) -> list[str]:
        """Removes segments that no checkpoint needs; for any thread.

        Args:
            oldest_step: of the oldest checkpoint that is kept, which is whole; None where that is
                not known, so that every segment stays.

        Returns:
            Old segments that could not be removed, each with the reason.
        """
        return [] if oldest_step is None else self._spool.prune(oldest_step)

    def close(self) -> None:
        """Closes the log; nothing can be written after."""
        self._spool.close()

    def _forget_before(self, policy_version: int) -> None:
        """Forgets the digests of versions that no group may name any more."""
        self._digests = {v: d for v, d in self._digests.items() if v >= policy_version}
        self._replayed = {v: r for v, r in self._replayed.items() if v >= policy_version}

    def _without_unfit(self, work: OpenWork) -> OpenWork:
        """Sets groups aside that cannot train: each would end every process that repeats it.

        One that waits is made anew under its id; an update that has one goes on without it.
        """
        unfit = []
        for group in work.groups.values():
            try:
                self._check_trainable(group)
            except ValueError as error:
                unfit.append(UnfitGroup(group=group, reason=str(error)))
        self.set_aside = tuple(unfit)
        ids = {one.group.group_id for one in unfit}
        used = {g for update in work.updates for g in (*update.group_ids, *update.dropped_ids)}
        self._left_out = ids & used
        self.buffer.forget(self._left_out)
        return dataclasses.replace(
            work, groups={name: group for name, group in work.groups.items() if name not in ids}
        )

    def _abandon(self, policy_version: int) -> None:
        """Voids updates that make this version or later ones, and groups sampled under those."""
        self._pending.clear()
        self._spool.write_abandoned(policy_version)
        self._digests = {v: d for v, d in self._digests.items() if v < policy_version}
        self._disown(self.buffer.revoke(policy_version))

    def _disown(self, group_ids: Sequence[str]) -> None:
        self._disowned.update(group_ids)
        self._unreported += group_ids


def _check_sequence(
    updates: Sequence[UpdateRecord], policy_version: int, folder: str | os.PathLike
) -> None:
    """Raises DamagedFile if an update between the checkpoint and the last one is missing."""
    newest = policy_version
    for update in updates:
        if update.policy_version > newest + 1:
            raise DamagedFile(
                f"{folder} lacks the update that makes policy version {newest + 1}: the checkpoint "
                f"holds {policy_version}, and the next update written down makes "
                f"{update.policy_version}; resume from a later checkpoint"
            )
        newest = max(newest, update.policy_version)
