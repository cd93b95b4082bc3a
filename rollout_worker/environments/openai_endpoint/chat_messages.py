"""Messages of OpenAI's API, and the messages that the policy takes for them.

A message of the model goes back to the policy as the text that was sampled, in which form ever the
client sends it. Its calls have ids made of turn and place, so that an episode which is played again
says the same.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rollout_worker.environments.openai_endpoint.chat_request import BadChatRequest, shown
from rollout_worker.environments.turn_values import ASSISTANT, CALLS, Message

if TYPE_CHECKING:
    from rollout_worker.environments.tools.tool_calls import CallReader

_ROLES = {
    **{"system": "system", "developer": "system", "user": "user"},
    **{ASSISTANT: ASSISTANT, "tool": "tool"},
}
"""By role of the API: that of chat templates, which do not know `developer`."""
_FIELDS = {ASSISTANT: ("name", CALLS), "tool": ("name", "tool_call_id")}
"""By role, beside role and content; else `name`."""


@dataclasses.dataclass(frozen=True)
class AssistantTurn:
    """A turn of the model, as sampled and as a client gets it."""

    text: str
    """As sampled, without the stop token."""
    content: str | None
    """The text without calls; None where nothing else was written."""
    calls: tuple[dict[str, Any], ...] = ()
    """`tool_calls` of the API."""


def assistant_turn(text: str, number: int, reader: "CallReader | None") -> AssistantTurn:
    """Reads a turn of the model.

    A turn of which one call is malformed stays text: nothing is half read.

    Args:
        text: as sampled.
        number: of the turn in its episode, from 0.
        reader: of its calls; None leaves them in the text.
    """
    if reader is None:
        return AssistantTurn(text, text)
    # The libraries of a reader take time that an episode without tools need not spend.
    from rollout_worker.environments.tools.tool_calls import ToolCall

    read = reader.read(text)
    calls = [call for call in read if isinstance(call, ToolCall)]
    if not calls or len(calls) < len(read):
        return AssistantTurn(text, text)
    made = tuple(
        # Nine letters and digits are what Mistral's templates take for an id.
        _call_json(f"call{number:03d}{place:02d}", call.name, _json(call.arguments))
        for place, call in enumerate(calls)
    )
    return AssistantTurn(text, reader.text_before_calls(text).strip() or None, made)


def policy_messages(asked: Sequence[Any], turns: Mapping[int, AssistantTurn]) -> list[Message]:
    """The messages that the policy takes for those of a request.

    Args:
        asked: the whole conversation, in the form of the API.
        turns: of the model in this episode, by their place in the conversation.

    Raises:
        BadChatRequest: if a message breaks a rule, or is not the turn that it stands for.
    """
    messages: list[Message] = []
    call_ids: set[str] = set()
    for place, message in enumerate(asked):
        fields = _checked_fields(message, place)
        role, turn = fields["role"], turns.get(place)
        if role == ASSISTANT and turn is not None:
            messages.append({"role": role, "content": _sampled_text(turn, fields, place)})
            call_ids |= {call["id"] for call in turn.calls}
            continue
        content = fields.get("content")
        if content is None and fields.get(CALLS):
            content = ""
        said = {"role": role, "content": _text(content, place)}
        said |= {name: fields[name] for name in ("name", "tool_call_id") if name in fields}
        if CALLS in fields:
            said[CALLS] = [_known_call(call, place) for call in _calls(fields, place)]
            call_ids |= {call["id"] for call in said[CALLS]}
        if role == "tool" and said.get("tool_call_id") not in call_ids:
            _refuse(
                place,
                f"answers the call {said.get('tool_call_id')!r:.80}, which no message before it "
                f"makes: set tool_call_id to one of {sorted(call_ids)}",
            )
        messages.append(said)
    if messages[-1]["role"] == ASSISTANT:
        _refuse(len(messages) - 1, "is the last and the model's own: end with another's")
    return messages


def _checked_fields(message: Any, place: int) -> dict[str, Any]:
    """A message with its role, without fields that say nothing."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(place, f"must have one of the roles {', '.join(_ROLES)}, got {shown(message)}")
    known = ("role", "content", *_FIELDS.get(role, ("name",)))
    fields = {name: value for name, value in message.items() if value not in (None, [])}
    for name, value in fields.items():
        if name not in known:
            _refuse(place, f"has the field {name!r:.80}, but {role} takes {', '.join(known)} alone")
        if name in ("name", "tool_call_id") and not isinstance(value, str):
            _refuse(place, f"has {name}={shown(value)}, which must be a text")
    return fields | {"role": _ROLES[role]}


def _sampled_text(turn: AssistantTurn, fields: Mapping[str, Any], place: int) -> str:
    """What the policy is to get for a turn of its own."""
    content = _text(fields.get("content", ""), place)
    calls = _calls(fields, place)
    if not turn.calls and not calls:
        return content  # the policy compares it with what it sampled, and names the difference
    if not calls and content == turn.text:
        return content
    if [_comparable(call) for call in calls] != [_comparable(call) for call in turn.calls]:
        _refuse(
            place,
            f"must have the tool_calls that were returned, {shown(list(turn.calls))}, got "
            f"{shown(calls)}: send messages of the assistant back unchanged",
        )
    if content not in ("", turn.content, turn.text):
        _refuse(
            place,
            f"must have no content or the one that was returned, {turn.content!r:.200}, got "
            f"{content!r:.200}: send messages of the assistant back unchanged",
        )
    return turn.text


def _calls(fields: Mapping[str, Any], place: int) -> list[Any]:
    calls = fields.get(CALLS, [])
    if not isinstance(calls, list):
        _refuse(place, f"must have a list as tool_calls, got {shown(calls)}")
    return calls


def _known_call(call: Any, place: int) -> dict[str, Any]:
    """A call that a client says was made, in the form of chat templates: arguments are an object.

    Raises:
        BadChatRequest: if it is none.
    """
    match call:
        case {"id": str(name), "function": {"name": str(function), "arguments": str(text)}}:
            arguments = _decoded(text)
            if isinstance(arguments, dict):
                return _call_json(name, function, arguments)
    rule = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': <JSON object>}}"
    _refuse(place, f"has a call that is not {rule}: {shown(call)}")


def _comparable(call: Any) -> Any:
    """What of a call says whether it is another one; its arguments may be spaced otherwise."""
    match call:
        case {"id": name, "function": {"name": function, "arguments": str(text)}}:
            return name, function, _decoded(text)
    return None


def _decoded(text: str) -> Any:
    """A JSON value; None where the text is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _call_json(name: str, function: str, arguments: Any) -> dict[str, Any]:
    call = {"name": function, "arguments": arguments}
    return {"id": name, "type": "function", "function": call}


def _text(content: Any, place: int) -> str:
    """The text of a message; that of its parts, with nothing between them."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                rule = "must have a text as content, or a list of {'type': 'text', 'text': ...}"
                _refuse(place, f"{rule}, got {shown(part)}")
    return "".join(texts)


def _refuse(place: int, problem: str) -> NoReturn:
    raise BadChatRequest(f"messages[{place}] {problem}", f"messages[{place}]")
