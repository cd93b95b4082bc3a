"""Prompts: the records of a source as chat messages, and these as token ids.

Dimension key:
    P: tokens of one prompt

A source is a reasoning-gym task, a JSONL or Parquet file, or an HF dataset. Every fault of a source
is a ValueError that names the source, the place in it, and the fix. Only this module imports
`datasets`.
"""

import dataclasses
import datetime
import decimal
import importlib.metadata
import json
import math
import pathlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from rollout_worker.config import SourceConfig
from rollout_worker.data.chat_rows import read_row, text_columns
from rollout_worker.data.float_text import number_text
from rollout_worker.data.procedural import PREFIX, make_dataset
from services.user_code.import_path import nearest_hint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_DEPTH = 64
_HUB_ROWS = 1000
_OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow", ".yaml", ".yml")


class ChatTokenizer(Protocol):
    """The part of `models.tokenizer.Tokenizer` that this module uses."""

    def encode_chat(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids of messages in the chat template, generation prompt included."""
        ...


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question, ready to be prefilled."""

    prompt_id: int
    """Index in the source, prompts that are left out included: the same for every length bound."""
    token_ids: np.ndarray
    """int32 [P], read-only; ends in the generation prompt of the chat template."""
    question: str
    """The record's question, without template and system prompt."""
    answer: str
    """The gold answer; of a GSM8K solution, the text after the last `####`. Empty where there is
    none."""
    item: dict[str, Any]
    """The whole record, as JSON values."""
    source: str = ""
    """Name of the source, where several are trained on."""
    is_chat: bool = False
    """Whether the record brought messages."""
    has_system: bool = False
    """Whether a system message was among them."""


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of a source that are not too long, in its order."""

    prompts: tuple[Prompt, ...]
    overlong: int
    """Prompts left out because they have more tokens than allowed."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Index in the source and tokens of each of these."""
    procedural: bool = False
    """Whether a reasoning_gym task made them."""
    first_id: int = 0
    """Id of the source's first record; not 0 for a later one of several sources."""
    next_id: int = 0
    """Id after that of the last record which was read."""

    @property
    def indices(self) -> Sequence[int]:
        """Index in the source of each prompt."""
        return array("q", (prompt.prompt_id - self.first_id for prompt in self.prompts))

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(
    source: SourceConfig,
    *,
    tokenizer: ChatTokenizer,
    system_prompt: str | None,
    question_template: str,
    max_prompt_tokens: int,
) -> PromptSet:
    """Reads a source and encodes its prompts.

    Args:
        source: location of the records, and the names of their fields.
        tokenizer: applies the chat template.
        system_prompt: first message where a record has no system message; None for none.
        question_template: user message, with `{question}` for a question that is text.
        max_prompt_tokens: longer prompts are left out and counted.

    Raises:
        ValueError: if the source is missing, broken, empty, or no prompt fits.
    """
    prompts, next_id = [], source.skip
    left_out: list[tuple[int, int]] = []
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    for prompt_id, place, raw in records(source):
        next_id = prompt_id + 1
        try:
            record = plain_record(raw)
            row = read_row(raw, record, source)
            content = question_template.replace("{question}", row.question)
            said = row.messages or ({"role": "user", "content": content},)
            token_ids = tokenizer.encode_chat(
                [*([] if row.has_system else system), *said], tools=row.tools
            )
        except ValueError as error:
            raise ValueError(f"{source.source}, {place}: {error}") from error
        if len(token_ids) > max_prompt_tokens:
            left_out.append((prompt_id, len(token_ids)))
            continue
        token_ids_P = np.array(token_ids, dtype=np.int32)
        token_ids_P.flags.writeable = False
        prompts.append(
            Prompt(
                prompt_id,
                token_ids_P,
                row.question,
                row.answer,
                record,
                is_chat=bool(row.messages),
                has_system=row.has_system,
            )
        )
    if not prompts and not left_out:
        raise ValueError(
            f"{source.source} has no records"
            + (
                f" after the first {source.skip}: lower skip={source.skip}"
                if source.skip
                else ": fill it, or name another source"
            )
        )
    if not prompts:
        shortest = min(tokens for _, tokens in left_out)
        raise ValueError(
            f"{source.source}: all {len(left_out)} prompts are longer than "
            f"max_prompt_tokens={max_prompt_tokens}; the shortest has {shortest} tokens with chat "
            "template and system prompt: raise rollout.max_prompt_tokens or shorten the template"
        )
    return PromptSet(
        tuple(prompts),
        overlong=len(left_out),
        left_out=tuple(left_out),
        procedural=source.is_procedural,
        next_id=next_id,
    )


def count_shared(train: PromptSet, held_out: PromptSet) -> int:
    """Counts the held-out prompts whose question is also in a training source.

    Two reasoning-gym sources share items if their seeds differ by less than their sizes.
    """
    questions = {prompt.question for prompt in train.prompts}
    return sum(prompt.question in questions for prompt in held_out.prompts)


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
    elif _HUB_ID.fullmatch(name) and not name.endswith(_OTHER_FILES):
        found = _hub(source)
    else:
        raise ValueError(
            f"source {name!r} is none of: {PREFIX}<task>, a path that ends in .jsonl or .parquet, "
            "an HF dataset id such as openai/gsm8k"
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
        with pyarrow.parquet.ParquetFile(path) as file:
            text_fields = text_columns(source, file.schema_arrow.names)
            for record in rows(file.iter_batches(), text_fields):
                yield f"row {row}", record
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as Parquet at row {row} ({error}): write it again"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}, row {row}, {error}") from error


def _hub(source: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    name = source.source
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError(
            f"source {name!r} is read as an HF dataset id, which needs the package `datasets` "
            f"({error}): pip install datasets, or give a path ending in .jsonl or .parquet"
        ) from error
    try:
        dataset = datasets.load_dataset(name, name=source.subset, split=source.split)
    # Missing data sets, unknown subsets and splits, and an unreachable hub: the library raises
    # OSError, ValueError and their subclasses, and RuntimeError for a closed client.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise ValueError(
            f"HF dataset {name!r} (subset={source.subset}, split={source.split!r}) cannot be "
            f"loaded: {type(error).__name__}: {str(error)[:300]}. Check id, subset and split; "
            "without network, give a path ending in .jsonl or .parquet"
        ) from error
    from rollout_worker.data.cells import rows

    row = 0
    try:
        tables: Any = dataset.with_format("arrow").iter(batch_size=_HUB_ROWS)
        batches = (batch for table in tables for batch in table.to_batches())
        for record in rows(batches, text_columns(source, dataset.column_names)):
            yield f"row {row} of split {source.split!r}", record
            row += 1
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise ValueError(
            f"HF dataset {name!r}, row {row} of split {source.split!r} cannot be read: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error


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
