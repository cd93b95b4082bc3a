"""From a YAML file and `--set` overrides to a configuration, or to one message with every error.

The file is YAML 1.2, so `1e-6` is a number and `no` is a word; duplicate keys are refused. An
override `--set dotted.key=value` is applied to the file's content, in the order given, and its
value is read by the same rules, except that a key of type text takes the text unchanged.
Setting a whole section to a mapping replaces it; what is left out takes its default.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml.error import YAMLError

from driver.config.config_keys import (
    ABSENT_KEYS,
    IGNORED_VALUES,
    Key,
    Kind,
    fields_of,
    nearest,
    resolve,
)
from driver.config.presets import preset
from driver.config.run_config import RunConfig
from driver.config.yaml_text import dump_yaml, parse_yaml, yaml_problem
from driver.errors import RunError
from services.wire.secret_text import hide_secrets, looks_secret, names_secret, setting_is_secret

C = TypeVar("C", bound=BaseModel)

_SET = "--set"
_ELSEWHERE = (
    "a secret belongs into an environment variable, which reward.environment gives to scorers, and "
    "not here"
)


class ConfigError(RunError, ValueError):
    """The configuration cannot be used; the message lists every fault with value, rule and fix."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class _Fault:
    key: str
    text: str


def load(
    path: str | None, overrides: Sequence[str] = (), preset_name: str | None = None
) -> RunConfig:
    """Reads the configuration of a run; see `load_as`."""
    return load_as(RunConfig, path, overrides, preset_name)


def read_section(path: str, name: str) -> dict[str, Any]:
    """What a file that can be loaded gives of a section, as it stands there."""
    return _read_file(path, {}).get(name) or {}


def load_as(
    root: type[C],
    path: str | None,
    overrides: Sequence[str] = (),
    preset_name: str | None = None,
) -> C:
    """Reads a configuration.

    Args:
        root: the model of its sections.
        path: a YAML file; None starts from the defaults alone.
        overrides: `dotted.key=value` each, applied in order; the last one for a key counts.
        preset_name: of presets.py, if any; its keys replace those of the file.

    Raises:
        ConfigError: naming every unknown key, wrong value and broken rule at once.
        NoSuchPreset: if there is no preset of this name.
    """
    faults: list[_Fault] = []
    sources: dict[str, str] = {}
    tree = _read_file(path, sources) if path is not None else {}
    if preset_name is not None:
        tree["algorithm"] = dict(preset(preset_name).algorithm)
        for inner in [name for name in sources if name.partition(".")[0] == "algorithm"]:
            del sources[inner]
        sources["algorithm"] = f"--preset {preset_name}"
    for override in overrides:
        _apply_override(tree, override, root, sources, faults)
    clean = _check_section(tree, root, "", faults, root)
    config = None
    try:
        config = root.model_validate(clean)
    except ValidationError as error:
        faults += _pydantic_faults(error, faults)
    if faults or config is None:
        raise ConfigError(_message(path, overrides, faults, sources))
    return config


def dump(config: BaseModel) -> str:
    """YAML text that `load`, or `load_as`, reads back to an equal configuration."""
    return dump_yaml(config.model_dump(mode="json"))


def _read_file(path: str, sources: dict[str, str]) -> dict[str, Any]:
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}: "
            "give an existing file with --config"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None
    lines: dict[str, int] = {}
    try:
        tree = parse_yaml(text, lines)
    except YAMLError as error:
        raise ConfigError(f"{path}{yaml_problem(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must be a mapping of sections such as `model:` and `data:`, "
            f"not a {type(tree).__name__}"
        )
    sources.update({key: f"{path}, line {line}" for key, line in lines.items()})
    return tree


def _apply_override(
    tree: dict[str, Any],
    override: str,
    root: type[BaseModel],
    sources: dict[str, str],
    faults: list[_Fault],
) -> None:
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    parts = tuple(dotted.split("."))
    if not equals or not all(parts):
        shown = dotted if equals else override
        faults.append(_Fault("--set " + shown, "write it as --set section.key=value"))
        return
    key = resolve(parts, root)
    if key is None:
        sources[dotted] = _SET
        faults.append(_Fault(dotted, _unknown(dotted, root)))
        return
    try:
        value = _override_value(text, key)
    except ValueError as error:
        sources[dotted] = _SET
        faults.append(_Fault(dotted, str(error)))
        return
    problem = _assign(tree, parts, value, root)
    if problem:
        faults.append(_Fault(dotted, problem))
    for inner in [name for name in sources if name.startswith(f"{dotted}.")]:
        del sources[inner]
    sources[dotted] = _SET


def _override_value(text: str, key: Key) -> Any:
    stripped = text.strip()
    if not stripped:
        raise ValueError("has no value: write null for none, '' for an empty text")
    takes_text = key.kind is Kind.LEAF and key.types == {str}
    if takes_text and stripped not in ("null", "~") and stripped[0] not in "'\"":
        return text
    try:
        value = parse_yaml(text)
    except YAMLError as error:
        raise ValueError(
            f"{_shown(text)} is not a YAML value{yaml_problem(error)}: quote it if it is text"
        ) from None
    if value is None and stripped.startswith("#"):
        raise ValueError(f"{_shown(text)} is a comment in YAML: quote what is text")
    return value


def _assign(tree: dict[str, Any], parts: tuple[str, ...], value: Any, root: type[BaseModel]) -> str:
    """Sets one key in place, making the sections above it; returns a problem or ''."""
    here: Any = tree
    for depth, part in enumerate(parts):
        name: Any = part
        if isinstance(here, list):
            where = ".".join(parts[:depth])
            if not part.isdecimal():
                return f"{where} is a list here: name an item, such as {where}.0.{part}"
            name = int(part)
            if name > len(here):
                return f"index {name} is past the end: the list has {len(here)} items"
            if name == len(here):
                here.append({})
        if depth == len(parts) - 1:
            here[name] = value
        else:
            before = here[name] if isinstance(here, list) else here.get(name)
            below = parts[depth + 1]
            if below.isdecimal() and isinstance(before, dict):
                where = ".".join(parts[: depth + 1])
                return f"{where} is no list here: make it one in the file, or leave {below} out"
            here[name] = _container(parts[: depth + 1], before, below, root)
            here = here[name]
    return ""


def _container(parts: tuple[str, ...], before: Any, below: str, root: type[BaseModel]) -> Any:
    """The mapping or list in which a longer key is set; what is there, where that is one.

    Args:
        below: the next part of the longer key.
    """
    key = resolve(parts, root)
    assert key is not None
    if key.items is not None and (isinstance(before, list) or below.isdecimal()):
        return before if isinstance(before, list) else []
    if key.kind is not Kind.SECTION_LIST:
        return before if isinstance(before, dict) else {}
    if isinstance(before, list):
        return before
    return [item.model_dump(mode="json") for item in key.default or ()]


def _check_section(
    tree: Any, model: type[BaseModel], prefix: str, faults: list[_Fault], root: type[BaseModel]
) -> dict[str, Any]:
    """Returns the keys for pydantic to check; adds a fault for each that it would explain badly."""
    clean: dict[str, Any] = {}
    fields = fields_of(model)
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        key = fields.get(name) if isinstance(name, str) else None
        if key is None:
            if value not in IGNORED_VALUES.get(dotted, ()):
                faults.append(_Fault(dotted, _unknown(dotted, root)))
            continue
        if value is None and not key.optional and key.kind in (Kind.SECTION, Kind.FREE):
            continue  # a section whose keys are all commented out takes its defaults
        checked = _check_value(value, key, dotted, faults, root)
        if checked is not _REFUSED:
            clean[name] = checked
    return clean


def _check_value(
    value: Any, key: Key, dotted: str, faults: list[_Fault], root: type[BaseModel]
) -> Any:
    """The value for pydantic to check, or _REFUSED with a fault added."""
    if value is None and key.optional:
        return None
    if key.kind is Kind.SECTION and isinstance(value, dict):
        assert key.model is not None
        return _check_section(value, key.model, f"{dotted}.", faults, root)
    item_model = key.model if key.kind is Kind.SECTION_LIST else key.items
    if item_model is not None and isinstance(value, list):
        item = Key(kind=Kind.SECTION, optional=False, model=item_model)
        checked = [
            _check_value(v, item, f"{dotted}.{i}", faults, root) for i, v in enumerate(value)
        ]
        return _REFUSED if any(entry is _REFUSED for entry in checked) else checked
    fault = _value_fault(value, key, dotted)
    if fault is None:
        return value
    faults.append(fault)
    return _REFUSED


def _value_fault(value: Any, key: Key, dotted: str) -> _Fault | None:
    """Why a value is refused before pydantic checks it; None if it is not."""
    if value is None:
        problem = "null is not allowed: give a value or leave it out"
    elif key.kind is Kind.SECTION:
        problem = _section_problem(value, key, dotted)
    elif key.kind is Kind.SECTION_LIST:
        problem = f"{_shown(value)} is not a list: write one item per `- `"
    elif key.kind is Kind.LEAF:
        problem = _leaf_problem(value, key)
    elif key.kind is Kind.FREE_LIST:
        if isinstance(value, list) and all(isinstance(one, dict) for one in value):
            return _free_fault(value, dotted)
        problem = f"{_shown(value)} is not a list of mappings: write one item per `- `"
    elif isinstance(value, dict):
        return _free_fault(value, dotted)
    else:
        problem = f"{_shown(value)} is not a mapping: write it as {{name: value}}"
    return _Fault(dotted, problem) if problem else None


def _section_problem(value: Any, key: Key, dotted: str) -> str:
    """Why a plain value cannot replace a section; '' if it can."""
    assert key.model is not None
    if type(value) in key.types:
        return ""
    example = f"{dotted}.{next(iter(key.model.model_fields))}"
    if key.types:
        return f"{_shown(value)} is not a whole number: write one, or set keys such as {example}"
    return f"{_shown(value)} cannot replace a section: set its keys, such as {example}"


def _leaf_problem(value: Any, key: Key) -> str:
    """Why a value is refused before pydantic checks it; '' if it is not."""
    for text in value if isinstance(value, list) else [value]:
        problem = _text_problem(text) if isinstance(text, str) else ""
        if problem:
            return problem
    if isinstance(value, bool) and key.types and bool not in key.types and key.types != {str}:
        return f"{_shown(value)} is not a number"
    if key.types == {str} and isinstance(value, int | float):
        return f"{_shown(value)} is not text: put it in quotes"
    return ""


def _free_fault(value: Any, dotted: str) -> _Fault | None:
    """Why a value of a free mapping cannot be kept as JSON and shown in logs; None if it can."""
    problem = ""
    if isinstance(value, dict):
        for name, inner in value.items():
            if fault := _entry_fault(name, inner, dotted):
                return fault
    elif isinstance(value, list):
        within = (_free_fault(inner, f"{dotted}.{index}") for index, inner in enumerate(value))
        return next(filter(None, within), None)
    elif isinstance(value, str):
        problem = _text_problem(value)
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"{value} is not finite: give a finite number"
    elif not (value is None or isinstance(value, bool | int | float)):
        kind = type(value).__name__
        problem = f"is a {kind}: only text, numbers, booleans, lists and mappings"
    return _Fault(dotted, problem) if problem else None


def _entry_fault(name: Any, value: Any, dotted: str) -> _Fault | None:
    """The same for one entry of a free mapping, whose name counts too."""
    if not isinstance(name, str):
        return _Fault(dotted, f"key {name!r} is not text: put it in quotes")
    if problem := _text_problem(name):
        return _Fault(dotted, f"has a key that {problem}")
    within = f"{dotted}.{name}"
    if isinstance(value, str) and value and setting_is_secret(name, value):
        return _Fault(within, f"is named like a secret: {_ELSEWHERE}")
    return _free_fault(value, within)


def _text_problem(text: str) -> str:
    if kind := looks_secret(text):
        return f"contains {kind}: {_ELSEWHERE}"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return f"{_shown(text)} contains half a surrogate pair, which is not text: write UTF-8"
    return ""


def _pydantic_faults(error: ValidationError, known: list[_Fault]) -> list[_Fault]:
    """Pydantic's findings in our words, without those that follow from a fault already named."""
    found = []
    for detail in error.errors(include_url=False):
        named = [str(part) for part in detail["loc"] if not str(part).startswith("[")]
        dotted = ".".join(named) or "configuration"
        # A rule of a whole section, or one that spans sections, cannot be checked while a key of it
        # is refused: its default would be used.
        about_it = (
            not detail["loc"] or fault.key == dotted or fault.key.startswith(f"{dotted}.")
            for fault in known
        )
        follows = detail["type"] in ("missing", "value_error") and any(about_it)
        if not follows:
            found.append(_Fault(dotted, _rule(detail)))
    return found


def _rule(detail: Any) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "missing":
        return "is required and not set: add it to the file or give it with --set"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"{_shown(value)} is none of {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"{_shown(value)} must match {context['pattern']}"
    bounds = {
        "greater_than_equal": "must be at least {ge}",
        "greater_than": "must be greater than {gt}",
        "less_than_equal": "must be at most {le}",
        "less_than": "must be less than {lt}",
    }
    if kind in bounds:
        return f"{_shown(value)} {bounds[kind].format(**context)}"
    wanted = {
        "bool": "is not a boolean: write true or false",
        "int": "is not a whole number",
        "float": "is not a number",
        "finite": "is not a finite number",
        "string": "is not text: put it in quotes",
        "tuple": "is not a list: write it as [a, b]",
    }
    rule = next((text for start, text in wanted.items() if kind.startswith(start)), detail["msg"])
    return f"{_shown(value)} {rule}"


def _unknown(dotted: str, root: type[BaseModel]) -> str:
    if names_secret(dotted.rpartition(".")[2]):
        return "unknown key; secrets are read from the environment (WANDB_API_KEY), never from here"
    if dotted in ABSENT_KEYS:
        return ABSENT_KEYS[dotted]
    hint = nearest(dotted, root)
    return f"unknown key; did you mean {hint}?" if hint else "unknown key"


def _shown(value: Any) -> str:
    text = hide_secrets(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _message(
    path: str | None, overrides: Sequence[str], faults: list[_Fault], sources: dict[str, str]
) -> str:
    origin = path or "defaults"
    if overrides:
        origin += f" and {len(overrides)} --set"
    unique = list(dict.fromkeys(faults))
    plural = "s" if len(unique) > 1 else ""
    lines = [f"{len(unique)} problem{plural} in the configuration ({origin}):"]
    for fault in unique:
        where = _source_of(fault.key, sources)
        lines.append(f"  {fault.key}: {fault.text}{f' ({where})' if where else ''}")
    return "\n".join(lines)


def _source_of(dotted: str, sources: dict[str, str]) -> str:
    """Where a key was given; of a section, with the overrides of keys in it."""
    given = [key for key, source in sources.items() if source == _SET]
    section = around = dotted
    while around not in sources and around:
        section, around = around, around.rpartition(".")[0]
    # A section that only overrides have made is not in the file.
    section = dotted if around == dotted else section
    inside = [f"{_SET} {key}" for key in given if key.startswith(f"{section}.")]
    return " and ".join(filter(None, [sources.get(around, ""), *inside]))


_REFUSED = object()
