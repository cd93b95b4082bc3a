"""YAML 1.2 text to plain values and back, with the line of every key.

What ruamel resolves beyond the core schema of YAML 1.2 stays text: dates and a lone `=`.
"""

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

_NOT_IN_YAML_12 = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
_MAX_DEPTH = 64
_OLD_BREAKS = re.compile("[\x85\u2028\u2029]")
_STRING_TAG = "tag:yaml.org,2002:str"


def parse_yaml(text: str, lines: dict[str, int] | None = None) -> Any:
    """Reads one YAML 1.2 document of plain values; fills `lines` with the line of each dotted key.

    Raises:
        YAMLError: for a syntax error, a duplicate key, a second document, a foreign tag, or more
            nesting than any configuration has.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    node = yaml.compose(text)
    if node is None:
        return None
    _walk(node, "", {} if lines is None else lines, set(), ())
    return yaml.constructor.construct_document(node)


class _Composer(Composer):
    """Stops at the first node that is nested too deeply: to scan on would take minutes."""

    _depth = 0

    def compose_node(self, parent, index):
        if self._depth > _MAX_DEPTH:
            problem = f"nested more than {_MAX_DEPTH} levels deep"
            mark = self.parser.peek_event().start_mark
            raise MarkedYAMLError(problem=problem, problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _walk(
    node: Node, dotted: str, lines: dict[str, int], seen: set[int], around: tuple[Node, ...]
) -> None:
    """Visits every node once: undoes dates and a lone `=`, and notes the line of each key.

    Raises:
        MarkedYAMLError: if an alias is inside what it names, which would never end.
    """
    if any(node is outer for outer in around):
        raise MarkedYAMLError(problem="an alias contains itself", problem_mark=node.start_mark)
    if id(node) in seen:
        return
    seen.add(id(node))
    prefix, inside = (f"{dotted}." if dotted else ""), (*around, node)
    if isinstance(node, ScalarNode):
        if node.style is None and node.tag in _NOT_IN_YAML_12:
            node.tag = _STRING_TAG
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
            _walk(key, f"{prefix}{key.value}", lines, seen, inside)
            _walk(value, f"{prefix}{key.value}", lines, seen, inside)
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{prefix}{index}"] = item.start_mark.line + 1
            _walk(item, f"{prefix}{index}", lines, seen, inside)


class _Representer(SafeRepresenter):
    """Quotes text with line breaks that only YAML 1.1 has, so that they are read back."""

    def represent_str(self, data: str):
        style = '"' if _OLD_BREAKS.search(data) else None
        return self.represent_scalar(_STRING_TAG, data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


def dump_yaml(value: Any) -> str:
    """Text that `parse_yaml` reads back to an equal value; mappings keep their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[attr-defined]
    yaml.width = 100
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def yaml_problem(error: YAMLError) -> str:
    """Where and why a text is not YAML: `, line 3, column 1: ...`, to follow its name."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return f": not YAML: {error}"
    mark = error.problem_mark
    problem = re.sub(r" with value .*", "", error.problem or str(error), flags=re.S)
    first = error.context_mark
    since = ""
    if first is not None and "duplicate" in problem:
        since = f", in the mapping that starts at line {first.line + 1}: keep one of them"
    return f", line {mark.line + 1}, column {mark.column + 1}: {problem}{since}"
