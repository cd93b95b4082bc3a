"""Examples of supervised training: the records of a source as token ids of which some train.

A record has one of these shapes, in which data sets for TRL come:

    prompt, completion   each text or a list of messages; the completion trains
    messages             a conversation; every turn of the assistant trains
    text                 trains whole, as it stands: the chat template is not applied

The prompt is found as in a run of reinforcement learning: it is text for the question template, and
the system prompt stands before it, so that a policy is asked what it was taught on. Any field can
be named as the completion (answer_field), such as the worked answers of GSM8K. A turn of the
assistant with `weight: 0`, as OpenAI's fine-tuning has it, does not train.

Dimension key:
    N: tokens of one example
"""

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.tokenizer import Tokenizer, TrainedText
from rollout_worker.config.data_config import DataConfig, SourceConfig
from rollout_worker.data.chat_rows import (
    QUESTIONS,
    TOOLS,
    conversation,
    refuse_json_messages,
    text_value,
    tools_of,
)
from rollout_worker.data.lazy_sequences import ByteStrings, LazySequence
from rollout_worker.data.records import plain_record, records
from services.user_code.import_path import nearest_hint

COMPLETION, MESSAGES, TEXT = "completion", "messages", "text"
ASSISTANT = "assistant"
_HEADER = struct.Struct("<qI")
"""Index in the source, and N."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One record, up to the last token that trains; arrays are read-only."""

    row: int
    """Index in the source."""
    token_ids: np.ndarray
    """int32 [N]."""
    trains: np.ndarray
    """bool [N]; never the first token, which nothing precedes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleSet:
    """The examples of a source that are not too long, in its order."""

    examples: Sequence[Example]
    """Each access reads one from a file."""
    overlong: int
    """Records left out because they have more tokens than allowed."""
    longest: int
    """Tokens of the longest record, also of one that was left out."""
    open_ended: int
    """Examples with a turn that trains and does not end in a stop token."""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def tokens(self) -> int:
        """Of all examples."""
        return sum(len(one.token_ids) for one in self.examples)

    @property
    def trained_tokens(self) -> int:
        """Of all examples."""
        return sum(int(one.trains.sum()) for one in self.examples)


def load_examples(
    source: SourceConfig, data: DataConfig, *, tokenizer: Tokenizer, max_tokens: int
) -> ExampleSet:
    """Reads a source and encodes its records.

    Args:
        source: location of the records, and the names of their fields.
        data: system prompt and question template.
        tokenizer: applies the chat template.
        max_tokens: records with more tokens, up to the last that trains, are left out and counted.

    Raises:
        ValueError: if the source is missing, broken or empty, it cannot be told what of a record
            trains, or none is short enough.
    """
    overlong, longest, open_ended = 0, 0, 0
    stored = ByteStrings(source.source)
    shortest = None
    for row, place, record in records(source):
        try:
            encoded = _encode(record, source, data, tokenizer)
        except ValueError as error:
            raise ValueError(f"{source.source}, {place}: {error}") from error
        count = len(encoded.token_ids)
        longest, shortest = max(longest, count), min(shortest or count, count)
        if count > max_tokens:
            overlong += 1
            continue
        open_ended += encoded.open_turns > 0
        stored.append(_packed(row, encoded))
    stored.finish()
    if shortest is None:
        raise ValueError(
            f"{source.source} has no records"
            + (f" after the first {source.skip}: lower skip={source.skip}" if source.skip else "")
        )
    if not len(stored):
        raise ValueError(
            f"{source.source}: all {overlong} records have more than batch.max_tokens={max_tokens} "
            f"tokens, the shortest {shortest}: raise batch.max_tokens (and "
            "learner.microbatch_tokens), or shorten the records"
        )
    return ExampleSet(
        examples=LazySequence(len(stored), lambda place: _unpacked(stored.read(place))),
        overlong=overlong,
        longest=longest,
        open_ended=open_ended,
    )


def _packed(row: int, encoded: TrainedText) -> bytes:
    token_ids_N = np.array(encoded.token_ids, dtype=np.int32)
    trains_N = np.array(encoded.trains, dtype=bool)
    return _HEADER.pack(row, len(token_ids_N)) + token_ids_N.tobytes() + trains_N.tobytes()


def _unpacked(stored: bytes) -> Example:
    row, N = _HEADER.unpack_from(stored)
    token_ids_N = np.frombuffer(stored, np.int32, N, offset=_HEADER.size)
    trains_N = np.frombuffer(stored, bool, N, offset=_HEADER.size + token_ids_N.nbytes)
    return Example(row, token_ids_N, trains_N)


def _encode(
    raw: Mapping[str, Any], source: SourceConfig, data: DataConfig, tokenizer: Tokenizer
) -> TrainedText:
    """The tokens of one record.

    Raises:
        ValueError: naming the field, the rule and the fix.
    """
    plain = plain_record(raw)
    there = {name: value for name, value in raw.items() if value is not None}
    if source.answer_field is not None or COMPLETION in there:
        before = _prompt(there, plain, source, data)
        said = _completion(there, plain, source.answer_field or COMPLETION)
    elif source.question_field is not None or MESSAGES in there:
        name = source.question_field or MESSAGES
        before, said = [], _messages(there, plain, name)
    elif TEXT in there:
        encoded = tokenizer.encode_text(_text(there, TEXT))
        if not any(encoded.trains):
            raise ValueError(f"field {TEXT!r} is empty: fill it in or remove the record")
        return encoded
    else:
        raise ValueError(
            f"has no field {COMPLETION!r}, {MESSAGES!r} or {TEXT!r}"
            f"{nearest_hint(COMPLETION, list(there))}, only {sorted(there)}: name the field with "
            "what the assistant says as the source's answer_field"
        )
    messages = [*before, *said]
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    first = len(messages) - len(said)
    trained = [
        place
        for place, message in enumerate(messages)
        if place >= first and message["role"] == ASSISTANT and _weighs(message)
    ]
    if not trained:
        raise ValueError(
            f"has no message of role {ASSISTANT!r} to train on: remove the record, or name another "
            "field"
        )
    return tokenizer.encode_turns(messages, trained, tools=tools_of(plain.get(TOOLS)))


def _prompt(
    there: Mapping[str, Any], plain: Mapping[str, Any], source: SourceConfig, data: DataConfig
) -> list[dict[str, Any]]:
    """The messages that the completion answers."""
    name = source.question_field or next((one for one in QUESTIONS if one in there), None)
    if name is None:
        raise ValueError(
            f"has a completion but no field {', '.join(map(repr, QUESTIONS[:-1]))} or "
            f"{QUESTIONS[-1]!r}, only {sorted(there)}: set the source's question_field"
        )
    if isinstance(_value(there, name, "question_field"), list):
        return list(conversation(plain[name], name))
    text = _text(there, name)
    return [{"role": "user", "content": data.question_template.replace("{question}", text)}]


def _completion(
    there: Mapping[str, Any], plain: Mapping[str, Any], name: str
) -> list[dict[str, Any]]:
    if isinstance(_value(there, name, "answer_field"), list):
        return list(conversation(plain[name], name))
    return [{"role": ASSISTANT, "content": _text(there, name)}]


def _messages(
    there: Mapping[str, Any], plain: Mapping[str, Any], name: str
) -> list[dict[str, Any]]:
    value = _value(there, name, "question_field")
    if not isinstance(value, list):
        if isinstance(value, str):
            refuse_json_messages(value, name)
        raise ValueError(
            f"field {name!r} must be a list of messages where the record has no completion, got "
            f"{value!r:.80}: name the field with what the assistant says as the source's "
            "answer_field"
        )
    return list(conversation(plain[name], name))


def _value(there: Mapping[str, Any], name: str, key: str) -> Any:
    if name not in there:
        raise ValueError(
            f"has no field {name!r}{nearest_hint(name, list(there))}, only {sorted(there)}: set "
            f"the source's {key}"
        )
    return there[name]


def _text(there: Mapping[str, Any], name: str) -> str:
    text = text_value(there[name])
    if text is None:
        raise ValueError(
            f"field {name!r} must be text, a number or a list of messages, got "
            f"{there[name]!r:.80}: correct the record"
        )
    if not text.strip():
        raise ValueError(f"field {name!r} is empty: fill it in or remove the record")
    refuse_json_messages(text, name)
    return text


def _weighs(message: Mapping[str, Any]) -> bool:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(
            f"a message has weight={weight!r}, but a turn trains (1) or does not (0): correct it"
        )
    return weight == 1
