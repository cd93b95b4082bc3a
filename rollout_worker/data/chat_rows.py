"""A record as a conversation and its gold answer, in the shapes that data sets have.

Where the source names no field, the question is the first of `question`, `prompt` and `messages`
that is there, and the answer the first of `answer`, `solution` and `reward_model.ground_truth` that
is not empty: so rows for TRL, verl and verifiers load as they are. A question is text, or a list of
messages; with messages, `tools` are the functions that the chat template offers.
"""

import dataclasses
import decimal
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.data.float_text import number_text
from rollout_worker.rewards.answers import gold_answer
from services.user_code.import_path import nearest_hint

QUESTIONS = ("question", "prompt", "messages")
ANSWERS = ("answer", "solution")
TOOLS = "tools"
REWARD_MODEL, GROUND_TRUTH = "reward_model", "ground_truth"
ROLES = ("system", "user", "assistant", "tool")
_MAX_DIGITS = 1000
_SAID = frozenset(("content", "tool_calls"))


@dataclasses.dataclass(frozen=True)
class ChatRow:
    """What one record asks, and what is right."""

    messages: tuple[dict[str, Any], ...]
    """Of a row of messages, as JSON values; empty where the question is text."""
    question: str
    """The text; of messages, the user's if there is only one, else all of them."""
    answer: str
    """The gold answer; empty where the record has none."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas that come with messages."""

    @property
    def has_system(self) -> bool:
        """Whether the record brings a system message of its own."""
        return bool(self.messages) and self.messages[0]["role"] == "system"


def text_columns(source: SourceConfig, names: Collection[str]) -> tuple[str, ...]:
    """The columns that hold question and answer, as far as they are text or numbers."""
    question = source.question_field or _first(QUESTIONS, names)
    answer = source.answer_field or _first(ANSWERS, names)
    return tuple(filter(None, (question, answer)))


def read_row(record: Mapping[str, Any], plain: Mapping[str, Any], source: SourceConfig) -> ChatRow:
    """Reads what a record asks and its answer.

    Args:
        record: with numbers as they stand in the source.
        plain: the same as JSON values.

    Raises:
        ValueError: naming the field, the rule and the fix.
    """
    name = source.question_field
    if name is None:
        name = _first(QUESTIONS, record)
    if name is None:
        near = "".join(nearest_hint(each, list(record)) for each in QUESTIONS[:1])
        raise ValueError(
            f"has no field {', '.join(map(repr, QUESTIONS[:-1]))} or {QUESTIONS[-1]!r}{near}, only "
            f"{sorted(record)}: set the source's question_field"
        )
    value = _value_of(record, name, "question_field")
    messages: tuple[dict[str, Any], ...] = ()
    if isinstance(value, list):
        messages = _messages(plain[name], name)
        question = _question_of(messages)
    else:
        question = _text_of(value, name, "question_field")
        if not question.strip():
            raise ValueError(f"field {name!r} is empty: fill it in or remove the record")
        refuse_json_messages(question, name)
    tools = tools_of(plain.get(TOOLS)) if messages else ()
    return ChatRow(messages, question, _answer(record, plain, source), tools)


def _first(wanted: Collection[str], names: Collection[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _value_of(record: Mapping[str, Any], name: str, key: str) -> Any:
    if name not in record:
        raise ValueError(
            f"has no field {name!r}{nearest_hint(name, list(record))}, only {sorted(record)}: set "
            f"the source's {key}"
        )
    return record[name]


def _text_of(value: Any, name: str, key: str) -> str:
    text = text_value(value)
    if text is None:
        many = ", or a list of messages" if key == "question_field" else ""
        raise ValueError(
            f"field {name!r} must be text or a number{many}, got {value!r:.80}: correct the record "
            f"or set the source's {key}"
        )
    return text


def _answer(record: Mapping[str, Any], plain: Mapping[str, Any], source: SourceConfig) -> str:
    """The gold answer; empty where the record has none and the source names no field."""
    if source.answer_field is None:
        name = next((each for each in ANSWERS if not _is_missing(record.get(each))), None)
        if name is None:
            return _ground_truth(record, plain)
    else:
        name = source.answer_field
    value = _value_of(record, name, "answer_field")
    # An answer of None: the task judges with the item that it makes again.
    if value is None and source.is_procedural:
        return ""
    gold = gold_answer(_text_of(value, name, "answer_field"))
    # A reasoning-gym task scores with the item that it makes again; its answer may be empty.
    if not gold and not source.is_procedural:
        raise ValueError(f"field {name!r} is empty: fill it in or remove the record")
    return gold


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _ground_truth(record: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """The answer as verl keeps it; what is neither text nor a number as its JSON text."""
    rewarded = record.get(REWARD_MODEL)
    value = rewarded.get(GROUND_TRUTH) if isinstance(rewarded, Mapping) else None
    if _is_missing(value):
        return ""
    text = text_value(value)
    if text is None:
        return json.dumps(plain[REWARD_MODEL][GROUND_TRUTH], ensure_ascii=False)
    return gold_answer(text)


def conversation(values: list[Any], name: str) -> tuple[dict[str, Any], ...]:
    """The messages of a field, checked; without keys of null, which Parquet adds.

    Raises:
        ValueError: naming the message, the rule and the fix.
    """
    if not values:
        raise ValueError(f"field {name!r} has no messages: fill it in or remove the record")
    messages = tuple(_message(value, f"{name}[{i}]") for i, value in enumerate(values))
    for place, message in enumerate(messages[1:], start=1):
        if message["role"] == "system":
            raise ValueError(
                f"{name}[{place}] is a system message, which only the first may be: move or "
                "remove it"
            )
    return messages


def _messages(values: list[Any], name: str) -> tuple[dict[str, Any], ...]:
    """A conversation that a completion is to answer."""
    messages = conversation(values, name)
    last = messages[-1]["role"]
    if last not in ("user", "tool"):
        raise ValueError(
            f"the last message of {name} is of role {last!r}, but the completion answers one of "
            "user or tool: remove what follows that, or the record"
        )
    return messages


def refuse_json_messages(text: str, name: str) -> None:
    """Raises ValueError if the text of this field is the JSON of messages."""
    if _are_messages(text):
        raise ValueError(
            f"field {name!r} has messages as JSON text, which the model would read as they stand, "
            f"{text!r:.80}: write them as a list of messages"
        )


def _are_messages(text: str) -> bool:
    """Whether a text is the JSON of messages: each has a role and what is said."""
    if not text.lstrip().startswith("["):
        return False
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(values) and all(
        isinstance(one, Mapping) and "role" in one and not _SAID.isdisjoint(one) for one in values
    )


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{where} must be a message such as {{'role': 'user', 'content': 'text'}}, got "
            f"{value!r:.80}: correct the record"
        )
    message = {key: each for key, each in value.items() if each is not None}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(
            f"{where} has role={role!r}, which is none of {', '.join(ROLES)}: correct the record"
        )
    calls = role == "assistant" and bool(_checked_calls(message.get("tool_calls"), where))
    if content is None and calls:
        return message | {"content": ""}
    if not isinstance(content, str):
        raise ValueError(
            f"{where} of role {role!r} must have text as content, got {content!r:.80}: correct "
            "the record"
        )
    if not content.strip() and not calls:
        raise ValueError(f"{where} of role {role!r} is empty: fill it in or remove the record")
    return message


def _checked_calls(calls: Any, where: str) -> Any:
    """The calls of a message, of which each must name its function: others reach no prompt."""
    rule = (
        f"{where}.tool_calls must be a list of calls such as {{'function': {{'name': 'add', "
        "'arguments': {}}}"
    )
    if not isinstance(calls or [], list):
        raise ValueError(f"{rule}, got {calls!r:.80}: correct the record")
    for call in calls or []:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"{rule}, got {call!r:.80}: correct the record")
    return calls


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """The schemas of a record, as a list or its JSON text; without keys of null.

    Raises:
        ValueError: if they are neither.
    """
    given = value
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not given or given == "null":
        return ()
    if not isinstance(value, list) or not all(isinstance(one, Mapping) and one for one in value):
        raise ValueError(
            f"field {TOOLS!r} must be a list of JSON schemas, or the text of one, got "
            f"{given!r:.80}: correct the record"
        )
    return tuple(_without_nulls(one) for one in value)


def _without_nulls(value: Any) -> Any:
    """The same without keys of null, which Parquet adds where rows have different keys."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _question_of(messages: tuple[dict[str, Any], ...]) -> str:
    said = [message for message in messages if message["role"] != "system"]
    if len(said) == 1:
        return said[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in said)


def text_value(value: Any) -> str | None:
    """The text of a question or an answer; None where a value is neither text nor a number."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | decimal.Decimal):
        return None
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(float(value)):
        return None
    if isinstance(value, float):
        return number_text(value)
    exponent = value.as_tuple().exponent
    return (
        format(value, "f") if isinstance(exponent, int) and abs(exponent) <= _MAX_DIGITS else None
    )
