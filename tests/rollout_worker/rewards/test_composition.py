"""Sum, product and gates: totals computed by hand."""

import math
import sys
from contextlib import closing

import pytest

from driver.config import load_config as settings
from driver.config.load_config import ConfigError
from rollout_worker.config.reward_config import RewardConfig, RewardFunctionConfig
from rollout_worker.rewards.composition import Composition
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from tests.deadlines import HANG_S


def composed(combine, *functions):
    named = [
        RewardFunctionConfig(name=name, weight=weight, gate=gate)
        for name, weight, gate in functions
    ]
    return Composition.of(RewardConfig(functions=tuple(named), combine=combine).functions, combine)


@pytest.mark.parametrize(
    "combine, functions, rewards, total",
    [
        ("sum", [("a", 1, None), ("b", 0.25, None), ("c", -2, None)], (1, 1, 0.5), 0.25),
        ("sum", [("a", 2, None), ("b", 0, None)], (3, 100), 6.0),
        ("product", [("a", 2, None), ("b", 3, None)], (0.5, 4), 12.0),
        ("product", [("a", 2, None), ("b", 0, None)], (0.5, 100), 1.0),
        ("product", [("a", 1, None), ("b", -1, None)], (-2, 3), 6.0),
        ("product", [("a", 1, None), ("b", 1, None)], (0, 7), 0.0),
        # A gate of weight 0 only lets through or not.
        ("sum", [("gate", 0, 1), ("b", 2, None)], (1, 3), 6.0),
        ("sum", [("gate", 0, 1), ("b", 2, None)], (0.999, 3), 0.0),
        # One with a weight keeps its own reward where it is closed.
        ("sum", [("gate", 0.5, 1), ("b", 2, None), ("c", 1, None)], (1, 3, 10), 16.5),
        ("sum", [("gate", 0.5, 1), ("b", 2, None), ("c", 1, None)], (0.8, 3, 10), 0.4),
        # Any closed gate closes; the other gate still counts.
        ("sum", [("g", 1, 0), ("h", 1, 5), ("b", 1, None)], (0, 5, 7), 12.0),
        ("sum", [("g", 1, 0), ("h", 1, 5), ("b", 1, None)], (-1, 5, 7), 4.0),
        ("sum", [("g", 1, 0), ("h", 1, 5), ("b", 1, None)], (3, 4, 7), 7.0),
        ("product", [("gate", 0, 0.5), ("b", 2, None), ("c", 1, None)], (0.5, 3, 4), 24.0),
        ("product", [("gate", 2, 0.5), ("b", 2, None)], (0.4, 3), 0.0),
        # A negative reward behind a closed gate is held back as well.
        ("sum", [("gate", 0, 1), ("b", 1, None)], (0, -3), 0.0),
    ],
)
def test_totals_by_hand(combine, functions, rewards, total):
    names = [name for name, *_ in functions]
    found = composed(combine, *functions).total(dict(zip(names, rewards, strict=True)))
    assert found == pytest.approx(total, abs=1e-15)


def test_variants_have_no_part_and_a_missing_reward_is_no_zero():
    composition = composed("sum", ("a", 1, None), ("b", 1, None))
    assert composition.total({"a": 1.0, "a/strict": 7.0, "b": 2.0}) == 3.0
    with pytest.raises(KeyError):
        composition.total({"a": 1.0})


@pytest.mark.parametrize("size", [1e5, 1e200])
def test_a_total_beyond_all_bounds_is_an_error_with_the_fix(size):
    composition = composed("product", *((name, 1, None) for name in "abc"))
    with pytest.raises(ValueError, match="product of the rewards is .*: lower the rewards"):
        composition.total({"a": size, "b": size, "c": size})


def test_the_rule_is_one_line():
    assert str(composed("sum", ("a", 0, 1), ("b", 2, None))) == "a x 0 (gate from 1) + b x 2"
    assert str(composed("product", ("a", 1, None), ("b", 2, None))) == "a x 1 times b x 2"


@pytest.mark.parametrize(
    "functions",
    [
        [{"name": "format", "gate": 1}],
        [{"name": "format", "gate": 1}, {"name": "gsm8k_answer", "weight": 0}],
        [{"name": "format", "gate": 1}, {"name": "gsm8k_answer", "gate": 1}],
    ],
)
def test_gates_with_nothing_behind_them_are_refused(functions):
    with pytest.raises(ValueError, match="no other function with a weight for them to hold back"):
        RewardConfig(functions=functions)


@pytest.mark.parametrize(
    "reward, found",
    [
        ("{combine: product}", "reward.combine=product"),
        (
            "{functions: [{name: format, gate: 1}, {name: gsm8k_answer}]}",
            r"gates=\['format'\]",
        ),
    ],
)
def test_standardising_each_reward_alone_refuses_what_is_no_sum(tmp_path, reward, found):
    file = tmp_path / "run.yaml"
    text = "model: {path: x}\ndata: {train: {source: a.jsonl}}\n"
    text += "eval: {at_start: false, at_end: false}\n"
    file.write_text(f"{text}reward: {reward}\nalgorithm: {{advantage: reward_norm}}\n")
    with pytest.raises(ConfigError, match=f"reward_norm standardises .* so that {found} would"):
        settings.load(str(file))


@pytest.mark.slow
def test_the_pool_gives_totals_by_the_rule_and_errors_beyond_it(tmp_path, monkeypatch):
    (tmp_path / "sizes.py").write_text(
        "def size(completion, **given): return float(completion)\n"
        "def same(completion, **given): return float(completion)\n"
        "def third(completion, **given): return float(completion)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    functions = [RewardFunctionConfig(name=f"sizes:{name}") for name in ("size", "same", "third")]
    pool = RewardPool(functions, processes=1, timeout_s=HANG_S, combine="product")
    with closing(pool):
        texts = [ScoreRequest(text, "", "", {}) for text in ("2", "-3", "100000")]
        scores = pool.submit(texts).wait()
    assert [score.total for score in scores[:2]] == [8.0, -27.0]
    assert math.isnan(scores[2].total) and "must lie between" in scores[2].error
    gated = [functions[0], RewardFunctionConfig(name="sizes:same", weight=0.0, gate=2.0)]
    with closing(RewardPool(gated, processes=1, timeout_s=HANG_S)) as pool:
        assert [score.total for score in pool.submit(texts[:2]).wait()] == [2.0, 0.0]
