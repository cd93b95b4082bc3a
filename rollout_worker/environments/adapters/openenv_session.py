"""Sessions of an OpenEnv server: what its clients send over a WebSocket, and nothing of their code.

Each episode has a connection, and so an environment of its own in the server.
"""

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rollout_worker.environments.adapters.parameter_checks import (
    BadAdapter,
    Extract,
    NonEmpty,
    check_template,
    json_of,
    say,
)
from rollout_worker.environments.given_values import check_values
from rollout_worker.rewards.answers import answer_text

Message = dict[str, str]

TEXT = "{text}"
"""The value in `action` that stands for what the model writes."""
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_MOST_BYTES = 2**24
"""Of a message; what the model reads of it may be 1 MiB."""
_SEEDS = 2**31
"""Environments often draw from generators that take no larger seed."""
_CLOSING_S = 10.0
_NO_ACTION = "VALIDATION_ERROR"
"""The code of the server's error where it cannot read an action."""


class OpenEnvSession:
    """Plays an environment that an OpenEnv server has, with the rewards of its steps.

    A turn that the server cannot read as an action is answered with what is wrong with it, and
    counted in `info` as `invalid_actions`, beside `env_steps`. The server gets the seed with the
    reset, where its environment takes one, and promises what it promises: one that draws otherwise
    for the same seed ends its completions with an error.
    """

    def __init__(
        self,
        url: NonEmpty,
        *,
        action: Mapping[str, Any] | None = None,
        describe: NonEmpty = "{observation}",
        reset_fields: Sequence[str] = (),
        extract: Extract = "marker",
        most_invalid: Annotated[int, Field(ge=1)] = 3,
        system_prompt: NonEmpty | None = None,
    ):
        """Args:
        url: of the server, `http://host:port` or with `https`, `ws` or `wss`.
        action: the fields of an action, of which one has the value "{text}", the model's text;
            None reads the text as a JSON object with all of them.
        describe: what the model reads of an observation: a template with {observation}, as JSON,
            of which parts are {observation[field]}.
        reset_fields: fields of the record that go to the environment's reset, beside the seed.
        extract: the text is the line after the last `####`, or the whole turn.
        most_invalid: the episode ends at so many turns without an action.
        system_prompt: the first message; None sends none.

        Raises:
            BadScorer: if one of them breaks a rule, or the package websockets is not installed.
        """
        _websockets()
        given = {"url": url, "action": action, "describe": describe, "reset_fields": reset_fields}
        given |= {"extract": extract, "most_invalid": most_invalid, "system_prompt": system_prompt}
        check_values("", OpenEnvSession.__init__, given)
        self._url = _checked_url(url)
        self._action = None if action is None else _checked_action(action)
        check_template("describe", describe, ("observation",))
        self._describe, self._extract, self._most_invalid = describe, extract, most_invalid
        self._reset_fields = reset_fields
        self._system = [] if system_prompt is None else say(system_prompt, "system")
        self._connection: Any = None

    async def reset(self, item: dict[str, Any], seed: int) -> list[Message]:
        """Begins a session with the record's `question`, if it has one, and an observation."""
        missing = [name for name in self._reset_fields if name not in item]
        if missing:
            raise ValueError(f"the record has no {missing[0]!r} (it has {sorted(item)})")
        self._invalid = 0
        websockets = _websockets()
        try:
            self._connection = await websockets.connect(self._url, max_size=_MOST_BYTES)
        except (OSError, websockets.WebSocketException) as error:
            raise ConnectionError(f"no connection to the server {self._url}: {error}") from error
        fields = {name: item[name] for name in self._reset_fields}
        answer = await self._ask("reset", {"seed": seed % _SEEDS, **fields})
        asked = item.get("question")
        parts = [asked] if isinstance(asked, str) and asked else []
        return [*self._system, *say("\n\n".join([*parts, self._described(_observed(answer))]))]

    async def step(
        self, message: Mapping[str, str]
    ) -> tuple[list[Message], float, bool, dict[str, float]]:
        """Sends the action of a turn, and answers with what is observed then."""
        action, problem = self._action_of(message["content"])
        if not problem:
            answer = await self._ask("step", action)
            if answer["type"] != "error":
                data = _observed(answer)
                info = {"invalid_actions": 0.0, "env_steps": 1.0}
                described = say(self._described(data))
                return described, data.get("reward") or 0.0, bool(data.get("done")), info
            problem = _named_problems(answer)
        self._invalid += 1
        info = {"invalid_actions": 1.0, "env_steps": 0.0}
        done = self._invalid >= self._most_invalid
        return say(f"That is no action: {problem}"), 0.0, done, info

    async def close(self) -> None:
        """Ends the session; the server closes its connection then, and logs an error otherwise."""
        if self._connection is None:
            return
        with contextlib.suppress(_websockets().ConnectionClosed):
            await self._connection.send(json.dumps({"type": "close"}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                await self._connection.wait_closed()
        await self._connection.close()

    def _action_of(self, text: str) -> tuple[dict[str, Any], str]:
        """The action that a turn has, and what is wrong with it; empty if nothing is."""
        written = answer_text(text) if self._extract == "marker" else text.strip()
        if written is None:
            return {}, "it stands on a line after ####."
        if self._action is not None:
            return {k: written if v == TEXT else v for k, v in self._action.items()}, ""
        try:
            action = json.loads(written)
        except (ValueError, RecursionError) as error:
            return {}, f"no JSON: {error}"
        return (action, "") if isinstance(action, dict) else ({}, "it must be a JSON object")

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message, and returns the answer, which may be that the action is none.

        Raises:
            RuntimeError: for other errors of the server.
        """
        closed = _websockets().ConnectionClosed
        # A server that is full says so before it closes, which may be before this is sent.
        with contextlib.suppress(closed):
            await self._connection.send(json.dumps({"type": kind, "data": data}))
        try:
            answer = json.loads(await self._connection.recv())
        except closed as error:
            raise ConnectionError(f"the server {self._url} ended the session: {error}") from error
        if answer.get("type") == "error":
            error = answer.get("data", {})
            if kind != "step" or error.get("code") != _NO_ACTION:
                raise RuntimeError(
                    f"the server {self._url} answers {error.get('code')}: "
                    f"{error.get('message')!s:.500}"
                )
        return answer

    def _described(self, data: Mapping[str, Any]) -> str:
        observation = data.get("observation")
        try:
            return self._describe.format(observation=_Shown(observation or {}))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"describe={self._describe!r} cannot be filled from the observation "
                f"{observation!r:.200}: {type(error).__name__}: {error}"
            ) from None


class _Shown(dict):
    """An observation that is written as JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def _observed(answer: Mapping[str, Any]) -> dict[str, Any]:
    data = answer.get("data")
    if answer.get("type") != "observation" or not isinstance(data, dict):
        raise RuntimeError(f"the server answers with no observation: {answer!r:.200}")
    return data


def _named_problems(answer: Mapping[str, Any]) -> str:
    """What the server says of an action that it cannot read."""
    errors = answer["data"].get("errors") or []
    named = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in errors]
    return "; ".join(named) or str(answer["data"].get("message"))


def _checked_url(url: str) -> str:
    """The address of the WebSocket of a server."""
    refused = BadAdapter(f"{url=} must be the address of a server, such as http://127.0.0.1:8000")
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in _SCHEMES and parts.hostname and parts.port != 0
    except ValueError:
        raise refused from None
    if not good:
        raise refused
    return f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}/ws"


def _checked_action(action: Mapping[str, Any]) -> dict[str, Any]:
    fields = json.loads(json_of("action", action))
    if TEXT not in fields.values():
        raise BadAdapter(
            f"{action=} must have a field with the value {TEXT!r}, such as {{'message': {TEXT!r}}}"
        )
    return fields


def _websockets() -> Any:
    try:
        import websockets  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise BadAdapter(
            "OpenEnvSession needs the package websockets, which does not import "
            f"({error}): pip install '.[openenv]'"
        ) from error
    return websockets
