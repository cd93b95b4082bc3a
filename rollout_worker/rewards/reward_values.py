"""What a scorer, or a step of an environment, may return as a reward, and what becomes of it.

The child processes of `reward_pool.py` import this module, so it imports neither jax nor pydantic.
"""

import decimal
import logging
import math
import numbers
import threading
from collections.abc import Mapping, Sequence
from typing import Any

MOST_VARIANTS = 64
"""Names of the values of one scorer, each of which is a metric."""
NAME_CHARS = 100
NOTE_CHARS = 2000
"""Of a note; of a longer one its beginning and its end are kept."""
_NOTE = "note"
MAX_REWARD = 1e6
"""Largest absolute reward; a larger one is a mistake that would outweigh the rest."""


NO_REWARD = "what it returned is no reward: "
"""How the error of a completion begins whose scorer returned something else."""


log = logging.getLogger(__name__)


class BadResult(ValueError):
    """What was returned is no reward; says what it was and what it must be."""


def finite_number(value: Any, what: str) -> float:
    """Reads a number of Python, `decimal`, `fractions`, or a scalar of numpy, JAX or torch.

    Args:
        what: how a message names it.

    Raises:
        BadResult: if it is none, or not finite.
    """
    if getattr(value, "shape", None) == ():  # a scalar of numpy, JAX or torch, bool_ and 0-d too
        value = value.item()
    # Real covers int, float, bool and Fraction.
    if not isinstance(value, numbers.Real | decimal.Decimal):
        hint = ": return float(...) of it" if isinstance(value, str | bytes) else ""
        raise BadResult(
            f"{what} must be a number, got {type(value).__name__} {str(value)[:80]!r}{hint}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadResult(f"{what} must be finite, got {number}")
    return number


def bounded_reward(value: Any, what: str) -> float:
    """As `finite_number`, within MAX_REWARD."""
    reward = finite_number(value, what)
    if abs(reward) > MAX_REWARD:
        raise BadResult(
            f"a reward must lie between -{MAX_REWARD:g} and {MAX_REWARD:g}, got {reward:g}"
        )
    return reward


def named_rewards(name: str, result: Any) -> dict[str, float]:
    """Names the values that a scorer returned: `name` for the reward, `name/variant` for a variant.

    Raises:
        BadResult: if the result is neither a finite number nor a dict of them with `value`, if
            the reward is beyond MAX_REWARD, or if a variant's name is no text.
    """
    if not isinstance(result, Mapping):
        return {name: bounded_reward(result, "the result")}
    if "value" not in result:
        raise BadResult(f"a dict result needs the key 'value', got {sorted(map(str, result))}")
    rewards = {name: bounded_reward(result["value"], "the result's 'value'")}
    if len(result) > MOST_VARIANTS + 1:
        raise BadResult(f"at most {MOST_VARIANTS} values have a name, got {len(result)}")
    for variant, value in result.items():
        if not isinstance(variant, str) or not variant or not variant.isprintable():
            raise BadResult(f"the names of variants must be printable text, got {variant!r}")
        if len(variant) > NAME_CHARS:
            raise BadResult(
                f"the name of a variant has at most {NAME_CHARS} characters, got "
                f"{variant[:NAME_CHARS]!r}..."
            )
        if variant not in ("value", _NOTE):
            rewards[f"{name}/{variant}"] = finite_number(value, f"the result's {variant!r}")
    return rewards


def note_of(result: Any) -> str:
    """The note in what a scorer returned, cut to NOTE_CHARS; empty where there is none.

    Raises:
        BadResult: if it is no text.
    """
    note = result.get(_NOTE, "") if isinstance(result, Mapping) else ""
    if not isinstance(note, str):
        raise BadResult(f"the result's {_NOTE!r} must be text, got {type(note).__name__}")
    if len(note) > NOTE_CHARS:
        half = NOTE_CHARS // 2 - 3
        note = f"{note[:half]} ... {note[-half:]}"
    return note.encode("utf-8", "backslashreplace").decode("utf-8")[:NOTE_CHARS]


class ValueNames:
    """The names of the values of each reward that are metrics: the first MOST_VARIANTS.

    Each is a metric for good. Later ones count for nothing, so that leaving them out changes no
    training. For any thread.
    """

    def __init__(self):
        self._known: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        self._said = False

    def known(self, reward: str, values: Mapping[str, float]) -> dict[str, float]:
        """The values of a reward whose names are among the first, and the reward itself."""
        kept = {}
        with self._lock:
            names = self._known.setdefault(reward, set())
            for name, value in values.items():
                if name == reward or name in names:
                    kept[name] = value
                elif len(names) < MOST_VARIANTS:
                    names.add(name)
                    kept[name] = value
                elif not self._said:
                    self._said = True
                    log.warning(
                        "%s has values under more than %d names: %r and later ones are left out; "
                        "give the values of all completions the same names",
                        reward,
                        MOST_VARIANTS,
                        name,
                    )
        return kept


def named_group_rewards(name: str, result: Any, completions: int) -> list[dict[str, float]]:
    """Names what a group scorer returned, for each completion as `named_rewards` does.

    Args:
        completions: of the group.

    Raises:
        BadResult: if the result is no list, tuple or array with one entry for each completion, or
            an entry is none that a scorer may return; with the entry, the rule and the fix.
    """
    rule = (
        f"a group scorer must return a list with one reward for each of the {completions} "
        "completions, in their order"
    )
    is_array = len(getattr(result, "shape", ())) == 1
    if not is_array and (isinstance(result, str | bytes) or not isinstance(result, Sequence)):
        raise BadResult(f"{rule}, got {type(result).__name__} {str(result)[:80]!r}")
    entries = list(result)
    if len(entries) != completions:
        raise BadResult(f"{rule}, got {len(entries)}; an empty completion has a reward as well")
    named = []
    for place, entry in enumerate(entries):
        try:
            named.append(named_rewards(name, entry))
        except BadResult as error:
            raise BadResult(
                f"{rule}, but for completion {place} (from 0): {error}; where there is no reward, "
                "raise an error"
            ) from None
    return named
