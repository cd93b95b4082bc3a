"""A run of the driver whose judge costs money: counted by step and run, and stopped at a budget."""

import dataclasses
import json

import pytest

from rollout_worker.rewards.spending import Spending
from tests.driver.simulated_run import SimulatedRun, World

JUDGE = {"name": "judge", "params": {"url": "http://x", "model": "m", "prompt_price": 1.0}}


def start(folder, monkeypatch, *, steps=6, budget=None, cost=0.5, **changes):
    world = World()
    world.group_cost = cost
    reward = {"reward__functions": [JUDGE], "reward__budget": budget or {}}
    run = SimulatedRun(folder, world, steps=steps, **reward, **changes)
    return run.run(monkeypatch), world


def lines(run, name):
    return [json.loads(line) for line in (run.folder / name).read_text().splitlines()]


def test_cost_is_in_the_metrics_the_ledger_and_the_summary(tmp_path, monkeypatch):
    run, world = start(tmp_path / "run", monkeypatch)
    assert run.error is None, run.said
    paid = 0.5 * len(world.pushed)
    metrics, ledger = lines(run, "metrics.jsonl"), lines(run, "ledger.jsonl")
    assert sum(line["reward/judge/cost"] for line in metrics) == pytest.approx(paid)
    assert metrics[-1]["reward/judge/cost_total"] == pytest.approx(paid)
    assert sum(line["spent"]["cost"] for line in ledger if line["spent"]) == pytest.approx(paid)
    assert json.loads((run.folder / "spending.json").read_text())["cost"] == pytest.approx(paid)
    assert len(run.said_of(f"spent by scorers ({2 * len(world.pushed)} requests", "cost 12")) == 1


def test_a_spent_budget_is_said_once_and_stops_every_worker(tmp_path, monkeypatch):
    run, world = start(tmp_path / "run", monkeypatch, budget={"cost": 5.0})
    assert run.error is None, run.said
    assert len(run.said_of("reward.budget.cost=5", "each completion that a judge should")) == 1
    assert run.said_of("could not be scored", "reward.budget.cost=5")
    spent = json.loads((run.folder / "spending.json").read_text())["cost"]
    assert 5.0 <= spent < 0.5 * len(world.pushed), "what was under way is still paid for"


@pytest.mark.parametrize("bound, judged", [(3.0, False), (4.0, True)])
def test_what_earlier_starts_have_paid_counts(tmp_path, monkeypatch, bound, judged):
    (tmp_path / "run").mkdir()
    paid = Spending(requests=9, cost=3.0)
    (tmp_path / "run" / "spending.json").write_text(json.dumps(dataclasses.asdict(paid)))
    run, _ = start(tmp_path / "run", monkeypatch, budget={"cost": bound})
    assert run.error is None, run.said
    assert len(run.said_of(f"cost={bound:g}, spent", "each completion that a judge should")) == 1
    spent = json.loads((run.folder / "spending.json").read_text())["cost"]
    assert (spent > 3.0) is judged


@pytest.mark.parametrize(
    "functions, budget, message",
    [
        ([{"name": "exact"}], {"requests": 5}, "but no scorer is judge, only ['exact']: remove it"),
        (
            [{"name": "judge", "params": {"url": "http://x", "model": "m"}}],
            {"cost": 5},
            "reward.budget.cost=5 is never reached, since judge has no price",
        ),
        ([JUDGE], {"cost": 0}, "greater than 0"),
    ],
)
def test_a_budget_that_bounds_nothing_is_refused(tmp_path, functions, budget, message):
    changes = {"reward__functions": functions, "reward__budget": budget}
    with pytest.raises(ValueError) as refused:
        SimulatedRun(tmp_path, World(), **changes)
    assert message in str(refused.value)


def test_a_budget_may_be_that_of_a_judge_of_held_out_prompts_only(tmp_path):
    held_out = {"source": "none.jsonl", "scorer": "judge", "scorer_params": JUDGE["params"]}
    data = {"data__eval": [held_out], "reward__budget": {"cost": 5}}
    assert SimulatedRun(tmp_path, World(), **data).config.reward.budget.cost == 5
