"""Two evaluations on the same prompts are compared pair by pair, over a checkpoint too."""

import json

import pytest

from driver.accounting.accuracy import Accuracy
from driver.accounting.evaluations import Evaluations, RightCounts, paired


def counts(step, right, *, samples=1, correct_from=1.0):
    by_prompt = dict(enumerate(right))
    return RightCounts(step=step, samples=samples, correct_from=correct_from, by_prompt=by_prompt)


def test_prompts_that_became_right_and_wrong_are_counted_and_the_others_say_nothing():
    found = paired(counts(10, [0, 0, 0, 1, 1, 0]), counts(20, [1, 1, 1, 0, 1, 0]))
    assert found is not None
    assert (found.against, found.prompts, found.better, found.worse) == (10, 6, 3, 1)
    assert found.p_value == 5 / 8  # of 4 changes, 2 x (1 + 4) / 16
    assert str(found) == (
        "against step 10 on the same 6 prompts: 3 better, 1 worse, p = 0.625 (exact sign test)"
    )


def test_with_several_completions_a_prompt_counts_once():
    found = paired(counts(1, [0, 3, 2], samples=4), counts(2, [4, 2, 2], samples=4))
    assert found is not None and (found.better, found.worse) == (1, 1)


def test_only_the_prompts_of_both_are_compared():
    found = paired(counts(1, [0, 0]), counts(2, [1, 1, 1, 1]))
    assert found is not None and (found.prompts, found.better) == (2, 2)


@pytest.mark.parametrize(
    "before",
    [
        None,
        counts(5, [1], samples=2),
        counts(5, [1], correct_from=2.0),
        counts(6, [1]),
    ],
)
def test_what_did_not_ask_the_same_is_not_compared(before):
    assert paired(before, counts(6, [0])) is None


def add(evaluations, name, step, right):
    accuracy = Accuracy(correct=sum(right), total=len(right))
    return evaluations.add(name, step, accuracy, counts(step, right))


def test_each_set_is_compared_with_its_own_evaluation_before_also_after_a_resume():
    straight = Evaluations()
    assert add(straight, "sums", 0, [0, 0, 1]) is None
    assert add(straight, "words", 0, [1, 1]) is None
    kept = json.loads(json.dumps({"evaluations": straight.state()}))
    resumed = Evaluations.restore(kept)
    assert resumed.accuracy == straight.accuracy and resumed.has_step(0)
    assert not resumed.has_step(5)
    for one in (straight, resumed):
        found = add(one, "sums", 5, [1, 1, 1])
        assert found is not None and (found.better, found.worse, found.p_value) == (2, 0, 0.5)
    assert resumed.state() == straight.state()


def test_an_evaluation_whose_threshold_is_unknown_is_passed_over():
    evaluations = Evaluations()
    add(evaluations, "", 0, [0, 1])
    assert evaluations.add("", 5, None, None) is None
    found = add(evaluations, "", 10, [1, 1])
    assert found is not None and found.against == 0
