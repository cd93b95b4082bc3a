"""The configuration of supervised training, and one message for what it does not accept."""

import pytest

from driver.config.config_keys import known_keys
from driver.config.load_config import ConfigError, dump, load_as
from driver.sft.sft_config import SftConfig
from driver.sft.sft_reference import main, page

MINIMAL = ("model.path=m", "data.train.source=rows.jsonl")


def load(*overrides):
    return load_as(SftConfig, None, [*MINIMAL, *overrides])


def test_it_is_read_back_from_what_is_written(tmp_path):
    config = load("run.epochs=2.5", "learner.optimizer.name=muon", "data.eval.source=held.jsonl")
    file = tmp_path / "config.yaml"
    file.write_text(dump(config))
    assert load_as(SftConfig, str(file)) == config


def test_the_data_and_learner_sections_are_those_of_a_run():
    run = {key for key in known_keys() if key.split(".")[0] in ("model", "data", "learner")}
    assert run <= set(known_keys(SftConfig))


@pytest.mark.parametrize(
    "override, message",
    [
        ("run.epoch=2", r"run.epoch: unknown key; did you mean run.epochs\?"),
        ("num_train_epochs=2", r"did you mean run.epochs\?"),
        ("max_seq_length=9", r"did you mean batch.max_tokens\?"),
        ("data.max_length=9", r"did you mean batch.max_tokens\?"),
        ("rollout.workers=2", "rollout.workers: unknown key"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low: unknown key"),
        ("batch.max_tokens=9000", "microbatch_tokens=8192 cannot hold one record of .*9000"),
        ("learner.updates_per_batch=2", "updates_per_batch=2 is for reinforcement learning"),
        ("eval.every_steps=5", "eval.every_steps=5 but data.eval is not set"),
        ("data.curriculum.skip_after=2", "data.curriculum skips prompts by the rewards"),
        ("run.epochs=0", "must be greater than 0"),
        ("placement.platform=cuda", "'cuda' is none of 'cpu', 'gpu' or 'tpu'"),
    ],
)
def test_a_fault_names_value_rule_and_fix(override, message):
    with pytest.raises(ConfigError, match=message):
        load(override)


def test_steps_and_epochs_exclude_each_other():
    with pytest.raises(ConfigError, match="steps=5 and epochs=2 both say how long to train"):
        load("run.steps=5", "run.epochs=2")


def test_the_committed_page_is_current():
    import pathlib

    committed = pathlib.Path(__file__).parents[3] / "docs" / "sft_configuration.md"
    assert committed.read_text(encoding="utf-8") == page(), (
        "run `python -m driver.sft.sft_reference > docs/sft_configuration.md`"
    )


def test_the_page_has_every_own_key_with_its_meaning():
    own = [key for key in known_keys(SftConfig) if key.split(".")[0] in ("run", "batch", "eval")]
    assert [key for key in own if f"`{key}`" not in page()] == []
    assert [row for row in page().splitlines() if row.endswith("|  |")] == []
    assert "learner.optimizer.name" not in page(), "stands on the page of a run"


def test_the_page_is_printed(capsys):
    main([])
    assert capsys.readouterr().out == page()
