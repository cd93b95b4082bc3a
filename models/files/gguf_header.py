"""The header of a GGUF file: metadata and the table of tensors, checked against the file's size.

Read here rather than with the `gguf` package's reader, which takes seconds for a vocabulary and
fails on a cut file without a name. The package defines the quantisations (see `gguf.py`).

Format (version 2 and 3, little-endian): magic, version, two counts, key/value pairs, tensor
descriptions, and from the next multiple of the alignment on the tensors' bytes.
"""

import dataclasses
import mmap
import pathlib
import struct
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor's description; `shape` has the outermost axis first, as numpy writes it."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    start: int
    """First byte, from the beginning of the file."""
    size: int
    """Bytes."""


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Everything in a GGUF file but the tensors' bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: pathlib.Path) -> GgufHeader:
    """Reads everything but the tensors.

    Raises:
        ValueError: if the file is not GGUF, is cut short, or describes a tensor that does not fit
            in it; names the file, and the tensor where there is one.
    """
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{path} is cut short or is not a GGUF file ({size} bytes)")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        if data[:4] != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it starts with {bytes(data[:4])!r}")
        cursor.at = 4
        try:
            version = cursor.scalar("<I")
            if version not in _VERSIONS:
                raise ValueError(f"{path} is GGUF version {version}: only 2 and 3 are supported")
            tensor_count, pair_count = cursor.scalar("<Q"), cursor.scalar("<Q")
            metadata = {}
            for _ in range(pair_count):
                key = cursor.string()
                metadata[key] = cursor.value(cursor.scalar("<I"))
            described = dict(cursor.tensor() for _ in range(tensor_count))
        except (struct.error, KeyError, UnicodeDecodeError, EOFError) as error:
            raise ValueError(
                f"{path} is cut short or damaged in its header, at byte {cursor.at} of {size}"
            ) from error
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{path}: general.alignment={alignment!r} must be a positive integer")
    data_start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: _placed(path, name, *description, data_start=data_start, file_size=size)
        for name, description in described.items()
    }
    return GgufHeader(metadata, tensors)


def _placed(
    path: pathlib.Path,
    name: str,
    shape: tuple[int, ...],
    type_number: int,
    offset: int,
    *,
    data_start: int,
    file_size: int,
) -> GgufTensor:
    if type_number not in {kind.value for kind in GGMLQuantizationType}:
        raise ValueError(f"{path} stores {name} in the unknown quantisation {type_number}")
    quantization = GGMLQuantizationType(type_number)
    block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
    elements = 1
    for length in shape:
        elements *= length
    if not shape or shape[-1] % block_elements:
        raise ValueError(
            f"{path} gives {name} the shape {list(shape)}, whose rows are no multiple of "
            f"{quantization.name}'s blocks of {block_elements}"
        )
    tensor_bytes = elements // block_elements * block_bytes
    start = data_start + offset
    if start + tensor_bytes > file_size:
        raise ValueError(
            f"{path} is cut short: {name} lies at bytes {start}..{start + tensor_bytes}, the file "
            f"has {file_size}; fetch it again"
        )
    return GgufTensor(shape, quantization, start, tensor_bytes)


class _Cursor:
    """Reads forward through the header; leaves the file as struct.error or EOFError."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self.at = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        if self.at + length > len(self._data):
            raise EOFError
        text = self._data[self.at : self.at + length].decode("utf-8")
        self.at += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, length = self.scalar("<I"), self.scalar("<Q")
        if length > len(self._data):
            raise EOFError
        if item_kind not in _SCALARS:
            return [self.value(item_kind) for _ in range(length)]
        form = f"<{length}{_SCALARS[item_kind][1]}"
        values = list(struct.unpack_from(form, self._data, self.at))
        self.at += struct.calcsize(form)
        return values

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name, dimensions = self.string(), self.scalar("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise EOFError
        shape = tuple(self.scalar("<Q") for _ in range(dimensions))[::-1]
        return name, (shape, self.scalar("<I"), self.scalar("<Q"))
