"""The records of a source, one after the other, of which few are in memory at a time.

A source is a reasoning-gym task, a JSONL or Parquet file, or an HF dataset. Every fault of a source
is a ValueError that names the source, the place in it, and the fix. Only this module imports
`datasets`.
"""

import datetime
import decimal
import importlib.metadata
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.data.chat_rows import text_columns
from rollout_worker.data.float_text import number_text
from rollout_worker.data.procedural import PREFIX, make_dataset
from services.user_code.import_path import nearest_hint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_DEPTH = 64
_BATCH_ROWS = 256
"""Rows of Arrow data that are converted at a time."""
_BUFFER_BYTES = 2**20
"""Of a column of a Parquet file; else whole row groups are in memory, often the whole file."""
_OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow", ".yaml", ".yml")


def records(source: SourceConfig) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields (index in the source, place for error messages, record) of what it has.

    Raises:
        ValueError: if the source is missing or broken.
    """
    name = source.source
    if source.is_procedural:
        found = _procedural(source)
    elif name.endswith(".jsonl"):
        found = _jsonl(_existing_file(name))
    elif name.endswith(".parquet"):
        found = _parquet(_existing_file(name), source)
    elif pathlib.Path(name).expanduser().is_dir() or (
        _HUB_ID.fullmatch(name) and not name.endswith(_OTHER_FILES)
    ):
        found = _dataset(source)
    else:
        raise ValueError(
            f"source {name!r} is none of: {PREFIX}<task>, a path that ends in .jsonl or .parquet, "
            "an existing folder with an HF dataset, an HF dataset id such as openai/gsm8k"
        )
    stop = None if source.size is None else source.skip + source.size
    indexed = enumerate(found)
    for index, (place, record) in islice(indexed, source.skip, stop):
        yield index, place, record


def _existing_file(name: str) -> pathlib.Path:
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"data file {name} is a folder: name one file of it")
    if not path.is_file():
        there = (
            [p.name for p in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        )
        raise ValueError(
            f"data file {name} does not exist (looked in {path.absolute().parent})"
            f"{nearest_hint(path.name, there)}"
        )
    return path


def _procedural(source: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    task = source.source.removeprefix(PREFIX)
    if source.size is None:
        raise ValueError(f"{source.source} has no end: set size, the number of prompts")
    origin = {
        "task": task,
        "seed": source.seed,
        "size": source.skip + source.size,
        "params": source.params,
        "version": importlib.metadata.version("reasoning-gym"),
    }
    dataset = make_dataset(task, seed=origin["seed"], size=origin["size"], params=source.params)
    for index in range(origin["size"]):
        try:
            record = dataset[index]
        # Parameters that pass the task's own check may still break it at one item.
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{source.source} cannot make item {index} with params={source.params}: "
                f"{type(error).__name__}: {error}; change params"
            ) from error
        yield f"item {index}", {**record, "reasoning_gym": {**origin, "index": index}}


def _refuse_constant(constant: str):
    raise ValueError(f"{constant} is not a JSON number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, in which no key stands twice: the value of one of them would be left out."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands in it more than once")
    return found


def _exact_number(digits: str) -> decimal.Decimal:
    """Keeps every digit, since a number may be an answer."""
    try:
        return decimal.Decimal(digits)
    except decimal.InvalidOperation as error:
        raise ValueError(f"{digits[:80]} is beyond the range of numbers") from error


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # Python reads no more than some thousands of digits
        raise ValueError(
            f"{digits[:20]}... is a number of {len(digits):,} digits: write it as text"
        ) from error


def _jsonl(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"line {number}"
            if not line.strip():
                raise ValueError(f"{path}, {place} is empty: remove it")
            try:
                record = json.loads(
                    line.decode("utf-8-sig"),
                    parse_constant=_refuse_constant,
                    parse_int=_whole_number,
                    parse_float=_exact_number,
                    object_pairs_hook=_distinct,
                )
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, {place} is not UTF-8 ({error}): re-encode it") from error
            except RecursionError as error:
                raise ValueError(
                    f"{path}, {place} is nested more than {_MAX_DEPTH} levels deep: flatten it"
                ) from error
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, {place} is not JSON ({error}): each line must be one object, "
                    f"got {line[:80]!r}"
                ) from error
            except ValueError as error:
                raise ValueError(f"{path}, {place}: {error}: correct the record") from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}, {place} must be a JSON object with named fields, "
                    f"got {type(record).__name__} {line[:80]!r}"
                )
            yield place, record


def _parquet(path: pathlib.Path, source: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    # Here, since most runs read JSONL.
    import pyarrow.parquet

    from rollout_worker.data.cells import rows

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            text_fields = text_columns(source, file.schema_arrow.names)
            for record in rows(file.iter_batches(_BATCH_ROWS), text_fields):
                yield f"row {row}", record
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as Parquet at row {row} ({error}): write it again"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}, row {row}, {error}") from error


def _dataset(source: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError(
            f"source {source.source!r} is read as an HF dataset, which needs the package "
            f"`datasets` ({error}): pip install datasets, or give a path ending in .jsonl or "
            ".parquet"
        ) from error
    # Missing data sets, unknown subsets and splits, and an unreachable hub: the library raises
    # OSError, ValueError and their subclasses, and RuntimeError for a closed client.
    faults = (OSError, ValueError, RuntimeError, DatasetsError)
    about = f"HF dataset {source.source!r}"
    folder = pathlib.Path(source.source).expanduser()
    try:
        if folder.is_dir():
            dataset = _in_folder(datasets, folder, source)
        else:
            dataset = _load_dataset(datasets, source.source, source)
    except faults as error:
        raise ValueError(
            f"{about} (subset={source.subset}, split={source.split!r}) cannot be "
            f"loaded: {type(error).__name__}: {str(error)[:300]}. Check id, subset and split; "
            "without network, give a path ending in .jsonl or .parquet"
        ) from error
    from rollout_worker.data.cells import rows

    row = 0
    try:
        # A stream learns its columns from its first rows.
        for table in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            for record in rows(table.to_batches(), text_columns(source, table.column_names)):
                yield f"row {row} of split {source.split!r}", record
                row += 1
    except faults as error:
        raise ValueError(
            f"{about}, row {row} of split {source.split!r} cannot be read: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error


def _load_dataset(datasets: Any, name: str, source: SourceConfig) -> Any:
    streaming = {"streaming": True} if source.streaming else {}
    return datasets.load_dataset(name, name=source.subset, split=source.split, **streaming)


def _in_folder(datasets: Any, folder: pathlib.Path, source: SourceConfig) -> Any:
    """Of files, or of what `save_to_disk` wrote, which is read where it lies in either case."""
    several = (folder / "dataset_dict.json").is_file()
    if not several and not (folder / "state.json").is_file():
        return _load_dataset(datasets, str(folder.absolute()), source)
    found = datasets.load_from_disk(str(folder.absolute()))
    if not several:
        return found
    if source.split not in found:
        raise ValueError(f"Bad split: {source.split}. Available splits: {sorted(found)}")
    return found[source.split]


def plain_record(value: Any, where: str = "", depth: int = 0) -> Any:
    """Turns a record, or a value of it, into JSON values, since it crosses process boundaries.

    An object that has no form in JSON becomes None.

    Raises:
        ValueError: if a text has half of a surrogate pair, which neither UTF-8 nor a tokenizer
            accepts, or if the value is nested too deeply for the JSON of another process.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"the record is nested more than {_MAX_DEPTH} levels deep: flatten it")
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _checked_text(value, where)
    if isinstance(value, np.floating):
        value = float(number_text(value))
    if isinstance(value, float | decimal.Decimal):
        return float(value) if math.isfinite(float(value)) else None
    if isinstance(value, Mapping):
        return {
            _checked_text(str(key), "a key"): plain_record(
                each, where or f"field {key!r}", depth + 1
            )
            for key, each in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset | np.ndarray):
        return [plain_record(each, where, depth + 1) for each in value]
    if isinstance(value, np.generic):
        return plain_record(value.item(), where, depth)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return None


def _checked_text(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has the lone surrogate {text[error.start]!r} at character {error.start}, "
            "which is not valid text: correct the record"
        ) from error
    return text
