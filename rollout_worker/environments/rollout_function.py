"""Agents of any form: an async function that asks the policy for its turns, as an environment.

`async def rollout(policy, item)` awaits `policy.generate` as often as it likes, and returns the
reward of the episode. What it asks for first is what `reset` of an environment returns, what it
asks for next is an observation, and its end is the end of the episode.
"""

import asyncio
import contextlib
import functools
import json
import operator
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rollout_worker.environments.openai_endpoint.endpoint import OpenAIEndpoint
from rollout_worker.environments.turn_values import (
    ASSISTANT,
    CALLS,
    MOST_ID,
    MOST_OBSERVATION_BYTES,
    BadTurn,
    Message,
    Said,
    SampledTurn,
    Turn,
    message_of,
    messages_of,
    numbers_of,
    reward_of,
)

_ASKED = "what generate is asked for"


class Policy:
    """The model in one episode."""

    def __init__(self, seed: int, tools: Sequence[dict[str, Any]], endpoint: OpenAIEndpoint):
        self._endpoint = endpoint
        self.seed = seed
        """Of all completions of a prompt the same, below 2**63."""
        self.tools = tuple(tools)
        """JSON schemas of the functions that the model is offered."""
        self._asked: asyncio.Queue[Turn] = asyncio.Queue()
        self._answer: asyncio.Future[SampledTurn] | None = None
        self._messages: list[Message] = []
        """Of the conversation so far, the model's turns included."""
        self._token_ids: list[int] = []
        """The same as the model has read and sampled it."""
        self._by_ids: bool | None = None
        self._given_up = False

    @property
    def base_url(self) -> str:
        """Of OpenAI's API, which samples this policy for `api_key`; to be read in the loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "policy.base_url is read outside the event loop: read it, and policy.api_key, "
                "before asyncio.to_thread"
            ) from None
        return self._endpoint.base_url

    @functools.cached_property
    def api_key(self) -> str:
        """Of this episode."""
        return self._endpoint.register(self)

    def end(self) -> None:
        """Refuses its key from here on."""
        if "api_key" in vars(self):
            self._endpoint.forget(self.api_key)

    async def generate(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[int],
        *,
        max_tokens: int | None = None,
    ) -> SampledTurn:
        """Samples the next turn.

        The sampling is that of the run, since the policy is trained on what it sampled.

        Args:
            messages: the whole conversation, which goes on from what was said: it begins with the
                messages of the call before and the model's answer to them. Or all its token ids, in
                the same way; an episode is of one form.
            max_tokens: of this turn; None is what the episode has left.

        Raises:
            BadTurn: if it does not go on, or a call is under way; with the value and the rule.
        """
        if self._answer is not None:
            raise BadTurn(
                "an episode is one conversation: await a generate before the next is called"
            )
        if self._given_up:
            raise BadTurn("no generate can follow one that was cancelled: end the rollout there")
        bound = _bound(max_tokens)  # first: what is refused leaves the conversation as it was
        turn = self._turn(messages)._replace(max_tokens=bound)
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(turn)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self._given_up = True
            raise
        finally:
            self._answer = None

    async def next_turn(self) -> Turn:
        """What it is asked for next."""
        return await self._asked.get()

    def give(self, said: Said) -> None:
        """Answers what it was asked for last."""
        known = [] if said.is_new_record else self._token_ids
        before = [*known, *said.before]
        self._token_ids = [*before, *said.token_ids]
        self._messages.append({"role": ASSISTANT, "content": said.text})
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(
                SampledTurn(said.text, said.token_ids, said.logprobs, said.finish_reason, before)
            )

    def _turn(self, asked: Any) -> Turn:
        """What is new in a conversation."""
        if isinstance(asked, str | bytes | Mapping) or not hasattr(asked, "__len__"):
            got = f"{asked!r:.80}"
            raise BadTurn(f"{_ASKED} must be a list, of messages or of token ids, got {got}")
        by_ids = len(asked) > 0 and not isinstance(asked[0], Mapping)
        if self._by_ids not in (None, by_ids):
            raise BadTurn("an episode asks either by messages or by token ids, got both")
        if by_ids:
            turn = Turn([], 0.0, False, token_ids=self._new_ids(asked))
        else:
            turn = Turn(self._new_messages(asked), 0.0, False)
            self._messages += turn.messages
        self._by_ids = by_ids
        return turn

    def _new_ids(self, asked: Sequence[Any]) -> list[int]:
        ids, known = _ids(asked), len(self._token_ids)
        if ids[:known] != self._token_ids or len(ids) == known:
            raise BadTurn(
                f"the token ids must begin with the {known} of this episode so far and go on, got "
                f"{len(ids)}: put new ones behind prompt_token_ids and token_ids"
            )
        if (size := len(json.dumps(ids[known:]))) > MOST_OBSERVATION_BYTES:
            raise BadTurn(
                f"{_ASKED} adds {len(ids) - known:,} token ids of {size:,} bytes, at most "
                f"{MOST_OBSERVATION_BYTES:,} are taken"
            )
        return ids[known:]

    def _new_messages(self, asked: Sequence[Any]) -> list[Message]:
        known = len(self._messages)
        rule = f"the messages must begin with the {known} of this episode so far"
        for place, message in enumerate(self._messages):
            if place >= len(asked) or not _says(asked[place], message, place):
                got = "nothing" if place >= len(asked) else f"{asked[place]!r:.200}"
                raise BadTurn(
                    f"{rule}, since what was sampled cannot be changed: message {place} was "
                    f"{message!r:.200}, got {got}"
                )
        if known and len(asked) == known:
            raise BadTurn(f"{rule} and go on, got these alone: put a new one behind them")
        what = f"{_ASKED} behind the {known} messages so far" if known else _ASKED
        return messages_of(asked[known:], what)


class FunctionEnvironment:
    """One episode of a function."""

    def __init__(
        self,
        rollout: Callable[..., Coroutine[Any, Any, Any]],
        params: Mapping[str, Any],
        tools: Sequence[dict[str, Any]],
        endpoint: OpenAIEndpoint,
    ):
        self._rollout, self._params, self._tools = rollout, params, tools
        self._endpoint = endpoint
        self._policy: Policy | None = None
        self._run: asyncio.Task | None = None

    async def reset(self, item: dict[str, Any], seed: int) -> Turn:
        """Begins it; returns what it asks for first."""
        self._policy = Policy(seed, self._tools, self._endpoint)
        self._run = asyncio.create_task(_played(self._rollout(self._policy, item, **self._params)))
        turn = await self._next()
        if turn.done:
            raise BadTurn("the rollout ended without a generate: an episode has at least one turn")
        return turn

    async def say(self, said: Said) -> Turn:
        """Has it go on with a turn of the model."""
        assert self._policy is not None
        self._policy.give(said)
        return await self._next()

    def close(self) -> None:
        """Cancels what is left of it."""
        if self._policy is not None:
            self._policy.end()
        if self._run is not None:
            self._run.cancel()
            self._run.add_done_callback(lambda run: run.cancelled() or run.exception())

    async def _next(self) -> Turn:
        assert self._policy is not None and self._run is not None
        asked = asyncio.create_task(self._policy.next_turn())
        try:
            await asyncio.wait({asked, self._run}, return_when=asyncio.FIRST_COMPLETED)
            return _end_of(self._run.result()) if self._run.done() else asked.result()
        except _Exited as exited:
            raise exited.error from None
        finally:
            asked.cancel()


class _Exited(Exception):
    """Carries what would end the event loop, and with it all episodes, out of its task."""

    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error


async def _played(rollout: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await rollout
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Exited(error) from None


def _end_of(result: Any) -> Turn:
    reward, info = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    return Turn([], reward_of(reward), True, numbers_of(info))


def _bound(max_tokens: Any) -> int | None:
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise BadTurn(f"max_tokens must be a whole number of at least 1, got {max_tokens!r:.80}")
    return max_tokens if max_tokens is None else min(max_tokens, MOST_ID)


def _ids(values: Sequence[Any]) -> list[int]:
    with contextlib.suppress(TypeError):
        ids = [operator.index(value) for value in values]
        if min(ids) >= 0 and max(ids) <= MOST_ID:
            return ids
    raise BadTurn(f"{_ASKED} holds neither messages nor token ids: {values!r:.80}")


def _says(message: Any, known: Message, place: int) -> bool:
    """Whether it is the same message; of the model's, the text decides."""
    if known["role"] == ASSISTANT and CALLS not in known and isinstance(message, Mapping):
        return (message.get("role"), message.get("content")) == (ASSISTANT, known["content"])
    return message_of(message, f"{_ASKED} must be messages", f"message {place}") == known
