"""The fields of `POST /v1/chat/completions`, of OpenAI's API and of vLLM's additions to it.

The policy is trained on what it sampled, so that a request may not change how tokens are drawn: a
value that would is refused, and one that changes nothing is taken. A field that is not known is
refused, as OpenAI's API does, since `max_token` instead of `max_tokens` would change an episode
and nothing would show it. Null is the same as a field that is missing.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from services.user_code.import_path import nearest_hint

MOST_BODY_BYTES = 2**20
"""Of a request."""

_OF_THE_RUN = "the policy is trained on what it sampled, so that sampling is that of the run"
_ONE_TURN = "an episode is one conversation, of which a request samples the next turn"
_TOOLS_STAY = "the policy is trained on what it sampled, and may call the run's tools or none"

_IGNORED = (
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("safety_identifier", "seed", "service_tier", "store", "user"),
)
"""Fields that change nothing here; every draw follows from the seed of the run."""
_READ = (
    *("logprobs", "max_completion_tokens", "max_tokens", "messages", "model"),
    *("return_token_ids", "stream", "stream_options", "tools"),
)
_NOT_SERVED = (
    *("audio", "function_call", "functions", "moderation", "prediction", "reasoning_effort"),
    *("verbosity", "web_search_options"),
)


class BadChatRequest(ValueError):
    """A request breaks a rule; the message names the value, the rule and the fix."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field = field
        """Of the request, where one is the cause."""
        self.status = status
        """Of HTTP."""


@dataclasses.dataclass(frozen=True)
class RunSampling:
    """How the run samples: what a request may say of it."""

    temperature: float = 1.0
    stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """What a request asks for."""

    messages: list[Any]
    """Not checked yet."""
    model: str
    max_tokens: int | None
    reads_calls: bool
    """Whether calls of tools are read; else they stay text."""
    stream: bool
    include_usage: bool
    """Of a stream."""
    logprobs: bool
    return_token_ids: bool


def parse_chat_request(
    body: bytes, sampling: RunSampling, tools: Sequence[Mapping[str, Any]]
) -> ChatRequest:
    """Reads a request.

    Args:
        body: JSON.
        sampling: of the run.
        tools: JSON schemas of the run's tools.

    Raises:
        BadChatRequest: if it breaks a rule.
    """
    fields = _object_of(body)
    fixed = _fixed_fields(sampling)
    known = [*_READ, *_IGNORED, *_NOT_SERVED, *fixed]
    for name, value in fields.items():
        if name not in known:
            hint = nearest_hint(name, known)
            _refuse(name, f"{name!r:.80} is no known field{hint}: correct it or leave it out")
        if name in _NOT_SERVED:
            _refuse(name, f"{name} is not served here: leave it out")
        if name in fixed:
            allowed, why = fixed[name]
            if not any(_is_same(value, one) for one in allowed):
                rule = f"must be {' or '.join(map(json.dumps, allowed))} or missing"
                _refuse(name, f"{name}={shown(value)} {rule}: {why}")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        _refuse("messages", f"messages must be a list of messages, got {shown(messages)}")
    if not isinstance(model := fields.get("model"), str):
        _refuse("model", f"model must be a text, any will do, got {shown(model)}")
    _check_tools(fields.get("tools"), tools)
    stream = _flag(fields, "stream")
    return ChatRequest(
        messages=messages,
        model=model,
        max_tokens=_max_tokens(fields),
        reads_calls=bool(tools) and fields.get("tool_choice") != "none",
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        logprobs=_flag(fields, "logprobs"),
        return_token_ids=_flag(fields, "return_token_ids"),
    )


def _fixed_fields(sampling: RunSampling) -> dict[str, tuple[Sequence[Any], str]]:
    """By field: the values that change nothing, and why there is no other."""
    stops: list[Any] = [list(sampling.stop_strings)]
    if len(sampling.stop_strings) == 1:
        stops += sampling.stop_strings
    temperature = f"{_OF_THE_RUN}, and rollout.temperature is {sampling.temperature:g}"
    return {
        "frequency_penalty": ([0], _OF_THE_RUN),
        "logit_bias": ([{}], _OF_THE_RUN),
        "min_p": ([0], _OF_THE_RUN),
        "modalities": ([["text"]], "the policy writes text"),
        "n": ([1], _ONE_TURN),
        "parallel_tool_calls": ([True], _TOOLS_STAY),
        "presence_penalty": ([0], _OF_THE_RUN),
        "repetition_penalty": ([1], _OF_THE_RUN),
        "response_format": ([{"type": "text"}], _OF_THE_RUN),
        "stop": (stops, f"{_OF_THE_RUN}: set rollout.stop_strings"),
        "temperature": ([sampling.temperature], temperature),
        "tool_choice": (["auto", "none"], f"{_TOOLS_STAY}; `none` leaves calls in the text"),
        "top_k": ([-1, 0], _OF_THE_RUN),
        "top_logprobs": ([0], "of each token only the one that was sampled is recorded"),
        "top_p": ([1], _OF_THE_RUN),
    }


def _object_of(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadChatRequest(f"the body must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise BadChatRequest(f"the body must be a JSON object, got {shown(found)}")
    return {name: value for name, value in found.items() if value is not None}


def _check_tools(asked: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuses tools that are not those which every prompt of the run offers."""
    if asked is None:
        return
    if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
        _refuse("tools", f"tools must be a list of JSON schemas, got {shown(asked)}")
    mine = {_name_of(one): _without_defaults(one) for one in tools}
    theirs = {_name_of(one): _without_defaults(one) for one in asked}
    if mine == theirs and len(theirs) == len(asked):
        return
    fix = (
        "declare them for the whole run, `rollout.tools = [...]` below the function that "
        "environment.name names, and send the same or none"
    )
    for name in theirs:
        if name not in mine:
            there = f"the run's tools are {', '.join(mine)}" if mine else "the run has no tools"
            _refuse("tools", f"the tool {name!r:.80} is not one of the run ({there}): {fix}")
        if mine[name] != theirs[name]:
            schema = json.dumps(mine[name])[:500]
            _refuse("tools", f"the tool {name!r:.80} has another schema than in the run, {schema}")
    _refuse("tools", f"tools must be the run's, {', '.join(mine)}, each once, or missing: {fix}")


def _name_of(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        _refuse("tools", f"a tool must be {{'function': {{'name': ...}}}}, got {shown(tool)}")
    return name


def _without_defaults(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without what clients add to it that says nothing."""
    kept = {name: value for name, value in tool["function"].items() if value not in (None, False)}
    return {"type": "function", **tool, "function": kept}


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    found = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    for name in found:
        if type(fields[name]) is not int or fields[name] < 1:
            rule = f"{name} must be a whole number of at least 1, or missing"
            _refuse(name, f"{rule}, got {shown(fields[name])}")
    values = {fields[name] for name in found}
    if len(values) > 1:
        both = " and ".join(f"{name}={fields[name]}" for name in found)
        _refuse(found[0], f"{both} say the same thing in two ways: send one of them")
    return values.pop() if values else None


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    known = ["include_obfuscation", "include_usage"]
    if not isinstance(options, dict) or not set(options) <= set(known):
        rule = f"stream_options must be an object with {' and '.join(known)}"
        _refuse("stream_options", f"{rule}, got {shown(options)}")
    if not stream:
        _refuse("stream_options", "stream_options needs stream=true: send both or neither")
    return _flag(options, "include_usage")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        _refuse(name, f"{name} must be true or false, got {shown(value)}")
    return bool(value)


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are the same; 1 is 1.0, but not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _refuse(field: str, message: str) -> NoReturn:
    raise BadChatRequest(message, field)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def shown(value: Any) -> str:
    """A JSON value as errors show it."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
