"""The tests of a row, in the shapes that data sets of programming tasks have.

* Statements of Python, each a test: `tests`, `test_list` (MBPP, with `test_setup_code` or
  `test_imports`), `test_cases` (AceCode).
* A program of Python in `test`: it defines `check(candidate)` for the function that `entry_point`
  names (HumanEval, LeetCodeDataset), or functions `test_...` that import from `solution` (KodCode),
  or is one test as a whole.
* Pairs of input and output: `input_output` with `inputs` and `outputs` (APPS, TACO),
  `public_test_cases` and `private_test_cases` (LiveCodeBench), `verification_info` (prime-rl,
  open-r1), `tests` (DeepCoder), or the answer (Eurus). They are those of a program, or with a
  function's name (`fn_name`, `metadata.func_name`) its arguments and result.

Any of these may be JSON text. Nothing is unpickled.
"""

import ast
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

FIELDS = (
    "tests",
    "test_list",
    "test_cases",
    "test",
    "input_output",
    "public_test_cases",
    "private_test_cases",
    "verification_info",
)
_SHOWN = 80


@dataclasses.dataclass(frozen=True)
class CallTests:
    """Programs of Python that call what a completion defines."""

    tests: tuple[str, ...]
    setup: str = ""
    """Runs before them."""
    prompt: str = ""
    """Code that the prompt has: it runs before the completion, and before the tests."""
    entry: str | None = None
    """The function that the tests know as `candidate`, an expression."""


@dataclasses.dataclass(frozen=True)
class ScriptTests:
    """Pairs of a program's input and output."""

    pairs: tuple[tuple[str, str], ...]


def read_tests(item: Mapping[str, Any], answer: str, field: str | None) -> CallTests | ScriptTests:
    """Reads the tests of a row.

    Args:
        item: the row.
        answer: has the tests where no field of the row has them.
        field: of the row; None takes the first of FIELDS that is there, and of public and private
            test cases both.

    Raises:
        ValueError: if there are none, or they cannot be read, with what is wrong.
    """
    names = [field] if field else [name for name in FIELDS if item.get(name)]
    if not field and names[:1] == ["public_test_cases"]:
        names = [name for name in names if name.endswith("_test_cases")]
    else:
        names = names[:1]
    sources = [(f"the row's field {name!r}", item.get(name)) for name in names]
    sources = sources or [("the answer", answer)]
    found = [_read(_decode(value, where), item, where) for where, value in sources]
    if len(found) == 1:
        return found[0]
    return _joined(found)


def _joined(found: Sequence[CallTests | ScriptTests]) -> CallTests | ScriptTests:
    """Several lists of the same kind as one."""
    scripts = [one for one in found if isinstance(one, ScriptTests)]
    calls = [one for one in found if isinstance(one, CallTests)]
    if scripts and calls:
        raise ValueError("the row's test cases are of a program and of a function: name one field")
    if scripts:
        return ScriptTests(tuple(pair for one in scripts for pair in one.pairs))
    return dataclasses.replace(calls[0], tests=tuple(test for one in calls for test in one.tests))


def _decode(value: Any, where: str) -> Any:
    """The value of a field, decoded where it is JSON text."""
    if where.endswith("_test_cases'") and isinstance(value, str) and value[:1] not in "[":
        raise ValueError(
            f"{where} is packed, as the private tests of LiveCodeBench are: with a pickle, which "
            "runs code where it is opened. Unpack it where you trust it, or set params.field"
        )
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    if not value:
        raise ValueError(
            f"there are no tests: {where} is {value!r}, and code_tests takes them from the first "
            f"of {', '.join(FIELDS)} that the row has, from params.field, or from the answer"
        )
    return value


def _read(value: Any, item: Mapping[str, Any], where: str) -> CallTests | ScriptTests:
    if isinstance(value, str):
        return _program(value, item, where)
    if isinstance(value, Mapping):
        inner = next((key for key in ("test_cases", "tests") if key in value), None)
        if inner:
            named = {**item, **{key: value[key] for key in ("fn_name", "language") if key in value}}
            return _read(_decode(value[inner], where), named, where)
        return _columns(value, item, where)
    if isinstance(value, Sequence) and value:
        if all(isinstance(one, str) for one in value):
            return _statements(value, item, where)
        if all(isinstance(one, Mapping) for one in value):
            return _cases(value, item, where)
    raise ValueError(f"{where} has no tests that code_tests knows: {str(value)[:_SHOWN]!r}")


def _statements(tests: Sequence[str], item: Mapping[str, Any], where: str) -> CallTests:
    imports = item.get("test_imports")
    setup = [str(line) for line in imports] if isinstance(imports, list | tuple) else []
    if isinstance(item.get("test_setup_code"), str):
        setup.append(item["test_setup_code"])
    return _checked(CallTests(tuple(tests), "\n".join(setup), *_context(item)), where)


def _program(text: str, item: Mapping[str, Any], where: str) -> CallTests:
    prompt, entry = _context(item)
    tree = _parse(text, where)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    named = [one for one in functions if one.name.startswith("test_")]
    if any(one.name == "check" for one in functions):
        if entry is None:
            raise ValueError(f"{where} defines check(candidate), but the row has no entry_point")
        return _checked(CallTests(("check(candidate)",), text, prompt, entry), where)
    if named:
        fixtures = [one.name for one in named if one.args.args]
        if fixtures:
            raise ValueError(f"{where} has {fixtures[0]} with arguments, which only pytest gives")
        return _checked(
            CallTests(tuple(f"{one.name}()" for one in named), text, prompt, entry), where
        )
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if classes or not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        kinds = f"the classes {classes}" if classes else "no assert statement"
        raise ValueError(
            f"{where} has {kinds}, and code_tests runs assert statements, check(candidate) or "
            "functions test_..."
        )
    return _checked(CallTests((text,), "", prompt, entry), where)


def _columns(value: Mapping[str, Any], item: Mapping[str, Any], where: str) -> Any:
    """Inputs and outputs as two lists."""
    for ins, outs in (("inputs", "outputs"), ("input", "output")):
        given, expected = value.get(ins), value.get(outs)
        if isinstance(given, list) and isinstance(expected, list):
            if len(given) != len(expected) or not given:
                raise ValueError(
                    f"{where} has {len(given)} inputs and {len(expected)} outputs: as many, and "
                    "at least one, make tests"
                )
            pairs = list(zip(given, expected, strict=True))
            name = value.get("fn_name") or value.get("func_name") or item.get("fn_name")
            return _functional(pairs, name, item, where) if name else _script(pairs, where)
    raise ValueError(f"{where} has no tests that code_tests knows, only {sorted(value)[:8]}")


def _cases(cases: Sequence[Mapping[str, Any]], item: Mapping[str, Any], where: str) -> Any:
    """Inputs and outputs, each pair apart."""
    pairs = []
    for case in cases:
        if "input" not in case or "output" not in case:
            raise ValueError(f"{where} has a test without input or output, only {sorted(case)[:8]}")
        pairs.append((case["input"], case["output"]))
    first = cases[0]
    language = item.get("language") or first.get("language") or "python"
    if not str(language).lower().startswith("python"):
        raise ValueError(f"{where} is for the language {language!r}: code_tests runs Python")
    metadata = item.get("metadata")
    metadata = _decode(metadata, "metadata") if metadata else {}
    inner = first.get("metadata") if isinstance(first.get("metadata"), Mapping) else {}
    names = [
        first.get("fn_name"),
        item.get("fn_name"),
        *(one.get("func_name") for one in (inner, metadata) if isinstance(one, Mapping)),
    ]
    name = next(filter(None, names), None)
    kinds = {str(case.get("type") or case.get("testtype") or "") for case in cases}
    if kinds & {"functional", "function_call"}:
        if not name:
            raise ValueError(f"{where} has tests of a function, but no fn_name or func_name")
        return _functional(pairs, name, item, where)
    return _script(pairs, where)


def _script(pairs: Sequence[tuple[Any, Any]], where: str) -> ScriptTests:
    return ScriptTests(tuple((_lines(one, where), _lines(two, where)) for one, two in pairs))


def _lines(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    raise ValueError(f"{where} has an input or output that is no text: {str(value)[:_SHOWN]!r}")


def _functional(
    pairs: Sequence[tuple[Any, Any]], name: Any, item: Mapping[str, Any], where: str
) -> CallTests:
    tests = []
    for given, expected in pairs:
        if isinstance(given, str):  # a value on each line, as LiveCodeBench has them
            given = [_value(line, where) for line in given.splitlines() if line.strip()]
        if isinstance(expected, str):
            expected = _value(expected, where, default=expected)
        if not isinstance(given, list):
            raise ValueError(f"{where}: arguments must be a list, got {str(given)[:_SHOWN]!r}")
        tests.append(f"assert _same_value(candidate(*{given!r}), {expected!r})")
    prompt, _ = _context(item)
    return _checked(CallTests(tuple(tests), "", prompt, str(name)), where)


_NEEDED = object()


def _value(text: str, where: str, default: Any = _NEEDED) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if default is not _NEEDED:
            return default
        raise ValueError(f"{where}: {text[:_SHOWN]!r} is no JSON value: {error}") from None


def _context(item: Mapping[str, Any]) -> tuple[str, str | None]:
    """The code of a row's prompt, and the function that its tests call."""
    entry = item.get("entry_point")
    for name in ("prompt", "starter_code"):
        text = item.get(name)
        if isinstance(text, str) and text.strip():
            try:
                body = ast.parse(text).body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            kinds = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
            if any(isinstance(node, kinds) for node in body):
                return text, entry or None
    return "", entry or None


def _checked(found: CallTests, where: str) -> CallTests:
    """Raises ValueError for tests that are no Python."""
    _parse(found.setup, where)
    for text in found.tests:
        nodes = ast.walk(_parse(text, where))
        if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in nodes):
            raise ValueError(f"{where} has a test that asserts nothing: {text[:_SHOWN]!r}")
    if found.entry:
        _parse(found.entry, "entry_point")
    return found


def _parse(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} is no Python: {error}: {text[:_SHOWN]!r}") from None
