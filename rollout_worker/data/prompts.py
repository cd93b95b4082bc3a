"""Prompts: the records of a source as chat messages, and these as token ids.

They lie in a temporary file, and only those that are asked for are in memory: a source may be
larger than that.

Dimension key:
    P: tokens of one prompt
"""

import dataclasses
import json
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.data.chat_rows import read_row
from rollout_worker.data.lazy_sequences import ByteStrings, LazySequence
from rollout_worker.data.records import plain_record, records
from rollout_worker.data.source_digest import SourceDigest, SourceHashes

_TOKENS = struct.Struct("<I")
_NOTHING = SourceDigest().hashes()


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


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of a source that are not too long, in its order."""

    prompts: Sequence[Prompt]
    """Each access reads one from a file."""
    overlong: int
    """Prompts left out because they have more tokens than allowed."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Index in the source and tokens of each of these."""
    procedural: bool = False
    """Whether a reasoning_gym task made them."""
    chats: int = 0
    """Prompts whose record brought messages."""
    with_system: int = 0
    """Those of them with a system message of their own."""
    unanswered: int = 0
    """Prompts without an answer."""
    first_id: int = 0
    """Id of the source's first record; not 0 for a later one of several sources."""
    next_id: int = 0
    """Id after that of the last record which was read."""
    indices: Sequence[int] = ()
    """Index in the source of each prompt."""
    questions: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int64), compare=False
    )
    """int64; a hash of each question, the same in this process only."""
    hashes: SourceHashes = _NOTHING
    """What two processes compare."""

    def __len__(self) -> int:
        return len(self.prompts)

    def as_part(self, name: str, *, first_id: int) -> "PromptSet":
        """The same prompts as those of one source among several."""

        def named(place: int) -> Prompt:
            prompt = self.prompts[place]
            return dataclasses.replace(prompt, prompt_id=first_id + prompt.prompt_id, source=name)

        return dataclasses.replace(
            self,
            prompts=LazySequence(len(self), named),
            first_id=first_id,
            next_id=first_id + self.next_id,
        )


class _PromptFile:
    """Prompts of a source in a temporary file."""

    def __init__(self, about: str):
        self.indices = array("q")
        self._stored = ByteStrings(about)

    def append(self, prompt: Prompt) -> None:
        fields = (prompt.question, prompt.answer, prompt.item)
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
        tokens = prompt.token_ids.tobytes()
        self._stored.append(_TOKENS.pack(len(prompt.token_ids)) + tokens + text.encode())
        self.indices.append(prompt.prompt_id)

    def prompts(self) -> Sequence[Prompt]:
        self._stored.finish()
        return LazySequence(len(self.indices), self._read)

    def _read(self, place: int) -> Prompt:
        stored = self._stored.read(place)
        (count,) = _TOKENS.unpack_from(stored)
        token_ids_P = np.frombuffer(stored, np.int32, count, offset=_TOKENS.size)
        question, answer, item = json.loads(stored[_TOKENS.size + token_ids_P.nbytes :])
        return Prompt(self.indices[place], token_ids_P, question, answer, item)


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
    next_id, left_out = source.skip, []
    chats = with_system = unanswered = 0
    file, questions, digest = (
        _PromptFile(source.source),
        array("q"),
        SourceDigest(source.is_procedural),
    )
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
        prompt = Prompt(prompt_id, token_ids_P, row.question, row.answer, record)
        chats += bool(row.messages)
        with_system += row.has_system
        unanswered += not row.answer
        digest.add(prompt_id, prompt.token_ids, row.answer, record)
        questions.append(hash(row.question))
        file.append(prompt)
    prompts = file.prompts()
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
        prompts,
        overlong=len(left_out),
        left_out=tuple(left_out),
        procedural=source.is_procedural,
        chats=chats,
        with_system=with_system,
        unanswered=unanswered,
        next_id=next_id,
        indices=file.indices,
        questions=np.frombuffer(questions, np.int64),
        hashes=digest.hashes(),
    )


def count_shared(train: PromptSet, held_out: PromptSet) -> int:
    """Counts the held-out prompts whose question is also in a training source.

    Two reasoning-gym sources share items if their seeds differ by less than their sizes.
    """
    return int(np.isin(held_out.questions, train.questions).sum())
