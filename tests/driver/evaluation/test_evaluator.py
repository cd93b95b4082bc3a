"""How held-out prompts are shared out, and what an evaluation writes down and shows;
`test_lost_processes.py` loses workers meanwhile.
"""

import math
import types
from typing import Any

import pytest

from driver.accounting.accuracy import Accuracy
from driver.accounting.evaluations import Evaluations
from driver.config.run_config import RunConfig
from driver.evaluation.eval_results import named_metrics
from driver.evaluation.evaluator import Evaluator, shares
from rollout_worker.worker_records import EvalItem

CONFIG = {
    "model": {"path": "m"},
    "data": {"train": {"source": "train.jsonl"}, "eval": {"source": "held_out.jsonl"}},
    "reward": {"functions": [{"name": "mine:score"}]},
}
TWO = [
    {"source": "sums.jsonl"},
    {
        **{"source": "words.jsonl", "name": "w", "scorer": "exact", "pass_k": [1, 2]},
        **{"samples_per_prompt": 2, "temperature": 0.7},
    },
]


@pytest.mark.parametrize(
    "prompts, workers, expected",
    [(5, 2, [[0, 1, 2], [3, 4]]), (4, 2, [[0, 1], [2, 3]]), (1, 8, [[0]]), (0, 2, [])],
)
def test_case_f05_prompts_are_shared_out_and_none_is_lost(prompts, workers, expected):
    assert shares(range(prompts), workers) == expected


class Told:
    """Stands in for the reports and the one worker of a run."""

    def __init__(self, rewards):
        """Args:
        rewards: of each set, one for each completion by prompt; None could not be scored.
        """
        self.rewards, self.said, self.written, self.asked = rewards, [], [], []
        self.name, self.evaluates = "rollout-0", False
        self.fleet = self.handle = self.clock = self

    def ready(self):
        return [self]

    def now(self):
        return 0.0

    def evaluate(self, request):
        self.asked.append(request)
        return self

    def turn(self, calls):
        return list(calls)

    def result(self):
        request = self.asked[-1]
        scorer = ("mine:score", "exact")[request.held_out]
        return [
            item(prompt, sample, scorer, self.rewards[request.held_out][prompt][sample])
            for prompt in request.positions
            for sample in range(request.samples)
        ]

    def say(self, text):
        self.said.append(text)

    def write_evaluation(self, step, items, correct, *, evaluated_step):
        self.written += zip(items, correct, strict=True)


def item(prompt, sample, scorer, reward):
    return EvalItem(
        prompt_id=prompt,
        sample_index=sample,
        question="",
        answer="",
        completion="",
        completion_tokens=4,
        finish_reason="stop",
        rewards={} if reward is None else {scorer: float(reward)},
        total_reward=math.nan if reward is None else float(reward),
        reward_error="raised" if reward is None else "",
        policy_version=0,
    )


def evaluator_of(told: Any, prompts, **sections) -> Evaluator:
    config = RunConfig.model_validate({**CONFIG, **sections})
    sets = config.held_out_sets
    return Evaluator(config.eval, sets, prompts, told, told, steps=20, timeout_s=1.0)


def evaluate(evaluator, step, evaluations=None) -> dict[str, float]:
    state: Any = types.SimpleNamespace(
        step=step, policy_version=step, evaluations=evaluations or Evaluations()
    )
    return evaluator.evaluate(state)


@pytest.mark.parametrize(
    "chosen, correct, accuracy",
    [
        (None, [None, None, None], None),
        (9.0, [False, True, True], Accuracy(correct=2, total=3, correct_from=9.0)),
    ],
)
def test_evaluation_log_metrics_and_terminal_agree_N32(chosen, correct, accuracy):
    told, evaluations = Told([[[2], [9], [10]]]), Evaluations()
    evaluator = evaluator_of(told, [3], eval={"correct_from": chosen})
    metrics = evaluate(evaluator, 4, evaluations)
    assert [right for _, right in told.written] == correct
    assert evaluations.accuracy == {"": {4: accuracy}}
    assert metrics.get("eval/accuracy/strict") == (accuracy.fraction if accuracy else None)
    if accuracy is None:
        assert "step 4: no accuracy and no pass@k: mine:score gave up to 10" in told.said[0]
        assert "set eval.correct_from" in told.said[0]
    else:
        assert not told.said and "with a reward of at least 9" in str(accuracy)


def test_each_set_has_its_scorer_its_samples_and_its_names():
    told, evaluations = Told([[[1], [0], [1]], [[1, 0], [0, 0]]]), Evaluations()
    evaluator = evaluator_of(told, [3, 2], data={**CONFIG["data"], "eval": TWO})
    metrics = evaluate(evaluator, 4, evaluations)
    assert [(one.held_out, one.samples, one.sampling.temperature) for one in told.asked] == [
        (0, 1, 0.0),
        (1, 2, 0.7),
    ]
    assert metrics["eval/sums/accuracy/strict"] == metrics["eval/accuracy/strict"] == 2 / 3
    assert metrics["eval/w/accuracy/strict"] == 0.25
    assert (metrics["eval/w/pass_at_1"], metrics["eval/w/pass_at_2"]) == (0.25, 0.5)
    assert "eval/sums/pass_at_2" not in metrics and "eval/pass_at_2" not in metrics
    assert [line.split(":")[1] for line in told.said] == [
        " evaluation of sums under policy version 4",
        " evaluation of w under policy version 4",
    ]
    assert evaluations.accuracy["w"] == {4: Accuracy(correct=1, total=4)}


def test_the_next_evaluation_is_compared_with_the_one_before_in_log_and_metrics():
    told, evaluations = Told([[[1], [0], [0]]]), Evaluations()
    evaluator = evaluator_of(told, [3])
    first = evaluate(evaluator, 0, evaluations)
    assert "eval/paired/p_value" not in first and not told.said
    told.rewards = [[[0], [1], [1]]]
    second = evaluate(evaluator, 5, evaluations)
    assert second["eval/paired/p_value"] == 1.0
    assert (second["eval/paired/better"], second["eval/paired/worse"]) == (2, 1)
    [said] = told.said
    assert said.startswith("step 5: evaluation under policy version 5: accuracy 0.667 (2 of 3")
    assert said.endswith(
        "; against step 0 on the same 3 prompts: 2 better, 1 worse, p = 1 (exact sign test)"
    )


def test_no_more_prompts_are_asked_than_eval_prompts_says():
    told = Told([[[1], [0], [1]]])
    evaluate(evaluator_of(told, [3], eval={"prompts": 2}), 0)
    assert [list(one.positions) for one in told.asked] == [[0, 1]]


def test_metrics_of_one_of_several_sets_have_its_name():
    named = named_metrics({"eval/accuracy/strict": 0.5, "eval/pass_at_2": 1.0}, "sums")
    assert named == {"eval/sums/accuracy/strict": 0.5, "eval/sums/pass_at_2": 1.0}
