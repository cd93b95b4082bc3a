"""What an evaluation says of hand-made records."""

import math

import pytest

from driver.reports.evaluation import eval_metrics, is_correct
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
    metrics = eval_metrics(items, scorer="gsm8k_answer", pass_k=(1,))
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
    metrics = eval_metrics(items, scorer="gsm8k_answer", pass_k=(1, 2, 4))
    # Of 4 with 2 right, 2 drawn are both wrong with probability 1/6.
    assert metrics["eval/pass_at_1"] == pytest.approx(0.5 / 2)
    assert metrics["eval/pass_at_2"] == pytest.approx((5 / 6) / 2)
    assert metrics["eval/pass_at_4"] == pytest.approx(1 / 2)


def test_samples_of_one_prompt_do_not_narrow_the_interval():
    one = [item(i, strict=float(i < 2)) for i in range(4)]
    four = [item(i, sample, strict=float(i < 2)) for i in range(4) for sample in range(4)]
    narrow, wide = (
        eval_metrics(items, scorer="gsm8k_answer", pass_k=(1,)) for items in (one, four)
    )
    for bound in ("low", "high"):
        name = f"eval/accuracy/strict_{bound}"
        assert narrow[name] == wide[name]


def test_a_completion_that_could_not_be_scored_is_wrong_and_out_of_the_reward_mean():
    items = [item(0, strict=1, lenient=1), item(1, error="mine:score raised KeyError")]
    metrics = eval_metrics(items, scorer="gsm8k_answer", pass_k=(1,))
    assert metrics["eval/accuracy/strict"] == 0.5
    assert metrics["eval/reward/total/mean"] == 2.0
    assert metrics["eval/reward/gsm8k_answer/lenient/mean"] == 1.0
    assert metrics["eval/reward_errors"] == 1
    assert not any(math.isnan(value) for value in metrics.values())


def test_a_scorer_without_variants_counts_one_as_right():
    assert is_correct({"mine:score": 1.0}, "mine:score", "lenient")
    assert not is_correct({"mine:score": 0.9}, "mine:score", "strict")
    assert not is_correct({}, "mine:score", "strict")


def test_no_item_is_refused():
    with pytest.raises(ValueError, match="at least one completion"):
        eval_metrics([], scorer="gsm8k_answer", pass_k=(1,))
