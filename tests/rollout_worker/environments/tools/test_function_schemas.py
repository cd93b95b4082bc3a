"""What chat templates get of a function, and what is refused before a run."""

import inspect
import json
from typing import Any, Optional

import pytest
from transformers.utils import get_json_schema

from models.load_tokenizer import load_tokenizer
from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.environments.environment_pool import validate_environment
from rollout_worker.environments.tools.function_schemas import BadTool, schema_of, schemas_of
from tests.rollout_worker.environments.test_environment_pool import REWARD
from tests.rollout_worker.environments.tools import tool_kinds

KINDS = "tests.rollout_worker.environments.tools.tool_kinds"


def test_a_schema_comes_of_type_hints_and_docstring():
    assert schema_of(tool_kinds.weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.\n\nOf one place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the place, as in an atlas."},
                    "unit": {
                        "type": "string",
                        "enum": ["c", "f"],
                        "default": "c",
                        "description": "Of the temperature.",
                    },
                    "days": {
                        "type": "integer",
                        "default": 1,
                        "description": "How many: 1 to 7.",
                    },
                },
                "required": ["city"],
            },
        },
    }


def nested(rows: list[list[int]], table: dict[str, float], title: Any = None) -> str:
    """Sums rows.

    Args:
        rows: Of numbers.
        table: Weights.
        title: Of anything.
    """
    return ""


def without() -> str:
    """Tells the time."""
    return ""


@pytest.mark.parametrize("function", [nested, without, tool_kinds.later, tool_kinds.weather])
def test_types_and_texts_are_those_that_transformers_finds(function):
    def essence(schema):
        parameters = schema["function"]["parameters"]
        for one in parameters["properties"].values():
            one.pop("default", None)
        return (
            schema["function"]["name"],
            schema["function"]["description"],
            parameters["properties"],
            parameters.get("required", []),
        )

    assert essence(schema_of(function)) == essence(get_json_schema(function))


def test_a_method_is_a_tool_and_self_is_no_argument():
    class Board:
        def move(self, square: str) -> str:
            """Moves.

            Args:
                square: Such as e4.
            """
            return square

    assert list(schema_of(Board().move)["function"]["parameters"]["properties"]) == ["square"]


@pytest.mark.parametrize(
    "given",
    [
        {"name": "add", "parameters": {"type": "object"}},
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    ],
)
def test_a_schema_is_taken_as_it_is(given):
    wrapped = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert schema_of(given) == wrapped


def no_docstring(a: int) -> str:
    return ""


def no_hint(a) -> str:
    """Does.

    Args:
        a: One.
    """
    return ""


def undescribed(a: int, b: int) -> str:
    """Does.

    Args:
        a: One.
    """
    return ""


def any_number(*numbers: int) -> str:
    """Does."""
    return ""


def of_a_class(a: inspect.Signature) -> str:
    """Does.

    Args:
        a: One.
    """
    return ""


def unknown_hint(a: "Nothing") -> str:  # noqa: F821
    """Does.

    Args:
        a: One.
    """
    return ""


def wrong_default(a: int = "five") -> str:  # pyright: ignore[reportArgumentType]
    """Does.

    Args:
        a: One.
    """
    return ""


def default_of_no_json(a: object = object()) -> str:
    """Does.

    Args:
        a: One.
    """
    return ""


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([wrong_default], "'wrong_default': the default of 'a' is not of its type hint .'five' is"),
        ([default_of_no_json], "the default of 'a' is no JSON value, <object object"),
        ([no_docstring], "'no_docstring' needs a docstring"),
        ([no_hint], "'no_hint': its argument 'a' needs a type hint"),
        ([undescribed], "must describe the argument 'b' for the model, under `Args:`"),
        ([any_number], r"passed by name, \*numbers: int cannot be"),
        ([of_a_class], "'of_a_class': a type hint has no JSON schema"),
        ([unknown_hint], "'unknown_hint': a type hint has no JSON schema"),
        ([3], "a function or its JSON schema, got int '3'"),
        ([{"description": "x"}], "must name its function"),
        ([{"name": "a", "parameters": {"type": "objet"}}], "'a': its parameters are no JSON sch"),
        ([{"name": "a", "parameters": {"default": float("nan")}}], "'a': its schema is no JSON"),
        ([without, without], r"the names of tools must differ, got \['without', 'without'\]"),
        ("without", "tools must be a list of functions, or of JSON schemas, got str"),
        ([{"name": "a", "description": "x" * 300_000}], "have 300,.* bytes, at most 262,144"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_the_reason(tools, message):
    with pytest.raises(BadTool, match=message):
        schemas_of(tools)


def optional(a: Optional[int] = None) -> str:  # noqa: UP045 - both ways of writing it
    """Does.

    Args:
        a: One.
    """
    return ""


def test_an_optional_argument_may_be_null_and_is_not_required():
    parameters = schema_of(optional)["function"]["parameters"]
    kinds = [one["type"] for one in parameters["properties"]["a"]["anyOf"]]
    assert (kinds, parameters["required"]) == (["integer", "null"], [])


# --- an environment with tools


def test_the_tools_of_an_environment_reach_the_chat_template():
    config = EnvironmentConfig(name=f"{KINDS}:Offering")
    tools = validate_environment(config, REWARD)
    assert [tool["function"]["name"] for tool in tools] == ["weather", "add"]
    tokenizer = load_tokenizer(
        "deploy/demo/model",
        chat_template="{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    asked = [{"role": "user", "content": "Guess."}]
    assert tokenizer.decode(tokenizer.encode_chat(asked)) == "Guess."
    offering = tokenizer.with_tools(tools)
    assert offering.decode(offering.encode_chat(asked)) == "[weather][add]Guess."
    after = offering.encode_after_turn(asked, asked, last_id=0, history="as_rendered")
    assert offering.decode(after) == "Guess."
    assert tokenizer.decode(tokenizer.encode_chat(asked)) == "Guess."


def test_an_environment_without_tools_offers_none():
    name = "tests.rollout_worker.environments.kinds:Guessing"
    assert validate_environment(EnvironmentConfig(name=name), REWARD) == ()


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Offering", {"more": 3}, r"Offering': a tool must be a function .*, got int '3'"),
        ("Offering", {"more": {"name": "add"}}, r"names of tools must differ"),
        ("Unmade", {}, r"Unmade' cannot be made with params=\{\}: LookupError: no table"),
    ],
)
def test_an_environment_with_bad_tools_is_refused_before_the_run(kind, params, message):
    with pytest.raises(ValueError, match=message):
        validate_environment(EnvironmentConfig(name=f"{KINDS}:{kind}", params=params), REWARD)


def test_a_template_that_reads_no_tools_is_refused_before_the_run():
    tokenizer = load_tokenizer("deploy/demo/model")
    with pytest.raises(ValueError, match="tools of the environment: .* does not read tools"):
        tokenizer.with_tools(schemas_of([tool_kinds.weather]))
    assert tokenizer.with_tools([]).template is tokenizer.template


def test_schemas_are_json(tmp_path):
    schemas = schemas_of([tool_kinds.weather, nested, optional])
    assert json.loads(json.dumps(schemas)) == schemas
