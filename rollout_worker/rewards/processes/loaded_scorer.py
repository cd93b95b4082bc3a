"""A scorer in the process that runs it: called with a request, its result checked and named."""

import dataclasses
import functools
import inspect
import json
import selectors
import sys
from collections.abc import Awaitable
from typing import Any

from rollout_worker.rewards.reward_values import (
    named_group_rewards,
    named_rewards,
    note_of,
)
from rollout_worker.rewards.scorers import (
    Scorer,
    ScorerKind,
    check_scorer_params,
    kind_of,
    resolve_scorer,
)


@dataclasses.dataclass(frozen=True)
class LoadedScorer:
    """A scorer with its parameters."""

    name: str
    function: Scorer
    params: dict[str, Any]
    kind: ScorerKind

    @classmethod
    def load(cls, name: str, params: dict[str, Any]) -> "LoadedScorer":
        """Finds a scorer and checks its parameters.

        Raises:
            BadScorer: if there is no such scorer, or it does not take them.
        """
        function = resolve_scorer(name)
        check_scorer_params(name, function, params)
        return cls(name, function, params, kind_of(function))

    def score(self, line: bytes) -> dict[str, Any]:
        """Runs it on one request; returns named `rewards` for each completion, and `notes` where
        it has any.
        """
        result, completions = self._call(line)
        if inspect.isawaitable(result):
            result = _awaited(self.name, result)
        return self._named(result, completions)

    async def score_async(self, line: bytes) -> dict[str, Any]:
        """As `score`, for an async scorer."""
        result, completions = self._call(line)
        return self._named(await result, completions)

    def after_reply(self, line: bytes) -> None:
        """Nothing is left to be done."""

    def _call(self, line: bytes) -> tuple[Any, int]:
        """What it returns for a request, decoded anew so that no scorer sees another's changes."""
        request = json.loads(line)
        texts = request["completions"]
        count = len(texts)
        result = self.function(
            texts if self.kind.is_group else texts[0],
            answer=request["answer"],
            prompt=request["prompt"],
            item=request["item"],
            **self.params,
        )
        return result, count

    def _named(self, result: Any, completions: int) -> dict[str, Any]:
        if self.kind.is_group:
            rewards = named_group_rewards(self.name, result, completions)
            notes = [note_of(entry) for entry in result]
        else:
            rewards, notes = [named_rewards(self.name, result)], [note_of(result)]
        return {"rewards": rewards} | ({"notes": notes} if any(notes) else {})


def _awaited(name: str, result: Awaitable[Any]) -> Any:
    """What comes of a coroutine that a plain function returned, as a decorator of an async one."""

    async def wait() -> Any:
        return await result

    _say_slow(name)
    return _runner().run(wait())


@functools.cache
def _say_slow(name: str) -> None:
    print(
        f"reward function {name!r} is a plain function that returns a coroutine, so that only one "
        "call is under way at a time: make it `async def`",
        file=sys.stderr,
    )


@functools.cache
def _runner() -> Any:
    """One event loop for all calls of this process, since a client of a scorer belongs to one."""
    import asyncio  # takes time that plain scorers need not spend

    # Not epoll: a copy of this process would share it.
    loop = functools.partial(asyncio.SelectorEventLoop, selectors.SelectSelector())
    return asyncio.Runner(loop_factory=loop)
