"""Episodes with tools: calls answered, answers scored, and what each bad tool becomes."""

import json

import pytest

from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.environments.environment_pool import (
    EnvironmentFailed,
    EnvironmentPool,
    validate_environment,
)
from tests.deadlines import HANG_S
from tests.rollout_worker.environments.test_environment_pool import REWARD, heard

NAME = "rollout_worker.environments.tools.tool_environment:ToolEnvironment"
KINDS = "tests.rollout_worker.environments.tools.tool_kinds"
ITEM = {"question": "What is 17 * 23?", "answer": "391"}
TOOLS = ["calculator", f"{KINDS}:later", f"{KINDS}:bad"]


def configured(*, timeout_s=HANG_S, **params):
    return EnvironmentConfig(name=NAME, params={"tools": TOOLS} | params, timeout_s=timeout_s)


def hermes(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def pool():
    pool = EnvironmentPool(configured(result_chars=100, calls_per_turn=3), REWARD)
    yield pool
    pool.close()


def contents(turn):
    assert {message["role"] for message in turn.messages} == {"tool"}
    return [message["content"] for message in turn.messages]


def test_calls_are_answered_and_the_first_turn_without_one_is_scored(pool):
    two = hermes("calculator", expression="17 * 23") + "\n" + hermes("later", number=1.5)
    begun, answered, over = heard(pool, [f"Let me see. {two}", "So #### 391"], ITEM)
    assert begun.messages == [{"role": "user", "content": "What is 17 * 23?"}]
    assert contents(answered) == ["391", '{"doubled": 3.0}']
    assert (answered.reward, answered.done) == (0.0, False)
    assert (over.messages, over.reward, over.done) == ([], 1.0, True)
    [_, over] = heard(pool, ["#### 392"], ITEM)
    assert (over.reward, over.done) == (0.0, True)


def test_what_is_wrong_with_a_call_is_its_answer(pool):
    wrong = [
        "<tool_call>{</tool_call>",
        hermes("calculate", expression="1"),
        hermes("calculator", expression="1 / 0"),
    ]
    turns = heard(pool, [*wrong, hermes("bad", does="raises"), "#### 391"], ITEM)
    assert [contents(turn)[0] for turn in turns[1:-1]] == [
        "Error: no JSON: Expecting property name enclosed in double quotes at character 1 of the "
        "call",
        "Error: there is no tool 'calculate' (nearest: 'calculator'): there are calculator, later, "
        "bad",
        "Error: ZeroDivisionError: division by zero",
        "Error: LookupError: the table fell over",
    ]
    assert turns[-1].reward == 1.0
    counts = [tuple(turn.numbers.values()) for turn in turns]
    assert counts == [(), (0, 1, 0), (0, 1, 0), (1, 0, 1), (1, 0, 1), (0, 0, 0)]
    assert list(turns[1].numbers) == ["tool_calls", "malformed_calls", "failed_calls"]


def test_calls_beyond_those_of_a_turn_are_not_run(pool):
    many = hermes("calculator", expression="1 + 1") * 4
    [_, answered] = heard(pool, [many], ITEM)
    assert contents(answered) == ["2", "2", "2", "Error: not run, a turn has at most 3 calls"]


def test_a_long_result_is_cut(pool):
    [_, answered] = heard(pool, [hermes("bad", does="10 mb")], ITEM)
    assert contents(answered) == ["x" * 100 + "... (9999900 characters cut)"]


def test_null_is_a_value_of_json(pool):
    [_, answered] = heard(pool, [hermes("bad", does="none")], ITEM)
    assert contents(answered) == ["null"]


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("object", "step 1: .*ToolFailed: tool 'bad' must return text or a JSON value, got object"),
        ("nan", "step 1: .*ToolFailed: tool 'bad' must return text or a JSON value, got float"),
        ("exits", "step 1: SystemExit: 3"),
    ],
)
def test_a_tool_that_does_not_work_ends_the_episode_with_an_error(pool, does, error):
    with pytest.raises(EnvironmentFailed, match=error):
        heard(pool, [hermes("bad", does=does)], ITEM)


def test_a_tool_that_never_returns_ends_its_episode_and_no_other():
    pool = EnvironmentPool(configured(timeout_s=2.0), REWARD)
    try:
        with pytest.raises(EnvironmentFailed, match="step 1: no result within 2 s"):
            heard(pool, [hermes("bad", does="hangs")], ITEM)
        assert heard(pool, ["#### 391"], ITEM)[-1].reward == 1.0
    finally:
        pool.close()


def test_formats_scorers_and_fields_are_those_of_the_configuration():
    config = configured(
        tools=["calculator"],
        call_format="llama",
        scorer="exact",
        scorer_params={"extract": "whole"},
        question="q",
        answer="a",
        system_prompt="Use tools.",
    )
    pool = EnvironmentPool(config, REWARD)
    try:
        call = '<|python_tag|>{"name": "calculator", "parameters": {"expression": "2 + 3"}}'
        said = [{"role": "user", "content": "2 + 3?"}]
        begun, answered, over = heard(pool, [call, "Five"], {"q": said, "a": "five"})
        assert begun.messages == [{"role": "system", "content": "Use tools."}, *said]
        assert contents(answered) == ["5"]
        assert (over.reward, over.done) == (1.0, True)
        own = [{"role": "system", "content": "Be brief."}, *said]
        assert heard(pool, [], {"q": own, "a": "five"})[0].messages == own, "as data sources do"
    finally:
        pool.close()


def test_records_are_read_as_those_of_a_data_source(pool):
    asked = [{"role": "user", "content": "What is 17 * 23?"}]
    for item in (
        {"prompt": asked, "reward_model": {"ground_truth": 391}},
        {"messages": asked, "solution": "17 * 23 is\n#### 391"},
    ):
        begun, over = heard(pool, ["#### 391"], item)
        assert begun.messages == asked and over.reward == 1.0


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (
            {"answer": "391"},
            r"the record has no field 'question', .*only \['answer'\]: .*params.question",
        ),
        ({"question": True, "answer": "391"}, "field 'question' must be text or a number"),
        ({"question": "?", "answer": "many"}, "the gold answer 'many' is not a number"),
        (
            {"question": [{"role": "user"}], "answer": "1"},
            r"the record question\[0\] of role 'user' must have text as content",
        ),
    ],
)
def test_a_record_that_cannot_be_played_ends_its_episode_with_an_error(pool, item, error):
    with pytest.raises(EnvironmentFailed, match=f"reset: .*{error}"):
        heard(pool, [], item)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tools": ["calculater"]}, "Environment': unknown tool 'calculater' .nearest: 'calcul"),
        ({"tools": ["calculator", "calculator"]}, "the names of tools must differ"),
        ({"tools": "calculator"}, "tools must be a list with the name of a tool, got 'calculator'"),
        ({"tools": []}, r"tools must be a list with the name of a tool, got \[\]"),
        ({"scorer": "gsm8k"}, "unknown reward function 'gsm8k'"),
        ({"scorer": "judge"}, "judge"),
        ({"scorer_params": {"mode": "x"}}, "mode must be one of"),
        ({"call_format": "xml"}, "call_format='xml' cannot be: Input should be 'hermes' or 'lla"),
        ({"calls_per_turn": 0}, "calls_per_turn=0 cannot be: .*greater than or equal to 1"),
        ({"calls_per_turn": "8"}, "calls_per_turn='8' cannot be: .*valid integer"),
        ({"result_chars": None}, "result_chars=None cannot be: .*valid integer"),
        ({"system_prompt": 3}, "system_prompt=3 cannot be: .*valid string"),
        ({"question": 5}, "question=5 cannot be: .*valid string"),
        ({"scorer_params": [1]}, r"scorer_params=\[1\] cannot be: .*valid dict"),
        ({"tool": []}, "nearest: 'tools'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(params, message):
    with pytest.raises(ValueError, match=message):
        validate_environment(configured(**params), REWARD)
