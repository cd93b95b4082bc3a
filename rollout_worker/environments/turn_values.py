"""What an environment returns, in the form in which it crosses from its process to the worker.

Both ends check it: the child, to say what is wrong with it, and the worker, since a child runs
foreign code. Neither jax nor pydantic is imported here, since the child imports this.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollout_worker.rewards.reward_values import (
    MOST_VARIANTS,
    NAME_CHARS,
    BadResult,
    bounded_reward,
)

MOST_OBSERVATION_BYTES = 2**20
"""Of the messages of one turn, as JSON."""
MOST_ID = 2**31 - 1
"""A token id, or a number of tokens."""
ASSISTANT = "assistant"
"""The role of the model's messages."""
CALLS = "tool_calls"
"""Of a message of the model, beside its content, which may then be missing."""

Message = dict[str, Any]
"""Texts by name; one of the assistant may have `tool_calls`, in the form of OpenAI's API."""


class BadTurn(ValueError):
    """What an environment returned breaks a rule; the message names the value and the rule."""


class Turn(NamedTuple):
    """What an environment says to one message of the model."""

    messages: list[Message]
    """That the model reads next; none where the episode is over."""
    reward: float
    done: bool
    numbers: dict[str, float] = {}  # noqa: RUF012 - never changed
    """By name, of its `info`; only logged."""
    token_ids: list[int] | None = None
    """That the model reads next, in the place of messages."""
    max_tokens: int | None = None
    """Of the model's next turn; None is what the episode has left."""

    @property
    def asked(self) -> tuple[list[Message], list[int] | None, int | None]:
        """What the model's next turn depends on."""
        return self.messages, self.token_ids, self.max_tokens


class Said(NamedTuple):
    """A turn of the model."""

    text: str
    """Without the stop token that ended it."""
    before: list[int] = []  # noqa: RUF012 - never changed
    """Token ids between the turn before and this one; of the first, the prompt's. These and the
    next are given to functions alone."""
    token_ids: list[int] = []  # noqa: RUF012 - never changed
    logprobs: list[float] = []  # noqa: RUF012 - never changed
    finish_reason: str = "stop"
    is_new_record: bool = False
    """Whether `before` is all that it read, since earlier turns were written in another way."""


class SampledTurn(NamedTuple):
    """One turn of the model, exactly as it is trained."""

    text: str
    """Without the stop token that ended it."""
    token_ids: list[int]
    """As sampled."""
    logprobs: list[float]
    """Natural log of the probability that each was drawn with."""
    finish_reason: str
    """`stop`, or `length` where `max_tokens` cut it off."""
    prompt_token_ids: list[int]
    """All tokens that it was sampled after."""


def digest_of(turn: Turn) -> str:
    """By which an answer is recognised when an episode is played again."""
    known = (turn.asked, turn.reward, turn.done)
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def begun_turn(result: Any) -> Turn:
    """Reads what `reset` returned: messages.

    Raises:
        BadTurn: if it is none.
    """
    return Turn(messages_of(result, "what reset returns"), 0.0, False)


def turn_of(result: Any) -> Turn:
    """Reads what `step` returned: a tuple of observation, reward, done and info, or an object with
    these names.

    Raises:
        BadTurn: if it is neither, or one of them breaks a rule.
    """
    names = ("observation", "reward", "done", "info")
    if isinstance(result, tuple) and len(result) == 4 and not hasattr(result, "_fields"):
        observation, reward, done, info = result
    elif all(hasattr(result, name) for name in names[:3]):
        observation, reward, done = (getattr(result, name) for name in names[:3])
        info = getattr(result, "info", None)
    else:
        raise BadTurn(
            f"step must return a tuple of {', '.join(names)}, or an object with these names, got "
            f"{_shown(result)}"
        )
    if getattr(done, "shape", None) == ():  # a scalar of numpy, JAX or torch
        done = done.item()
    if not isinstance(done, bool):
        raise BadTurn(f"done must be true or false, got {_shown(done)}")
    messages = [] if done and not observation else messages_of(observation, "the observation")
    return Turn(messages, reward_of(reward), done, numbers_of(info))


def messages_of(value: Any, what: str) -> list[Message]:
    """Reads messages for the model: at least one, each with a role that is not the model's own.

    Args:
        what: how a message names them.

    Raises:
        BadTurn: if they are none, or too large.
    """
    rule = f"{what} must be a list of messages such as {{'role': 'user', 'content': 'Higher.'}}"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence) or not value:
        raise BadTurn(f"{rule}, got {_shown(value)}")
    messages = [message_of(one, rule, f"message {n} of {what}") for n, one in enumerate(value)]
    if messages[-1]["role"] == ASSISTANT:
        raise BadTurn(f"{rule}; the last one has the role {ASSISTANT!r}, which is the model's own")
    text = json.dumps(messages, ensure_ascii=False)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadTurn(f"{what} has a lone surrogate, which is no valid text: {error}") from None
    if size > MOST_OBSERVATION_BYTES:
        raise BadTurn(f"{what} has {size:,} bytes, at most {MOST_OBSERVATION_BYTES:,} are taken")
    return messages


def message_of(value: Any, rule: str, place: str) -> Message:
    """Reads one message.

    Args:
        rule: what an error says that it breaks.
        place: how an error names it.

    Raises:
        BadTurn: if it is none.
    """
    fields = dict(value) if isinstance(value, Mapping) else {"": value}
    calls = fields.pop(CALLS, None) or []
    if calls and fields.get("content") is None:
        fields["content"] = ""
    if not all(isinstance(field, str) for pair in fields.items() for field in pair):
        raise BadTurn(f"{rule}, with texts alone; {place} is {_shown(value)}")
    if not fields.get("role") or "content" not in fields:
        raise BadTurn(f"{rule}; {place} has no role or no content: {_shown(value)}")
    message: Message = {str(key): str(field) for key, field in fields.items()}
    return message | {CALLS: _calls_of(calls, f"{CALLS} of {place}")} if calls else message


def _calls_of(calls: Any, what: str) -> list[dict[str, Any]]:
    """Calls of tools that the assistant is said to have made, as JSON values."""
    rule = f"{what} must be a list such as [{{'function': {{'name': 'add', 'arguments': {{}}}}}}]"
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
        raise BadTurn(f"{rule}, got {_shown(calls)}")
    try:
        read = json.loads(json.dumps(list(calls), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadTurn(f"{rule}, of JSON values: {error}") from None
    for call in read:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise BadTurn(f"{rule}, got the call {_shown(call)}")
    return read


def reward_of(value: Any) -> float:
    """Reads the reward of a step.

    Raises:
        BadTurn: if it is no finite number, or too large.
    """
    try:
        return bounded_reward(value, "the reward")
    except BadResult as error:
        raise BadTurn(str(error)) from None


def numbers_of(info: Any) -> dict[str, float]:
    """The numbers in the `info` of a step that can be metrics; the rest is not read."""
    found: dict[str, float] = {}
    for name, value in info.items() if isinstance(info, Mapping) else ():
        is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= NAME_CHARS
        if is_name and len(found) < MOST_VARIANTS:
            with contextlib.suppress(BadResult):
                found[name] = bounded_reward(value, name)
    return found


def parse_turn(answer: Mapping[str, Any]) -> Turn:
    """Reads what the process of an environment sends, which foreign code may have written.

    Raises:
        BadTurn: if it is no turn.
    """
    if set(answer) != set(Turn._fields):
        raise BadTurn(f"its process sent {_shown(dict(answer))}, which is no turn")
    token_ids, max_tokens = answer["token_ids"], answer["max_tokens"]
    is_limit = max_tokens is None or (_is_id(max_tokens) and max_tokens > 0)
    if not is_limit or not _is_list_of_ids(token_ids):
        raise BadTurn(f"its process sent {_shown(dict(answer))}, which is no turn")
    if token_ids is not None:
        return Turn([], 0.0, False, token_ids=token_ids, max_tokens=max_tokens)
    turn = turn_of((answer["messages"], answer["reward"], answer["done"], answer["numbers"]))
    return turn._replace(max_tokens=max_tokens)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_ID


def _is_list_of_ids(value: Any) -> bool:
    """Also where there is none."""
    return value is None or (isinstance(value, list) and bool(value) and all(map(_is_id, value)))


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"
