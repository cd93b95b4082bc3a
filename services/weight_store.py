"""Published policy versions in host memory, for the weight service to serve.

The store owns its bytes: `publish` copies, so a training step that donates, frees or changes the
arrays it came from cannot touch a version that is being sent.
"""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from services.digest import (
    HASH_THREADS,
    checksum,
    digest_of_specs,
    layout,
    tensor_bytes,
    with_checksums,
)
from services.messages import TensorSpec, WeightManifest

NO_VERSION = -1
"""Stands for the current version before the first is published."""


class UnknownVersion(LookupError):
    """The version was never published, or is no longer held."""


@dataclasses.dataclass(frozen=True)
class _Held:
    manifest: WeightManifest
    stream: memoryview


class WeightStore:
    """The newest versions of one run, each as one flat byte stream; safe to use from any thread."""

    def __init__(self, run_id: str, keep_versions: int):
        """Starts without a version.

        Args:
            run_id: stamped on every manifest.
            keep_versions: how many of the newest versions stay in memory, >= 1; while one is
                published, it comes on top.
        """
        if keep_versions < 1:
            raise ValueError(f"keep_versions must be at least 1, got {keep_versions}")
        self.run_id = run_id
        self._keep_versions = keep_versions
        self._held: dict[int, _Held] = {}
        self._digests: dict[int, str] = {}
        self._changed = threading.Condition()

    @property
    def current_version(self) -> int:
        """Newest published version; NO_VERSION before the first."""
        with self._changed:
            return max(self._held, default=NO_VERSION)

    def publish(self, policy_version: int, tensors: Mapping[str, npt.ArrayLike]) -> WeightManifest:
        """Copies the tensors into a new version; from then on the sources may change.

        Args:
            policy_version: higher than every version before, >= 0.
            tensors: by Hugging Face name; host or device arrays that nobody changes during the
                call.

        Returns:
            Its manifest; the version is served from now on, and the oldest beyond keep_versions
            is dropped.

        Raises:
            ValueError: if the version does not rise, there is no tensor, or a dtype cannot travel.
        """
        self._check_rises(policy_version)
        specs = layout(tensors)
        stream = np.empty(sum(spec.nbytes for spec in specs), np.uint8)

        def copy_in(spec: TensorSpec) -> str:
            place = stream[spec.offset : spec.offset + spec.nbytes]
            place[:] = tensor_bytes(np.asarray(tensors[spec.name]))
            return checksum(place)

        with concurrent.futures.ThreadPoolExecutor(HASH_THREADS) as pool:
            specs = with_checksums(specs, pool.map(copy_in, specs))
        stream.flags.writeable = False
        manifest = WeightManifest(
            run_id=self.run_id,
            policy_version=policy_version,
            tensors=specs,
            digest=digest_of_specs(specs),
        )
        with self._changed:
            self._check_rises(policy_version)
            self._held[policy_version] = _Held(manifest, stream.data)
            self._digests[policy_version] = manifest.digest
            while len(self._held) > self._keep_versions:
                del self._held[min(self._held)]
            self._changed.notify_all()
        return manifest

    def manifest(
        self,
        min_version: int = 0,
        timeout_s: float = 0.0,
        *,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> WeightManifest:
        """Returns the newest manifest, once it is at least `min_version`.

        Args:
            min_version: oldest policy version that will do.
            timeout_s: how long to wait for it.
            abandoned: ends the wait early when true; looked at after every `wake`.

        Raises:
            TimeoutError: if no such version was published in that time.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.current_version >= min_version or abandoned(), timeout_s
            )
            current = self.current_version
            if current == NO_VERSION or current < min_version:
                raise TimeoutError(
                    f"run {self.run_id!r} has no policy version >= {min_version} after "
                    f"{timeout_s:g} s; the newest is {_named(current)}"
                )
            return self._held[current].manifest

    def wake(self) -> None:
        """Lets every waiter look at its `abandoned` again."""
        with self._changed:
            self._changed.notify_all()

    def read(self, policy_version: int, offset: int, length: int) -> memoryview:
        """Returns a view of one range of the version's bytes, which stays valid if it is dropped.

        Raises:
            UnknownVersion: if the version is not held.
            ValueError: if the range does not lie within the version.
        """
        with self._changed:
            if policy_version not in self._held:
                raise UnknownVersion(
                    f"policy version {policy_version} is not held; these are: {sorted(self._held)}"
                )
            stream = self._held[policy_version].stream
        if offset < 0 or length < 0 or offset + length > stream.nbytes:
            raise ValueError(
                f"bytes [{offset}, {offset + length}) do not lie within the {stream.nbytes} of "
                f"policy version {policy_version}"
            )
        return stream[offset : offset + length]

    def digest_of(self, policy_version: int) -> str:
        """Returns the tree digest of a version published here, dropped ones included.

        Raises:
            UnknownVersion: if it was never published.
        """
        with self._changed:
            if policy_version not in self._digests:
                raise UnknownVersion(f"policy version {policy_version} was never published")
            return self._digests[policy_version]

    def _check_rises(self, policy_version: int) -> None:
        newest = max(self._digests, default=NO_VERSION)
        if policy_version <= newest:
            raise ValueError(
                f"policy versions must rise from 0: got {policy_version} after {_named(newest)}"
            )


def _named(version: int) -> str:
    return "none" if version == NO_VERSION else str(version)
