"""One version on its way to one replica, from several sources: what to try, and what next.

Each source is asked for the delta first, if a base is held, then for all. What a source sent stays
when it fails: the next gives the rest. A tensor whose bytes are wrong is fetched again from the
next, and the last source gets a second chance where others had a part in it.
"""

import collections
import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from services.weights.buffer_pool import BufferPool
from services.weights.client import POLL_S, WAIT_FRACTION, WeightClient
from services.weights.delta import Delta, DeltaKind, DeltaManifest, apply_delta
from services.weights.digest import HASH_THREADS, checksum, digest_of_specs
from services.weights.store import DELTA_SHARE, HeldDelta, HeldVersion, same_layout
from services.weights.transfer import NotHeld, Transfer, Unreachable, WeightTransferError
from services.wire.channel import Deadline
from services.wire.messages import TensorSpec, WeightManifest

DELTA_NAME = "delta"
"""Names the one tensor that a delta's stream is to the transfer that receives it."""


class Pull:
    """Tries sources in turn until one version is whole. Runs once."""

    def __init__(
        self,
        manifest: WeightManifest,
        *,
        base: HeldVersion | None,
        pool: BufferPool,
        patience_s: float,
        stopped: Callable[[], bool],
    ):
        """Args:
        manifest: of the version, from whoever is believed.
        base: a version that is held, for deltas against it; None asks for no delta.
        pool: gives the buffer.
        patience_s: how long a source that is not the last may lack the version or send nothing.
        stopped: ends it early when true.
        """
        self.received: collections.Counter[str] = collections.Counter()
        """Bytes by address, of all that sent some."""
        self.failures: list[str] = []
        self.by_delta = False
        self._manifest = manifest
        self._base = base if base and same_layout(base.manifest, manifest) else None
        self._pool = pool
        self._patience_s = patience_s
        self._stopped = stopped
        self._hashing = concurrent.futures.ThreadPoolExecutor(HASH_THREADS)
        self._full: Transfer | None = None
        self._buffer = np.empty(0, np.uint8)
        self._delta: Transfer | None = None
        self._delta_stream = np.empty(0, np.uint8)
        self._delta_checksum = ""
        self._depth = 0

    def run(
        self, clients: Sequence[WeightClient], known: Mapping[str, int], deadline: Deadline
    ) -> HeldVersion:
        """Returns the version, verified.

        Args:
            clients: one for each source, in order of preference, >= 1.
            known: depths of sources that have offered this very version, by address.
            deadline: of it all.

        Raises:
            WeightTransferError: naming what was wrong with each source.
        """
        *relays, last = clients
        error: WeightTransferError | None = None
        with self._hashing:
            for client in relays:
                left_s = max(deadline.remaining_s() / 2, POLL_S)
                bound = Deadline(left_s, f"{deadline.waiting_for}: {client.address}")
                try:
                    return self._from(client, known.get(client.address), bound, self._patience_s)
                except WeightTransferError as failure:
                    self._note(client, failure)
            for _ in range(2):
                try:
                    return self._from(last, known.get(last.address, 0), deadline, None)
                except WeightTransferError as failure:
                    self._note(last, failure)
                    error = failure
                if len(self.received) < 2 or self._stopped() or deadline.remaining_s() == 0:
                    break
        raise WeightTransferError(
            f"policy version {self._manifest.policy_version} could not be pulled: "
            + "; ".join(self.failures)
        ) from error

    def _note(self, client: WeightClient, failure: Exception) -> None:
        self.failures.append(f"{client.address}: {failure}")

    def _from(
        self, client: WeightClient, depth: int | None, bound: Deadline, patience_s: float | None
    ) -> HeldVersion:
        """Has one source give all that is missing."""
        if self._stopped():
            raise Unreachable("the pull was stopped")
        if depth is None:
            depth = self._depth_of(client)
        delta = self._try_delta(client, depth, bound, patience_s) if self._full is None else None
        if delta is None:
            self._fill(client, depth, bound, patience_s)
            assert self._full is not None
        self.by_delta = delta is not None
        return HeldVersion(
            manifest=self._manifest, stream=self._buffer, depth=self._depth + 1, delta=delta
        )

    def _depth_of(self, client: WeightClient) -> int:
        """Waits until a relay has the version."""
        version = self._manifest.policy_version
        deadline = Deadline(self._patience_s, client.address)
        while True:
            left_s = max(deadline.remaining_s(), POLL_S)
            answer = client.ask(
                version, wait_s=WAIT_FRACTION * left_s, timeout_s=left_s, stopped=self._stopped
            )
            offered = answer.manifest
            if offered is not None:
                break
            if deadline.remaining_s() <= POLL_S:
                raise NotHeld(f"has nothing newer than policy version {answer.current_version}")
            time.sleep(POLL_S)
        if offered.policy_version == version and offered.digest != self._manifest.digest:
            raise WeightTransferError(
                f"offers policy version {version} with digest {offered.digest}, but the learner "
                f"issued {self._manifest.digest}"
            )
        return answer.depth

    def _fill(
        self, client: WeightClient, depth: int, bound: Deadline, patience_s: float | None
    ) -> None:
        """Fetches what is missing of the version itself."""
        if self._full is None:
            self._buffer = self._pool.take(self._manifest.nbytes)
            self._full = Transfer(self._manifest, self._buffer, self._hashing)
        transfer = self._full
        try:
            self._receive(client, depth, transfer, bound, patience_s, None)
        finally:
            wrong = transfer.wrong(wait=True)
            transfer.reject(wrong)
        if wrong:
            raise transfer.error_of(wrong)

    def _try_delta(
        self, client: WeightClient, depth: int, bound: Deadline, patience_s: float | None
    ) -> HeldDelta | None:
        """Makes the version from its base; None, with the reason noted, where all is needed."""
        base = self._base
        if base is None:
            return None
        try:
            described = self._described(client, base, bound)
            if described is None:
                return None
            delta = self._fetch_delta(client, depth, described, base, bound, patience_s)
            self._apply(base, delta)
        except (WeightTransferError, ValueError) as error:
            if isinstance(error, Unreachable) and patience_s is not None:
                raise
            self._note(client, error)
            self._base = None
            return None
        made: concurrent.futures.Future[Delta] = concurrent.futures.Future()
        made.set_result(delta)
        return HeldDelta(
            base_version=base.manifest.policy_version, base_digest=base.manifest.digest, made=made
        )

    def _described(
        self, client: WeightClient, base: HeldVersion, bound: Deadline
    ) -> DeltaManifest | None:
        left_s = max(min(bound.remaining_s(), self._patience_s), POLL_S)
        described = client.ask_delta(
            self._manifest,
            base.manifest,
            wait_s=WAIT_FRACTION * left_s,
            timeout_s=left_s,
            stopped=self._stopped,
        )
        if described is None or described.nbytes > DELTA_SHARE * self._manifest.nbytes:
            return None
        return described

    def _fetch_delta(
        self,
        client: WeightClient,
        depth: int,
        described: DeltaManifest,
        base: HeldVersion,
        bound: Deadline,
        patience_s: float | None,
    ) -> Delta:
        if self._delta is None or described.checksum != self._delta_checksum:
            self._delta_checksum = described.checksum
            self._delta_stream = np.empty(described.nbytes, np.uint8)
            self._delta = Transfer(
                _as_version(self._manifest, described), self._delta_stream, self._hashing
            )
        version = base.manifest.policy_version
        self._receive(client, depth, self._delta, bound, patience_s, version)
        self._delta.finish()
        return Delta(manifest=described, stream=self._delta_stream)

    def _receive(
        self,
        client: WeightClient,
        depth: int,
        transfer: Transfer,
        bound: Deadline,
        patience_s: float | None,
        base_version: int | None,
    ) -> None:
        """Fills a transfer from one source, and counts what that gave, also if it failed."""
        before = transfer.received.total()
        try:
            client.fill(
                transfer,
                self._manifest.policy_version,
                bound,
                base_version=base_version,
                patience_s=patience_s,
                stopped=self._stopped,
            )
        finally:
            got = transfer.received.total() - before
            if got:
                self.received[client.address] += got
                self._depth = max(self._depth, depth)

    def _apply(self, base: HeldVersion, delta: Delta) -> None:
        """Makes the version from a copy of its base, and checks every tensor of it."""
        stream = self._pool.take(self._manifest.nbytes)
        specs = self._manifest.tensors
        apply_delta(base.stream, delta, specs, out=stream)

        def is_right(new: TensorSpec, old: TensorSpec, unchanged: bool) -> bool:
            if unchanged:
                return old.checksum == new.checksum
            return checksum(stream[new.offset : new.offset + new.nbytes]) == new.checksum

        unchanged = [tensor.kind is DeltaKind.UNCHANGED for tensor in delta.manifest.tensors]
        right = self._hashing.map(is_right, specs, base.manifest.tensors, unchanged)
        wrong = [spec.name for spec, fine in zip(specs, right, strict=True) if not fine]
        if wrong:
            raise WeightTransferError(
                f"what the delta from policy version {base.manifest.policy_version} makes does not "
                f"match the checksum of {wrong}"
            )
        self._buffer = stream


def _as_version(manifest: WeightManifest, delta: DeltaManifest) -> WeightManifest:
    """Describes a delta's stream as the one tensor of a version, for a transfer."""
    spec = TensorSpec(
        name=DELTA_NAME,
        dtype="uint8",
        shape=(delta.nbytes,),
        offset=0,
        nbytes=delta.nbytes,
        checksum=delta.checksum,
    )
    return WeightManifest(
        run_id=manifest.run_id,
        policy_version=manifest.policy_version,
        tensors=(spec,),
        digest=digest_of_specs((spec,)),
    )
