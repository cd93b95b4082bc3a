"""Finds completions in samples.jsonl and eval.jsonl.

Memory holds the offset of each line, a few small fields, and its text in lower case up to a budget;
texts beyond the budget are searched on disk. What the page shows is read from disk, so that long
completions cost nothing until they are opened.
"""

import dataclasses
import io
import json
import pathlib
import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from diagnosis.records.columns import number
from diagnosis.records.tail import Tail, TailChange, parse_line

FILES = {"train": "samples.jsonl", "eval": "eval.jsonl"}
SHOWN_CHARS = 400
"""Of a completion or question in a list."""
MOST_LISTED = 500
MOST_SAME = 200
"""Completions of one prompt that are listed: the newest ones."""
QUERY_CHARS = 1000
TEXT_BUDGET = 32 << 20
"""Characters kept in memory for the search, for both files together."""
LONG_CHARS = 16 << 10
"""A longer text is not kept in memory."""
_ID = re.compile(r"([te])(\d{1,15})")
_DISAGREES, _FAILED = 1, 2
_NO_PROMPT = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleQuery:
    """Which completions to list; None and "" mean no restriction.

    Raises:
        ValueError: for an impossible value.
    """

    q: str = ""
    """Text in question, prompt, completion or answer, ignoring case."""
    kind: str | None = None
    """`train` or `eval`."""
    first: int | None = None
    last: int | None = None
    """Step numbers, included."""
    prompt: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    finish: str | None = None
    why: str | None = None
    disagree: bool = False
    """Only those on which a strict and a lenient parser differ."""
    error: bool = False
    """Only those whose scoring failed."""
    offset: int = 0
    limit: int = 50

    def __post_init__(self):
        if len(self.q) > QUERY_CHARS:
            raise ValueError(f"q has {len(self.q)} characters: give at most {QUERY_CHARS}")
        if self.kind is not None and self.kind not in FILES:
            raise ValueError(f"kind={self.kind[:40]!r} must be one of {', '.join(FILES)}")
        for low, high in (("first", "last"), ("reward_min", "reward_max")):
            a, b = getattr(self, low), getattr(self, high)
            if a is not None and b is not None and not a <= b:
                raise ValueError(f"{low}={a} must not be above {high}={b}: swap them")
        if self.offset < 0:
            raise ValueError(f"offset={self.offset} must not be negative: 0 is the newest")
        if not 1 <= self.limit <= MOST_LISTED:
            raise ValueError(f"limit={self.limit} must be between 1 and {MOST_LISTED}")


class SampleIndex:
    """Indexes the recorded completions of a run. One thread at a time may use it."""

    def __init__(self, folder: pathlib.Path, *, text_budget: int = TEXT_BUDGET):
        """Reads nothing yet; files may be missing.

        Args:
            text_budget: characters kept in memory for the search.
        """
        share = text_budget // len(FILES)
        self._files = {
            kind: _IndexedFile(folder / name, kind, share) for kind, name in FILES.items()
        }

    def refresh(self) -> int:
        """Reads what was written since the last call; returns `total`."""
        for file in self._files.values():
            file.refresh()
        return self.total

    @property
    def total(self) -> int:
        """Number of completions, of training and of evaluation."""
        return sum(map(len, self._files.values()))

    def search(self, query: SampleQuery) -> dict[str, Any]:
        """The document of /api/samples: those that match, the newest first."""
        found = []
        for kind, file in self._files.items():
            if query.kind in (None, kind):
                found += [(file.steps[place], kind, place) for place in file.matches(query)]
        found.sort(key=lambda one: (one[0], one[1] == "eval", one[2]), reverse=True)
        page = found[query.offset : query.offset + query.limit]
        items = (self._files[kind].item(place, query.q) for _, kind, place in page)
        return {
            "total": len(found),
            "offset": query.offset,
            "limit": query.limit,
            "items": [item for item in items if item is not None],
        }

    def sample(self, name: str) -> dict[str, Any] | None:
        """The whole record of an id, such as `t12`; None for an unknown id."""
        if (place := self._find(name)) is None:
            return None
        file, index = place
        record = file.record(index)
        return None if record is None else {**record, "id": name, "kind": file.kind}

    def same_prompt(self, name: str) -> dict[str, Any] | None:
        """The document of /api/samples/ID/same: completions of its prompt, the oldest first.

        Prompts of training and of evaluation are numbered separately, so it lists one kind.
        """
        if (place := self._find(name)) is None:
            return None
        file, index = place
        same = [index]
        if file.prompts[index] != _NO_PROMPT:
            same = np.flatnonzero(np.array(file.prompts) == file.prompts[index]).tolist()
        items = (file.item(one, "") for one in same[-MOST_SAME:])
        return {"items": [item for item in items if item is not None]}

    def _find(self, name: str) -> tuple["_IndexedFile", int] | None:
        parsed = _ID.fullmatch(name)
        if parsed is None:
            return None
        file = self._files["train" if parsed[1] == "t" else "eval"]
        return (file, int(parsed[2])) if int(parsed[2]) < len(file) else None


class _IndexedFile:
    """The index of one file; a completion's place is the number of its line."""

    def __init__(self, path: pathlib.Path, kind: str, text_budget: int):
        self.path = path
        self.kind = kind
        self._text_budget = text_budget
        self._forget()

    def _forget(self) -> None:
        self._tail = Tail(self.path)
        self._offsets, self._sizes = array("q"), array("q")
        self.steps, self.prompts = array("q"), array("q")
        self._rewards = array("d")
        self._finishes, self._whys, self._flags = array("q"), array("q"), array("B")
        self._codes: dict[str, int] = {}
        """Finish reasons and reasons to keep a completion, as numbers."""
        self._texts: list[str | None] = []
        """In lower case; None for those that stay on disk."""
        self._budget_left = self._text_budget

    def __len__(self) -> int:
        return len(self._texts)

    def refresh(self) -> None:
        """Reads what was written since the last call."""
        change = self._tail.poll()
        if change is TailChange.REPLACED:
            self._forget()
        if change is not TailChange.SAME:
            for offset, line in self._tail.lines():
                record = parse_line(line)
                if record is not None and type(record.get("step")) is int:
                    self._add(offset, len(line), record)

    def _add(self, offset: int, size: int, record: Mapping[str, Any]) -> None:
        self._offsets.append(offset)
        self._sizes.append(size)
        self.steps.append(_small(record["step"]))
        self.prompts.append(_small(record.get("prompt_id")))
        self._rewards.append(number(record.get("total_reward")))
        self._finishes.append(self._code(record.get("finish_reason")))
        self._whys.append(self._code(record.get("why")))
        failed = _FAILED if record.get("reward_error") else 0
        self._flags.append(failed | (_DISAGREES if _disagrees(record) else 0))
        text = _search_text(record)
        if len(text) <= min(LONG_CHARS, self._budget_left):
            self._budget_left -= len(text)
            self._texts.append(text)
        else:
            self._texts.append(None)

    def _code(self, text: Any) -> int:
        return self._codes.setdefault(text if isinstance(text, str) else "", len(self._codes))

    def matches(self, query: SampleQuery) -> list[int]:
        """Places of the matching completions, rising."""
        found = np.ones(len(self), bool)
        steps, rewards = np.array(self.steps), np.array(self._rewards)
        if query.first is not None:
            found &= steps >= query.first
        if query.last is not None:
            found &= steps <= query.last
        if query.prompt is not None:
            found &= np.array(self.prompts) == query.prompt
        if query.reward_min is not None:
            found &= rewards >= query.reward_min
        if query.reward_max is not None:
            found &= rewards <= query.reward_max
        if query.finish:
            found &= np.array(self._finishes) == self._codes.get(query.finish, -1)
        if query.why:
            found &= np.array(self._whys) == self._codes.get(query.why, -1)
        flags = np.array(self._flags)
        if query.disagree:
            found &= (flags & _DISAGREES) > 0
        if query.error:
            found &= (flags & _FAILED) > 0
        places = np.flatnonzero(found).tolist()
        return list(self._holding(places, query.q.lower())) if query.q else places

    def _holding(self, places: list[int], words: str) -> Iterator[int]:
        """The places whose text contains the words."""
        escaped = json.dumps(words, ensure_ascii=False)[1:-1]
        with _opened(self.path) as file:
            for place in places:
                text = self._texts[place]
                if (
                    words in text
                    if text is not None
                    else self._on_disk(file, place, words, escaped)
                ):
                    yield place

    def _on_disk(self, file: BinaryIO, place: int, words: str, escaped: str) -> bool:
        line = self._line(file, place)
        raw = line.decode("utf-8", "replace").lower()
        if escaped not in raw and "\\u" not in raw:
            return False  # most lines, and parsing one takes far longer
        record = parse_line(line)
        return record is not None and words in _search_text(record)

    def record(self, place: int) -> dict[str, Any] | None:
        """The record at a place; None if the file has changed since the last refresh."""
        with _opened(self.path) as file:
            record = parse_line(self._line(file, place))
        is_it = record is not None and record.get("step") == self.steps[place]
        return record if is_it else None

    def item(self, place: int, words: str) -> dict[str, Any] | None:
        """A completion as a list shows it: an excerpt around the words if they come late."""
        record = self.record(place)
        if record is None:
            return None
        completion, is_cut = _excerpt(_text(record.get("completion")), words)
        question, question_is_cut = _excerpt(_text(record.get("question")), words)
        fields = (
            *("step", "prompt_id", "group_id", "sample_index", "worker", "rewards"),
            *("total_reward", "finish_reason", "completion_tokens", "policy_version"),
            *("parsed", "why"),
        )
        return {
            **{name: record.get(name) for name in fields},
            "id": f"{self.kind[0]}{place}",
            "kind": self.kind,
            "question": question,
            "answer": _text(record.get("answer"))[:SHOWN_CHARS],
            "completion": completion,
            "cut": is_cut or question_is_cut,
            "reward_error": _text(record.get("reward_error"))[:SHOWN_CHARS],
        }

    def _line(self, file: BinaryIO, place: int) -> bytes:
        file.seek(self._offsets[place])
        return file.read(self._sizes[place])


def _search_text(record: Mapping[str, Any]) -> str:
    """The searchable text, in lower case."""
    names = ("question", "prompt", "completion", "answer")
    question, prompt, completion, answer = (_text(record.get(name)) for name in names)
    if question in prompt:
        question = ""  # a prompt contains its question
    return "\0".join((question, prompt, completion, answer)).lower()


def _excerpt(text: str, words: str) -> tuple[str, bool]:
    """At most SHOWN_CHARS of a text, around the words if they come later; and whether it is cut.

    An excerpt from the middle begins with an ellipsis.
    """
    if len(text) <= SHOWN_CHARS:
        return text, False
    found = text.lower().find(words.lower()) if words else 0
    if found + len(words) <= SHOWN_CHARS:
        return text[:SHOWN_CHARS], True
    begin = max(0, min(found - SHOWN_CHARS // 4, len(text) - SHOWN_CHARS + 1))
    return "…" + text[begin : begin + SHOWN_CHARS - 1], True


def _opened(path: pathlib.Path) -> BinaryIO:
    """The file, or an empty one if it does not exist."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return io.BytesIO()


def _disagrees(record: Mapping[str, Any]) -> bool:
    rewards = record.get("rewards")
    if not isinstance(rewards, dict):
        return False
    pairs = ((name, f"{name.removesuffix('strict')}lenient") for name in rewards)
    return any(
        name.endswith("/strict") and lenient in rewards and rewards[name] != rewards[lenient]
        for name, lenient in pairs
    )


def _small(value: Any) -> int:
    """A whole number that fits; _NO_PROMPT for anything else."""
    return value if type(value) is int and abs(value) < 2**62 else _NO_PROMPT


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)
