"""Rows of Arrow data as JSON values.

Arrow's own conversion to Python objects is not used where it changes what is stored (a float32 0.1
becomes 0.10000000149011612), depends on installed packages (nanoseconds need pandas), or gives
objects that have no JSON form (bytes).
"""

import decimal
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow
from pyarrow import types

from rollout_worker.data.float_text import number_text

_UNIT_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_NARROW_FLOATS = {16: np.float16, 32: np.float32}


def rows(
    batches: Iterable[pyarrow.RecordBatch], text_fields: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yields one record for each row; where it raises, the row is the one that was asked for.

    Args:
        batches: columns of any Arrow types.
        text_fields: columns that hold a question or an answer.

    Raises:
        ValueError: if two columns have one name, a text is not UTF-8, or a cell of `text_fields`
            can be written in several ways; names the column.
    """
    for batch in batches:
        _check_names(batch.schema.names, "columns")
        columns = [
            (name, column, _text_value if name in text_fields else json_value)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        for index in range(batch.num_rows):
            record = {}
            for name, column, convert in columns:
                try:
                    record[name] = convert(column[index])
                except ValueError as error:
                    raise ValueError(f"column {name!r} {error}") from error
            yield record


def json_value(cell: pyarrow.Scalar) -> Any:
    """The value of a cell as JSON has it.

    Bytes that are UTF-8 become text. A narrow float becomes the shortest decimal that is stored as
    the same float; a decimal, a duration, a date, a time or a moment becomes its ISO 8601 text, a
    moment with a time zone in UTC. What has no form in JSON, such as the bytes of an image or a
    date beyond every calendar, becomes None.

    Raises:
        ValueError: if a cell of a text type is not UTF-8, or two fields of a struct have one name.
    """
    cell = _unwrapped(cell)
    kind = cell.type
    if not cell.is_valid:
        return None
    if types.is_struct(kind):
        _check_names([field.name for field in kind], "fields")
        return {name: json_value(inner) for name, inner in cell.items()}
    if types.is_map(kind):
        return [[json_value(inner) for _, inner in entry.items()] for entry in cell.values]
    if types.is_nested(kind):  # lists of every kind
        return [json_value(inner) for inner in cell.values]
    if types.is_temporal(kind):
        return _moment(cell)
    if types.is_decimal(kind):
        return format(cell.as_py(), "f")
    if types.is_floating(kind) and kind.bit_width in _NARROW_FLOATS:
        return float(number_text(_NARROW_FLOATS[kind.bit_width](cell.as_py())))
    if _is_binary(kind):
        try:
            return _decoded(cell)
        except ValueError:
            return None
    return _decoded(cell) if _is_text(kind) else cell.as_py()  # a boolean, an integer or a double


def _moment(cell: pyarrow.Scalar) -> str | None:
    kind = cell.type
    if types.is_duration(kind):
        seconds = decimal.Decimal(cell.value).scaleb(-_UNIT_DIGITS[kind.unit])
        return f"PT{seconds:f}S"
    if types.is_interval(kind):
        return None
    zone = types.is_timestamp(kind) and kind.tz
    cell = cell.cast(pyarrow.timestamp(kind.unit)) if zone else cell
    text = cell.cast(pyarrow.string()).as_py()
    if text.startswith("<"):  # `<value out of range: 2147483647>`: no calendar or clock shows it
        return None
    return text.replace(" ", "T") + ("Z" if zone else "")


def _text_value(cell: pyarrow.Scalar) -> Any:
    """As `json_value`, and refuses what would need a guess to become a question or an answer."""
    cell = _unwrapped(cell)
    if _is_binary(cell.type) and cell.is_valid:
        return _decoded(cell)
    if types.is_timestamp(cell.type) or types.is_duration(cell.type):
        raise ValueError(
            f"is of type {cell.type}, which can be written in several ways: convert the column to "
            "text in the form that is asked for"
        )
    return json_value(cell)


def _unwrapped(cell: pyarrow.Scalar) -> pyarrow.Scalar:
    """The value that a dictionary, a run, a union or an extension type stands for."""
    while True:
        kind = cell.type
        if isinstance(kind, pyarrow.UuidType):
            return pyarrow.scalar(None if cell.as_py() is None else str(cell.as_py()))
        if isinstance(kind, pyarrow.Bool8Type):
            return pyarrow.scalar(cell.as_py(), pyarrow.bool_())
        wrapped = isinstance(kind, pyarrow.BaseExtensionType) or types.is_dictionary(kind)
        if not wrapped and not types.is_run_end_encoded(kind) and not types.is_union(kind):
            return cell
        inner = cell.value
        cell = inner if isinstance(inner, pyarrow.Scalar) else pyarrow.scalar(inner)


def _check_names(names: Collection[str], what: str) -> None:
    """One name for two would leave one of their values out."""
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        raise ValueError(f"has several {what} called {twice[0]!r}: rename all but one")


def _decoded(cell: pyarrow.Scalar) -> str:
    try:
        return cell.as_buffer().to_pybytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 ({error.reason} at byte {error.start}): write it as UTF-8 text"
        ) from error


def _is_text(kind: pyarrow.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_binary(kind: pyarrow.DataType) -> bool:
    plain = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return plain or types.is_fixed_size_binary(kind)
