"""Tasks of reasoning-gym with several tries.

The package makes an item and scores an answer to it, and has no conversation of its own: what
follows a wrong answer is said here.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rollout_worker.environments.adapters.parameter_checks import (
    BadAdapter,
    Extract,
    NonEmpty,
    check_template,
    say,
)
from rollout_worker.environments.given_values import check_values
from rollout_worker.rewards.scorers import reasoning_gym_answer

Message = dict[str, str]

AGAIN = "That is not right. Try again."


class ReasoningGymRetries:
    """Asks again until the task's own score of an answer is high enough, or no try is left.

    The reward is the score of the last try, which some tasks give in parts. An episode depends on
    nothing but its item and messages; the seed is not read. A task that makes another item here
    than in the data source, or raises at an answer that it cannot read, ends the episode with an
    error.
    """

    def __init__(
        self,
        tries: Annotated[int, Field(ge=1)] = 3,
        *,
        extract: Extract = "marker",
        right_from: Annotated[float, Field(ge=0, le=1)] = 1.0,
        discount: Annotated[float, Field(ge=0, le=1)] = 1.0,
        again: NonEmpty = AGAIN,
        system_prompt: NonEmpty | None = None,
    ):
        """Args:
        tries: answers that the model may give; `environment.max_turns` must be no less.
        extract: as of the scorer `reasoning_gym`: the line after the last `####`, or the turn.
        right_from: the score at which an answer counts as right.
        discount: the score is multiplied by it for each try before.
        again: what the model reads after another one; may contain {score} and {left}, the tries.
        system_prompt: the first message; None sends none.

        Raises:
            BadScorer: if one of them breaks a rule.
        """
        given = {"tries": tries, "extract": extract, "right_from": right_from}
        given |= {"discount": discount, "again": again, "system_prompt": system_prompt}
        check_values("", ReasoningGymRetries.__init__, given)
        check_template("again", again, ("score", "left"))
        self._tries, self._right_from = tries, right_from
        self._discount, self._again = discount, again
        self._extract: Extract = extract
        self._system = [] if system_prompt is None else say(system_prompt, "system")
        _filled(again, 0.5, tries)

    async def reset(self, item: dict[str, Any], seed: int) -> list[Message]:
        """Begins with the question of a record that a `reasoning_gym:` source has made."""
        self._item, self._tried = item, 0
        await self._score("", "whole")  # finds out whether the task makes this item here too
        return [*self._system, *say(item["question"])]

    async def step(
        self, message: Mapping[str, str]
    ) -> tuple[list[Message], float, bool, dict[str, float]]:
        """Scores a try; `info` counts `tries`, and has `first_score` and whether it was `right`."""
        score = await self._score(message["content"], self._extract)
        paid = score * self._discount**self._tried
        self._tried += 1
        left, right = self._tries - self._tried, score >= self._right_from
        info = {
            "tries": 1.0,
            "first_score": score if self._tried == 1 else 0.0,
            "right": float(right),
        }
        if right or not left:
            return [], paid, True, info
        return say(_filled(self._again, score, left)), 0.0, False, info

    async def _score(self, text: str, extract: Extract) -> float:
        """The task's score, in a thread: it makes the item again, which may take long."""
        return await asyncio.to_thread(
            reasoning_gym_answer, text, answer="", prompt="", item=self._item, extract=extract
        )


def _filled(again: str, score: float, left: int) -> str:
    try:
        return again.format(score=score, left=left)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadAdapter(f"{again=} cannot be filled with {score=} and {left=}: {error}") from None
