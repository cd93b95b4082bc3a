"""What the README shows must be what the program takes."""

import json
import pathlib
import re
import textwrap

from driver.cli import DEFAULT_CONFIG, parser
from driver.config import load_config as settings
from driver.config.run_config import RunConfig
from rollout_worker.config.reward_config import RewardFunctionConfig

ROOT = pathlib.Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def yaml_blocks() -> list[str]:
    return re.findall(r"^ *```yaml\n(.*?)^ *```", README, re.M | re.S)


def test_the_complete_example_loads(tmp_path):
    (example,) = [block for block in yaml_blocks() if block.startswith("run:")]
    file = tmp_path / "run.yaml"
    file.write_text(example)
    assert settings.load(str(file)).rollout.completions_per_step == 64


def test_the_example_of_a_reward_is_a_valid_entry():
    (example,) = [block for block in yaml_blocks() if "my_pkg.rewards" in block]
    lines = [line.removeprefix("  ") for line in example.splitlines()]
    entry = settings.parse_yaml("\n".join(lines))["reward"]["functions"][0]
    assert RewardFunctionConfig(**entry).name == "my_pkg.rewards:score"


def test_the_example_of_a_judge_loads_and_is_not_taken_for_a_secret(tmp_path):
    (complete,) = [block for block in yaml_blocks() if block.startswith("run:")]
    (judge,) = [block for block in yaml_blocks() if "my-judge" in block]
    reward = "\n".join(line.removeprefix("  ") for line in judge.splitlines())
    text, count = re.subn(r"^reward:\n(?: .*\n)+", lambda _: f"{reward}\n", complete, flags=re.M)
    assert count == 1
    file = tmp_path / "run.yaml"
    file.write_text(text)
    (function,) = settings.load(str(file)).reward.functions
    assert function.name == "judge" and function.params["key_from"] == "JUDGE_API_KEY"


def test_the_examples_of_ones_own_are_short_and_load(tmp_path):
    section = README.partition("### Bring your own")[2].partition("\n### ")[0]
    blocks = re.findall(r"^  ```(\w+)\n(.*?)^  ```", section, re.M | re.S)
    assert {kind for kind, _ in blocks} == {"python", "yaml"}
    assert max(block.count("\n") for _, block in blocks) <= 12
    (complete,) = [block for block in yaml_blocks() if block.startswith("run:")]
    whole = settings.parse_yaml(complete)
    keys = []
    for _, block in [one for one in blocks if one[0] == "yaml"]:
        ((key, values),) = settings.parse_yaml(textwrap.dedent(block)).items()
        keys.append(key)
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps(whole | {key: {**whole.get(key, {}), **values}}))
        settings.load(str(file))
    assert set(keys) == {"data", "reward", "algorithm"}


def test_every_command_and_configuration_that_is_named_exists():
    known = {action.dest for action in parser()._actions}
    for option in re.findall(r"-m driver [^\n`]*?--([a-z-]+)", README):
        assert option.replace("-", "_") in known | {"set"}, option
    for path in {DEFAULT_CONFIG, *re.findall(r"deploy/[\w/.]+\.(?:yaml|py)", README)}:
        assert (ROOT / path).is_file(), path
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"`make ([a-z0-9-]+)`", README):
        assert target in targets, target


def test_the_example_of_several_held_out_sets_loads():
    (example,) = [block for block in yaml_blocks() if "held_out.jsonl" in block]
    lines = [line.removeprefix("  ") for line in example.splitlines()]
    data = settings.parse_yaml("\n".join(lines))["data"]
    sections = {"model": {"path": "m"}, "data": {"train": {"source": "a.jsonl"}} | data}
    sums, words = RunConfig.model_validate(sections).held_out_sets
    assert (sums.name, sums.scorer, sums.rules.pass_k) == ("sums", "gsm8k_answer", (1,))
    assert (words.name, words.scorer, words.rules.pass_k) == ("words", "exact", (1, 8))
