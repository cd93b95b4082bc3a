"""The receiving end of one version: where bytes go, what is still missing, whether it is right.

No sockets here: `weight_client.py` brings the bytes. The buffer is cut into segments that
connections take from a common list, so a slow connection does little; a tensor is hashed as soon
as its last byte is there.
"""

import bisect
import collections
import concurrent.futures
import threading

import numpy as np

from services.codec import Piece
from services.digest import checksum, wire_dtype
from services.messages import TensorSpec, WeightManifest

SEGMENT_BYTES = 32 * 2**20
"""What one connection asks for at a time."""


class WeightTransferError(RuntimeError):
    """A version could not be fetched whole; whoever asked keeps what it has."""


class Transfer:
    """One version on its way into one buffer; safe to use from several threads."""

    def __init__(
        self,
        manifest: WeightManifest,
        peer: str,
        hashing: concurrent.futures.Executor,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ):
        """Allocates the buffer.

        Args:
            manifest: of the version, checked.
            peer: whom the bytes come from, for errors.
            hashing: runs the checksums.
            segment_bytes: length of a segment.
        """
        self._manifest = manifest
        self._peer = peer
        self._hashing = hashing
        self._lock = threading.Lock()
        self._buffer = np.empty(manifest.nbytes, np.uint8)
        self._segments = collections.deque(
            range(start, min(start + segment_bytes, manifest.nbytes))
            for start in range(0, manifest.nbytes, segment_bytes)
        )
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

    def finish(self) -> dict[str, np.ndarray]:
        """Waits for the checksums and returns the tensors.

        Returns:
            Writable arrays by name: views of one buffer, except where that would misalign them.

        Raises:
            WeightTransferError: naming the tensors whose bytes are wrong.
        """
        assert not self._segments and len(self._checksums) == len(self._manifest.tensors)
        wrong = [
            spec.name
            for spec in self._manifest.tensors
            if self._checksums[spec.name].result() != spec.checksum
        ]
        if wrong:
            raise self.error(f"the bytes received do not match the checksum of {wrong}")
        return {spec.name: self._array(spec) for spec in self._manifest.tensors}

    def error(self, reason: str) -> WeightTransferError:
        """Returns an error that names version, peer, and the first tensor that is incomplete."""
        with self._lock:
            missing = {name: count for name, count in self._missing_bytes.items() if count}
        where = f"policy version {self._manifest.policy_version} from {self._peer}"
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
        self._checksums[spec.name] = self._hashing.submit(checksum, self._bytes(spec))

    def _bytes(self, spec: TensorSpec) -> np.ndarray:
        return self._buffer[spec.offset : spec.offset + spec.nbytes]

    def _array(self, spec: TensorSpec) -> np.ndarray:
        dtype = wire_dtype(spec.dtype)
        raw = self._bytes(spec)
        if spec.offset % dtype.alignment:
            raw = raw.copy()
        return raw.view(dtype).reshape(spec.shape)
