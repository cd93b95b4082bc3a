"""What changed between two policy versions, as bytes: exact to the bit, small where little changed.

An optimiser step at a small learning rate leaves most elements of a 16-bit copy as they were. A
delta holds, for every tensor, whichever is smallest: nothing, the changed elements, or all bytes.
Elements are compared and moved as unsigned integers, so NaN and -0 are bits like any others.
`proto/tandem/v1/weights.proto` describes the format. Pure: no sockets, no threads.

Work goes through blocks of BLOCK_ELEMENTS, so that neither side needs more than a few MiB beside
its buffers.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from services.weights.digest import checksum, wire_dtype
from services.wire.messages import TensorSpec

BLOCK_ELEMENTS = 2**20
GAP_BYTES = (1, 2)
"""Sizes of a code; each tensor takes the one that makes it smaller."""


class DeltaTooLarge(ValueError):
    """The delta would have more bytes than it may."""


class DeltaKind(enum.Enum):
    """How one tensor is made from its base."""

    UNCHANGED = "unchanged"
    SPARSE = "sparse"
    FULL = "full"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaTensor:
    """One tensor in a delta."""

    kind: DeltaKind
    nbytes: int
    """In the delta's stream."""
    changed: int = 0
    """Elements that changed, if SPARSE."""
    gap_bytes: int = 0
    """Size of a code, if SPARSE."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaManifest:
    """What a receiver needs before the bytes."""

    tensors: tuple[DeltaTensor, ...]
    """In the order of the version's manifest."""
    checksum: str
    """sha256 of the delta's stream, hex."""

    @property
    def nbytes(self) -> int:
        """Bytes of the delta's stream."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """The changes that turn one version's bytes into another's."""

    manifest: DeltaManifest
    stream: np.ndarray
    """uint8 [manifest.nbytes]."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stream."""
        return self.manifest.nbytes


def encode_delta(
    base: npt.ArrayLike | memoryview,
    target: npt.ArrayLike | memoryview,
    specs: Sequence[TensorSpec],
    *,
    max_bytes: int | None = None,
) -> Delta:
    """Compares two versions of the same layout.

    Args:
        base: contiguous bytes of the version that the receiver holds.
        target: contiguous bytes of the version that it is to make, as many.
        specs: of either, in stream order; checksums are not read.
        max_bytes: largest delta of use to the caller; None for any.

    Raises:
        DeltaTooLarge: as soon as it is clear.
        ValueError: if the sizes are not those of the specs.
    """
    old, new = _bytes_of(base, specs, "base"), _bytes_of(target, specs, "target")
    tensors: list[DeltaTensor] = []
    arrays: list[np.ndarray] = []
    total = 0
    for spec in specs:
        tensor, pieces = _encode_tensor(_elements(old, spec), _elements(new, spec))
        total += tensor.nbytes
        if max_bytes is not None and total > max_bytes:
            raise DeltaTooLarge(
                f"the delta has {total} bytes at tensor {spec.name!r} already, more than the "
                f"{max_bytes} allowed"
            )
        tensors.append(tensor)
        arrays += pieces
    stream = np.concatenate([np.empty(0, np.uint8), *(array.view(np.uint8) for array in arrays)])
    stream.flags.writeable = False
    return Delta(
        manifest=DeltaManifest(tensors=tuple(tensors), checksum=checksum(stream)), stream=stream
    )


def apply_delta(
    base: npt.ArrayLike | memoryview,
    delta: Delta,
    specs: Sequence[TensorSpec],
    *,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Makes the target from a copy of its base; the caller checks the result by its checksums.

    Args:
        base: contiguous bytes of the version that the delta was made against.
        delta: as `encode_delta` returned it.
        specs: of the target, in stream order.
        out: where the target goes, uint8 of the same length, not the base itself; None makes one.

    Returns:
        uint8, the target's bytes.

    Raises:
        ValueError: if the delta does not fit these specs.
    """
    check_delta(delta.manifest, specs)
    if delta.stream.nbytes != delta.nbytes:
        raise ValueError(f"the delta has {delta.stream.nbytes} bytes, described are {delta.nbytes}")
    old = _bytes_of(base, specs, "base")
    new = np.empty(old.nbytes, np.uint8) if out is None else out
    position = 0
    for spec, tensor in zip(specs, delta.manifest.tensors, strict=True):
        raw = delta.stream[position : position + tensor.nbytes]
        position += tensor.nbytes
        place = new[spec.offset : spec.offset + spec.nbytes]
        if tensor.kind is DeltaKind.FULL:
            place[:] = raw
            continue
        place[:] = old[spec.offset : spec.offset + spec.nbytes]
        if tensor.kind is DeltaKind.SPARSE:
            _scatter(_elements(new, spec), tensor, raw, spec.name)
    return new


def check_delta(manifest: DeltaManifest, specs: Sequence[TensorSpec]) -> None:
    """Raises ValueError unless every tensor of the delta has a size that its spec allows."""
    if len(manifest.tensors) != len(specs):
        raise ValueError(f"the delta has {len(manifest.tensors)} tensors, the version {len(specs)}")
    for spec, tensor in zip(specs, manifest.tensors, strict=True):
        itemsize = wire_dtype(spec.dtype).itemsize
        if tensor.kind is DeltaKind.UNCHANGED:
            fits = tensor.nbytes == 0
        elif tensor.kind is DeltaKind.FULL:
            fits = tensor.nbytes == spec.nbytes
        else:
            code_bytes = tensor.nbytes - tensor.changed * itemsize
            fits = (
                tensor.gap_bytes in GAP_BYTES
                and 0 < tensor.changed <= math.prod(spec.shape)
                and code_bytes >= tensor.changed * tensor.gap_bytes
                and code_bytes % tensor.gap_bytes == 0
                and tensor.nbytes <= spec.nbytes
            )
        if not fits:
            raise ValueError(f"the delta of tensor {spec.name!r} contradicts itself: {tensor}")


def _encode_tensor(old: np.ndarray, new: np.ndarray) -> tuple[DeltaTensor, list[np.ndarray]]:
    """Returns one tensor of a delta, and the arrays whose bytes make it up."""
    codes: dict[int, list[np.ndarray]] = {size: [] for size in GAP_BYTES}
    code_bytes = dict.fromkeys(GAP_BYTES, 0)
    values: list[np.ndarray] = []
    changed = 0
    for places, gaps in _changes(old, new):
        values.append(new[places])
        changed += len(places)
        for size in GAP_BYTES:
            codes[size].append(_codes(gaps, _code_dtype(size)))
            code_bytes[size] += codes[size][-1].nbytes
        if min(code_bytes.values()) + changed * new.itemsize >= new.nbytes:
            return DeltaTensor(kind=DeltaKind.FULL, nbytes=new.nbytes), [new]
    if not changed:
        return DeltaTensor(kind=DeltaKind.UNCHANGED, nbytes=0), []
    size = min(GAP_BYTES, key=lambda size: code_bytes[size])
    nbytes = code_bytes[size] + changed * new.itemsize
    sparse = DeltaTensor(kind=DeltaKind.SPARSE, nbytes=nbytes, changed=changed, gap_bytes=size)
    return sparse, [*codes[size], *values]


def _changes(old: np.ndarray, new: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, block by block, where elements differ and how many equal ones lie before each."""
    last = -1
    for start in range(0, len(new), BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        places = np.flatnonzero(old[block] != new[block])
        if not len(places):
            continue
        places += start
        gaps = np.diff(places, prepend=last) - 1
        last = int(places[-1])
        yield places, gaps


def _codes(gaps: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Writes each gap as codes: the largest number as often as it fits, then the remainder."""
    largest = np.iinfo(dtype).max
    escapes, rest = np.divmod(gaps, largest)
    ends = np.cumsum(escapes + 1)
    codes = np.full(int(ends[-1]), largest, dtype)
    codes[ends - 1] = rest
    return codes


def _scatter(place: np.ndarray, tensor: DeltaTensor, raw: np.ndarray, name: str) -> None:
    """Writes the changed elements of one tensor over those of its base."""
    split = tensor.nbytes - tensor.changed * place.itemsize
    codes = raw[:split].view(_code_dtype(tensor.gap_bytes))
    values = raw[split:].view(place.dtype)
    largest = np.iinfo(codes.dtype).max
    last, taken = -1, 0
    for start in range(0, len(codes), BLOCK_ELEMENTS):
        block = codes[start : start + BLOCK_ELEMENTS]
        is_change = block != largest
        ends = last + np.cumsum(block.astype(np.int64) + is_change)
        last = int(ends[-1])
        places = ends[is_change]
        if (len(places) and places[-1] >= len(place)) or taken + len(places) > len(values):
            raise ValueError(f"the delta of tensor {name!r} leads beyond its end")
        place[places] = values[taken : taken + len(places)]
        taken += len(places)
    if taken != tensor.changed:
        raise ValueError(
            f"the delta of tensor {name!r} has {taken} changes, described are {tensor.changed}"
        )


def _bytes_of(
    raw: npt.ArrayLike | memoryview, specs: Iterable[TensorSpec], role: str
) -> np.ndarray:
    flat = np.frombuffer(raw, np.uint8)  # pyright: ignore[reportArgumentType, reportCallIssue]
    expected = sum(spec.nbytes for spec in specs)
    if flat.nbytes != expected:
        raise ValueError(f"the {role} has {flat.nbytes} bytes, its specs say {expected}")
    return flat


def _elements(raw: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Views one tensor's bytes as little-endian unsigned integers of its item size."""
    itemsize = wire_dtype(spec.dtype).itemsize
    return raw[spec.offset : spec.offset + spec.nbytes].view(f"<u{itemsize}")


def _code_dtype(size: int) -> np.dtype:
    return np.dtype(f"<u{size}")
