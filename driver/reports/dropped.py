"""Which prompts and groups were dropped, why, and where each stands in the data: `dropped.jsonl`.

A prompt that no group is made of has a line of step -1, before all steps; a group that did not
train has one in the step in which it ended. At a resume the lines of later steps move aside, as
those of other logs do.
"""

import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from driver.accounting.jsonl import JsonlLog
from driver.accounting.leases import TrajectoryState
from services.trajectories.data_order import DataOrder, index_of

FILE = "dropped.jsonl"
BEFORE_ALL = -1

WHY = {
    TrajectoryState.DROPPED_STALE: "too old, or outside the off-policy bounds",
    TrajectoryState.DROPPED_ZERO_VARIANCE: "all its rewards are equal",
    TrajectoryState.DROPPED_TRUNCATED: "all its scored completions were cut by length",
    TrajectoryState.DROPPED_ERROR: "no completion was scored, its update was not finite, or its "
    "policy version could not be made again",
    TrajectoryState.SET_ASIDE: "its prompt has ended two workers (quarantine.json)",
    TrajectoryState.SKIPPED: "data.curriculum skips its prompt for a while",
}
"""In words, the states in which a group ends that did not train; DUPLICATE is no group."""


class DroppedLog:
    """Owns `dropped.jsonl` of one run."""

    def __init__(self, folder: pathlib.Path, order: DataOrder, place_of: Callable[[int], str]):
        """Args:
        place_of: names the place of a training prompt in the data, by its position.
        """
        self._log = JsonlLog(folder / FILE)
        self._order = order
        self._place_of = place_of

    def write_prompts(self, left_out: Iterable[Mapping[str, Any]]) -> None:
        """Writes the prompts that were left out when the data was read."""
        for one in left_out:
            self._log.append({"step": BEFORE_ALL, **one})

    def write_groups(self, step: int, ended: Mapping[str, Iterable[str]]) -> None:
        """Writes the groups of a step that ended without training.

        Args:
            ended: group ids by TrajectoryState value.
        """
        for state, why in WHY.items():
            for group_id in ended.get(state.value, ()):
                index = index_of(group_id)
                assert index is not None
                epoch, position = self._order.prompt_at(index)
                where = {"where": self._place_of(position), "epoch": epoch}
                self._log.append(
                    {"step": step, "group_id": group_id, "state": state.value, "why": why, **where}
                )

    def rewind(self, step: int) -> int:
        """Moves the lines after a checkpoint's step aside; returns how many."""
        return self._log.rewind(step)

    def close_log(self) -> None:
        """Closes the file."""
        self._log.close()
