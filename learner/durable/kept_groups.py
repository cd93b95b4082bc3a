"""Groups that are kept beside their training: to train on them again, or for a look."""

import json
import pathlib
from collections.abc import Sequence

from learner.durable.rollout_file import RolloutHeader, RolloutRecorder
from learner.learner_records import plain_group
from services.wire.messages import Group


class KeptGroups:
    """Owns the files of one run that hold groups as they were trained on."""

    def __init__(self, header: RolloutHeader, *, rejected: pathlib.Path, recorded: str | None):
        """Args:
        rejected: folder of groups whose update was not finite; made when there is one.
        recorded: file of the groups of every update (`rollout_file.py`); None records nothing.
        """
        self._rejected = rejected
        self._recorder = None
        if recorded is not None:
            self._recorder = RolloutRecorder(pathlib.Path(recorded), header)

    def record(self, policy_version: int, groups: Sequence[Group]) -> None:
        """Writes groups down before they train, so that a failed update can be repeated.

        Args:
            policy_version: that trains on them.
        """
        if self._recorder is not None:
            self._recorder.append(policy_version, groups)

    def reject(self, policy_version: int, groups: Sequence[Group]) -> None:
        """Writes the groups of an update that was not finite to a file of their own.

        Args:
            policy_version: that the update was to make.
            groups: none where it was finite.
        """
        if not groups:
            return
        self._rejected.mkdir(parents=True, exist_ok=True)
        path = self._rejected / f"version-{policy_version:08d}.jsonl"
        with path.open("w") as file:
            for group in groups:
                file.write(json.dumps(plain_group(group)) + "\n")
