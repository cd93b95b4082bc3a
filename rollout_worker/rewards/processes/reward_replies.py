"""Replies of a process that runs scorers, as its parent reads them.

That process runs foreign code, which may write anything into its pipes. A line counts only if it
carries the id of the request that waits for it and has exactly the expected form.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from rollout_worker.rewards.reward_values import MAX_REWARD, NOTE_CHARS
from rollout_worker.rewards.scorers import ScorerKind
from rollout_worker.rewards.spending import NOTHING, Spending

_SHOWN_BYTES = 80


class BadReply(ValueError):
    """A line that is no reply to the request that waits."""


@dataclasses.dataclass(frozen=True)
class LoadReply:
    """How far the child has come with the loading of its scorers."""

    kind: Literal["loading", "refused", "ready"]
    text: str
    """The scorer that is loaded next, or why one is refused; empty where all are loaded."""
    kinds: dict[str, ScorerKind] = dataclasses.field(default_factory=dict)
    """By name of scorer, where all are loaded."""


@dataclasses.dataclass(frozen=True)
class ScoreReply:
    """What one scorer made of one request."""

    rewards: tuple[dict[str, float], ...]
    """For each completion of the request: by the scorer's name, and `name/variant`. Empty if it
    failed."""
    error: str
    """Empty, or how it failed."""
    late: bool = False
    """It ran out of time, which ends the request: no other scorer runs."""
    doubtful: bool = False
    """It failed for want of something that another request of the same process may have taken."""
    notes: tuple[str, ...] = ()
    """For each completion, or none at all."""
    spent: Spending = NOTHING
    """By the process, since its reply before."""
    answer: Mapping[str, Any] | None = None
    """JSON values of an environment, in place of rewards; its form is not checked here."""


def parse_load_reply(line: bytes, request_id: str) -> LoadReply:
    """Reads a reply to the setup.

    Raises:
        BadReply: if the line is none.
    """
    match _fields(line, request_id):
        case {"ready": dict(kinds), **rest} if not rest and all(map(_is_kind, kinds.values())):
            read = {
                name: ScorerKind(**kind | {"tools": tuple(kind["tools"])})
                for name, kind in kinds.items()
            }
            return LoadReply("ready", "", read)
        case {"loading": str(text), **rest} if not rest:
            return LoadReply("loading", text)
        case {"refused": str(text), **rest} if not rest:
            return LoadReply("refused", text)
    raise _bad(line)


def parse_score_reply(
    line: bytes, request_id: str, scorer: str, completions: int = 1
) -> ScoreReply:
    """Reads the reply of one scorer to one request.

    Args:
        completions: of the request; a reply that pays has as many entries.

    Raises:
        BadReply: if the line is none: of another request or scorer, or with a reward that is no
            finite number, is out of bounds or has the name of another scorer.
    """
    fields = _fields(line, request_id)
    spent = _spending(fields.pop("spent", None), line)
    match fields:
        case {
            "scorer": str(name),
            "error": str(text),
            "late": bool(late),
            "doubtful": bool(doubtful),
            **rest,
        } if not rest and name == scorer:
            text = text or "an error without a text"
            return ScoreReply((), text, late, doubtful, spent=spent)
        case {"scorer": str(name), "answer": dict(answer), **rest} if not rest and name == scorer:
            return ScoreReply((), "", spent=spent, answer=answer)
        case {"scorer": str(name), "rewards": list(entries), **rest} if (
            name == scorer
            and _are_notes(rest, completions)
            and len(entries) == completions
            and all(_are_rewards(rewards, scorer) for rewards in entries)
        ):
            rewards = tuple({key: float(value) for key, value in one.items()} for one in entries)
            return ScoreReply(rewards, "", notes=tuple(rest.get("notes", ())), spent=spent)
    raise _bad(line)


def read_id(line: bytes) -> str:
    """The id of the request that a line answers; empty where it names none.

    Raises:
        BadReply: if the line is no reply of any kind.
    """
    name = _read(line).get("id")
    return name if isinstance(name, str) else ""


def _fields(line: bytes, request_id: str) -> dict[str, Any]:
    """The fields of a reply to this request, without its id."""
    reply = _read(line)
    if reply.pop("id", None) != request_id:
        raise BadReply(f"{line[:_SHOWN_BYTES]!r}, which answers another request")
    return reply


def _read(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: no JSON, no UTF-8, or an endless number
        raise _bad(line) from None
    if not isinstance(reply, dict):
        raise _bad(line)
    return reply


def _is_kind(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"is_async", "is_group", "tools", "wants_tokens"}
        and all(isinstance(value[one], bool) for one in ("is_async", "is_group", "wants_tokens"))
        and isinstance(value["tools"], list)
        and all(isinstance(one, dict) for one in value["tools"])
    )


def _are_rewards(rewards: Any, scorer: str) -> bool:
    return (
        isinstance(rewards, Mapping)
        and scorer in rewards
        and all(name == scorer or name.startswith(f"{scorer}/") for name in rewards)
        and all(_is_finite(value) for value in rewards.values())
        and abs(rewards[scorer]) <= MAX_REWARD
    )


def _are_notes(rest: Mapping[str, Any], completions: int) -> bool:
    """Whether a reply has nothing else beside its rewards but notes."""
    notes = rest.get("notes", [""] * completions)
    return (
        not set(rest) - {"notes"}
        and isinstance(notes, list)
        and len(notes) == completions
        and all(isinstance(note, str) and len(note) <= NOTE_CHARS for note in notes)
    )


def _spending(value: Any, line: bytes) -> Spending:
    try:
        return NOTHING if value is None else Spending.parse(value)
    except ValueError:
        raise _bad(line) from None


def _is_finite(value: Any) -> bool:
    """Whether a JSON value is a finite number; `true` is none."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _bad(line: bytes) -> BadReply:
    return BadReply(f"{line[:_SHOWN_BYTES]!r}, which is no reply")
