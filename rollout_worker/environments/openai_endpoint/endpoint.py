"""An endpoint of OpenAI's API for agents in the process of environments.

An agent that was written for the `openai` client asks here for its turns. The key that it sends
says which episode it plays; each turn is one `generate` of that episode's policy. The server is in
`http_app.py`, whose libraries a process without such agents does not import.
"""

import asyncio
import dataclasses
import functools
import hashlib
import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_worker.environments.openai_endpoint.chat_messages import (
    AssistantTurn,
    assistant_turn,
)
from rollout_worker.environments.openai_endpoint.chat_request import ChatRequest, RunSampling
from rollout_worker.environments.turn_values import Message, SampledTurn

if TYPE_CHECKING:
    from rollout_worker.environments.openai_endpoint.http_app import EndpointServer
    from rollout_worker.environments.rollout_function import Policy
    from rollout_worker.environments.tools.tool_calls import CallFormat, CallReader

HOST = "127.0.0.1"
_BACKLOG = 256
"""Connections that may wait to be accepted."""


@dataclasses.dataclass(eq=False)
class PendingTurn:
    """A turn that is sampled for a client."""

    asked: tuple[list[Message], int | None, bool]
    task: asyncio.Task[tuple[SampledTurn, AssistantTurn]]
    is_left: bool = False
    """Its client went away before it was sampled."""


class ServedEpisode:
    """One episode: its policy, and the turns that clients got of it.

    A client that goes away in mid-turn does not cancel the turn, which has been said in the
    conversation and cannot be taken back. It is kept for a client that asks the same again, as
    OpenAI's does after a lost connection.
    """

    def __init__(self, policy: "Policy", call_format: "CallFormat"):
        self.policy = policy
        self.turns: dict[int, AssistantTurn] = {}
        """Of the model, by their place in the conversation."""
        self._call_format: CallFormat = call_format
        self._kept: list[PendingTurn] = []
        """The last that was sampled, and what is being sampled."""

    def begin_turn(
        self, messages: list[Message], request: ChatRequest, *, is_retry: bool
    ) -> PendingTurn:
        """Has a turn sampled, or finds the one that a repeated request has not received.

        Args:
            messages: of the request, as the policy takes them.
            request: that asks for it.
            is_retry: whether the client says that it repeats it.
        """
        asked = (messages, request.max_tokens, request.reads_calls)
        for pending in self._kept:
            if pending.asked == asked and (is_retry or pending.is_left):
                pending.is_left = False
                return pending
        pending = PendingTurn(asked, asyncio.get_running_loop().create_task(self._sample(*asked)))
        self._kept.append(pending)
        pending.task.add_done_callback(functools.partial(self._end_turn, pending))
        return pending

    def end(self) -> None:
        """Cancels what is still being sampled."""
        for pending in self._kept:
            pending.task.cancel()

    async def _sample(
        self, messages: list[Message], max_tokens: int | None, reads_calls: bool
    ) -> tuple[SampledTurn, AssistantTurn]:
        sampled = await self.policy.generate(messages, max_tokens=max_tokens)
        reader = self._reader if reads_calls else None
        turn = assistant_turn(sampled.text, len(self.turns), reader)
        self.turns[len(messages)] = turn
        return sampled, turn

    @functools.cached_property
    def _reader(self) -> "CallReader":
        # Its libraries take time that an episode without tools need not spend.
        from rollout_worker.environments.tools.tool_calls import CallReader

        return CallReader(self.policy.tools, self._call_format)

    def _end_turn(self, pending: PendingTurn, task: asyncio.Task) -> None:
        # What it raised is raised where its client waits, who may have gone away.
        if task.cancelled() or task.exception() is not None:
            self._kept = [one for one in self._kept if one is not pending]
        else:
            self._kept = [one for one in self._kept if one is pending or not one.task.done()]


class OpenAIEndpoint:
    """Serves OpenAI's API on a port of 127.0.0.1, in the running event loop.

    A client that blocks this loop waits for itself: agents await `AsyncOpenAI`, or run in
    `asyncio.to_thread`.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        stop_strings: Sequence[str] = (),
        call_format: "CallFormat" = "hermes",
    ):
        """Args:
        temperature, stop_strings: of the run; a request may say the same or nothing.
        call_format: in which the model writes calls of tools.
        """
        self.sampling = RunSampling(temperature, tuple(stop_strings))
        self._call_format: CallFormat = call_format
        self._episodes: dict[bytes, ServedEpisode] = {}
        """By digest of their keys, so that a look-up's time says nothing of a key."""
        self._listener: socket.socket | None = None
        self._server: EndpointServer | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """The `base_url` of clients; when it is first asked for, in the loop, the server starts."""
        if self._listener is None:
            # Its libraries take time that a process without such agents need not spend.
            from rollout_worker.environments.openai_endpoint.http_app import EndpointServer

            loop = asyncio.get_running_loop()
            self._listener = socket.create_server((HOST, 0), backlog=_BACKLOG)
            # Its connections inherit this, which asyncio leaves out for a socket of this kind: else
            # each body would wait 40 ms for the client to acknowledge the headers.
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._server = EndpointServer(self)
            self._serving = loop.create_task(self._server.serve([self._listener]))
        return f"http://{HOST}:{self._listener.getsockname()[1]}/v1"

    def register(self, policy: "Policy") -> str:
        """Returns the key with which clients play the episode of this policy."""
        api_key = secrets.token_urlsafe(32)
        self._episodes[_digest(api_key)] = ServedEpisode(policy, self._call_format)
        return api_key

    def forget(self, api_key: str) -> None:
        """Ends an episode: what is being sampled is cancelled, and its key is refused."""
        if episode := self._episodes.pop(_digest(api_key), None):
            episode.end()

    def find_episode(self, api_key: str) -> ServedEpisode | None:
        """The episode of a key; None if there is none, or it has ended."""
        return self._episodes.get(_digest(api_key))

    async def aclose(self) -> None:
        """Ends all episodes and the server."""
        for episode in self._episodes.values():
            episode.end()
        self._episodes.clear()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving


def _digest(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).digest()
