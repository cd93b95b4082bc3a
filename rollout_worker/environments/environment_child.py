"""The process that runs environments:
`python -m rollout_worker.environments.environment_child PARENT_PID BYTES`.

The program of `rewards/processes/reward_child.py` with environments in the place of scorers: its
guardian, memory bound, pipes and time limits hold here. Every call of an environment is a request
to an async scorer, whose `item` says what is called, and whose answer is the turn.
"""

import asyncio
import dataclasses
import inspect
import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rollout_worker.environments.openai_endpoint.endpoint import OpenAIEndpoint
from rollout_worker.environments.rollout_function import FunctionEnvironment
from rollout_worker.environments.turn_values import (
    ASSISTANT,
    BadTurn,
    Said,
    Turn,
    begun_turn,
    digest_of,
    turn_of,
)
from rollout_worker.rewards.processes.concurrent_requests import ConcurrentRequests
from rollout_worker.rewards.processes.reward_child import describe_error, start_child
from rollout_worker.rewards.scorers import BadScorer, ScorerKind
from services.user_code.import_path import BadImportPath, load_named, nearest_hint


@dataclasses.dataclass
class _Episode:
    """One live environment, and what it has answered so far."""

    environment: Any
    turns: int = 0
    """Answers given, that of reset included."""
    call: asyncio.Task | None = None
    """That is answered, or was last."""


class LiveEnvironments:
    """One class of environments, or one function, and the episodes that have not ended.

    A request says all that the model has said in its episode, so that it can be answered without
    this process having seen the earlier ones: then the episode is played again, and where it goes
    another way than before, it ends with an error.
    """

    def __init__(self, make: Callable[[], Any], kind: ScorerKind):
        """Args:
        make: returns the environment of an episode.
        kind: with the functions that it offers.
        """
        self._make = make
        self.kind = kind
        self._live: dict[str, _Episode] = {}
        self._over: dict[str, _Episode] = {}
        """Episodes whose last answer is on its way."""
        self._closing: set[asyncio.Task] = set()

    @classmethod
    def load(cls, name: str, given: dict[str, Any]) -> "LiveEnvironments":
        """Finds a class or a function, and checks it; an instance is made to see its tools.

        Args:
            given: its `params`, and the `sampling` of the run.

        Raises:
            BadScorer: if it cannot be used; with the reason and what to do.
        """
        made, params = _load_named(name), given["params"]
        if not isinstance(made, type):
            _check_params(name, made, params, given=("policy", "item"))
            tools = _schemas_of(name, getattr(made, "tools", ()))
            kind = ScorerKind(is_async=True, is_group=False, tools=tools, wants_tokens=True)
            endpoint = OpenAIEndpoint(call_format=_call_format_of(name, made), **given["sampling"])
            return cls(lambda: FunctionEnvironment(made, params, tools, endpoint), kind)
        _check_params(name, made, params)
        _check_methods(name, made)
        tools = _tools_of(name, made, params)
        kind = ScorerKind(is_async=True, is_group=False, tools=tools)
        return cls(lambda: made(**params), kind)

    async def score_async(self, line: bytes) -> dict[str, Any]:
        """Answers one call; see `environment_pool.py` for its fields."""
        call = json.loads(line)["item"]
        name, heard = call["episode"], call["heard"]
        said = [Said(**one) for one in call["said"]]
        if call["ends"]:
            self._end(name)
            return {"answer": {}}
        episode = self._live.get(name)
        if episode is None or episode.turns != len(said):
            self._end(name)
            episode = self._live[name] = _Episode(self._make())
        episode.call = asyncio.current_task()
        try:
            while True:
                turn = await self._next(episode, call, said)
                if episode.turns > len(said):
                    break
                if digest_of(turn) != heard[episode.turns - 1]:
                    raise BadScorer(
                        f"the process of this environment was lost, and when the episode was "
                        f"played again, answer {episode.turns - 1} (from 0) was another one: it "
                        "depends on more than item, seed and messages"
                    )
        except BadTurn as error:
            self._end(name)
            raise BadScorer(str(error)) from error
        except BaseException as error:
            if self._live.get(name) is not episode:
                raise BadScorer("its episode was ended meanwhile") from error
            self._end(name)
            raise
        if turn.done:
            self._over[name] = self._live.pop(name)
        return {"answer": turn._asdict()}

    def after_reply(self, line: bytes) -> None:
        """Closes the environment of an episode that is over: its reward is known by then."""
        if self._over and (over := self._over.pop(json.loads(line)["item"]["episode"], None)):
            self._close(over)

    async def _next(self, episode: _Episode, call: dict[str, Any], said: Sequence[Said]) -> Turn:
        """The next answer of an episode; calls are decoded anew, so that no change is shared."""
        environment = episode.environment
        if episode.turns == 0:
            begun = await environment.reset(call["item"], call["seed"])
            turn = begun if self.kind.wants_tokens else begun_turn(begun)
        elif self.kind.wants_tokens:
            turn = await environment.say(said[episode.turns - 1])
        else:
            message = {"role": ASSISTANT, "content": said[episode.turns - 1].text}
            turn = turn_of(await environment.step(message))
        episode.turns += 1
        return turn

    def _end(self, name: str) -> None:
        """Cancels what an environment is at, and closes it in the background: no episode waits."""
        episode = self._live.pop(name, None)
        if episode is None:
            return
        if episode.call and episode.call is not asyncio.current_task():
            episode.call.cancel()  # else it would keep others waiting, up to the time limit
        self._close(episode)

    def _close(self, episode: _Episode) -> None:
        close = getattr(episode.environment, "close", None)
        if close is not None:
            task = asyncio.get_running_loop().create_task(_close(close))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _check_params(
    name: str, made: Callable[..., Any], params: dict[str, Any], given: Sequence[str] = ()
) -> None:
    """Args:
    given: further arguments, before the parameters.
    """
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError) as error:
        raise BadScorer(f"environment {name!r} cannot be made: {error}") from error
    try:
        signature.bind(*given, **params)
    except (TypeError, ValueError) as error:
        known = [one for one in signature.parameters if one != "self"][len(given) :]
        wrong = next((one for one in params if one not in known), "")
        raise BadScorer(
            f"environment {name!r} cannot be {'called' if given else 'made'} with params={params}"
            f"{' behind policy and item' if given else ''}: {error}{nearest_hint(wrong, known)}; "
            f"it takes {known or 'none'}"
        ) from error


def _check_methods(name: str, made: type) -> None:
    for method, given in (("reset", ("item", "seed")), ("step", ("message",))):
        found = getattr(made, method, None)
        problem = ""
        if not inspect.iscoroutinefunction(found):
            problem = f"needs `async def {method}`"
        elif inspect.isfunction(found):  # with self, which a method of the class has already
            try:
                inspect.signature(found).bind("self", *given)
            except TypeError as error:
                problem = f"cannot be called as {method}({', '.join(given)}): {error}"
        if problem:
            raise BadScorer(
                f"environment {name!r} {problem}: async reset(item, seed) -> messages, async "
                "step(message) -> observation, reward, done, info"
            )


def _tools_of(name: str, made: type, params: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """JSON schemas of what one environment offers, which is made for this and has no episode."""
    try:
        environment = made(**params)
        tools = getattr(environment, "tools", None)
    except BadScorer as error:
        raise BadScorer(f"environment {name!r}: {error}") from error
    # This is foreign code; what it raises is why no episode can begin.
    except Exception as error:
        traceback.print_exception(error)
        raise BadScorer(
            f"environment {name!r} cannot be made with params={params}: {describe_error(error)}"
        ) from error
    if (close := getattr(environment, "close", None)) is not None:
        asyncio.run(_close(close))
    return _schemas_of(name, tools)


def _schemas_of(name: str, tools: Any) -> tuple[dict[str, Any], ...]:
    if not tools:
        return ()
    # Its libraries take time that environments without tools need not spend.
    from rollout_worker.environments.tools.function_schemas import BadTool, schemas_of

    try:
        return tuple(schemas_of(tools))
    except BadTool as error:
        raise BadScorer(f"environment {name!r}: {error}") from error


def _call_format_of(name: str, rollout: Callable[..., Any]) -> Any:
    """In which the model of an agent of OpenAI's client writes calls."""
    known = ("hermes", "llama")
    found = getattr(rollout, "call_format", known[0])
    if found not in known:
        raise BadScorer(f"environment {name!r}: call_format must be one of {known}, got {found!r}")
    return found


async def _close(close: Callable[[], Any]) -> None:
    try:
        found = close()
        if inspect.isawaitable(found):
            await found
    # The episode has ended, so that there is nothing left for this to spoil.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        traceback.print_exception(error)


def _load_named(name: str) -> Callable[..., Any]:
    """The class or the async function of a name, which may be one of a file."""
    _, colon, attribute = name.rpartition(":")
    if not colon or not attribute.isidentifier():
        raise BadScorer(
            f"environment.name={name!r} must be package.module:Class, or a file such as "
            "my_pkg/retry.py:Retry; or an async function in the place of the class"
        )
    try:
        found = load_named(name)
    except BadImportPath as error:
        raise BadScorer(f"environment {name!r}: {error}") from error
    if not isinstance(found, type) and not inspect.iscoroutinefunction(found):
        raise BadScorer(
            f"environment {name!r} must be a class, or an `async def rollout(policy, item)`, got "
            f"{type(found).__name__} {str(found)[:80]!r}"
        )
    return found


def main() -> None:
    """Loads the environment, then answers calls until stdin ends."""
    child = start_child(LiveEnvironments.load)
    if child is not None:
        ConcurrentRequests(child.scorers, child.pipes, child.guard).run(child.pipes.requests)


if __name__ == "__main__":
    main()
