"""One version on its way into one buffer: what is missing, who sent what, whether it is right.

No sockets here: `weights/client.py` brings the bytes. The buffer is cut into segments that
connections take from a common list, so a slow connection does little; a tensor is hashed as soon
as its last byte is there. What has arrived stays when its source fails, and the next one goes on.
"""

import bisect
import collections
import concurrent.futures
import threading

import numpy as np

from services.weights.codec import WeightPiece
from services.weights.delta import Delta, DeltaKind, DeltaManifest, apply_delta
from services.weights.digest import checksum, digest_of_specs, wire_dtype
from services.weights.store import HeldVersion
from services.wire.messages import TensorSpec, WeightManifest

SEGMENT_BYTES = 128 * 2**20
"""What one connection asks for at a time; each request starts with a small window."""
DELTA_NAME = "delta"
"""Name of the one tensor that a delta's stream is to the transfer that receives it."""


class WeightTransferError(RuntimeError):
    """A version could not be fetched whole; the caller keeps what it has."""


class Unreachable(WeightTransferError):
    """The server did not answer, or not in time; another may."""


class NotHeld(WeightTransferError):
    """The server does not hold what was asked for."""


class Transfer:
    """What has arrived of one version; safe to use from several threads."""

    def __init__(
        self,
        manifest: WeightManifest,
        buffer: np.ndarray,
        hashing: concurrent.futures.Executor,
        *,
        base: HeldVersion | None = None,
        received: collections.Counter[str] | None = None,
    ):
        """Starts with nothing received.

        Args:
            manifest: of the version, checked.
            buffer: writable uint8 [manifest.nbytes], where the bytes go.
            hashing: runs the checksums.
            base: a version of the same layout that is held; None asks for no delta.
            received: where the bytes of each source are counted; None starts at zero.
        """
        self.manifest = manifest
        self.buffer = buffer
        self.base = base
        """What a delta may start from; None once bytes of the version itself are fetched."""
        self.source = ""
        """Address that the bytes come from at the moment."""
        self.received = collections.Counter() if received is None else received
        """Bytes by the address that sent them, wrong ones and those of a delta included."""
        self._hashing = hashing
        self._lock = threading.Lock()
        self._segments: collections.deque[range] = collections.deque()
        self._add_segments(range(manifest.nbytes))
        self._ends = [spec.offset + spec.nbytes for spec in manifest.tensors]
        self._missing_bytes = {spec.name: spec.nbytes for spec in manifest.tensors}
        self._checksums: dict[str, concurrent.futures.Future[str]] = {}
        for spec in manifest.tensors:
            if spec.nbytes == 0:
                self._hash(spec)
        self._delta: Transfer | None = None

    def take_segment(self) -> range | None:
        """Returns the byte range to fetch next; None when all are taken."""
        with self._lock:
            return self._segments.popleft() if self._segments else None

    def return_segment(self, rest: range) -> None:
        """Leaves to others what a connection took and did not fetch."""
        with self._lock:
            if rest:
                self._segments.appendleft(rest)

    def write_piece(self, segment: range, position: int, piece: WeightPiece) -> int:
        """Puts one piece of a segment in its place.

        Args:
            segment: being fetched.
            position: first byte of it that is missing.
            piece: what came next.

        Returns:
            The first byte that is missing now.

        Raises:
            WeightTransferError: if the piece is empty, leaves a gap or overruns the segment.
        """
        end = position + len(piece.data)
        if piece.offset != position or not position < end <= segment.stop:
            raise self.error(
                f"got {len(piece.data)} bytes at offset {piece.offset}, where 1 to "
                f"{segment.stop - position} at {position} were due"
            )
        self.buffer.data[position:end] = piece.data
        self._record_bytes(position, end)
        return end

    def check_checksums(self) -> None:
        """Raises WeightTransferError if a tensor is known to be wrong; waits for no checksum."""
        if wrong := self._wrong(wait=False):
            raise self._mismatch(wrong)

    def reject_wrong(self) -> WeightTransferError | None:
        """Waits for the checksums, and has tensors whose bytes are wrong fetched again.

        Returns:
            An error that names them, if there are any.
        """
        wrong = self._wrong(wait=True)
        with self._lock:
            for spec in self.manifest.tensors:
                if spec.name in wrong:
                    del self._checksums[spec.name]
                    self._missing_bytes[spec.name] = spec.nbytes
                    self._add_segments(range(spec.offset, spec.offset + spec.nbytes))
        return self._mismatch(wrong) if wrong else None

    def delta_transfer(self, described: DeltaManifest) -> "Transfer":
        """Returns the transfer of a delta's stream: the one begun before, if it is the same."""
        spec = TensorSpec(
            name=DELTA_NAME,
            dtype="uint8",
            shape=(described.nbytes,),
            offset=0,
            nbytes=described.nbytes,
            checksum=described.checksum,
        )
        if self._delta is None or self._delta.manifest.tensors != (spec,):
            manifest = WeightManifest(
                run_id=self.manifest.run_id,
                policy_version=self.manifest.policy_version,
                tensors=(spec,),
                digest=digest_of_specs((spec,)),
            )
            stream = np.empty(described.nbytes, np.uint8)
            self._delta = Transfer(manifest, stream, self._hashing, received=self.received)
        return self._delta

    def apply_delta(self, delta: Delta) -> None:
        """Makes the version from a copy of its base, and checks every tensor of it.

        Raises:
            WeightTransferError: naming tensors that do not match their checksum.
            ValueError: if the delta does not fit the version.
        """
        base, specs = self.base, self.manifest.tensors
        assert base is not None
        apply_delta(base.stream, delta, specs, out=self.buffer)

        def is_right(new: TensorSpec, old: TensorSpec, unchanged: bool) -> bool:
            if unchanged:
                return old.checksum == new.checksum
            return checksum(_bytes_of(new, self.buffer)) == new.checksum

        unchanged = [tensor.kind is DeltaKind.UNCHANGED for tensor in delta.manifest.tensors]
        right = self._hashing.map(is_right, specs, base.manifest.tensors, unchanged)
        wrong = [spec.name for spec, fine in zip(specs, right, strict=True) if not fine]
        if wrong:
            raise WeightTransferError(
                f"what the delta from policy version {base.manifest.policy_version} makes does not "
                f"match the checksum of {wrong}"
            )

    def error(self, reason: str) -> WeightTransferError:
        """Returns an error that names version, source, and the first tensor that is incomplete."""
        with self._lock:
            missing = {name: count for name, count in self._missing_bytes.items() if count}
        where = (
            f"policy version {self.manifest.policy_version} from weight service {self.source}: "
            f"{reason}"
        )
        if not missing:
            return WeightTransferError(where)
        return WeightTransferError(
            f"{where}; {len(missing)} of {len(self.manifest.tensors)} tensors are "
            f"incomplete, {sum(missing.values())} of {self.manifest.nbytes} bytes missing, "
            f"first in {next(iter(missing))!r}"
        )

    def _wrong(self, *, wait: bool) -> list[str]:
        """Names the tensors whose bytes do not match their checksum, of those that are hashed."""
        with self._lock:
            checksums = dict(self._checksums)
        return [
            spec.name
            for spec in self.manifest.tensors
            if (sum_ := checksums.get(spec.name)) is not None
            and (wait or sum_.done())
            and sum_.result() != spec.checksum
        ]

    def _mismatch(self, wrong: list[str]) -> WeightTransferError:
        return self.error(f"the bytes received do not match the checksum of {wrong}")

    def _record_bytes(self, start: int, end: int) -> None:
        """Counts the bytes to their source and tensors, and hashes tensors that are complete."""
        tensors = self.manifest.tensors
        with self._lock:
            self.received[self.source] += end - start
        index = bisect.bisect_right(self._ends, start)
        while index < len(tensors) and tensors[index].offset < end:
            spec = tensors[index]
            got = min(end, self._ends[index]) - max(start, spec.offset)
            with self._lock:
                self._missing_bytes[spec.name] -= got
                complete = got > 0 and self._missing_bytes[spec.name] == 0
            if complete:
                self._hash(spec)
            index += 1

    def _hash(self, spec: TensorSpec) -> None:
        sum_ = self._hashing.submit(checksum, _bytes_of(spec, self.buffer))
        with self._lock:
            self._checksums[spec.name] = sum_

    def _add_segments(self, missing: range) -> None:
        self._segments.extend(
            range(start, min(start + SEGMENT_BYTES, missing.stop))
            for start in range(missing.start, missing.stop, SEGMENT_BYTES)
        )


def arrays_of(manifest: WeightManifest, stream: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a version's tensors: views of its bytes, except where that would misalign them."""
    arrays = {}
    for spec in manifest.tensors:
        dtype = wire_dtype(spec.dtype)
        raw = _bytes_of(spec, stream)
        if spec.offset % dtype.alignment:
            raw = raw.copy()
        arrays[spec.name] = raw.view(dtype).reshape(spec.shape)
    return arrays


def _bytes_of(spec: TensorSpec, stream: np.ndarray) -> np.ndarray:
    return stream[spec.offset : spec.offset + spec.nbytes]
