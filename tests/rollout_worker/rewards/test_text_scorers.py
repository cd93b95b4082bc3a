"""Scorers of texts: equal, matching, one option, JSON of a form; values by hand."""

import pytest

from rollout_worker.rewards.gold_answers import find_unjudged
from rollout_worker.rewards.reward_pool import ScoreRequest
from rollout_worker.rewards.scorers import BadScorer, check_scorer_params, resolve_scorer
from rollout_worker.rewards.text_scorers import check_json_schema
from tests.deadlines import HANG_S


def score(name, completion, answer="", item=None, **params):
    scorer = resolve_scorer(name)
    check_scorer_params(name, scorer, params)
    return scorer(completion, answer=answer, prompt="", item=item or {}, **params)


@pytest.mark.parametrize(
    "completion, answer, expected",
    [
        ("so\n#### Paris", "Paris", 1),
        ("#### **paris**  ", " PARIS", 1),
        ("#### New \t York\u00a0City", "new york city", 1),
        ("#### Cafe\u0301", "caf\u00e9", 1),
        ("#### Stra\u00dfe", "STRASSE", 1),
        ("#### Paris.", "Paris", 0),
        ("#### Cafe", "caf\u00e9", 0),
        ("#### x\u00b2", "x2", 0),
        ("#### Par\u200bis", "Paris", 0),
        ("#### London\n#### Paris", "Paris", 1),
        ("#### Paris\n#### London", "Paris", 0),
        ("Paris", "Paris", 0),
        ("#### Paris", "a solution\n#### Paris", 1),
        ("", "Paris", 0),
        ("####", "Paris", 0),
    ],
)
def test_exact(completion, answer, expected):
    assert score("exact", completion, answer) == expected


def test_exact_takes_the_whole_completion_where_it_is_asked_to():
    assert score("exact", " New\nYork ", "new york", extract="whole") == 1
    assert score("exact", "#### new york", "new york", extract="whole") == 0
    with pytest.raises(ValueError, match="gold answer is empty"):
        score("exact", "", " ")


def test_regex_of_the_answer_or_of_all_prompts():
    assert score("regex", "x\nyes, 12 of them", r"yes.*\d+") == 1
    assert score("regex", "no", r"yes") == 0
    assert score("regex", "begin\nend", "(2, 5", pattern=r"\Abegin.end\Z") == 1
    assert score("regex", "", "a*") == 1
    for answer, message in [
        ("(2, 5", "the gold answer='(2, 5' is not a regular"),
        ("", "is empty"),
    ]:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            score("regex", "x", answer)
    for pattern in ("(", 3):
        with pytest.raises(BadScorer, match="'regex': pattern=.* is not a regular expression"):
            score("regex", "x", "y", pattern=pattern)


CHOOSES_B = [
    "B",
    " (b) ",
    "B.",
    "**B**",
    "B) Paris",
    "B. A dog",
    "**B) Paris**",
    "so\n#### B",
    "####\nB",
    "#### (B)",
    "#### option B",
    r"thus \boxed{B}",
    r"$\boxed{\text{B}}$.",
    r"\boxed{(B)}",
    r"The final answer is: $\boxed{B}$",
    "I first thought A.\nThe answer is B.",
    "Answer: A\nNo. Answer: **B**",
    "**Answer:** B",
    "answer is (B) because A is too small",
    "The correct answer is B, B.".replace(", B", ""),
    "The answer is B) Not enough information",
    "The answer is option B: Paris",
    "The answer is B. It does not depend on C.",
]
CHOOSES_NOTHING = [
    "",
    "A or B",
    "#### A or B",
    "#### B or C",
    "#### B, C",
    "#### B/C",
    "#### B and C",
    "#### (B) (C)",
    "#### B) C",
    "A) London\nB) Paris",
    "Both A and B",
    "The answer is A. The answer is B.",
    r"\boxed{A} \boxed{B}",
    r"\boxed{A}, so the answer is B",
    "The answer is not B",
    "#### B is wrong",
    "#### B isn't right",
    "answer: B: is not it",
    "A dog",
    "#### a banana",
    "Because",
    "#### Be",
    "#### B2",
    "#### 2",
    "#### Z",
    "#### Paris",
    "B is tempting\nand so is C",
    "\u0412",
    "\uff22",
]


@pytest.mark.parametrize("completion", CHOOSES_B)
def test_one_choice_is_read(completion):
    assert score("multiple_choice", completion, "B") == 1
    assert score("multiple_choice", completion, "C") == 0


@pytest.mark.parametrize("completion", CHOOSES_NOTHING)
def test_an_ambiguous_choice_is_never_paid(completion):
    assert [score("multiple_choice", completion, gold) for gold in "ABC"] == [0, 0, 0]


@pytest.mark.parametrize("answer", ["B", "b", "(B)", "B.", "B) Paris", "[B]", "reason\n#### B"])
def test_gold_options(answer):
    assert score("multiple_choice", "#### B", answer) == 1


@pytest.mark.parametrize("answer", ["", "Paris", "A dog", "A or B", "Z", "1", "AB"])
def test_a_gold_answer_that_is_no_option_is_an_error(answer):
    with pytest.raises(ValueError, match="is not one of the letters ABCDEFGHIJ"):
        score("multiple_choice", "#### A", answer)


def test_letters_of_the_options():
    assert score("multiple_choice", "#### Z", "Z", letters="XYZ") == 1
    for letters in ("", "A", "abc", "AAB", 3):
        with pytest.raises(BadScorer, match="must be different capital letters"):
            score("multiple_choice", "x", "A", letters=letters)


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "completion, expected",
    [
        ('{"age": 3}', 1),
        (' \n{"age": 3}\n', 1),
        ('Here:\n```json\n{"age": 3}\n```\nDone.', 1),
        ('```\n{"age": 3}\n```', 1),
        ('{"age": -1}', 0),
        ('{"age": "3"}', 0),
        ('{"age": 3, "more": 1}', 0),
        ('{"age": -1, "age": 3}', 0),
        ('{"age": NaN}', 0),
        ('{"age": 3', 0),
        ('{"age": 3} and more', 0),
        ('```\n{"age": 3}\n```\n```\n{"age": 4}\n```', 0),
        ("", 0),
        ("[" * 100_000, 0),
        ("9" * 10_000, 0),
        ('"\\ud800"', 0),
    ],
)
def test_json_schema(completion, expected):
    assert score("json_schema", completion, schema=SCHEMA) == expected
    assert score("json_schema", completion, item={"form": SCHEMA}, field="form") == expected


def test_the_schema_of_a_row_may_be_a_text():
    assert score("json_schema", "[1]", item={"schema": '{"type": "array"}'}) == 1
    assert score("json_schema", "{}", item={"schema": '{"type": "array"}'}) == 0


@pytest.mark.parametrize(
    "item, message",
    [
        ({"other": 1}, "the row has no field 'schema' .it has .'other'"),
        ({"schema": "{"}, "the row's field 'schema' is not JSON"),
        ({"schema": 3}, "must be a JSON schema, got int"),
        ({"schema": {"type": "objekt"}}, "is not a JSON schema: 'objekt' is not valid"),
    ],
)
def test_a_row_without_a_schema_is_an_error(item, message):
    with pytest.raises(ValueError, match=message):
        score("json_schema", "{}", item=item)


def test_a_schema_is_never_fetched():
    reference = {"$ref": "http://127.0.0.1:9/schema.json"}
    with pytest.raises(Exception, match="127.0.0.1"):
        score("json_schema", "{}", schema=reference)
    inside = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert score("json_schema", "3", schema=inside) == 1


@pytest.mark.parametrize(
    "schema, problem",
    [
        (
            {"properties": {"a": {"$ref": "#/$defs/n"}}},
            r"\$ref='#/\$defs/n', which is no place with",
        ),
        (
            {"items": {"$ref": "http://127.0.0.1:9/x"}},
            r"\$ref='http.*', which is no place within it",
        ),
        ({"anyOf": [{"$ref": "#"}]}, "leads back to itself"),
        (
            {"$schema": "http://other/draft"},
            "of the dialect .schema='http://other/draft', which is",
        ),
        ({"$schema": 7}, "of the dialect .schema=7, which is not known"),
    ],
)
def test_a_schema_that_no_completion_can_be_held_to_is_refused_at_the_start(schema, problem):
    with pytest.raises(BadScorer, match=problem):
        score("json_schema", "{}", schema=schema)
    with pytest.raises(ValueError, match=f"the row's field 'schema' .*{problem}"):
        check_json_schema("", {"schema": schema}, {})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"next": {"$ref": "#"}, "$ref": {"type": "string"}}},
        {"$id": "http://a/b", "$defs": {"c": {"$id": "c"}}, "properties": {"k": {"$ref": "c"}}},
        {"$defs": {"a": {"$anchor": "x"}}, "$ref": "#x", "enum": [{"$ref": "nowhere"}, {}]},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a"}
        | {"definitions": {"a": {}}},
    ],
)
def test_references_within_a_schema_are_followed(schema):
    assert score("json_schema", "{}", schema=schema) == 1


def test_a_schema_of_the_configuration_that_is_none_is_refused():
    with pytest.raises(BadScorer, match="'json_schema': schema is not a JSON schema"):
        score("json_schema", "{}", schema={"type": "objekt"})


def unjudged(scorer, *answers, params=None, **item):
    golds = [ScoreRequest("", answer, "", item) for answer in answers]
    return find_unjudged(scorer, golds, timeout_s=HANG_S, params=params)


def test_gold_answers_are_checked_with_the_parameters():
    assert list(unjudged("exact", "Paris", "")) == [1]
    assert list(unjudged("regex", "a+", "(2, 5")) == [1]
    assert unjudged("regex", "a+", "(2, 5", params={"pattern": "x"}) == {}
    assert list(unjudged("multiple_choice", "A", "K", "Paris")) == [1, 2]
    assert list(unjudged("multiple_choice", "A", "K", params={"letters": "KL"})) == [0]


@pytest.mark.slow
def test_rows_without_a_schema_are_named_before_the_run():
    assert list(unjudged("json_schema", "", "")) == [0, 1]
    assert unjudged("json_schema", "", params={"schema": SCHEMA}) == {}
    assert unjudged("json_schema", "", form=SCHEMA, params={"field": "form"}) == {}
