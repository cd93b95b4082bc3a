"""The configurations that docs/environment_adapters.md shows are run as it says."""

import contextlib
import json
import pathlib
import re

import pytest

from driver.config.yaml_text import parse_yaml
from rollout_worker.config.data_config import SourceConfig
from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.data.records import records
from rollout_worker.environments.environment_pool import EnvironmentPool
from tests.rollout_worker.environments.test_environment_pool import REWARD, heard

TEXT = (pathlib.Path(__file__).resolve().parents[4] / "docs/environment_adapters.md").read_text()
MOST_LINES = 70


def example(adapter):
    """The configuration in the document that names an adapter."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    [found] = [parse_yaml(block) for block in blocks if adapter in block]
    return found


@contextlib.contextmanager
def running(section):
    pool = EnvironmentPool(EnvironmentConfig(**section), REWARD)
    try:
        yield pool
    finally:
        pool.close()


def test_the_document_is_short_and_has_an_example_of_each_adapter():
    assert len(TEXT.splitlines()) <= MOST_LINES
    named = re.findall(r"^\| `(\w+:\w+)`", TEXT, re.MULTILINE)
    assert len(named) == 4
    for name in named:
        assert example(name)["environment"]["name"].endswith(f".{name}")


def test_a_task_of_reasoning_gym_is_tried_again():
    found = example("ReasoningGymRetries")
    source = SourceConfig(**found["data"]["train"] | {"size": 2})
    [*_, (_, _, item)] = records(source)
    with running(found["environment"]) as pool:
        begun, again, over = heard(pool, ["#### 1", f"#### {item['answer']}"], item)
    assert begun.messages[0]["content"] == "Think, then write the answer after ####."
    assert re.fullmatch(r"That scores 0\.\d\d\. 3 tries left\.", again.messages[0]["content"])
    assert (over.reward, over.done) == (0.8, True)
    assert f"`info`: {', '.join(f'`{name}`' for name in over.numbers)}" in TEXT
    assert found["environment"]["max_turns"] == found["environment"]["params"]["tries"]


def test_the_frozen_lake_is_drawn_and_walked_on():
    pytest.importorskip("gymnasium")
    with running(example("GymnasiumText")["environment"]) as pool:
        way = ["right"] * 7 + ["down"] * 7
        turns = heard(pool, [f"#### {word}" for word in way], {"question": "Reach G."})
    [first, rest] = turns[0].messages[0]["content"].split("\n\n", 1)
    assert (
        first == "Reach G." and rest.startswith("<red>S</red>FFFFFFF\n") and "<red>S</red>" in TEXT
    )
    assert (turns[-1].reward, turns[-1].done) == (1.0, True)
    assert f"`info`: {', '.join(f'`{name}`' for name in turns[-1].numbers)}" in TEXT


def test_a_session_of_a_server_is_played():
    pytest.importorskip("openenv.core.env_server.http_server")
    from tests.rollout_worker.environments.adapters.openenv_kinds import serving

    section = example("OpenEnvSession")["environment"]
    with serving() as url:
        section["params"]["url"] = url
        with running(section) as pool:
            begun, low, over = heard(pool, ["#### 3", "#### 7"], {"question": "Q?", "secret": 7})
    assert begun.messages == [{"role": "user", "content": "Q?\n\nGuess."}]
    assert low.messages == [{"role": "user", "content": "higher"}]
    assert (over.reward, over.done) == (1.0, True)


@pytest.mark.slow
def test_rows_of_verifiers_are_written_and_scored(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.legacy")
    from verifiers.legacy.envs.integrations.reasoninggym_env import ReasoningGymEnv

    [code] = re.findall(r"^`(ReasoningGymEnv\(.*)` writes", TEXT, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    eval(code, {"ReasoningGymEnv": ReasoningGymEnv})
    found = example("VerifiersEnvironment")
    [*_, (_, _, row)] = records(SourceConfig(**found["data"]["train"], size=2))
    terms = re.findall(r"-?\d+", row["question"].replace("- ", "-").replace("+ ", ""))
    with running(found["environment"]) as pool:
        begun, over = heard(pool, [f"<answer>{sum(map(int, terms))}</answer>"], row)
    assert begun.messages[-1]["content"] == json.loads(json.dumps(row))["question"]
    assert (over.reward, over.done) == (1.0, True)
