"""The tools of an environment by name, their calls run, and what becomes of their results."""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from rollout_worker.environments.tools.function_schemas import schemas_of
from rollout_worker.environments.tools.tool_calls import ToolCall

_SHOWN = 500


class ToolFailed(Exception):
    """A tool does not work, through no fault of the call: the episode cannot go on."""


class Toolbox:
    """Tools that are ready to be called."""

    def __init__(self, functions: Sequence[Callable[..., Any]]):
        """Raises BadTool for what is no tool, or where two have one name."""
        self.schemas = schemas_of(functions)
        """In the order given."""
        names = [schema["function"]["name"] for schema in self.schemas]
        self._functions = dict(zip(names, functions, strict=True))

    async def run(self, call: ToolCall) -> tuple[str, bool]:
        """The text that answers a call, and whether its tool raised.

        A plain function runs in a thread, so that other episodes need not wait for it.

        Raises:
            ToolFailed: if the tool does not work, or returned what is no text and no JSON value.
        """
        function = self._functions[call.name]
        try:
            if inspect.iscoroutinefunction(function):
                result = await function(**call.arguments)
            else:
                result = await asyncio.to_thread(function, **call.arguments)
        except (ToolFailed, MemoryError):
            raise
        # Whatever else it raises is its answer: the arguments are the model's.
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:_SHOWN], True
        return _text_of(call.name, result), False


def _text_of(name: str, result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailed(
            f"tool {name!r} must return text or a JSON value, got {type(result).__name__} "
            f"{str(result)[:80]!r} ({error})"
        ) from error
