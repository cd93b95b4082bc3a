"""Environments of verifiers, which drive a rollout themselves and ask a client for each turn.

Here the client asks the policy: what the environment asks it for is what the model reads, and what
it answers is the model's turn. So every method that an environment overrides is used. These
are the classes of `verifiers.legacy`, which releases from 0.4 on no longer have.
"""

import functools
import json
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_worker.environments.adapters.parameter_checks import (
    BadAdapter,
    NonEmpty,
    json_of,
    say,
)
from rollout_worker.environments.given_values import check_values
from rollout_worker.environments.openai_endpoint.endpoint import OpenAIEndpoint
from rollout_worker.environments.rollout_function import FunctionEnvironment, Policy
from rollout_worker.environments.tools.function_schemas import schemas_of
from rollout_worker.environments.tools.tool_calls import CallFormat, CallReader, ToolCall
from rollout_worker.environments.turn_values import Message, Said
from services.user_code.import_path import load_attribute


class VerifiersEnvironment:
    """A `SingleTurnEnv`, `MultiTurnEnv` or `ToolEnv` of verifiers, with the reward of its rubric.

    The reward comes with the last step, and what the rubric measures beside it is in its `info`.
    As the package has it, a reward function that raises counts 0 and is logged. All episodes of a
    process share one environment.

    The package knows no seed: the seed of an episode is not read, and an environment that draws
    numbers, or has a `timeout_seconds`, may answer otherwise when its episode is played again,
    which ends the episode with an error.
    """

    def __init__(
        self,
        env_id: NonEmpty,
        env_args: Mapping[str, Any] | None = None,
        *,
        call_format: CallFormat = "hermes",
    ):
        """Args:
        env_id: as of `verifiers.load_environment`, the name of an installed environment; or an
            import path `package.module:name` of a class or function that returns one.
        env_args: its keyword arguments.
        call_format: in which the model writes calls, `hermes` or `llama`; where there are tools.

        Raises:
            BadScorer: if it cannot be loaded or compares the completions of a group.
        """
        given = {"env_id": env_id, "env_args": env_args, "call_format": call_format}
        check_values("", VerifiersEnvironment.__init__, given)
        self._env, self.tools = _loaded(env_id, json_of("env_args", env_args))
        self._reader = CallReader(_of_any_arguments(self.tools), call_format)
        self._episode = FunctionEnvironment(self._play, {}, self.tools, OpenAIEndpoint())

    async def reset(self, item: dict[str, Any], seed: int) -> list[Message]:
        """Begins the rollout of a row of the environment's own data.

        Args:
            item: a row with messages in `prompt`, or with a text there or in `question`, which then
                follows system prompt and examples of the environment; `answer` and `info` go to
                the rubric.
            seed: not read.
        """
        return (await self._episode.reset(item, seed)).messages

    async def step(
        self, message: Mapping[str, str]
    ) -> tuple[list[Message], float, bool, dict[str, float]]:
        """Gives the turn to the rollout, and answers with what it asks next, or with the reward."""
        turn = await self._episode.say(Said(message["content"]))
        return turn.messages, turn.reward, turn.done, turn.numbers

    def close(self) -> None:
        """Ends a rollout that has not ended; its environment cleans up."""
        self._episode.close()

    async def _play(
        self, policy: Policy, item: Mapping[str, Any]
    ) -> tuple[float, dict[str, float]]:
        row = {"example_id": 0, **item}
        if not row.get("prompt") or isinstance(row["prompt"], str):
            row["prompt"] = _prompt(self._env, item)
        if isinstance(info := row.get("info"), Mapping) and "tool_defs" in info:
            raise ValueError("the record has tools in info.tool_defs: all must have the same")
        client = _client_class()(functools.partial(self._answer, policy))
        state = await self._env.rollout(row, client, "policy", {})
        if (error := state.get("error")) is not None:
            cause = error.__cause__
            more = f" ({type(cause).__name__}: {cause})" if cause else ""
            raise RuntimeError(f"the rollout failed: {error!r}{more}") from error
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return state["reward"], state["metrics"] or {}

    async def _answer(self, policy: Policy, messages: Sequence[Any]) -> dict[str, Any]:
        """Called by the rollout for each turn: the fields of the model's message."""
        text = (await policy.generate([_plain(message) for message in messages])).text
        # As a server of models does, this leaves what is no call of a tool in the text.
        calls = self._reader.read(text) if self.tools else []
        right = [call for call in calls if isinstance(call, ToolCall)]
        made = [
            {"id": f"call_{place}", "name": call.name, "arguments": json.dumps(call.arguments)}
            for place, call in enumerate(right)
        ]
        return {"content": text, "tool_calls": made or None}


def _of_any_arguments(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Schemas of the tools by which all arguments are right: the environment judges them."""
    anything = {"type": "object", "additionalProperties": True}
    return [
        {"function": {"name": one["function"]["name"], "parameters": anything}} for one in tools
    ]


def _plain(message: Any) -> Message:
    """A message as texts: role and content."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    content = fields.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a message has a part that is no text, such as an image")
        content = "".join(part["text"] for part in content)
    return {"role": fields["role"], "content": content}


def _prompt(env: Any, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row with a text, as `Environment` makes them for its own data."""
    if not isinstance(question := item.get("prompt") or item.get("question"), str):
        raise ValueError(f"the record has neither prompt nor question (it has {sorted(item)})")
    system = say(env.system_prompt, "system") if env.system_prompt else []
    return [*system, *(env.few_shot or []), *say(question)]


@functools.lru_cache(maxsize=16)
def _loaded(env_id: str, env_args: str) -> tuple[Any, list[dict[str, Any]]]:
    """An environment, given its arguments as JSON, and the schemas of its tools."""
    vf = _verifiers()
    args = json.loads(env_args)
    made = load_attribute(env_id) if ":" in env_id else functools.partial(_load, vf, env_id)
    with _Signals():
        try:
            env = made(**args)
        except (ImportError, TypeError, ValueError, RuntimeError) as error:
            raise BadAdapter(
                f"verifiers cannot load {env_id=} with env_args={args}: {error}"
            ) from error
    if not isinstance(env, vf.Environment):
        raise BadAdapter(
            f"{env_id=} must be an environment of verifiers.legacy, got {type(env).__name__}"
        )
    if env.requires_group_rollouts or env.provides_advantages:
        raise BadAdapter(
            f"{env_id=} has a rubric that compares the completions of a group, of which an "
            "environment sees one: give it reward functions of one completion"
        )
    definitions = [tool.model_dump(exclude_none=True) for tool in env.tool_defs or []]
    return env, schemas_of(definitions)


def _load(vf: Any, env_id: str, **args: Any) -> Any:
    return vf.load_environment(env_id, **args)


class _Signals:
    """Keeps the handlers of this process, which an environment would replace by its own."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> None:
        self._handlers = [signal.getsignal(number) for number in self._NUMBERS]

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in zip(self._NUMBERS, self._handlers, strict=True):
                signal.signal(number, handler)


def _verifiers() -> Any:
    try:
        import verifiers.legacy  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise BadAdapter(
            "VerifiersEnvironment needs the package verifiers before 0.4, which does not import "
            f"({error}): pip install '.[verifiers]'"
        ) from error
    return verifiers.legacy


@functools.lru_cache(maxsize=1)
def _client_class() -> Any:
    """The client of a rollout: it is made of a coroutine that answers messages."""
    vf = _verifiers()
    import verifiers.legacy.types as types  # pyright: ignore[reportMissingImports] - an extra

    class ConversationClient(vf.Client):
        def setup_client(self, config):
            raise NotImplementedError("it is made of a coroutine, and no configuration")

        async def to_native_tool(self, tool):
            return tool

        async def to_native_prompt(self, messages):
            return messages, {}

        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            return await self.client(prompt)

        async def raise_from_native_response(self, response):
            pass

        async def from_native_response(self, response):
            message = types.ResponseMessage(finish_reason="stop", is_truncated=False, **response)
            return types.Response(id="turn", created=0, model="policy", message=message)

        async def close(self):
            pass

    return ConversationClient
