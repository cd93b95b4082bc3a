"""Tokenizer and chat template of a model, and the ids that end a completion.

Text becomes token ids only through the chat template, but for records of plain text that supervised
training reads: completions are recorded as ids, and their text is only a view of them.
"""

import copy
import dataclasses
import datetime
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Otherwise transformers warns at every start that torch is absent, which a tokenizer does not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from models.assistant_turns import assistant_pieces
from models.chat_template import ChatTemplate, History
from models.files.carried_files import make_readable_by_both


@dataclasses.dataclass(frozen=True)
class TrainedText:
    """Token ids of which some train, up to the last that does."""

    token_ids: list[int]
    trains: list[bool]
    """Of each token; never the first, which nothing precedes."""
    open_turns: int = 0
    """Turns that train and end without a stop token."""


class Tokenizer:
    """One tokenizer with the chat template and stop ids of a model.

    Attributes:
        template: of the conversations.
        stop_ids: any of them ends a completion.
        pad_id: fills rows; eos where the tokenizer has no pad, since masks come from lengths.
        bos_id: or None.
        eos_id: ends a text; a stop id where the tokenizer names none.
        vocab_size: ids from here on are no tokens, though the embedding may have rows for them.
    """

    def __init__(
        self,
        backend,
        *,
        source: str,
        eos_ids: Iterable[int] = (),
        template_is_given: bool = False,
        moment: datetime.datetime | None = None,
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        """Takes a transformers tokenizer.

        Args:
            source: what messages call it.
            eos_ids: further stop ids of the model's files.
            template_is_given: whether model.chat_template replaced the tokenizer's own.
            moment: the time that the template reads; None is now.
            template_args: arguments of the template, such as `enable_thinking`.
            tools: JSON schemas that it offers where a conversation names none.

        Raises:
            ValueError: if there is no chat template, it does not render or leaves the user's text
                out, or nothing stops.
        """
        self._backend = backend
        if not backend.chat_template:
            raise ValueError(
                f"the tokenizer of {source} has no chat template: set model.chat_template to a "
                "Jinja template over `messages`"
            )
        self.template = ChatTemplate(
            backend.get_chat_template(),
            backend.special_tokens_map,
            name="model.chat_template" if template_is_given else f"the chat template of {source}",
            fix="correct model.chat_template"
            if template_is_given
            else "set model.chat_template to replace it",
            moment=moment,
            arguments=template_args,
            tools=tools,
        )
        self.vocab_size = len(backend)
        self.bos_id: int | None = backend.bos_token_id
        turn_ends = self._chat_end_ids()
        if backend.eos_token_id is not None:
            turn_ends.add(backend.eos_token_id)
        stop_ids = turn_ends.union(eos_ids)
        if not stop_ids:
            raise ValueError(
                f"the tokenizer of {source} has no end-of-sequence token, so nothing would stop a "
                "completion: set model.stop_tokens"
            )
        self.stop_ids = frozenset(stop_ids)
        pad_ids = (backend.pad_token_id, backend.eos_token_id, min(stop_ids))
        self.eos_id: int = min(stop_ids) if backend.eos_token_id is None else backend.eos_token_id
        self.pad_id: int = next(token_id for token_id in pad_ids if token_id is not None)
        control_tokens = {
            token.content
            for token_id, token in backend.added_tokens_decoder.items()
            if token.special or token_id in turn_ends
        }
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._shown_roles: set[tuple[str, ...]] = {("user",)}
        self._control_token = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Tokenizer":
        """The same tokenizer, whose template offers the tools of an environment.

        Args, Raises: as `ChatTemplate.with_tools` has them.
        """
        found = copy.copy(self)
        found.template = self.template.with_tools(tools)
        found._shown_roles = {("user",)}
        return found

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        content_is_text: bool = True,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        The template alone decides about BOS, as in training; the tokenizer adds no second one.

        Args:
            tools: JSON schemas of the functions that it offers; none takes those of the template.
            content_is_text: whether special tokens come from the template only. What spells one
                within a message is then encoded as other text is, so that a message cannot end its
                own turn.

        Raises:
            ValueError: if the template refuses the messages or leaves one out, or the tokenizer
                cannot encode a special token as text.
        """
        if tools:
            self.template.check_takes_tools("tools of the conversation")
        tools = tools or self.template.tools
        self._check_shown(messages, tools)
        spelled = self._spelled([*messages, *tools])
        if content_is_text and spelled:
            token_ids = self._marked_ids(messages, tools, spelled)
        else:
            text = self.template.render(messages, add_generation_prompt=True, tools=tools)
            token_ids = self._backend.encode(text, add_special_tokens=False)
        while self.bos_id is not None and token_ids[:2] == [self.bos_id, self.bos_id]:
            token_ids = token_ids[1:]
        return token_ids

    def encode_turns(
        self,
        messages: Sequence[Mapping[str, Any]],
        trained: Collection[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> TrainedText:
        """Token ids of a conversation in which turns of the assistant train.

        The tokens before the first such turn are those of `encode_chat` of the messages before it,
        and a turn begins with a token of its own, as when it is sampled. It trains up to its first
        stop token, which trains as well; special tokens come from the template only.

        Args:
            trained: places of those turns among the messages; at least one.
            tools: as `encode_chat` has them.

        Raises:
            ValueError: as `encode_chat` does, or if it cannot be told which tokens train.
        """
        if tools:
            self.template.check_takes_tools("tools of the conversation")
        tools = tools or self.template.tools
        if before := messages[: max(trained)]:
            self._check_shown(before, tools)
        spelled = self._spelled([*messages, *tools])
        if spelled:
            messages, tools = self._marked(messages), self._marked(tools)
        token_ids: list[int] = []
        trains: list[bool] = []
        open_turns = 0
        for piece in assistant_pieces(self.template, messages, trained, tools=tools):
            ids = self._part_ids(piece.text, spelled, is_first=not token_ids)
            end = next((i + 1 for i, one in enumerate(ids) if one in self.stop_ids), None)
            open_turns += piece.is_turn and end is None
            token_ids += ids
            trains += [piece.is_turn and (end is None or i < end) for i in range(len(ids))]
        while self.bos_id is not None and token_ids[:2] == [self.bos_id, self.bos_id]:
            token_ids, trains = token_ids[1:], trains[1:]
        return _trained_text(token_ids, trains, open_turns)

    def encode_after_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        following: Sequence[Mapping[str, Any]],
        *,
        last_id: int,
        history: History,
    ) -> list[int]:
        """Token ids that follow a turn of the assistant that was sampled, up to the next turn.

        What was sampled is not encoded again: the ids of the conversation before stay as they are.
        Special tokens come from the template only, as in `encode_chat`.

        Args:
            messages, following, history: as `ChatTemplate.after_turn` has them.
            last_id: the last token of the turn; a stop token that ended it is not written again.

        Raises:
            ValueError: as `ChatTemplate.after_turn` does, or if the tokenizer cannot encode a
                special token as text.
        """
        spelled = self._spelled([*messages, *following])
        if spelled:
            messages, following = self._marked(messages), self._marked(following)
        text = self.template.after_turn(messages, following, history=history)
        ids = self._part_ids(text, spelled, is_first=False)
        # Some models end a call with another token than the template writes, such as <|eom_id|>.
        ended = last_id in self.stop_ids and bool(ids) and ids[0] in self.stop_ids
        return ids[1:] if ended else ids

    def encode_next_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        following: Sequence[Mapping[str, Any]],
        *,
        written: str,
        last_id: int,
    ) -> tuple[list[int], str, bool]:
        """What is read before the next turn, where earlier ones may be written in another way.

        Args:
            messages: up to a turn of the assistant that was sampled, which is the last; every turn
                of the assistant with its text.
            following: messages of other roles; at least one.
            written: the text that was read before that turn, and what was sampled, without a stop
                token that ended it.
            last_id: as in `encode_after_turn`.

        Returns:
            Token ids that follow the turn; where the template writes anything before them otherwise
            than it is, those of the whole conversation. The text of the conversation, and whether
            it is such another one.

        Raises:
            ValueError: as `encode_after_turn` and `encode_chat` do.
        """
        template, before = self.template, messages[:-1]
        whole = template.render([*messages, *following], add_generation_prompt=True)
        if whole != written + template.after_turn(before, following, history="keep"):
            return self.encode_chat([*messages, *following]), whole, True
        after = self.encode_after_turn(before, following, last_id=last_id, history="keep")
        return after, whole, False

    def encode_text(self, text: str) -> TrainedText:
        """Token ids of a text that trains whole, without the chat template.

        It begins as the tokenizer begins a text and ends with `eos_id`; special tokens that it
        spells are such.
        """
        ids = self._backend.encode(text, add_special_tokens=True)
        ids += [] if ids[-1:] == [self.eos_id] else [self.eos_id]
        return _trained_text(ids, [True] * len(ids), 0)

    def special_tokens_in(self, text: str) -> list[str]:
        """The special tokens and ends of a turn that a text spells, in its order."""
        return self._control_token.findall(text)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids; special tokens are shown, since digits around one are two numbers."""
        ids = [int(token_id) for token_id in token_ids]
        return self._backend.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def decode_completion(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of a completion as people and scorers read it: without the stop token that ended it.

        A stop string that ended it stays.
        """
        ended = len(token_ids) > 0 and int(token_ids[-1]) in self.stop_ids
        return self.decode(token_ids[:-1] if ended else token_ids)

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the tokenizer anew, with the chat template, into an existing folder."""
        self._backend.save_pretrained(str(folder))
        make_readable_by_both(pathlib.Path(folder))

    def _marked_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        spelled: Sequence[str],
    ) -> list[int]:
        """Ids of a conversation in which the template's special tokens are the only ones."""
        text = self.template.render(
            self._marked(messages), add_generation_prompt=True, tools=self._marked(tools)
        )
        return self._marked_text_ids(text, spelled)

    def _marked(self, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same with marks around the special tokens that their texts spell."""
        return mark_control_tokens([dict(one) for one in values], self._control_token)

    def _part_ids(self, text: str, spelled: Sequence[str], *, is_first: bool) -> list[int]:
        """Ids of a part of a conversation; within it no blank is added, as some tokenizers do."""
        if not is_first:
            newline = self._backend.encode("\n", add_special_tokens=False)
            ids = self._marked_text_ids("\n" + text, spelled)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return self._marked_text_ids(text, spelled)

    def _marked_text_ids(self, text: str, spelled: Sequence[str]) -> list[int]:
        """Ids of a text in which what is marked is no special token."""
        try:
            return encode_marked_chat(self._backend, text)
        except ValueError as error:
            raise ValueError(
                f"{spelled[0]!r} is a special token that this tokenizer cannot encode as text "
                f"({error}): remove it from the text, which could end a turn with it"
            ) from error

    def _check_shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Checks once for every order of roles and calls that each message reaches the prompt."""
        roles = tuple(m["role"] + ":calls" * bool(m.get("tool_calls")) for m in messages)
        if roles not in self._shown_roles:
            self.template.check_shows(messages, tools=tools)
            self._shown_roles.add(roles)

    def _spelled(self, value: Any) -> list[str]:
        """The special tokens that the texts of some JSON values spell, such as a call's arguments.

        Raises:
            ValueError: if a key spells one, since keys cannot be told from what a template writes.
        """
        if isinstance(value, str):
            return self.special_tokens_in(value)
        if isinstance(value, Mapping):
            for key in value:
                if spelled := self.special_tokens_in(key):
                    raise ValueError(
                        f"the key {key!r} spells the special token {spelled[0]!r}: rename it"
                    )
            return self._spelled(list(value.values()))
        if isinstance(value, list | tuple):
            return [name for each in value for name in self._spelled(each)]
        return []

    def _chat_end_ids(self) -> set[int]:
        """The special token that the template puts after an assistant's turn, if there is one."""
        first = self._backend.encode(self.template.after_answer(), add_special_tokens=False)[:1]
        return set(first) & set(self._backend.added_tokens_decoder)


def _trained_text(token_ids: list[int], trains: list[bool], open_turns: int) -> TrainedText:
    trains = [False, *trains[1:]]
    count = max((i + 1 for i, one in enumerate(trains) if one), default=0)
    return TrainedText(token_ids[:count], trains[:count], open_turns)
