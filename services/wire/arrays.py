"""Arrays of one dimension as the bytes of a protobuf field, and back."""

import numpy as np

ID_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")


def to_wire(array: np.ndarray, dtype: np.dtype, field: str) -> bytes:
    """Returns the elements as little-endian bytes.

    Raises:
        ValueError: naming the field, unless the array has this dtype and one dimension.
    """
    if array.ndim != 1 or array.dtype.newbyteorder("<") != dtype:
        raise ValueError(
            f"{field} must be {dtype.name} of one dimension, got {array.dtype} {array.shape}"
        )
    return array.astype(dtype, copy=False).tobytes()


def from_wire(raw: bytes, dtype: np.dtype, field: str) -> np.ndarray:
    """Returns a writable copy of the elements, in the byte order of the host.

    Raises:
        ValueError: naming the field, if the bytes are not a whole number of elements.
    """
    if len(raw) % dtype.itemsize:
        raise ValueError(
            f"{field} has {len(raw)} bytes, which is not a multiple of {dtype.itemsize}"
        )
    return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
