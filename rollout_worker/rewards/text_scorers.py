r"""Built-in scorers for answers that are texts: equal, matching, one option, or JSON of a form.

What they cannot read with certainty pays 0; a gold answer or a parameter that cannot be used is an
error.
"""

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, Literal

from rollout_worker.rewards import answers

LETTERS = "ABCDEFGHIJ"

_STATEMENT = re.compile(
    r"#{4,}|\\f?boxed\s*\{|\b(?:answer|option|choice)\b\**\s*(?:is\b|[:=])", re.IGNORECASE
)
_DECORATION = (
    r"(?:[\s*_`\"'$:={]|\\[,;: ]|\\(?:text|mathrm|textbf)(?![A-Za-z])"
    r"|\b(?:option|choice|answer|letter|is)\b)*"
)
_OPTION = re.compile(
    rf"{_DECORATION}[(\[]?(?P<letter>[A-Za-z])(?![^\W_]|['\u2019][a-z])", re.IGNORECASE
)
# After the letter: nothing, its reason, or a delimiter and the text of the option.
_REST = re.compile(
    r"(?P<plain>[\s.*_`\"'$)\]}!,;]*"
    r"(?:\s(?:because|since|as|for the reason|is (?:the )?(?:correct|right)|for)\b.*)?)\Z"
    r"|[*_`\"'$\]}]*[).:\]][*_`]*\s*(?P<text>\S.*)\Z",
    re.DOTALL | re.IGNORECASE,
)
# What follows a letter only to deny it.
_DENIAL = r"(?i:\A\W*(?:(?:is|was)(?:\s+not|n['\u2019]t|\s+wrong|\s+incorrect)|wrong|incorrect)\b)"
_BETWEEN = " \t,;.:*_$`\"'("
_FENCED = re.compile(
    r"```(?:json)?[^\S\n]*\n(?P<content>.*?)\n?[^\S\n]*```", re.DOTALL | re.IGNORECASE
)


def normalised(text: str) -> str:
    """The text in Unicode's form NFC, in lower case (casefold), each run of white space one space.

    Nothing else is changed: punctuation, accents and invisible characters count.
    """
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


def exact(
    completion: str,
    *,
    answer: str,
    prompt: str,
    item: dict,
    extract: Literal["marker", "whole"] = "marker",
) -> float:
    """Scores 1 where the answer of the completion and the gold answer are the same text, else 0.

    Args:
        completion: both are compared as `normalised` says.
        answer: gold answer, or a text that ends in `#### answer`.
        prompt: not used.
        item: not used.
        extract: `marker` compares the line after the last `####`, and scores 0 without one;
            `whole` compares the completion.

    Raises:
        ValueError: if the gold answer is empty.
    """
    gold = normalised(answers.gold_answer(answer))
    if not gold:
        raise ValueError("the gold answer is empty: exact compares texts")
    text = answers.answer_text(completion) if extract == "marker" else completion
    return float(text is not None and normalised(text) == gold)


def regex(
    completion: str, *, answer: str, prompt: str, item: dict, pattern: str | None = None
) -> float:
    """Scores 1 where a regular expression is found in the completion, else 0.

    Args:
        completion: searched; `.` also matches a newline.
        answer: the expression, if `pattern` is None.
        prompt: not used.
        item: not used.
        pattern: an expression for all prompts.

    Raises:
        ValueError: if the answer is to be the expression and is none, or is empty.
    """
    if pattern is None and not answer:
        raise ValueError("the gold answer is empty: regex takes its expression from it, or pattern")
    source = "the gold answer" if pattern is None else "pattern"
    expression = compile_pattern(answer if pattern is None else pattern, source)
    return float(expression.search(completion) is not None)


def compile_pattern(pattern: Any, source: str) -> re.Pattern:
    """Compiles a regular expression in which `.` matches a newline.

    Raises:
        ValueError: if it is none, with the name of its source.
    """
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{source}={pattern!r} is not a regular expression: {error}") from error


def multiple_choice(
    completion: str, *, answer: str, prompt: str, item: dict, letters: str = LETTERS
) -> float:
    r"""Scores 1 where the completion chooses the option of the gold answer, and no other, else 0.

    The choice is a letter after the last `####`, in the last `\boxed{}` or after the last
    `answer is` or `answer:`; without any of these the completion must be nothing but the choice. It
    may be in brackets or bold, and its option's text or its reason may follow. Two letters, as in
    `A or B`, two different choices on one line, and a letter that is denied are no choice.

    Args:
        completion: the text sampled.
        answer: `B`, `(b)`, `B.` or `B) text of the option`.
        prompt: not used.
        item: not used.
        letters: of the options.

    Raises:
        ValueError: if the gold answer is not one of the letters.
    """
    gold = _read_option(answers.gold_answer(answer), letters)
    if gold is None:
        raise ValueError(
            f"the gold answer {answer[-80:]!r} is not one of the letters {letters}: "
            "multiple_choice needs it as B, (B), B. or B) text; exact compares other texts"
        )
    return float(_chosen(completion, letters) == gold)


def _chosen(completion: str, letters: str) -> str | None:
    """The letter that a completion chooses, or None without a certain one."""
    found = [*_STATEMENT.finditer(completion)]
    if not found:
        return _read_option(completion, letters)
    start = completion.rfind("\n", 0, found[-1].start()) + 1
    here = [one for one in found if one.start() >= start]
    ends = [one.start() for one in here[1:]]
    first, _, _ = completion[here[-1].end() :].lstrip().partition("\n")
    texts = [
        completion[one.end() : end].strip(_BETWEEN) for one, end in zip(here, ends, strict=False)
    ]
    # `answer: option B` states once; what stands between two statements may be empty.
    read = [_read_option(text, letters) for text in [*filter(None, texts), first]]
    return read[0] if len(set(read)) == 1 else None


def _read_option(text: str, letters: str) -> str | None:
    """Reads a text that should be one option, with its text or a reason."""
    text = text.strip()
    found = _OPTION.match(text)
    if not found or found["letter"].upper() not in letters:
        return None
    rest = _REST.match(text[found.end() :])
    if rest is None:
        return None
    more = rest["text"] or rest["plain"]
    label = f"[{letters}]"
    if re.search(
        rf"(?:\b(?i:or|and)|[,/&;])\s*(?i:option\s*)?[(\[]?{label}(?![^\W_])|[(\[]{label}[)\]]"
        rf"|(?<![^\W_]){label}\)|\A{label}\W*\Z|{_DENIAL}",
        more,
    ):
        return None
    return found["letter"].upper()


def json_schema(
    completion: str,
    *,
    answer: str,
    prompt: str,
    item: dict,
    schema: dict | None = None,
    field: str = "schema",
) -> float:
    """Scores 1 where the completion is JSON that a schema allows, else 0.

    Args:
        completion: JSON and nothing else, or with one block in ``` fences, which is then read.
            NaN, infinities and names that occur twice in an object are no JSON.
        answer: not used.
        prompt: not used.
        item: has the schema, or its text, in `field`, if `schema` is None.
        schema: a JSON schema for all prompts. References lead to places within it only.
        field: of the item.

    Raises:
        ValueError: if there is no schema, or it is none.
    """
    validator = _validator(item, schema, field)
    blocks = [*_FENCED.finditer(completion)]
    if len(blocks) > 1:
        return 0.0
    try:
        value = json.loads(
            blocks[0]["content"] if blocks else completion,
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_names,
        )
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(value))


def _validator(item: Mapping[str, Any], schema: Any, field: str) -> Any:
    # Loading the libraries takes time that only this scorer should cost.
    import jsonschema.validators
    import referencing

    source = "schema" if schema is not None else f"the row's field {field!r}"
    if schema is None:
        if field not in item:
            raise ValueError(
                f"json_schema has no schema: the row has no field {field!r} (it has "
                f"{sorted(map(str, item))}), and params has no schema"
            )
        schema = item[field]
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{source} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{source} must be a JSON schema, got {type(schema).__name__}")
    dialect = schema.get("$schema")
    kind = latest = jsonschema.Draft202012Validator
    if isinstance(dialect, str):
        kind = jsonschema.validators.validator_for(schema, default=latest)
    known = kind.META_SCHEMA.get("$id") or kind.META_SCHEMA["id"]
    if dialect is not None and str(dialect).rstrip("#") != known.rstrip("#"):
        raise ValueError(
            f"{source} is of the dialect $schema={dialect!r:.80}, which is not known: name one "
            f"such as {latest.META_SCHEMA['$id']}, or leave it out"
        )
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"{source} is not a JSON schema: {error.message[:200]}") from None
    return kind(schema, registry=referencing.Registry())


def _check_references(validator: Any, source: str) -> None:
    """Raises ValueError for a reference that leads out of a schema, to nothing, or in a circle."""
    import referencing.exceptions
    import referencing.jsonschema

    dialect = validator.META_SCHEMA.get("$id") or validator.META_SCHEMA["id"]
    root = referencing.Resource.from_contents(
        validator.schema,
        default_specification=referencing.jsonschema.specification_with(dialect),
    )
    left = [(root, referencing.Registry().resolver_with_root(root))]
    while left:
        here, resolver = left.pop()
        for key in ("$ref", "$dynamicRef"):
            reference = here.contents.get(key) if isinstance(here.contents, dict) else None
            if not isinstance(reference, str):
                continue
            try:
                resolver.lookup(reference)
            except referencing.exceptions.Unresolvable:
                raise ValueError(
                    f"{source} has {key}={reference!r:.80}, which is no place within it: write "
                    "what it stands for into $defs"
                ) from None
        left += [(one, resolver.in_subresource(one)) for one in here.subresources()]
    try:
        for value in (None, True, 0, "", [], {}):
            validator.is_valid(value)
    except RecursionError:
        raise ValueError(f"{source} has a $ref that leads back to itself: correct it") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name occurs twice")
    return value


def check_exact(answer: str, item: dict, params: Mapping[str, Any]) -> None:
    """Raises ValueError for a gold answer that `exact` cannot judge."""
    exact("", answer=answer, prompt="", item=item)


def check_regex(answer: str, item: dict, params: Mapping[str, Any]) -> None:
    """Raises ValueError for a gold answer that `regex` cannot judge."""
    regex("", answer=answer, prompt="", item=item, pattern=params.get("pattern"))


def check_multiple_choice(answer: str, item: dict, params: Mapping[str, Any]) -> None:
    """Raises ValueError for a gold answer that `multiple_choice` cannot judge."""
    multiple_choice("", answer=answer, prompt="", item=item, letters=params.get("letters", LETTERS))


def check_json_schema(answer: str, item: dict, params: Mapping[str, Any]) -> None:
    """Raises ValueError for a row without a schema."""
    if params.get("schema") is None:  # else `check_schema` has seen it
        field = params.get("field", "schema")
        _check_references(_validator(item, None, field), f"the row's field {field!r}")


def check_letters(params: Mapping[str, Any]) -> None:
    """Raises ValueError for letters that name no options."""
    letters = params.get("letters", LETTERS)
    good = isinstance(letters, str) and re.fullmatch("[A-Z]{2,26}", letters)
    if not good or len(set(letters)) < len(letters):
        raise ValueError(f"letters={letters!r} must be different capital letters, such as ABCDE")


def check_pattern(params: Mapping[str, Any]) -> None:
    """Raises ValueError for a pattern that is no regular expression, or empty."""
    pattern = params.get("pattern")
    if pattern == "":
        raise ValueError("pattern='' is the same to every completion: give an expression")
    if pattern is not None:
        compile_pattern(pattern, "pattern")


def check_schema(params: Mapping[str, Any]) -> None:
    """Raises ValueError for a schema that is none."""
    if params.get("schema") is not None:
        _check_references(_validator({}, params["schema"], "schema"), "schema")
