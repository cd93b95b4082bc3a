"""The safetensors format: headers checked against the file, tensors mapped, files written.

Written out here because reading must map bfloat16 without a copy, the check must not touch
tensor data, and writing must not hold a second copy of a shard in memory.

Format: 8 bytes of little-endian header length, a JSON header of name -> dtype, shape and byte
range, and the tensors one after another.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
"""By their name in the format; the one with the widest range first."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100 * 2**20
_ALIGNMENT_BYTES = 8


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies; `start` and `stop` count bytes from the beginning of the file."""

    path: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: pathlib.Path) -> dict[str, TensorEntry]:
    """Names, types and places of all tensors of one file, without reading any tensor.

    Raises:
        ValueError: if the file is not safetensors, is cut short or overlong, or holds a type
            other than F32, F16 and BF16; names the file, and the tensor where there is one.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{path} is cut short or is not a safetensors file ({size} bytes)")
        text = file.read(header_bytes)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a header that is not a JSON object")
    header.pop("__metadata__", None)
    entries = {
        name: _entry(path, name, fields, data_start=8 + header_bytes)
        for name, fields in header.items()
    }
    end = max((entry.stop for entry in entries.values()), default=8 + header_bytes)
    if size != end:
        raise ValueError(
            f"{path} is {'cut short' if size < end else 'too long'}: its header describes {end} "
            f"bytes, the file has {size}; fetch it again"
        )
    return entries


def _entry(path: pathlib.Path, name: str, fields: dict, *, data_start: int) -> TensorEntry:
    try:
        type_name, shape = fields["dtype"], tuple(int(size) for size in fields["shape"])
        start, stop = (int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes {name} wrongly: {fields}") from error
    if type_name not in DTYPES:
        raise ValueError(
            f"{path} stores {name} as {type_name}: only {', '.join(DTYPES)} are supported"
        )
    dtype = DTYPES[type_name]
    if stop - start != math.prod(shape) * dtype.itemsize or start < 0:
        raise ValueError(
            f"{path} gives {name} bytes {start}..{stop}, which is not {type_name} {list(shape)}"
        )
    return TensorEntry(path, dtype, shape, data_start + start, data_start + stop)


def map_tensor(entry: TensorEntry) -> np.ndarray:
    """A read-only view of the file's bytes; pages are read when they are used."""
    if entry.start == entry.stop:
        return np.empty(entry.shape, entry.dtype)
    count = entry.stop - entry.start
    raw = np.memmap(entry.path, np.uint8, mode="r", offset=entry.start, shape=(count,))
    return np.asarray(raw).view(entry.dtype).reshape(entry.shape)


def write_file(path: pathlib.Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes one file and flushes it to disk; one tensor at a time is made contiguous.

    Args:
        tensors: (name, array) of float32, float16 or bfloat16. Gone over twice: give a list.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tensors = list(tensors)
    for name, array in tensors:
        header[name] = {
            "dtype": _NAMES[np.dtype(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, array in tensors:
            raw = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
            file.write(raw.data)
        file.flush()
        os.fsync(file.fileno())
