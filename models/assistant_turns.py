"""What the assistant wrote in a conversation, in the text that a chat template makes of it.

A template may mark it with `{% generation %}`. One that does not is rendered up to each turn that
trains: as the prompt that the turn answers, and with the turn. If the whole conversation begins
with both, the turn is what the second has beyond the first. A template that writes earlier turns
in another way than they were written is refused: what would train is not what was said.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from models.chat_template import ChatTemplate

_SHOWN = 40
"""Characters of a text that a message shows."""


class Piece(NamedTuple):
    """A part of the text of a conversation; one after the other, they are the whole."""

    text: str
    is_turn: bool
    """Whether it is a turn that trains: from the first character that the assistant writes up to
    what belongs to the next turn, its end included."""


def assistant_pieces(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    trained: Collection[int],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Piece]:
    """Cuts a conversation at the turns of the assistant that train.

    Args:
        messages: what follows the last turn that trains is left out.
        trained: places of those turns among the messages; at least one, all of role assistant.
        tools: JSON schemas that the template offers.

    Raises:
        ValueError: if the template does not render them, or it cannot be told what trains.
    """
    messages = messages[: max(trained) + 1]
    if template.marks_turns:
        text, spans = _marked(template, messages, trained, tools)
    else:
        text, spans = _rendered(template, messages, trained, tools)
    pieces, done = [], 0
    for place, (start, end) in zip(sorted(trained), spans, strict=True):
        said, written = messages[place]["content"], text[start:end]
        if _unspaced(said) not in _unspaced(written):
            raise ValueError(
                f"{template.name} leaves message {place} of role 'assistant', {_begin(said)}, out "
                f"of the conversation, or a part of it: {template.fix}, or remove the record"
            )
        pieces += [Piece(text[done:start], False), Piece(written, True)]
        done = end
    return [piece for piece in pieces if piece.text]


def _marked(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    trained: Collection[int],
    tools: Sequence[Mapping[str, Any]],
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and where it has each turn that trains, by the marks of the template."""
    text, spans = template.render_marked(messages, tools=tools)
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) != len(turns):
        raise ValueError(
            f"{template.name} has {len(spans)} parts in {{% generation %}} for {len(turns)} "
            f"messages of the assistant, so that it cannot be told which is which: {template.fix}"
        )
    return text, [span for place, span in zip(turns, spans, strict=True) if place in trained]


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    trained: Collection[int],
    tools: Sequence[Mapping[str, Any]],
) -> tuple[str, list[tuple[int, int]]]:
    """The same by what the template makes of the messages up to each turn."""
    text = template.render(messages, add_generation_prompt=False, tools=tools)
    spans = []
    for place in sorted(trained):
        prompt = template.render(messages[:place], add_generation_prompt=True, tools=tools)
        answered = template.render(messages[: place + 1], add_generation_prompt=False, tools=tools)
        if not answered.startswith(prompt):
            raise ValueError(
                f"{template.name} ends the prompt of message {place} in {_end(prompt)} but writes "
                f"{_from_split(answered, prompt)} there once it is answered, so that what trains "
                f"would not follow what a run asks: {template.fix}, with {{% generation %}} around "
                "what the assistant writes"
            )
        if not text.startswith(answered):
            raise ValueError(
                f"{template.name} rewrites message {place}, a turn of the assistant, when others "
                f"follow: {_from_split(answered, text)} becomes {_from_split(text, answered)}. "
                "Give a record for each such turn that ends with it (as `prompt` and "
                f"`completion`), or {template.fix}, with {{% generation %}} around what the "
                "assistant writes"
            )
        spans.append((len(prompt), len(answered)))
    return text, spans


def _unspaced(text: str) -> str:
    """Templates set blanks around a text, or take them off."""
    return "".join(text.split())


def _begin(text: str) -> str:
    return repr(text[:_SHOWN])


def _end(text: str) -> str:
    return repr(text[-_SHOWN:])


def _from_split(text: str, other: str) -> str:
    """The text from where it differs from another."""
    same = next(
        (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b),
        min(len(text), len(other)),
    )
    return _begin(text[same:])
