"""Bounds of correctness that every completion reaches, or none."""

import pytest

from driver.config.checks.reachable_rewards import correctness_notes
from driver.config.load_config import load


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: here}\ndata: {train: {source: a}, eval: {source: b.jsonl}}\n")
    return lambda *overrides: correctness_notes(load(str(path), overrides))


PASS = "algorithm.advantage=pass_at_k"


@pytest.mark.parametrize(
    "overrides, said",
    [
        (
            ("eval.correct_from=2",),
            "data.eval: correct_from=2 is above 1, the most that a completion can get: none is "
            "ever correct, by gsm8k_answer",
        ),
        (
            ("eval.correct_from=0",),
            "data.eval: correct_from=0 is not above 0, the least that a completion can get: each "
            "is correct, by gsm8k_answer",
        ),
        (
            ("data.eval=[{source: b.jsonl, name: c, scorer: exact, correct_from: 1.5}]",),
            "data.eval.0 (c): correct_from=1.5 is above 1, the most that a completion can get: "
            "none is ever correct, by exact",
        ),
        (
            (PASS, "reward.functions=[{name: exact, weight: 0.5}, {name: format, weight: -1}]"),
            "algorithm.correct_from=1 is above 0.5, the most that a completion can get: none is "
            "ever correct",
        ),
        (
            (PASS, "algorithm.correct_from=-1", "reward.functions=[{name: exact}]"),
            "algorithm.correct_from=-1 is not above 0, the least that a completion can get: each "
            "is correct",
        ),
        (
            (
                "algorithm.length_coef=0.5",
                "reward={combine: product, functions: [{name: exact, weight: 2}, "
                "{name: format, weight: 0.25}]}",
            ),
            "algorithm.correct_from=1 is above 0.5, the most that a completion can get: none is "
            "ever correct",
        ),
    ],
)
def test_a_bound_that_no_or_every_completion_reaches_is_noted(notes, overrides, said):
    assert notes(*overrides) == [said]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("eval.correct_from=1",),
        ("eval.correct_from=5", "reward.functions=[{name: 'my.rewards:score'}]"),
        (PASS,),
        (PASS, "algorithm.correct_from=3", "reward.functions=[{name: 'my.rewards:score'}]"),
        (PASS, "algorithm.correct_from=3", "reward.functions=[{name: exact, weight: 3}]"),
        ("algorithm.correct_from=3",),
    ],
)
def test_a_bound_between_or_of_unknown_rewards_is_not_noted(notes, overrides):
    assert notes(*overrides) == []
