"""What an evaluation says of hand-made records."""

import dataclasses
import math

import pytest

from driver.reports.evaluation import eval_metrics, is_correct, threshold
from rollout_worker.worker_records import EvalItem


def item(prompt_id, sample_index=0, *, strict=0.0, lenient=0.0, error="", tokens=4, end="stop"):
    scores = {"": strict, "/strict": strict, "/lenient": lenient}
    return EvalItem(
        prompt_id=prompt_id,
        sample_index=sample_index,
        question="",
        answer="",
        completion="",
        rewards={} if error else {f"gsm8k_answer{name}": s for name, s in scores.items()},
        total_reward=float("nan") if error else 2 * strict,
        reward_error=error,
        completion_tokens=tokens,
        finish_reason=end,
        policy_version=0,
    )


def test_strict_and_lenient_are_counted_apart_with_their_intervals():
    items = [item(0, strict=1, lenient=1), item(1, lenient=1), item(2), item(3)]
    metrics = eval_metrics(items, scorer="gsm8k_answer", pass_k=(1,), correct_from=1.0)
    assert metrics["eval/accuracy/strict"] == 0.25
    assert metrics["eval/accuracy/lenient"] == 0.5
    # Wilson, 1 of 4 at z = 1.96: centre (1 + 1.9208) / 7.8416, half-width 0.32733.
    assert metrics["eval/accuracy/strict_low"] == pytest.approx(0.0456, abs=5e-4)
    assert metrics["eval/accuracy/strict_high"] == pytest.approx(0.6994, abs=5e-4)
    assert metrics["eval/reward/total/mean"] == 0.5


def test_pass_at_k_is_the_mean_over_prompts():
    right = {0: (1, 1, 0, 0), 1: (0, 0, 0, 0)}
    items = [
        item(prompt_id, i, strict=value)
        for prompt_id, row in right.items()
        for i, value in enumerate(row)
    ]
    metrics = eval_metrics(items, scorer="gsm8k_answer", pass_k=(1, 2, 4), correct_from=1.0)
    # Of 4 with 2 right, 2 drawn are both wrong with probability 1/6.
    assert metrics["eval/pass_at_1"] == pytest.approx(0.5 / 2)
    assert metrics["eval/pass_at_2"] == pytest.approx((5 / 6) / 2)
    assert metrics["eval/pass_at_4"] == pytest.approx(1 / 2)


def test_samples_of_one_prompt_do_not_narrow_the_interval():
    one = [item(i, strict=float(i < 2)) for i in range(4)]
    four = [item(i, sample, strict=float(i < 2)) for i in range(4) for sample in range(4)]
    narrow, wide = (
        eval_metrics(items, scorer="gsm8k_answer", pass_k=(1,), correct_from=1.0)
        for items in (one, four)
    )
    for bound in ("low", "high"):
        name = f"eval/accuracy/strict_{bound}"
        assert narrow[name] == wide[name]


def test_a_completion_that_could_not_be_scored_is_wrong_and_out_of_the_reward_mean():
    items = [item(0, strict=1, lenient=1), item(1, error="mine:score raised KeyError")]
    metrics = eval_metrics(items, scorer="gsm8k_answer", pass_k=(1,), correct_from=1.0)
    assert metrics["eval/accuracy/strict"] == 0.5
    assert metrics["eval/reward/total/mean"] == 2.0
    assert metrics["eval/reward/gsm8k_answer/lenient/mean"] == 1.0
    assert metrics["eval/reward_errors"] == 1
    assert not any(math.isnan(value) for value in metrics.values())


def test_a_scorer_without_variants_counts_alike_under_both():
    assert is_correct({"mine:score": 1.0}, "mine:score", "lenient", 1.0)
    assert not is_correct({"mine:score": 0.9}, "mine:score", "strict", 1.0)
    assert is_correct({"mine:score": 0.9}, "mine:score", "strict", 0.9)
    assert not is_correct({}, "mine:score", "strict", 0.0)


def graded(*values, name="mine:score"):
    """Held-out items with these rewards of a scorer without variants; None could not be scored."""
    return [
        dataclasses.replace(
            item(i, error="raised" if value is None else ""),
            rewards={} if value is None else {name: float(value)},
            total_reward=math.nan if value is None else float(value),
        )
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    "rewards, chosen, correct_from, accuracy",
    [
        ((2, 9, 10), None, None, None),  # the example of the report: of 10
        ((2, 9, 10), 10.0, 10.0, 1 / 3),
        ((-3, 0.5, 100), None, None, None),
        ((0, 1.5, None), None, None, None),
        ((0, 0.5, 1, None), None, 1.0, 1 / 4),
        ((-1, 1, 1), None, 1.0, 2 / 3),
        ((0.2, 0.5, 0.7), 0.5, 0.5, 2 / 3),
        ((-2, -1, None), -1.0, -1.0, 1 / 3),
        ((None, None), None, 1.0, 0.0),
    ],
)
def test_what_is_right_is_stated_or_there_is_no_accuracy_N32(
    rewards, chosen, correct_from, accuracy
):
    items = graded(*rewards)
    found = threshold(items, scorer="mine:score", chosen=chosen)
    assert found == correct_from
    metrics = eval_metrics(items, scorer="mine:score", pass_k=(1,), correct_from=found)
    for name in ("eval/accuracy/strict", "eval/accuracy/lenient", "eval/pass_at_1"):
        assert metrics.get(name) == pytest.approx(accuracy) if accuracy is not None else True
        assert (name in metrics) == (accuracy is not None)
    assert metrics.get("eval/correct_from") == correct_from


def test_no_item_is_refused():
    with pytest.raises(ValueError, match="at least one completion"):
        eval_metrics([], scorer="gsm8k_answer", pass_k=(1,), correct_from=1.0)
