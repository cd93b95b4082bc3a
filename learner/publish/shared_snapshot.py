"""The newest published policy version on its devices, for a rollout worker in the same process.

No bytes are copied: the worker samples with the arrays that the publication was copied from. They
are freed when a newer version was published and the worker has left this one.
"""

import threading

import jax

from learner.publish.snapshot import Snapshot
from services.wire.messages import WeightManifest


class SharedSnapshot:
    """Holds the newest published version: the publisher sets it, the worker waits for it."""

    def __init__(self):
        self._changed = threading.Condition()
        self._newest: tuple[WeightManifest, dict[str, jax.Array]] | None = None

    def offer_version(self, snapshot: Snapshot, manifest: WeightManifest) -> None:
        """Replaces the version by one that was just published.

        Args:
            snapshot: no other code changes or deletes its arrays from now on.
            manifest: as it was issued.
        """
        with self._changed:
            self._newest = manifest, snapshot.tensors
            self._changed.notify_all()

    def wait_for_version(
        self, min_version: int, timeout_s: float
    ) -> tuple[WeightManifest, dict[str, jax.Array]]:
        """Returns the newest version, once it is at least `min_version`; it stays available.

        Returns:
            its manifest, and its arrays by Hugging Face's names, cut as the learner's parameters.

        Raises:
            TimeoutError: if no such version was published in that time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version >= min_version, timeout_s)
            if self._newest is None or self._version < min_version:
                raise TimeoutError(
                    f"the learner in this process published no policy version >= {min_version} in "
                    f"{timeout_s:g} s; the newest is {self._version}"
                )
            return self._newest

    @property
    def _version(self) -> int:
        return -1 if self._newest is None else self._newest[0].policy_version
