r"""Scorers: a completion in, a reward out.

A scorer is a function

    score(completion: str, *, answer: str, prompt: str, item: dict, **params) -> float | dict

with the sampled text, the gold answer, the question and the whole record of the source. In a dict,
`value` is the reward, and `note` a text on it for samples.jsonl, such as the verdict of a judge;
the other keys are variants that are logged only. A number is one of Python, `decimal`, `fractions`,
or a scalar of numpy, JAX or torch; booleans count as 0 and 1. Any other result, and one that is not
finite, is an error of the scorer, as is any exception.

One whose first parameter is called `completions` is a group scorer: it gets the list of all
completions of a prompt, and returns a list with one such result for each, in their order. Either
kind may be `async def`; many calls of those run at once in a process. What a plain function returns
to be awaited, as a decorator around an async one does, is awaited too, one call at a time.

Scorers run in the child processes of `reward_pool.py`. The children import this module, so it
imports neither jax nor pydantic.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from rollout_worker.data.procedural import make_dataset
from rollout_worker.rewards import answers, text_scorers
from rollout_worker.rewards.code.code_tests import check_code_params, check_code_row, code_tests
from rollout_worker.rewards.judge import check_judge, judge
from services.user_code.import_path import (
    BadImportPath,
    NoSuchModule,
    load_attribute,
    nearest_hint,
)

Scorer = Callable[..., Any]


_IMPORT_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_GROUP = "completions"
"""First parameter of a scorer that sees all completions of a prompt."""

DEFAULT_FORMAT = r"(?:(?!####).)*(?<![^\n])#### ?[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?%?\s*"
"""Any text without the marker, then one line `#### number`, then nothing but white space."""


def gsm8k_answer(
    completion: str,
    *,
    answer: str,
    prompt: str,
    item: dict,
    mode: Literal["strict", "lenient"] = "strict",
) -> dict[str, float]:
    r"""Scores 1 where the final number equals the gold answer exactly, else 0.

    Args:
        completion: read by the rules of `answers.py`.
        answer: gold number, or a GSM8K solution that ends in `#### number`.
        prompt: not used.
        item: not used.
        mode: which variant is the reward. `strict` accepts only a number after `####` or in
            `\boxed{}`; `lenient` takes the last number of the text if there is neither.

    Returns:
        `value`, and both variants as `strict` and `lenient`.

    Raises:
        ValueError: if the gold answer is not a number.
    """
    gold = answers.parse_number(answers.gold_answer(answer))
    if gold is None:
        raise ValueError(
            f"the gold answer {answer[-80:]!r} is not a number: gsm8k_answer compares numbers, "
            "use math_verify or your own scorer for others"
        )

    def reward(final: answers.FinalAnswer | None) -> float:
        value: Fraction | None = final.value if final else None
        return 1.0 if value == gold else 0.0

    variants = {
        "strict": reward(answers.strict_answer(completion)),
        "lenient": reward(answers.lenient_answer(completion)),
    }
    return {"value": variants[mode], **variants}


def math_verify_answer(completion: str, *, answer: str, prompt: str, item: dict) -> float:
    """Scores 1 where the math-verify library finds the completion equal to the gold answer.

    Numbers are compared exactly: 1/3 is not 0.3333.

    Args:
        completion: searched for LaTeX and plain expressions by the library.
        answer: gold expression, with or without LaTeX delimiters.
        prompt: not used.
        item: not used.

    Raises:
        ValueError: if the gold answer has no expression.
    """
    # Loading the library takes a second, which only its own scorer should cost.
    from rollout_worker.rewards.expressions import equals_gold, parse_expressions

    gold_text = answers.gold_answer(answer)
    gold = parse_expressions(f"${gold_text}$") or parse_expressions(gold_text)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the gold answer {answer[-80:]!r}")
    return float(equals_gold(completion, gold_text, gold))


def answer_format(
    completion: str, *, answer: str, prompt: str, item: dict, pattern: str = DEFAULT_FORMAT
) -> float:
    """Scores 1 where the whole completion matches a pattern, else 0.

    Args:
        completion: matched from its first to its last character; `.` also matches a newline.
        answer: not used.
        prompt: not used.
        item: not used.
        pattern: a regular expression; the default requires exactly one `####`, on a last line
            `#### number`.
    """
    return 1.0 if text_scorers.compile_pattern(pattern, "pattern").fullmatch(completion) else 0.0


def reasoning_gym_answer(
    completion: str,
    *,
    answer: str,
    prompt: str,
    item: dict,
    extract: Literal["marker", "whole"] = "marker",
) -> float:
    """Lets the reasoning-gym task of a prompt score the answer; some tasks give partial credit.

    Args:
        completion: the text sampled.
        answer: not used; the task has its own.
        prompt: not used.
        item: of a `reasoning_gym:` source; its `reasoning_gym` entry says how to make the item
            again, since a task's own data about an item cannot be written as JSON.
        extract: `marker` passes the line after the last `####` to the task and scores 0 without
            one; `whole` passes the completion.

    Raises:
        ValueError: if the item is of another source, or the task makes a different item here.
    """
    if "reasoning_gym" not in item:
        raise ValueError("the reasoning_gym scorer needs prompts from a reasoning_gym: source")
    text = answers.answer_text(completion) if extract == "marker" else completion
    if text is None:
        return 0.0
    origin = item["reasoning_gym"]
    dataset = _dataset(
        origin["task"], origin["seed"], origin["size"], json.dumps(origin["params"], sort_keys=True)
    )
    entry = dataset[origin["index"]]
    if entry["question"] != item["question"]:
        raise ValueError(
            f"item {origin['index']} of {origin['task']} has another question here than in its "
            "prompt: the task depends on more than its seed, or versions of reasoning-gym differ"
        )
    return dataset.score_answer(text, entry)


@functools.lru_cache(maxsize=16)
def _dataset(task: str, seed: int, size: int, params: str):
    return make_dataset(task, seed=seed, size=size, params=json.loads(params))


class BadScorer(ValueError):
    """A reward function of the configuration does not exist or cannot take its parameters."""


@dataclasses.dataclass(frozen=True)
class ScorerKind:
    """How a scorer is called."""

    is_async: bool
    is_group: bool
    """It sees all completions of a prompt, and not one."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the functions that an environment offers; scorers have none."""
    wants_tokens: bool = False
    """Whether an environment reads the tokens of a turn beside its text."""


@dataclasses.dataclass(frozen=True)
class BuiltIn:
    """A scorer of this package, and the module that it needs, imported before any timed call."""

    score: Scorer
    needs: str | None = None
    check_gold: Callable[[str, dict, Mapping[str, Any]], object] | None = None
    """Raises ValueError for a gold answer, with its record, that the scorer cannot judge with its
    parameters."""
    check_params: Callable[[Mapping[str, Any]], object] | None = None
    """Raises ValueError for parameters that the scorer cannot use."""
    needs_answer: bool = False
    """Whether a record without an answer cannot be scored."""
    spends: bool = False
    """Whether it uses a service that is paid for, within `reward.budget`."""

    def bound_check(self, params: Mapping[str, Any]) -> Callable[[str, dict], object] | None:
        """The check of gold answers under these parameters, if there is one."""
        check = self.check_gold
        return None if check is None else lambda answer, item: check(answer, item, params)


def _check_number(answer: str, item: dict, params: Mapping[str, Any]) -> None:
    gsm8k_answer("", answer=answer, prompt="", item=item)


def _check_expression(answer: str, item: dict, params: Mapping[str, Any]) -> None:
    if answers.parse_number(answer) is None:  # numbers need not be parsed by the slow library
        math_verify_answer("", answer=answer, prompt="", item=item)


def _check_origin(answer: str, item: dict, params: Mapping[str, Any]) -> None:
    reasoning_gym_answer("", answer=answer, prompt="", item=item)


def _check_format(params: Mapping[str, Any]) -> None:
    if "pattern" in params:
        text_scorers.compile_pattern(params["pattern"], "pattern")
    text_scorers.check_pattern(params)


BUILT_INS = {
    "gsm8k_answer": BuiltIn(gsm8k_answer, check_gold=_check_number, needs_answer=True),
    "math_verify": BuiltIn(
        math_verify_answer, needs="math_verify", check_gold=_check_expression, needs_answer=True
    ),
    "format": BuiltIn(answer_format, check_params=_check_format),
    "reasoning_gym": BuiltIn(reasoning_gym_answer, needs="reasoning_gym", check_gold=_check_origin),
    "exact": BuiltIn(text_scorers.exact, check_gold=text_scorers.check_exact, needs_answer=True),
    "regex": BuiltIn(
        text_scorers.regex,
        check_gold=text_scorers.check_regex,
        check_params=text_scorers.check_pattern,
    ),
    "multiple_choice": BuiltIn(
        text_scorers.multiple_choice,
        check_gold=text_scorers.check_multiple_choice,
        check_params=text_scorers.check_letters,
        needs_answer=True,
    ),
    "json_schema": BuiltIn(
        text_scorers.json_schema,
        needs="jsonschema",
        check_gold=text_scorers.check_json_schema,
        check_params=text_scorers.check_schema,
    ),
    "code_tests": BuiltIn(code_tests, check_gold=check_code_row, check_params=check_code_params),
    "judge": BuiltIn(judge, needs="httpx", check_params=check_judge, spends=True),
}


def _nearest_built_in(name: str) -> str:
    # A colon never occurs in a built-in name; the text after it is more likely the misspelt name.
    return nearest_hint(name.rpartition(":")[2], list(BUILT_INS)) or nearest_hint(
        name, list(BUILT_INS)
    )


def resolve_scorer(name: str) -> Scorer:
    """Returns the scorer of a name: built-in, or `package.module:function`.

    Runs the module's own code, so it is called only in a child process.

    Raises:
        BadScorer: if there is no such scorer or its module does not load, with what to do.
    """
    if name in BUILT_INS:
        built_in = BUILT_INS[name]
        if built_in.needs:
            try:
                importlib.import_module(built_in.needs)
            except ImportError as error:
                raise BadScorer(
                    f"reward function {name!r} needs the package {built_in.needs}, which does not "
                    f"import ({error}): install it"
                ) from error
        return built_in.score
    if not _IMPORT_PATH.fullmatch(name):
        raise BadScorer(
            f"unknown reward function {name!r}{_nearest_built_in(name)}: built in are "
            f"{', '.join(BUILT_INS)}; your own is written package.module:function"
        )
    try:
        scorer = load_attribute(name)
    except NoSuchModule as error:
        raise BadScorer(
            f"reward function {name!r}: {error}. Built in are {', '.join(BUILT_INS)}"
            f"{_nearest_built_in(name)}"
        ) from error
    except BadImportPath as error:
        raise BadScorer(f"reward function {name!r}: {error}") from error
    if not callable(scorer) or isinstance(scorer, type):
        raise BadScorer(
            f"reward function {name!r} must be a function, got {type(scorer).__name__} "
            f"{str(scorer)[:80]!r}: name a def or async def"
        )
    if inspect.isgeneratorfunction(scorer) or inspect.isasyncgenfunction(scorer):
        raise BadScorer(
            f"reward function {name!r} is a generator, which yields: it must return its result"
        )
    return scorer


def kind_of(scorer: Scorer) -> ScorerKind:
    """Tells how a scorer is called, by its signature, which `check_scorer_params` has read."""
    is_async = inspect.iscoroutinefunction
    return ScorerKind(
        is_async=is_async(scorer) or is_async(type(scorer).__call__),
        is_group=next(iter(inspect.signature(scorer).parameters), "") == _GROUP,
    )


def check_scorer_params(name: str, scorer: Scorer, params: Mapping[str, Any]) -> None:
    """Refuses parameters that a scorer does not take, and scorers that cannot be called.

    Raises:
        BadScorer: naming the parameter, the nearest one known, and those that the scorer takes.
    """
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError) as error:
        raise BadScorer(
            f"reward function {name!r} must be a plain function of Python: {error}"
        ) from error
    given = {"answer": "", "prompt": "", "item": {}}
    first = _GROUP if _GROUP in list(signature.parameters)[:1] else "completion"
    own = [key for key in list(signature.parameters)[1:] if key not in given]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in params:
        if key in given:
            raise BadScorer(
                f"reward function {name!r}: params must not hold {key!r}, which is passed already"
            )
        if key not in own and not takes_any:
            raise BadScorer(
                f"reward function {name!r} has no parameter {key!r}{nearest_hint(key, own)}; "
                f"it takes {own or 'none'}"
            )
        choices = signature.parameters.get(key)
        if choices is not None and typing.get_origin(choices.annotation) is Literal:
            allowed = typing.get_args(choices.annotation)
            if params[key] not in allowed:
                raise BadScorer(
                    f"reward function {name!r}: {key} must be one of {list(allowed)}, "
                    f"got {params[key]!r}"
                )
    try:
        signature.bind("", **given, **params)
    except TypeError as error:
        raise BadScorer(
            f"reward function {name!r} cannot be called as score({first}, answer=, prompt=, "
            f"item=, {', '.join(f'{key}=' for key in params)}): {error}"
        ) from error
    _check_check(name, getattr(scorer, "check_gold", None))
    check = next((one.check_params for one in BUILT_INS.values() if one.score is scorer), None)
    try:
        if check is not None:
            check(params)
    except ValueError as error:
        raise BadScorer(f"reward function {name!r}: {error}") from error
    _check_types(name, signature, params)  # after the checks, which say more


_PLAIN: dict[Any, Any] = {bool: bool, int: int, float: (int, float), str: str}


def _check_types(name: str, signature: inspect.Signature, params: Mapping[str, Any]) -> None:
    """Refuses values of another type than a plain annotation says: `no` is a text that is true."""
    named = {one.__name__: one for one in _PLAIN}
    for key, value in params.items():
        parameter = signature.parameters.get(key)
        annotation = parameter.annotation if parameter is not None else None
        wanted = named.get(annotation, annotation) if isinstance(annotation, str) else annotation
        if not isinstance(wanted, type) or wanted not in _PLAIN:
            continue
        wrong_bool = isinstance(value, bool) and wanted is not bool
        if wrong_bool or not isinstance(value, _PLAIN[wanted]):
            raise BadScorer(
                f"reward function {name!r}: {key}={value!r:.80} must be of type "
                f"{wanted.__name__}, got {type(value).__name__}"
            )


def _check_check(name: str, check: Any) -> None:
    """Refuses a check of gold answers that cannot be called as `check(answer, item)`."""
    if check is None:
        return
    problem = "" if callable(check) else f"it is of type {type(check).__name__}"
    if inspect.iscoroutinefunction(check):
        problem = "it is async"
    if not problem:
        try:
            inspect.signature(check).bind("", {})
        except (TypeError, ValueError) as error:
            problem = str(error)
    if problem:
        raise BadScorer(
            f"reward function {name!r}: its check_gold must be a plain function "
            f"check(answer, item): {problem}"
        )
