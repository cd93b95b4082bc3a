"""What a run has spent: added up, kept over resumes, and held against its budget."""

import json

import pytest

from driver.accounting.run_spending import DamagedSpending, RunSpending, spending_metrics
from rollout_worker.config.reward_config import BudgetConfig
from rollout_worker.rewards.spending import Spending, over_budget

ONE = Spending(requests=2, failed_requests=1, prompt_tokens=100, completion_tokens=10, cost=0.5)


def test_what_was_spent_stays_spent_over_a_resume(tmp_path):
    first = RunSpending(tmp_path, BudgetConfig(cost=1.5))
    assert not first.add_spending(ONE) and not first.add_spending(Spending())
    assert not first.add_spending(ONE)
    resumed = RunSpending(tmp_path, BudgetConfig(cost=1.5))
    assert resumed.total == ONE + ONE and resumed.take_step() == Spending()
    assert resumed.refusal == ""
    assert resumed.add_spending(ONE), "this one reaches the budget"
    assert not resumed.add_spending(ONE), "and is said once"
    assert "reward.budget.cost=1.5, spent 2." in resumed.refusal
    assert RunSpending(tmp_path, BudgetConfig(cost=1.5)).refusal
    assert not RunSpending(tmp_path, BudgetConfig(cost=3)).refusal, "a raised budget goes on"


def test_steps_add_up_to_the_run(tmp_path):
    spending = RunSpending(tmp_path, BudgetConfig())
    assert spending_metrics(spending.take_step(), spending.total) == {}
    spending.add_spending(ONE)
    spending.add_spending(ONE)
    metrics = spending_metrics(spending.take_step(), spending.total)
    assert metrics["reward/judge/requests"] == metrics["reward/judge/requests_total"] == 4.0
    spending.add_spending(ONE)
    assert spending_metrics(spending.take_step(), spending.total) == {
        "reward/judge/requests": 2.0,
        "reward/judge/failed_requests": 1.0,
        "reward/judge/prompt_tokens": 100.0,
        "reward/judge/completion_tokens": 10.0,
        "reward/judge/cost": 0.5,
        "reward/judge/requests_total": 6.0,
        "reward/judge/tokens_total": 330.0,
        "reward/judge/cost_total": 1.5,
    }


@pytest.mark.parametrize(
    "budget, reached",
    [
        ({}, False),
        ({"requests": 2}, True),
        ({"requests": 3}, False),
        ({"tokens": 110}, True),
        ({"tokens": 111}, False),
        ({"cost": 0.5}, True),
        ({"cost": 0.51, "tokens": 111, "requests": 2}, True),
    ],
)
def test_a_budget_is_spent_at_the_first_bound_that_is_reached(budget, reached):
    assert bool(over_budget(ONE, BudgetConfig(**budget))) is reached


@pytest.mark.parametrize("text", ["", "[]", '{"requests": 1}', json.dumps({"cost": -1})])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "spending.json").write_text(text)
    with pytest.raises(DamagedSpending, match="correct it, or remove it to count from 0"):
        RunSpending(tmp_path, BudgetConfig())
