"""Episodes over tasks of reasoning-gym, whose records a data source made."""

import pytest

from rollout_worker.config.data_config import SourceConfig
from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.data.records import records
from rollout_worker.environments.environment_pool import (
    EnvironmentFailed,
    EnvironmentPool,
    validate_environment,
)
from tests.deadlines import HANG_S
from tests.rollout_worker.environments.test_environment_pool import REWARD, heard

NAME = "rollout_worker.environments.adapters.reasoning_gym_retries:ReasoningGymRetries"


def configured(**params):
    return EnvironmentConfig(name=NAME, params=params, timeout_s=HANG_S)


@pytest.fixture(scope="module")
def pool():
    params = {"discount": 0.5, "again": "{score:.2f} of 1, {left} left.", "system_prompt": "Go."}
    pool = EnvironmentPool(configured(**params), REWARD)
    yield pool
    pool.close()


def record(task, **params):
    source = SourceConfig(source=f"reasoning_gym:{task}", size=2, seed=5, params=params)
    return [item for _, _, item in records(source)][1]


def test_a_wrong_answer_is_asked_for_again_and_costs(pool):
    item = record("chain_sum", min_terms=2, max_terms=2)
    right = f"I add.\n#### {item['answer']}"
    begun, wrong, none, over = heard(pool, ["#### x", item["answer"], right], item)
    assert begun.messages == [
        {"role": "system", "content": "Go."},
        {"role": "user", "content": item["question"]},
    ]
    assert wrong.messages == [{"role": "user", "content": "0.00 of 1, 2 left."}]
    assert none.messages[0]["content"] == "0.00 of 1, 1 left.", "an answer follows ####"
    assert (wrong.reward, wrong.done) == (0.0, False)
    assert (over.messages, over.reward, over.done) == ([], 0.25, True)
    assert [turn.numbers for turn in (wrong, over)] == [
        {"tries": 1.0, "first_score": 0.0, "right": 0.0},
        {"tries": 1.0, "first_score": 0.0, "right": 1.0},
    ]


def test_the_last_try_is_paid_what_the_task_gives_it(pool):
    item = record("chain_sum", min_terms=2, max_terms=2)
    nearly = f"#### {item['answer']} or so"  # the task gives the share of the text that is right
    share = len(item["answer"]) / len(nearly.removeprefix("#### "))
    *_, over = heard(pool, [nearly] * 3, item)
    assert (over.reward, over.done) == (pytest.approx(share / 4), True)
    assert over.numbers["right"] == 0.0


def test_whole_turns_are_answers_and_right_begins_where_configured():
    pool = EnvironmentPool(configured(extract="whole", right_from=0.2, tries=2), REWARD)
    try:
        item = record("chain_sum", min_terms=2, max_terms=2)
        answer = item["answer"]
        [_, over] = heard(pool, [f"{answer}!"], item)
        assert (over.reward, over.done) == (len(answer) / (len(answer) + 1), True)
        [_, again, _] = heard(pool, ["x", answer], item)
        assert again.messages[0]["content"] == "That is not right. Try again."
    finally:
        pool.close()


def test_a_task_with_a_scorer_of_its_own_takes_every_solution(pool):
    item = record("countdown", min_numbers=3, max_numbers=3)
    begun, over = heard(pool, [f"#### {item['answer']}"], item)
    assert "target" in begun.messages[1]["content"]
    assert (over.reward, over.done) == (1.0, True)


def test_a_record_that_is_none_of_the_task_ends_with_an_error(pool):
    with pytest.raises(EnvironmentFailed, match="reset: ValueError: .* a reasoning_gym: source"):
        heard(pool, [], {"question": "4 + 4 ="})
    other = record("chain_sum") | {"question": "4 + 4 ="}
    with pytest.raises(EnvironmentFailed, match="reset: ValueError: .* another question here"):
        heard(pool, [], other)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tries": 0}, "Retries': tries=0 cannot be: .* than or equal to 1"),
        ({"tries": True}, "tries=True cannot be: .* a valid integer"),
        ({"extract": "mark"}, "extract='mark' cannot be: .* 'marker' or 'whole'"),
        ({"right_from": 2}, "right_from=2 cannot be: .* less than or equal to 1"),
        ({"discount": -0.1}, "discount=-0.1 cannot be: .* greater than or equal to 0"),
        ({"again": "{scor}"}, r"has the field \{scor\}.* \{score\}, \{left\} .nearest: 'score'"),
        ({"again": "{score"}, "again='{score' is no template: expected '}'"),
        ({"again": "{left.x}"}, "again='{left.x}' cannot be filled"),
        ({"system_prompt": 3}, "system_prompt=3 cannot be: .* a valid string"),
        ({"trys": 3}, "nearest: 'tries'"),
    ],
)
def test_parameters_that_break_a_rule_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        validate_environment(configured(**params), REWARD)
