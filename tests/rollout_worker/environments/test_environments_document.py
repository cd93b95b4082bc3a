"""The environment that docs/environments.md shows is run as it says."""

import pathlib
import re

import pytest

from driver.config.yaml_text import parse_yaml
from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.environments.environment_pool import EnvironmentPool
from tests.rollout_worker.environments.test_environment_pool import REWARD, heard

ROOT = pathlib.Path(__file__).resolve().parents[3]
MOST_LINES = 15


def blocks(language):
    text = (ROOT / "docs/environments.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def pool(tmp_path, monkeypatch):
    [code], [section] = blocks("python"), blocks("yaml")
    header, _, body = code.partition("\n")
    path = tmp_path / header.removeprefix("# ")
    assert len(body.splitlines()) <= MOST_LINES + 1  # of which one is a blank one of the class
    path.parent.mkdir()
    path.write_text(body)
    monkeypatch.chdir(tmp_path)
    pool = EnvironmentPool(EnvironmentConfig(**parse_yaml(section)["environment"]), REWARD)
    yield pool
    pool.close()


def test_the_environment_of_the_document_plays(pool):
    item = {"question": "4 + 4 =", "answer": 8}
    begun, wrong, right = heard(pool, ["7", " 8\n"], item)
    assert begun.messages == [{"role": "user", "content": "4 + 4 ="}]
    assert (wrong.messages[0]["content"], wrong.done) == ("That is wrong. Try again.", False)
    assert (right.reward, right.done) == (1.0, True)
    assert [turn.done for turn in heard(pool, ["1"] * 4, item)] == [False] * 4 + [True]
