"""Bytes, checksums and the tree digest of a set of tensors: the same sum on both sides of a wire.

The learner digests what it publishes, the worker what it received and, for its receipt, the
arrays it samples with. All three call the functions here. Hashing releases the GIL, so a few
threads share the tensors.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt

from services.wire.messages import TensorSpec, WeightManifest

HASH_THREADS = 4
WIRE_DTYPES: Mapping[str, np.dtype] = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
            *(np.float16, np.float32, np.float64, np.bool_),
            *(np.int8, np.int16, np.int32, np.int64),
            *(np.uint8, np.uint16, np.uint32, np.uint64),
        ),
    )
}
"""Every dtype that may travel, by name; all fixed-size, none can hold a Python object."""


def wire_dtype(name: str) -> np.dtype:
    """Returns the dtype of that name, such as `bfloat16`.

    Raises:
        ValueError: if no such dtype travels.
    """
    if name not in WIRE_DTYPES:
        raise ValueError(f"dtype {name!r} does not travel; these do: {sorted(WIRE_DTYPES)}")
    return WIRE_DTYPES[name]


def tensor_bytes(tensor: np.ndarray) -> np.ndarray:
    """Views the elements as uint8 [nbytes], row-major and little-endian; copies only if it must.

    Raises:
        ValueError: if the dtype does not travel.
    """
    little = tensor.dtype.newbyteorder("<")
    wire_dtype(little.name)
    flat = np.ascontiguousarray(tensor).reshape(-1)
    return flat.astype(little, copy=False).view(np.uint8)


def layout(tensors: Mapping[str, npt.ArrayLike]) -> tuple[TensorSpec, ...]:
    """Places the tensors in one flat byte stream: sorted by name, without gaps.

    Args:
        tensors: by name; only shape and dtype are read.

    Returns:
        Their specs in stream order, with empty checksums.

    Raises:
        ValueError: if there is none, or a dtype does not travel.
    """
    if not tensors:
        raise ValueError("a policy version needs at least one tensor, got none")
    specs = []
    offset = 0
    for name in sorted(tensors):
        shape, dtype = np.shape(tensors[name]), _dtype_of(tensors[name])
        nbytes = math.prod(shape) * wire_dtype(dtype.name).itemsize
        spec = TensorSpec(
            name=name, dtype=dtype.name, shape=shape, offset=offset, nbytes=nbytes, checksum=""
        )
        specs.append(spec)
        offset += nbytes
    return tuple(specs)


def checksum(raw: npt.ArrayLike | memoryview) -> str:
    """Returns the sha256 of contiguous bytes, hex."""
    return hashlib.sha256(raw).hexdigest()  # pyright: ignore[reportArgumentType]


def digest_of_specs(specs: Iterable[TensorSpec]) -> str:
    """Returns the tree digest, hex: sha256 over name, dtype, shape and checksum of every tensor.

    Offsets do not enter: they follow from the order.
    """
    tree = hashlib.sha256()
    for spec in specs:
        row = [spec.name, spec.dtype, list(spec.shape), spec.checksum]
        tree.update(json.dumps(row, separators=(",", ":")).encode("ascii") + b"\n")
    return tree.hexdigest()


def tree_digest(
    tensors: Mapping[str, npt.ArrayLike], *, threads: int = HASH_THREADS
) -> tuple[tuple[TensorSpec, ...], str]:
    """Hashes live arrays, which the caller leaves alone meanwhile.

    Args:
        tensors: by name; numpy arrays, or device arrays that numpy can read. Each of the latter
            is brought to the host alone, so at most `threads` of them are there at a time.
        threads: how many tensors are hashed at once.

    Returns:
        Their specs in stream order with checksums, and the tree digest, hex.

    Raises:
        ValueError: if there is no tensor, or a dtype does not travel.
    """
    specs = layout(tensors)

    def hashed(spec: TensorSpec) -> str:
        return checksum(tensor_bytes(np.asarray(tensors[spec.name])))

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        checksums = list(pool.map(hashed, specs))
    specs = with_checksums(specs, checksums)
    return specs, digest_of_specs(specs)


def with_checksums(specs: Iterable[TensorSpec], checksums: Iterable[str]) -> tuple[TensorSpec, ...]:
    """Returns the specs with these checksums, in the same order."""
    return tuple(
        dataclasses.replace(spec, checksum=value)
        for spec, value in zip(specs, checksums, strict=True)
    )


def _dtype_of(tensor: npt.ArrayLike) -> np.dtype:
    return np.dtype(getattr(tensor, "dtype", None) or np.asarray(tensor).dtype)


def check_manifest(manifest: WeightManifest) -> None:
    """Raises ValueError unless the manifest describes one gapless stream and keeps its digest."""
    end = 0
    names = [spec.name for spec in manifest.tensors]
    if names != sorted(set(names)):
        raise ValueError("manifest tensors must be sorted by name, each once")
    for spec in manifest.tensors:
        nbytes = math.prod(spec.shape) * wire_dtype(spec.dtype).itemsize
        if min(spec.shape, default=0) < 0 or (spec.offset, spec.nbytes) != (end, nbytes):
            raise ValueError(
                f"tensor {spec.name!r}, {spec.dtype} {spec.shape}, must have {nbytes} bytes at "
                f"offset {end}; the manifest says {spec.nbytes} at {spec.offset}"
            )
        end += nbytes
    digest = digest_of_specs(manifest.tensors)
    if digest != manifest.digest:
        raise ValueError(f"manifest digest is {manifest.digest!r}, its tensors give {digest!r}")
