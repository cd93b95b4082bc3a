"""The process that runs tests, which call the functions of a completion in another process.

It runs code of the data set only, and the process with the completion cannot reach it. So a
completion decides what its functions return, and nothing else: this process compares. An object of
the completion's own class is a `Remote` here, which may be called, iterated over and asked for its
attributes, and equals nothing but itself. Classes that the row defines, such as its `TreeNode`,
exist on both sides, and their objects cross by value.
"""

import ast
import builtins
import collections
import importlib
import json
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from rollout_worker.rewards.code.crossing_values import (
    SOLUTION,
    TEXT_CHARS,
    Channel,
    CrossingValues,
    ExchangeEnded,
    text_of,
)


class OutOfTime(BaseException):
    """A test has taken longer than it may."""


class SolutionError(Exception):
    """What the completion raised is no exception that the tests know."""


class _TestValues(CrossingValues):
    def __init__(self, namespace: dict[str, Any], remotes: "_Remotes"):
        super().__init__(namespace)
        self._remotes = remotes
        self.callbacks: list[Callable[..., Any]] = []

    def encode_other(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"remote": object.__getattribute__(value, "_number")}
        if callable(value):
            self.callbacks.append(value)
            return {"callback": len(self.callbacks) - 1}
        raise SolutionError(f"an object of {type(value).__name__} cannot be passed to a solution")

    def decode_other(self, value: dict[str, Any]) -> Any:
        match value:
            case {"remote": int(number)}:
                return Remote(number, self._remotes)
        return super().decode_other(value)


class Remote:
    """An object in the process of the completion."""

    def __init__(self, number: int, remotes: "_Remotes"):
        self._number = number
        self._remotes = remotes

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What it returns there."""
        return self._remotes.call(self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remotes.ask("get", self, name=name)

    def __getitem__(self, key: Any) -> Any:
        return self._remotes.ask("item", self, key=self._remotes.values.encode(key))

    def __iter__(self) -> Any:
        return iter(self._remotes.ask("iterate", self))

    def __len__(self) -> int:
        return self._remotes.ask("len", self)

    def __bool__(self) -> bool:
        return bool(self._remotes.ask("truth", self))

    def __str__(self) -> str:
        return self._remotes.ask("str", self)

    def __repr__(self) -> str:
        return self._remotes.ask("repr", self)


class _Remotes:
    """Asks the process of the completion."""

    def __init__(self, channel: Channel, namespace: dict[str, Any]):
        self._channel = channel
        self._namespace = namespace
        self.values = _TestValues(namespace, self)
        self.asked = 0

    def ask(self, what: str, target: Remote, **more: Any) -> Any:
        reply = self.request({"do": what, "target": self.values.encode(target), **more})
        return self._value(reply)

    def call(self, target: Remote, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        values = self.values
        message = {
            "do": "call",
            "target": values.encode(target),
            "arguments": [values.encode(one) for one in arguments],
            "named": {key: values.encode(one) for key, one in named.items()},
        }
        reply = self.request(message)
        result = self._value(reply)
        changed = reply.get("changed")
        for place, after in changed.items() if isinstance(changed, dict) else ():
            if not place.isdigit() or int(place) >= len(arguments):
                raise ExchangeEnded("no such argument")
            _change(arguments[int(place)], self._decode(after))
        return result

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply; meanwhile the completion may call functions that the tests have passed."""
        self.asked += 1
        self._channel.send(message)
        while "callback" in (reply := self._channel.receive()):
            self._channel.send(self._call_back(reply))
        if "error" in reply:
            raise self._error(reply)
        return reply

    def _value(self, reply: dict[str, Any]) -> Any:
        if "value" not in reply:
            raise ExchangeEnded("a reply without a value")
        return self._decode(reply["value"])

    def _decode(self, value: Any) -> Any:
        try:
            return self.values.decode(value)
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise ExchangeEnded(f"a reply that is none: {error}") from error

    def _call_back(self, asked: dict[str, Any]) -> dict[str, Any]:
        number, arguments = asked["callback"], asked.get("arguments")
        callbacks = self.values.callbacks
        if type(number) is not int or not 0 <= number < len(callbacks):
            raise ExchangeEnded("no such function")
        if not isinstance(arguments, list):
            raise ExchangeEnded("a call without arguments")
        try:
            result = callbacks[number](*[self._decode(one) for one in arguments])
            return {"value": self.values.encode(result)}
        except Exception as error:
            return {"error": type(error).__name__}

    def _error(self, reply: dict[str, Any]) -> Exception:
        """An exception of the type that the completion raised, where the tests know it."""
        name, text = str(reply["error"]), str(reply.get("text", ""))[:TEXT_CHARS]
        for known in (vars(builtins), self._namespace):
            kind = known.get(name)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    return kind(text)
                except TypeError:  # it takes other arguments, as UnicodeError does
                    break
        return SolutionError(f"{name}: {text}")


def _change(argument: Any, after: Any) -> None:
    """Makes an argument what the completion has made of its copy."""
    if isinstance(argument, list) and isinstance(after, list):
        argument[:] = after
    elif isinstance(argument, dict | set) and isinstance(after, dict | set):
        argument.clear()
        argument.update(after)
    elif isinstance(argument, collections.deque) and isinstance(after, collections.deque):
        argument.clear()
        argument.extend(after)
    elif type(argument) is type(after) and hasattr(argument, "__dict__"):
        vars(argument).update(vars(after))
    else:
        raise ExchangeEnded("an argument changed its type")


def run_tests(job: dict[str, Any]) -> None:
    """Runs tests against a completion in another process, and writes a line for each.

    The first line says whether they can run at all: `{"loaded": true}`, `{"failed": why}` where the
    completion's code does not load, or `{"broken": why}` where the fault is the row's. A test that
    runs out of time, or ends the other process, is the last one; the lines after it are missing.
    """
    channel = Channel(job["in_fd"], job["out_fd"])
    signal.signal(signal.SIGALRM, _end_test)

    def say(line: dict[str, Any]) -> None:
        os.write(job["results_fd"], json.dumps(line).encode() + b"\n")

    namespace: dict[str, Any] = {"__name__": "tests", "_same_value": same_value}
    remotes = _Remotes(channel, namespace)
    try:
        _start_clock(job["test_s"])
        reply = channel.receive()
        if "error" in reply:
            say({"failed": f"{reply['error']}: {reply.get('text', '')}"[:TEXT_CHARS]})
            return
        _prepare(job, namespace, remotes)
    except _Broken as error:
        say({"broken": str(error)})
        return
    except BaseException as error:
        say({"failed": _describe(error)})
        return
    finally:
        _stop_clock()
    say({"loaded": True})
    for test in job["tests"]:
        why, over = "", False
        try:
            _start_clock(job["test_s"])
            exec(compile(test, "test.py", "exec"), namespace)
        except (OutOfTime, ExchangeEnded) as error:
            why, over = _describe(error), True
        except BaseException as error:
            why = _describe(error)
        finally:
            _stop_clock()
        say({"passed": not why, "why": why})
        if over:
            return


class _Broken(Exception):
    """The tests of a row cannot run, whatever the completion is."""


def _prepare(job: dict[str, Any], namespace: dict[str, Any], remotes: _Remotes) -> None:
    """Fills the namespace of the tests: with what the completion defines, except where the row or
    Python has something of that name, and with the row's own code.
    """
    trees = [ast.parse(text) for text in (job["prompt"], job["setup"], *job["tests"])]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    wanted = _names(nodes) - set(vars(builtins))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {one.id for one in functions if isinstance(one, ast.Name)}
    library = (wanted - called) & set(sys.stdlib_module_names)
    own = remotes.request({"do": "names", "shared": [], "wanted": sorted(wanted - library)})
    names = own.get("names")
    if not isinstance(names, dict) or not set(names) <= wanted - library:
        raise ExchangeEnded("a reply without names")
    found = {name: remotes._decode(value) for name, value in names.items()}
    namespace.update(found)
    for name in library:  # a completion's `import math` counts as one of the tests
        namespace.setdefault(name, importlib.import_module(name))
    module = types.ModuleType(SOLUTION)
    vars(module).update(found)
    sys.modules[SOLUTION] = module
    for text in (job["prompt"], job["setup"]):
        asked = remotes.asked
        try:
            exec(compile(text, "tests.py", "exec"), namespace)
        except (ImportError, SyntaxError) as error:
            if remotes.asked == asked and getattr(error, "name", None) != SOLUTION:
                raise _Broken(_describe(error)) from error
            raise
    # What the prompt has only the beginning of is the completion's to define.
    stubs = {node.name for node in trees[0].body if _is_stub(node)}
    namespace.update({name: found[name] for name in stubs & set(found)})
    classes = [name for name, value in namespace.items() if isinstance(value, type)]
    shared = remotes.request({"do": "names", "shared": classes, "wanted": []}).get("shared")
    if not isinstance(shared, list) or not set(shared) <= set(classes):
        raise ExchangeEnded("a reply without classes")
    remotes.values.shared = set(shared)
    if job["entry"]:
        entry = remotes._value(remotes.request({"do": "entry", "entry": job["entry"]}))
        namespace["candidate"] = entry
        if job["entry"].isidentifier():
            namespace[job["entry"]] = entry


def same_value(result: Any, expected: Any) -> bool:
    """Whether a result is the one that a data set has as JSON: a tuple counts as a list, and a
    result may stand alone in a list, as those of APPS do.
    """
    result = _listed(result)
    return result == expected or (
        isinstance(expected, list) and len(expected) == 1 and result == expected[0]
    )


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_listed(one) for one in value]
    if isinstance(value, dict):
        return {key: _listed(one) for key, one in value.items()}
    return value


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that a program reads, or imports from the module of the solution."""
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == SOLUTION:
            found.update(one.name for one in node.names)
    return found


def _is_stub(node: ast.AST) -> bool:
    """Whether a function has no body but its documentation, or a class has such a method."""
    if isinstance(node, ast.ClassDef):
        return any(map(_is_stub, node.body))
    return isinstance(node, ast.FunctionDef) and all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        for one in node.body
    )


def _start_clock(seconds: float) -> None:
    # Again and again, where the code of a test catches everything.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)


def _stop_clock() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _end_test(number: int, frame: types.FrameType | None) -> None:
    raise OutOfTime("it ran out of time")


def _describe(error: BaseException) -> str:
    if isinstance(error, OutOfTime | ExchangeEnded):
        return str(error)
    return f"{type(error).__name__}: {text_of(error)}"
