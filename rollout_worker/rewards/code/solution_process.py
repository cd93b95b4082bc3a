"""The process that runs a completion's code, and answers what the tests ask of it."""

import ast
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from rollout_worker.rewards.code.crossing_values import (
    SOLUTION,
    Channel,
    CrossingValues,
    ExchangeEnded,
    text_of,
)

_MOST_ITEMS = 1_000_000


class _SolutionValues(CrossingValues):
    def __init__(self, namespace: dict[str, Any], call_back: Callable[..., Any]):
        super().__init__(namespace)
        self._objects: list[Any] = []
        self._call_back = call_back

    def encode_other(self, value: Any) -> Any:
        self._objects.append(value)
        return {"remote": len(self._objects) - 1}

    def decode_other(self, value: dict[str, Any]) -> Any:
        match value:
            case {"remote": int(number)}:
                return self._objects[number]
            case {"callback": int(number)}:
                return lambda *arguments: self._call_back(number, arguments)
        return super().decode_other(value)


class _Solution:
    """Answers what the tests ask of a completion."""

    def __init__(self, namespace: dict[str, Any], channel: Channel):
        self._channel = channel
        self._namespace = namespace
        self._values = _SolutionValues(namespace, self._call_back)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._do(request)
        except ExchangeEnded:
            raise
        except BaseException as error:
            return {"error": type(error).__name__, "text": text_of(error)}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        values = self._values
        if request["do"] == "names":
            values.shared = {name for name in request["shared"] if self._has_class(name)}
            found = {}
            for name in request["wanted"]:
                value = self._namespace.get(name)
                if name in self._namespace and not isinstance(value, types.ModuleType):
                    found[name] = values.encode(value)
            return {"names": found, "shared": sorted(values.shared)}
        if request["do"] == "entry":
            return {"value": values.encode(self._find(request["entry"]))}
        return self._use(values.decode(request["target"]), request)

    def _use(self, target: Any, request: dict[str, Any]) -> dict[str, Any]:
        values = self._values
        if request["do"] == "call":
            return self._call(target, request)
        if request["do"] == "get":
            return {"value": values.encode(getattr(target, request["name"]))}
        if request["do"] == "item":
            return {"value": values.encode(target[values.decode(request["key"])])}
        if request["do"] == "iterate":
            items = []
            for item in target:
                items.append(values.encode(item))
                if len(items) > _MOST_ITEMS:
                    raise OverflowError(f"more than {_MOST_ITEMS} items")
            return {"value": items}
        simple = {"len": len, "str": str, "repr": repr, "truth": bool}[request["do"]]
        return {"value": values.encode(simple(target))}

    def _call(self, target: Any, request: dict[str, Any]) -> dict[str, Any]:
        values = self._values
        arguments = [values.decode(one) for one in request["arguments"]]
        named = {key: values.decode(one) for key, one in request["named"].items()}
        reply = {"value": values.encode(target(*arguments, **named)), "changed": {}}
        for place, before in enumerate(request["arguments"]):
            if isinstance(before, list) or (isinstance(before, dict) and not _is_held(before)):
                after = values.encode(arguments[place])
                if after != before:
                    reply["changed"][str(place)] = after
        return reply

    def _call_back(self, number: int, arguments: Sequence[Any]) -> Any:
        asked = [self._values.encode(one) for one in arguments]
        self._channel.send({"callback": number, "arguments": asked})
        while "do" in (message := self._channel.receive()):
            self._channel.send(self.answer(message))
        if "error" in message:
            raise RuntimeError(f"a function of the tests raised {message['error']}")
        return self._values.decode(message["value"])

    def _find(self, entry: str) -> Any:
        """The function that a row names: as it is, or as a method of a class `Solution`."""
        if entry.isidentifier() and entry not in self._namespace and "Solution" in self._namespace:
            return getattr(self._namespace["Solution"](), entry)
        return eval(entry, self._namespace)

    def _has_class(self, name: str) -> bool:
        return isinstance(self._namespace.get(name), type)


def _is_held(value: dict[str, Any]) -> bool:
    """Whether a value is an object that one of the sides keeps."""
    return "remote" in value or "callback" in value


def serve_solution(job: dict[str, Any]) -> None:
    """Runs a completion's code, then answers what the tests ask of it until they end."""
    module = types.ModuleType(SOLUTION)
    sys.modules[SOLUTION] = module
    channel = Channel(job["in_fd"], job["out_fd"])
    try:
        program = _join_program(job["prompt"], job["code"], job["entry"])
        exec(compile(program, "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        channel.send({"error": type(error).__name__, "text": text_of(error)})
        return
    channel.send({"loaded": True})
    solution = _Solution(module.__dict__, channel)
    try:
        while True:
            channel.send(solution.answer(channel.receive()))
    except ExchangeEnded:
        return


def _join_program(prompt: str, code: str, entry: str | None) -> str:
    """The code of a row's prompt, and the completion after it: as a program of its own where it
    defines the function that is asked for, else as what goes on where the prompt has ended.
    """
    if not prompt:
        return code
    root = entry.partition(".")[0].partition("(")[0] if entry else None
    try:
        defined = {getattr(one, "name", None) for one in ast.parse(code).body}
    except (SyntaxError, ValueError):
        return prompt + code
    return prompt + ("\n\n" if root is None or root in defined else "") + code
