"""The receiving end of one version: where bytes go, what is still missing, whether it is right.

No sockets here: `weights/stream.py` brings the bytes. The buffer is cut into segments that
connections take from a common list, so a slow connection does little; a tensor is hashed as soon
as its last byte is there. What has arrived stays when its server fails, and another goes on.
"""

import bisect
import collections
import concurrent.futures
import threading

import numpy as np

from services.weights.codec import Piece
from services.weights.digest import checksum, wire_dtype
from services.wire.messages import TensorSpec, WeightManifest

SEGMENT_BYTES = 128 * 2**20
"""What one connection asks for at a time; each question starts with a small window."""


class WeightTransferError(RuntimeError):
    """A version could not be fetched whole; whoever asked keeps what it has."""


class Unreachable(WeightTransferError):
    """The server did not answer, or not in time; another may."""


class NotHeld(WeightTransferError):
    """The server does not hold what was asked for."""


class Transfer:
    """One version on its way into one buffer; safe to use from several threads."""

    def __init__(
        self,
        manifest: WeightManifest,
        buffer: np.ndarray,
        hashing: concurrent.futures.Executor,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ):
        """Starts with nothing received.

        Args:
            manifest: of the version, checked.
            buffer: writable uint8 [manifest.nbytes], where the bytes go.
            hashing: runs the checksums.
            segment_bytes: length of a segment.
        """
        self.peer = "nobody yet"
        """Whom the bytes come from at the moment, for errors."""
        self.received: collections.Counter[str] = collections.Counter()
        """Bytes by the peer that sent them, wrong ones included."""
        self._manifest = manifest
        self._hashing = hashing
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._buffer = buffer
        self._segments: collections.deque[range] = collections.deque()
        self._want(range(0, manifest.nbytes))
        self._ends = [spec.offset + spec.nbytes for spec in manifest.tensors]
        self._missing_bytes = {spec.name: spec.nbytes for spec in manifest.tensors}
        self._checksums: dict[str, concurrent.futures.Future[str]] = {}
        for spec in manifest.tensors:
            if spec.nbytes == 0:
                self._hash(spec)

    def take_segment(self) -> range | None:
        """Returns the byte range to fetch next; None when all are taken."""
        with self._lock:
            return self._segments.popleft() if self._segments else None

    def give_back(self, rest: range) -> None:
        """Leaves to others what a connection took and did not fetch."""
        with self._lock:
            if rest:
                self._segments.appendleft(rest)

    def write(self, segment: range, position: int, piece: Piece) -> int:
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
        self._buffer.data[position:end] = piece.data
        self._arrived(position, end)
        return end

    def wrong(self, *, wait: bool) -> list[str]:
        """Names the tensors whose bytes do not match their checksum.

        Args:
            wait: for the checksums that are being computed; otherwise those are left out.
        """
        with self._lock:
            checksums = dict(self._checksums)
        return [
            spec.name
            for spec in self._manifest.tensors
            if (sum_ := checksums.get(spec.name)) is not None
            and (wait or sum_.done())
            and sum_.result() != spec.checksum
        ]

    def reject(self, names: list[str]) -> None:
        """Wants these complete tensors once more."""
        with self._lock:
            for spec in self._manifest.tensors:
                if spec.name in names:
                    del self._checksums[spec.name]
                    self._missing_bytes[spec.name] = spec.nbytes
                    self._want(range(spec.offset, spec.offset + spec.nbytes))

    def finish(self) -> dict[str, np.ndarray]:
        """Waits for the checksums and returns the tensors.

        Returns:
            Writable arrays by name: views of the buffer, except where that would misalign them.

        Raises:
            WeightTransferError: naming the tensors whose bytes are wrong.
        """
        assert not self._segments and len(self._checksums) == len(self._manifest.tensors)
        wrong = self.wrong(wait=True)
        if wrong:
            raise self.error_of(wrong)
        return arrays_of(self._manifest, self._buffer)

    def error_of(self, wrong: list[str]) -> WeightTransferError:
        return self.error(f"the bytes received do not match the checksum of {wrong}")

    def error(self, reason: str) -> WeightTransferError:
        """Returns an error that names version, peer, and the first tensor that is incomplete."""
        with self._lock:
            missing = {name: count for name, count in self._missing_bytes.items() if count}
        where = f"policy version {self._manifest.policy_version} from {self.peer}"
        if not missing:
            return WeightTransferError(f"{where}: {reason}")
        return WeightTransferError(
            f"{where}: {reason}; {len(missing)} of {len(self._manifest.tensors)} tensors are "
            f"incomplete, {sum(missing.values())} of {self._manifest.nbytes} bytes missing, "
            f"first in {next(iter(missing))!r}"
        )

    def _arrived(self, start: int, end: int) -> None:
        """Books the bytes to their tensors, and hashes those that are complete now."""
        tensors = self._manifest.tensors
        with self._lock:
            self.received[self.peer] += end - start
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
        sum_ = self._hashing.submit(checksum, _bytes_of(spec, self._buffer))
        with self._lock:
            self._checksums[spec.name] = sum_

    def _want(self, missing: range) -> None:
        self._segments.extend(
            range(start, min(start + self._segment_bytes, missing.stop))
            for start in range(missing.start, missing.stop, self._segment_bytes)
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
