"""Which prompts are skipped for a while, since the rewards of their groups were all equal.

A prompt that is always right, or always wrong, teaches nothing. After `skip_after` such groups in a
row it is skipped for some epochs of its source; then one more group shows whether it still is.

The order stays a function of the seed and of what was recorded: groups count when their step is
closed, in the order of the steps, and so does a resume count them again. When a prompt is leased
before the last result of it is known, as with `rollout.max_staleness` above 0, timing has a part in
what is skipped. So every decision is written to `curriculum.jsonl` before a worker hears of it. No
rollback to a checkpoint touches that file: a run that is killed and resumed repeats its decisions,
and leases the very same groups.
"""

import collections
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from driver.accounting.jsonl import read_lines, strict_line
from rollout_worker.config.data_config import CurriculumConfig
from services.trajectories.data_order import DataOrder, index_of
from services.trajectories.group_report import GroupReport

FILE = "curriculum.jsonl"


class SkipJournal:
    """Owns `curriculum.jsonl` of one run: up to which index was decided, and what is skipped."""

    def __init__(self, folder: pathlib.Path):
        """Reads what an earlier start of the run has left; a line that a crash cut counts not."""
        self._path = folder / FILE
        self.decided = 0
        """The first index that no decision was made of."""
        self.skipped: set[int] = set()
        for line in read_lines(self._path):
            self.decided = max(self.decided, line["decided"])
            self.skipped.update(line["skipped"])

    def append(self, decided: int, skipped: Iterable[int]) -> None:
        """Writes decisions down; they are on the disk when it returns.

        Args:
            decided: the first index after them.
            skipped: those of their indices that are skipped.
        """
        added = sorted(skipped)
        torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + strict_line({"decided": decided, "skipped": added}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.decided = decided
        self.skipped.update(added)


class Curriculum:
    """The record of the groups by prompt, and the rules by which prompts are skipped."""

    def __init__(self, rules: CurriculumConfig, order: DataOrder, journal: SkipJournal):
        self._rules = rules
        self._order = order
        self._journal = journal
        self._equal: dict[int, int] = {}
        """Groups of equal rewards in a row, by position of the prompt."""
        self._until: dict[str, dict[int, int]] = collections.defaultdict(dict)
        """Last epoch in which a prompt is skipped, by source and position."""
        self._epochs: dict[str, int] = {}
        """The newest epoch of which a group was recorded, by source."""
        self._pending: set[int] = set()
        """Indices that are skipped, and not written down yet."""

    @property
    def skipping(self) -> int:
        """Prompts that are skipped now."""
        return sum(map(len, self._until.values()))

    def skips(self, index: int) -> bool:
        """Whether the group of an index is skipped; once it was decided, that stays."""
        if index < self._journal.decided:
            return index in self._journal.skipped
        epoch, position = self._order.prompt_at(index)
        source = self._order.source_of_position(position).name
        skipped = epoch <= self._until[source].get(position, -1)
        if skipped:
            self._pending.add(index)
        return skipped

    def write_decisions(self, cursor: int) -> None:
        """Writes down what was decided of the indices below the cursor, before they are leased."""
        if cursor > self._journal.decided:
            self._journal.append(cursor, self._pending)
        self._pending.clear()

    def record(self, reports: Iterable[GroupReport]) -> None:
        """Records the groups of a closed step, in the order of the data."""
        found = [(index_of(one.group_id), one) for one in reports if one.scored]
        for index, report in sorted((index, one) for index, one in found if index is not None):
            epoch, position = self._order.prompt_at(index)
            source = self._order.source_of_position(position)
            until = self._pass_epochs(source.name, epoch)
            if not report.zero_variance or report.reward_error:
                self._equal.pop(position, None)
                until.pop(position, None)
                continue
            self._equal[position] = self._equal.get(position, 0) + 1
            room = position in until or len(until) < int(self._rules.most * source.count)
            if self._equal[position] >= self._rules.skip_after and room:
                until[position] = epoch + self._rules.epochs

    def _pass_epochs(self, source: str, epoch: int) -> dict[int, int]:
        """The prompts of a source that are skipped, without those whose time is over."""
        if epoch > self._epochs.get(source, -1):
            self._epochs[source] = epoch
            self._until[source] = {
                position: last for position, last in self._until[source].items() if last >= epoch
            }
        return self._until[source]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values."""
        return {
            "equal": sorted(self._equal.items()),
            "until": {name: sorted(those.items()) for name, those in self._until.items()},
            "epochs": dict(self._epochs),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._equal = dict(map(tuple, state["equal"]))
        self._epochs = dict(state["epochs"])
        self._until.update(
            {name: dict(map(tuple, those)) for name, those in state["until"].items()}
        )
