"""Group scorers: all completions of a prompt in, one reward for each out, in their order."""

import math
import re
import sys
from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest, validate_functions
from rollout_worker.rewards.reward_values import named_group_rewards
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow

GROUP_MODULE = r"""
import asyncio, os, time

def rank(completions, *, answer, prompt, item):
    # The share of the others that are shorter, by hand in the tests.
    lengths = [len(text) for text in completions]
    completions.clear()
    return [sum(other < mine for other in lengths) / max(1, len(lengths) - 1) for mine in lengths]

async def distinct(completions, *, answer, prompt, item, scale=1.0):
    await asyncio.sleep(0.01)
    count = len(completions)
    return [{"value": scale / completions.count(text), "of": count} for text in completions]

def act(completions, *, answer, prompt, item):
    values = [float(text.rpartition(" ")[2]) for text in completions]
    if prompt == "short":
        return values[1:]
    if prompt == "long":
        return [*values, 1.0]
    if prompt == "None":
        return [values[0], None, *values[2:]]
    if prompt == "nan":
        return [*values[:-1], float("nan")]
    if prompt == "one number":
        return values[0]
    if prompt == "text":
        return "1" * len(values)
    if prompt == "set":
        return set(values)
    if prompt == "raise":
        raise RuntimeError("no ranking")
    if prompt == "hang":
        time.sleep(1000)
    if prompt == "exit":
        os._exit(4)
    if prompt == "exit once" and not os.path.exists(item["file"]):
        open(item["file"], "w").close()
        os._exit(4)
    return values

async def act_async(completions, *, answer, prompt, item):
    await asyncio.sleep(0.01)
    if prompt == "hang":
        await asyncio.sleep(1000)
    return act(completions, answer=answer, prompt=prompt, item=item)

def single(completion, *, answer, prompt, item):
    return 100.0 * len(completion)

def no_item(completions, *, answer, prompt):
    return [1.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "ranks.py").write_text(GROUP_MODULE)
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


def pool_of(*names, timeout_s=HANG_S, **weights):
    functions = [
        RewardFunctionConfig(name=f"ranks:{name}", weight=weights.get(name, 1.0)) for name in names
    ]
    return closing(RewardPool(functions, processes=1, timeout_s=timeout_s))


def group(texts, prompt="", **item):
    return [ScoreRequest(text, "3", prompt, item) for text in texts]


@pytest.fixture(scope="module", params=["act", "act_async"])
def acting(request, ranks):
    """A pool, and the name of its scorer."""
    with pool_of(request.param) as pool:
        yield pool, f"ranks:{request.param}"


def test_a_group_scorer_sees_the_whole_group_and_pays_each_its_own(ranks):
    with pool_of("rank", "distinct", distinct=10.0) as pool:
        scores = pool.submit(group(["a", "ccc", "bb", "bb"])).wait()
    assert [score.error for score in scores] == [""] * 4
    assert [score.rewards["ranks:rank"] for score in scores] == [0.0, 1.0, 1 / 3, 1 / 3]
    assert [score.rewards["ranks:distinct"] for score in scores] == [1.0, 1.0, 0.5, 0.5]
    assert [score.rewards["ranks:distinct/of"] for score in scores] == [4.0] * 4
    assert [score.total for score in scores] == [10.0, 11.0, 1 / 3 + 5.0, 1 / 3 + 5.0]


def test_one_sample_of_an_evaluation_is_a_list_of_one(ranks):
    with pool_of("rank", "distinct") as pool:
        (score,) = pool.submit(group(["alone"])).wait()
        assert (score.error, score.total) == ("", 1.0)
        assert pool.submit([]).wait() == []


def test_a_scorer_that_changes_the_list_changes_it_for_itself(ranks):
    with pool_of("rank", "act") as pool:
        scores = pool.submit(group(["1", "22", "333"])).wait()
    assert [score.rewards["ranks:act"] for score in scores] == [1.0, 22.0, 333.0]


def test_groups_beside_each_other_get_their_own_rewards(acting):
    pool, name = acting
    pending = [
        pool.submit(group([f"x {100 * g + i}" for i in range(g % 4 + 1)])) for g in range(40)
    ]
    for number, one in enumerate(pending):
        rewards = [score.rewards[name] for score in one.wait()]
        assert rewards == [100.0 * number + place for place in range(number % 4 + 1)]


def test_it_stands_beside_a_scorer_of_single_completions(ranks):
    with pool_of("single", "rank", rank=3.0) as pool:
        scores = pool.submit(group(["", "x"])).wait()
        assert [score.total for score in scores] == [0.0, 103.0]


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("short", "one reward for each of the 3 completions, in their order, got 2; an"),
        ("long", "one reward for each of the 3 completions, in their order, got 4"),
        ("None", "but for completion 1 (from 0): the result must be a number, got NoneType"),
        ("nan", "but for completion 2 (from 0): the result must be finite, got nan; where there"),
        (
            "one number",
            "must return a list with one reward for each of the 3 completions, in their",
        ),
        ("text", "got str '111'"),
        ("set", "got set "),
        ("raise", "RuntimeError: no ranking"),
        ("exit", "child exited with code 4"),
    ],
)
def test_what_a_group_scorer_does_wrong_is_an_error_of_its_whole_group_alone(
    acting, prompt, message
):
    pool, name = acting
    before, bad, after = (
        pool.submit(group(["x 1", "x 2", "x 3"], asked)) for asked in ("", prompt, "")
    )
    for score in bad.wait():
        assert score.error.startswith(f"{name}: ") and message in score.error
        assert math.isnan(score.total) and score.rewards == {}
    for one in (before, after):
        assert [(score.error, score.total) for score in one.wait()] == [
            ("", 1.0),
            ("", 2.0),
            ("", 3.0),
        ]


def test_a_group_is_scored_again_where_the_process_died_by_chance(acting, tmp_path):
    pool, name = acting
    file = str(tmp_path / f"seen {name}".replace(":", " "))
    scores = pool.submit(group(["x 1", "x 2"], "exit once", file=file)).wait()
    assert [(score.error, score.total) for score in scores] == [("", 1.0), ("", 2.0)]


@pytest.mark.parametrize("name", ["act", "act_async"])
def test_the_time_limit_is_that_of_a_group(ranks, name):
    with pool_of(name, timeout_s=3.0) as pool:
        bad, good = (pool.submit(group(["x 1", "x 2"], asked)) for asked in ("hang", ""))
        for score in bad.wait():
            assert score.error.startswith(f"ranks:{name}: no result within 3 s")
        assert [score.total for score in good.wait()] == [1.0, 2.0]


def test_completions_of_several_prompts_are_no_group(ranks):
    message = "ranks:rank scores the completions of one prompt"
    with pool_of("rank") as pool, pytest.raises(ValueError, match=message):
        pool.submit([*group(["a"], "first"), *group(["b"], "second")])


def test_a_group_scorer_that_cannot_be_called_is_refused_with_its_own_form(ranks):
    message = r"cannot be called as score\(completions, answer=, prompt=, item=, \)"
    with pytest.raises(ValueError, match=message):
        validate_functions([RewardFunctionConfig(name="ranks:no_item")])


def test_a_thousand_completions_with_many_variants_fit_into_a_reply(ranks):
    (ranks / "wide.py").write_text(
        "def score(completions, **given):\n"
        "    names = {f'a long name of a variant with the number {n}': 1 / 3 for n in range(60)}\n"
        "    return [{'value': float(text), **names} for text in completions]\n"
    )
    functions = [RewardFunctionConfig(name="wide:score")]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        scores = pool.submit(group([str(n) for n in range(1000)])).wait()
    assert [score.total for score in scores] == list(range(1000))


@pytest.mark.parametrize(
    "result",
    [[1, 0.5], (True, 0.5), np.array([1.0, 0.5]), jnp.array([1.0, 0.5]), [{"value": 1}, 0.5]],
)
def test_lists_tuples_and_arrays_are_results(result):
    assert named_group_rewards("f", result, 2) == [{"f": 1.0}, {"f": 0.5}]


@pytest.mark.parametrize(
    "result, message",
    [
        ({"value": 1.0}, "got dict"),
        (iter([1.0, 0.5]), "got list_iterator"),
        (b"ab", "got bytes"),
        (None, "got NoneType"),
        (np.ones((2, 2)), "got ndarray"),
        ([], "got 0; an empty"),
        ([1.0, {"other": 2.0}], "for completion 1 (from 0): a dict result needs the key 'value'"),
        ([[1.0], 1.0], "for completion 0 (from 0): the result must be a number, got list"),
        ([1e9, 1.0], "for completion 0 (from 0): a reward must lie between"),
        ([1.0, {"value": 1.0, "x": math.inf}], "the result's 'x' must be finite"),
    ],
)
def test_any_other_result_is_refused_with_the_entry_and_the_rule(result, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        named_group_rewards("f", result, 2)
    assert "one reward for each of the 2 completions" in str(refused.value)
