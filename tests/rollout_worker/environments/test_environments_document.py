"""The environment that docs/environments.md shows is run as it says."""

import contextlib
import json
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
    with shown(0, tmp_path, monkeypatch) as pool:
        yield pool


@contextlib.contextmanager
def shown(place, tmp_path, monkeypatch):
    """A pool with the code and the section of one of the examples."""
    header, _, body = blocks("python")[place].partition("\n")
    path = tmp_path / header.removeprefix("# ")
    assert len(body.splitlines()) <= MOST_LINES + 1  # of which one is a blank one of the class
    path.parent.mkdir()
    path.write_text(body)
    monkeypatch.chdir(tmp_path)
    section = parse_yaml(blocks("yaml")[place])["environment"]
    pool = EnvironmentPool(EnvironmentConfig(**section), REWARD)
    try:
        yield pool
    finally:
        pool.close()


def test_the_tools_of_the_document_answer_calls(tmp_path, monkeypatch):
    def call(name, **arguments):
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    turns = [
        call("price", item="tea", count=2) + call("calculator", expression="2 * 3"),
        call("price", item="tea", count="2"),
        call("price", item="coffee"),
        "6",
    ]
    with shown(2, tmp_path, monkeypatch) as pool:
        begun, *answered, over = heard(pool, turns, {"question": "Two teas?", "answer": "6"})
        schemas = {one["function"]["name"]: one["function"] for one in pool.tools}
    assert (
        schemas["price"]["parameters"]["properties"]["count"]["description"] == "How many pieces."
    )
    assert begun.messages == [{"role": "user", "content": "Two teas?"}]
    texts = [[message["content"] for message in turn.messages] for turn in answered]
    document = (ROOT / "docs/environments.md").read_text()
    assert texts[0] == ["6", "6"]
    assert all(f"`{text}`" in document for [text] in texts[1:])
    assert (over.reward, over.done) == (1.0, True)


def test_the_environment_of_the_document_plays(pool):
    item = {"question": "4 + 4 =", "answer": 8}
    begun, wrong, right = heard(pool, ["7", " 8\n"], item)
    assert begun.messages == [{"role": "user", "content": "4 + 4 ="}]
    assert (wrong.messages[0]["content"], wrong.done) == ("That is wrong. Try again.", False)
    assert (right.reward, right.done) == (1.0, True)
    assert [turn.done for turn in heard(pool, ["1"] * 4, item)] == [False] * 4 + [True]


def test_the_function_of_the_document_asks_twice(tmp_path, monkeypatch):
    with shown(1, tmp_path, monkeypatch) as pool:
        begun, again, right = heard(pool, ["7", " 8\n"], {"question": "4 + 4 =", "answer": 8})
    assert (begun.messages[0]["content"], begun.max_tokens) == ("4 + 4 =", 64)
    assert again.messages[0]["content"].startswith("Check it")
    assert (right.reward, right.done) == (1.0, True)
