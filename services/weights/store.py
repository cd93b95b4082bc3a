"""Policy versions in host memory, for the weight service to serve.

The store owns its bytes: a publication copies, so a training step that donates, frees or changes
the source arrays cannot touch a version that is being sent. A learner's store holds what was
published there, a relay's what it received.
"""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from services.weights.buffer_pool import BufferPool
from services.weights.delta import Delta, DeltaTooLarge, encode_delta
from services.weights.digest import HASH_THREADS, layout
from services.weights.publication import Publication, copy_all
from services.wire.messages import NO_VERSION, TensorSpec, WeightManifest

DELTA_SHARE = 0.5
"""A delta larger than this share of its version is not worth its work."""


class UnknownVersion(LookupError):
    """The version was never published, or is no longer held."""


class UnknownDelta(LookupError):
    """There is no delta between these versions; the caller fetches all bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldDelta:
    """The delta of a version from the one before it, made or still being made."""

    base_version: int
    base_digest: str
    made: "concurrent.futures.Future[Delta]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldVersion:
    """One version as the store holds it."""

    manifest: WeightManifest
    stream: np.ndarray
    """uint8 [manifest.nbytes], read-only."""
    depth: int = 0
    """Transfers between the publisher and this store."""
    delta: HeldDelta | None = None


class WeightStore:
    """The newest versions of one run, each as one flat byte stream; safe to use from any thread."""

    def __init__(self, run_id: str, keep_versions: int, *, deltas: bool = True):
        """Starts without a version.

        Args:
            run_id: stamped on every manifest.
            keep_versions: how many of the newest versions stay in memory, >= 1; while one is
                published, it comes on top.
            deltas: whether a published version is compared with the one before it, in a thread of
                the store's. Holds at most DELTA_SHARE of a version more for each one held.
        """
        if keep_versions < 1:
            raise ValueError(f"keep_versions must be at least 1, got {keep_versions}")
        self.run_id = run_id
        self.pool = BufferPool(keep=1)
        """Where the memory of dropped versions waits for the next."""
        self._keep_versions = keep_versions
        self._held: dict[int, HeldVersion] = {}
        self._newest = NO_VERSION
        """Newest version ever installed, dropped ones included."""
        self._egress_bytes = 0
        self._changed = threading.Condition()
        self._encoder = (
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="delta") if deltas else None
        )

    @property
    def current_version(self) -> int:
        """Newest version held; NO_VERSION before the first."""
        with self._changed:
            return max(self._held, default=NO_VERSION)

    @property
    def egress_bytes(self) -> int:
        """Bytes of tensors and deltas that were sent from here."""
        with self._changed:
            return self._egress_bytes

    def count_egress(self, nbytes: int) -> None:
        """Adds to `egress_bytes`."""
        with self._changed:
            self._egress_bytes += nbytes

    def begin(self, policy_version: int, specs: Sequence[TensorSpec]) -> Publication:
        """Opens a new version, which is not visible before its commit.

        Args:
            policy_version: higher than every version before, >= 0.
            specs: as `services.weights.digest.layout` makes them.

        Raises:
            ValueError: if the version does not rise.
        """
        with self._changed:
            self._check_rises(policy_version)
        stream = self.pool.take_buffer(sum(spec.nbytes for spec in specs))
        return Publication(self.run_id, policy_version, specs, stream, self._show)

    def publish(self, policy_version: int, tensors: Mapping[str, npt.ArrayLike]) -> WeightManifest:
        """Begins, writes and commits in one call; from then on the sources may change.

        Args:
            policy_version: higher than every version before, >= 0.
            tensors: by Hugging Face name; host or device arrays that must not change during the
                call.

        Returns:
            Its manifest; the version is served from now on, and the oldest beyond keep_versions
            is dropped.

        Raises:
            ValueError: if the version does not rise, there is no tensor, or a dtype cannot travel.
        """
        publication = self.begin(policy_version, layout(tensors))
        return copy_all(publication, tensors, threads=HASH_THREADS)

    def adopt(self, version: HeldVersion) -> None:
        """Takes in a version that was received and verified; versions as high or higher go."""
        version.stream.flags.writeable = False
        policy_version = version.manifest.policy_version
        with self._changed:
            self._forget_from(policy_version)
            self._install(policy_version, version)

    def reset(self, policy_version: int) -> None:
        """Forgets this version and every higher one, so that they can be published anew.

        For a learner that was restored to an older state.
        """
        with self._changed:
            self._forget_from(policy_version)

    def held(self, policy_version: int) -> HeldVersion:
        """Returns a version, whose bytes stay valid if it is dropped.

        Raises:
            UnknownVersion: if it is not held.
        """
        with self._changed:
            if policy_version not in self._held:
                raise UnknownVersion(
                    f"policy version {policy_version} is not held; these are: {sorted(self._held)}"
                )
            return self._held[policy_version]

    def wait_for_version(
        self,
        min_version: int = 0,
        timeout_s: float = 0.0,
        *,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> HeldVersion:
        """Returns the newest version, once it is at least `min_version`.

        Args:
            min_version: oldest policy version that will do.
            timeout_s: how long to wait for it.
            abandoned: ends the wait early when true; checked after every `wake`.

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
            return self._held[current]

    def wake(self) -> None:
        """Has every waiting call check its `abandoned` again."""
        with self._changed:
            self._changed.notify_all()

    def read(self, policy_version: int, offset: int, length: int) -> memoryview:
        """Returns a view of one range of the version's bytes, which stays valid if it is dropped.

        Raises:
            UnknownVersion: if the version is not held.
            ValueError: if the range does not lie within the version.
        """
        stream = self.held(policy_version).stream
        return _range_of(stream, offset, length, f"policy version {policy_version}")

    def delta(
        self, policy_version: int, base_version: int, base_digest: str, timeout_s: float
    ) -> Delta:
        """Returns the delta of a version against a base, waiting while it is being made.

        Raises:
            UnknownDelta: if there is none, or not in time.
            UnknownVersion: if the version is not held.
        """
        held = self.held(policy_version).delta
        wanted = (base_version, base_digest)
        if held is None or (held.base_version, held.base_digest) != wanted:
            raise UnknownDelta(f"no delta leads from {base_version} to {policy_version}")
        try:
            return held.made.result(timeout_s)
        except (DeltaTooLarge, concurrent.futures.CancelledError) as error:
            raise UnknownDelta(str(error) or "its version was dropped") from error
        except TimeoutError as error:
            raise UnknownDelta(
                f"the delta from {base_version} to {policy_version} was not made in {timeout_s:g} s"
            ) from error

    def read_delta(
        self, policy_version: int, base_version: int, offset: int, length: int
    ) -> memoryview:
        """Returns a view of one range of a delta that is made; errors as `read` and `delta`."""
        held = self.held(policy_version).delta
        digest = "" if held is None else held.base_digest
        stream = self.delta(policy_version, base_version, digest, 0.0).stream
        return _range_of(stream, offset, length, f"the delta from {base_version}")

    def _show(self, manifest: WeightManifest, stream: np.ndarray) -> None:
        """Makes a published version visible, and has its delta made."""
        stream.flags.writeable = False
        with self._changed:
            self._check_rises(manifest.policy_version)
            base = self._held.get(max(self._held, default=NO_VERSION))
            delta = self._delta_from(base, manifest, stream)
            version = HeldVersion(manifest=manifest, stream=stream, delta=delta)
            self._install(manifest.policy_version, version)

    def _delta_from(
        self, base: HeldVersion | None, manifest: WeightManifest, stream: np.ndarray
    ) -> HeldDelta | None:
        if self._encoder is None or base is None or not same_layout(base.manifest, manifest):
            return None
        return HeldDelta(
            base_version=base.manifest.policy_version,
            base_digest=base.manifest.digest,
            made=self._encoder.submit(
                encode_delta,
                base.stream,
                stream,
                manifest.tensors,
                max_bytes=int(DELTA_SHARE * manifest.nbytes),
            ),
        )

    def _install(self, policy_version: int, version: HeldVersion) -> None:
        self._held[policy_version] = version
        self._newest = policy_version
        while len(self._held) > self._keep_versions:
            dropped = self._held.pop(min(self._held))
            if dropped.delta is not None:
                dropped.delta.made.cancel()  # so that the encoder's queue holds no dropped version
        self._changed.notify_all()

    def _forget_from(self, policy_version: int) -> None:
        self._held = {v: held for v, held in self._held.items() if v < policy_version}
        self._newest = min(self._newest, policy_version - 1)

    def _check_rises(self, policy_version: int) -> None:
        if policy_version <= self._newest:
            raise ValueError(
                f"policy versions must rise from 0: got {policy_version} after "
                f"{_named(self._newest)}"
            )


def same_layout(left: WeightManifest, right: WeightManifest) -> bool:
    """Whether both have the same tensors, checksums aside."""
    return [(spec.name, spec.dtype, spec.shape) for spec in left.tensors] == [
        (spec.name, spec.dtype, spec.shape) for spec in right.tensors
    ]


def _range_of(stream: np.ndarray, offset: int, length: int, whose: str) -> memoryview:
    if offset < 0 or length < 0 or offset + length > stream.nbytes:
        raise ValueError(
            f"bytes [{offset}, {offset + length}) do not lie within the {stream.nbytes} of {whose}"
        )
    return stream.data[offset : offset + length]


def _named(version: int) -> str:
    return "none" if version == NO_VERSION else str(version)
