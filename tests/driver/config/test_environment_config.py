"""What a run with an environment may say, and where its file is found."""

import pytest

from driver.config.load_config import ConfigError
from driver.config.paths import locate
from driver.config.run_config import RunConfig

BASE = {
    "model": {"path": "deploy/demo/model"},
    "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 8}},
    "eval": {"at_start": False, "at_end": False},
}
GAME = {"name": "deploy/demo/guessing.py:Guessing"}


def run(**sections):
    return RunConfig.model_validate(BASE | sections)


def names(config):
    return [function.name for function in config.reward.functions]


def test_the_reward_of_an_environment_takes_the_place_of_the_default():
    assert names(run(environment=GAME)) == ["environment"]
    assert names(run(environment=GAME, reward={"processes": 2})) == ["environment"]
    assert names(run(environment=None)) == names(run()) == ["gsm8k_answer"]
    weighed = {"functions": [{"name": "environment", "weight": 0.5}]}
    assert run(environment=GAME, reward=weighed).reward.functions[0].weight == 0.5
    whole = run(environment=GAME)
    assert RunConfig.model_validate(whole.model_dump()) == whole


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward": {"functions": [{"name": "environment"}]}}, "set environment.name"),
        (
            {"environment": GAME, "reward": {"functions": [{"name": "exact"}]}},
            r"\['exact'\] would score nothing",
        ),
        ({"environment": GAME | {"max_turns": 0}}, "max_turns"),
        ({"environment": GAME | {"close_at_least": 1}}, "close_at_least"),
        ({"environment": GAME | {"close_at_least": 8}}, "close_at_least=8 must be less than the 8"),
        ({"environment": GAME | {"history": "drop"}}, "as_rendered"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(sections, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        run(**sections)


def test_a_file_of_an_environment_becomes_absolute_and_an_import_path_stays():
    located = locate(run(environment=GAME)).environment
    assert located is not None and located.name.startswith("/")
    assert located.name.endswith("/deploy/demo/guessing.py:Guessing")
    other = locate(run(environment={"name": "my_pkg.retry:Retry"})).environment
    assert other is not None and other.name == "my_pkg.retry:Retry"
