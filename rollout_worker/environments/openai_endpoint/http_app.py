"""The HTTP side of the endpoint: keys, status codes, and clients that go away.

A stream is sent in one piece after its turn was sampled, since turns leave the engine whole.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rollout_worker.environments.openai_endpoint.chat_answer import (
    ChatAnswer,
    error_body,
    models_body,
)
from rollout_worker.environments.openai_endpoint.chat_messages import policy_messages
from rollout_worker.environments.openai_endpoint.chat_request import (
    MOST_BODY_BYTES,
    BadChatRequest,
    parse_chat_request,
)
from rollout_worker.environments.openai_endpoint.endpoint import (
    OpenAIEndpoint,
    PendingTurn,
    ServedEpisode,
)
from rollout_worker.environments.turn_values import BadTurn

_IDLE_S = 60
"""A connection without requests is kept this long: the client, which keeps it 5 s, is to be the one
that closes it, and not to send a request into one that is being closed."""
_RETRIES = "x-stainless-retry-count"
"""Header in which OpenAI's client says how often it has repeated a request."""
_CLIENT_GONE = 499
"""Status of an answer that no client reads."""


class _BadKey(Exception):
    """No live episode has the key of a request."""


class EndpointServer(uvicorn.Server):
    """Serves an endpoint until `should_exit`; signals stay those of the process."""

    def __init__(self, endpoint: OpenAIEndpoint):
        super().__init__(
            uvicorn.Config(
                _app(endpoint),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def _app(endpoint: OpenAIEndpoint) -> Starlette:
    handlers = _Handlers(endpoint)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", handlers.chat_completions, methods=["POST"]),
            Route("/v1/models", handlers.models, methods=["GET"]),
        ],
        exception_handlers={
            BadChatRequest: _bad_request,
            BadTurn: _bad_turn,
            ClientDisconnect: _gone,
            HTTPException: _http_error,
            _BadKey: _bad_key,
            500: _failure,
        },
    )


class _Handlers:
    def __init__(self, endpoint: OpenAIEndpoint):
        self._endpoint = endpoint

    async def models(self, request: Request) -> Response:
        self._episode_of(request)
        return _json(200, models_body())

    async def chat_completions(self, request: Request) -> Response:
        # To its end whatever is wrong with it: a client that still sends does not read the answer.
        body = await _read_body(request)
        episode = self._episode_of(request)
        asked = parse_chat_request(body, self._endpoint.sampling, episode.policy.tools)
        messages = policy_messages(asked.messages, episode.turns)
        is_retry = request.headers.get(_RETRIES, "0") != "0"
        pending = episode.begin_turn(messages, asked, is_retry=is_retry)
        if not await _is_sampled(request, pending):
            return Response(status_code=_CLIENT_GONE)
        if pending.task.cancelled():
            raise _BadKey
        answer = ChatAnswer(asked, *pending.task.result())
        kind = "text/event-stream" if asked.stream else "application/json"
        return Response(answer.body(), media_type=kind)

    def _episode_of(self, request: Request) -> ServedEpisode:
        scheme, _, api_key = request.headers.get("authorization", "").partition(" ")
        episode = self._endpoint.find_episode(api_key.strip())
        if scheme.lower() != "bearer" or episode is None:
            raise _BadKey
        return episode


async def _read_body(request: Request) -> bytes:
    body, size = bytearray(), 0
    async for piece in request.stream():
        size += len(piece)
        if size <= MOST_BODY_BYTES:
            body += piece
    if size > MOST_BODY_BYTES:
        raise BadChatRequest(
            f"the body has {size:,} bytes, at most {MOST_BODY_BYTES:,} are taken: send less",
            status=413,
        )
    return bytes(body)


async def _is_sampled(request: Request, pending: PendingTurn) -> bool:
    """Waits for a turn; false if the client went away before it got it."""
    gone = asyncio.ensure_future(request.receive())  # after the body nothing else comes
    try:
        await asyncio.wait({pending.task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_gone = gone.done()
        gone.cancel()
        pending.is_left = is_gone or not pending.task.done()
    return not is_gone


def _json(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")


def _refusal(status: int, body: bytes) -> Response:
    refusal = _json(status, body)
    # OpenAI's client repeats a request after some errors, and none of these would go away.
    refusal.headers["x-should-retry"] = "false"
    return refusal


def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadChatRequest)
    return _refusal(error.status, error_body(str(error), error.field))


def _bad_turn(request: Request, error: Exception) -> Response:
    return _refusal(400, error_body(str(error)))


def _bad_key(request: Request, error: Exception) -> Response:
    refusal = _refusal(
        401,
        error_body(
            "the API key is missing or unknown, or its episode has ended: send policy.api_key as "
            "`Authorization: Bearer ...`, while the rollout function runs",
            code="invalid_api_key",
        ),
    )
    refusal.headers["www-authenticate"] = "Bearer"
    return refusal


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    served = "POST /v1/chat/completions and GET /v1/models"
    path = f"{request.method} {request.url.path:.200}"
    return _refusal(error.status_code, error_body(f"{path} is not served, but {served} are"))


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


def _failure(request: Request, error: Exception) -> Response:
    """The answer to a failure of the policy, which is logged as well."""
    return _refusal(500, error_body(f"the turn failed: {type(error).__name__}: {error}"))
