"""A turn of the model in the form of OpenAI's API: one JSON object, or the chunks of a stream.

With `return_token_ids` it has what vLLM returns: `prompt_token_ids` of the response, in a stream
of its first chunk, and `token_ids` of the choice.
"""

import dataclasses
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from rollout_worker.environments.openai_endpoint.chat_messages import AssistantTurn
from rollout_worker.environments.openai_endpoint.chat_request import ChatRequest
from rollout_worker.environments.turn_values import SampledTurn

MODEL = "policy"
"""Name of the one model that there is; requests may give it any other."""


@dataclasses.dataclass(frozen=True)
class ChatAnswer:
    """The answer to one request."""

    request: ChatRequest
    sampled: SampledTurn
    turn: AssistantTurn
    """The same, as the client gets it."""

    def body(self) -> bytes:
        """JSON, or the whole stream of a request that asks for one."""
        if self.request.stream:
            chunks = [json.dumps(chunk) for chunk in self._chunks()]
            return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode()
        message = {"role": "assistant", "content": self.turn.content, "refusal": None}
        if self.turn.calls:
            message["tool_calls"] = list(self.turn.calls)
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason}
        answer = self._head("chat.completion") | {"choices": [choice | self._tokens()]}
        return json.dumps(answer | self._prompt() | {"usage": self._usage()}).encode()

    def _chunks(self) -> Iterator[dict[str, Any]]:
        head = self._head("chat.completion.chunk")
        if self.request.include_usage:
            head["usage"] = None
        deltas: list[dict[str, Any]] = []
        if self.turn.content is not None:
            deltas.append({"content": self.turn.content})
        for index, call in enumerate(self.turn.calls):
            deltas.append({"tool_calls": [{"index": index, **call}]})
        begins = {"role": "assistant", "content": None if self.turn.calls else ""}
        yield head | {"choices": [_chunk_choice(begins)]} | self._prompt()
        for place, delta in enumerate(deltas):
            # The first has all of them: which token is in which delta is not known.
            choice = _chunk_choice(delta) | ({} if place else self._tokens())
            yield head | {"choices": [choice]}
        yield head | {"choices": [_chunk_choice({}, self._finish_reason)]}
        if self.request.include_usage:
            yield head | {"choices": [], "usage": self._usage()}

    @property
    def _finish_reason(self) -> str:
        reason = self.sampled.finish_reason
        return "tool_calls" if self.turn.calls and reason == "stop" else reason

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.request.model,
        }

    def _prompt(self) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": self.sampled.prompt_token_ids}

    def _tokens(self) -> dict[str, Any]:
        """What a choice says of its tokens."""
        found: dict[str, Any] = {"logprobs": None}
        if self.request.logprobs:
            pairs = zip(self.sampled.token_ids, self.sampled.logprobs, strict=True)
            content = [_token(token_id, logprob) for token_id, logprob in pairs]
            found["logprobs"] = {"content": content, "refusal": None}
        if self.request.return_token_ids:
            found["token_ids"] = self.sampled.token_ids
        return found

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.sampled.prompt_token_ids), len(self.sampled.token_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    """A token in the form of vLLM's `return_tokens_as_token_ids`: no tokenizer is here."""
    text = f"token_id:{token_id}"
    return {"token": text, "bytes": None, "logprob": logprob, "top_logprobs": []}


def error_body(message: str, field: str | None = None, code: str | None = None) -> bytes:
    """An error in the form of the API."""
    error = {"message": message, "type": "invalid_request_error", "param": field, "code": code}
    return json.dumps({"error": error}).encode()


def models_body() -> bytes:
    """The list of the one model."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tandem"}
    return json.dumps({"object": "list", "data": [model]}).encode()


def _chunk_choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
