"""Settings without effect, and the table that says when each is read."""

import pathlib

import pytest

from driver.config.checks.unread_settings import (
    ALWAYS_READ,
    CONDITIONS,
    OF_SOURCES,
    unread_settings,
)
from driver.config.config_keys import known_keys
from driver.config.load_config import dump, load
from driver.config.presets import PRESETS
from rollout_worker.config.data_config import SourceConfig

RUNS = pathlib.Path(__file__).parents[4] / "deploy/runs"
FILE = """
model: {path: here}
data: {train: {source: a.jsonl}, eval: {source: b.jsonl}}
"""
TEACHER = "algorithm.distillation={teacher: there}"
ENVIRONMENT = "environment={name: 'my.games:Game'}"
SFT_LIKE = (TEACHER, "algorithm.distillation.form=full")

GIVEN = {
    "algorithm.gamma": ("0.9", (), ("algorithm.advantage=gae",)),
    "algorithm.gae_lambda": ("0.9", (), ("algorithm.advantage=gae",)),
    "algorithm.value_coef": ("0.5", (), ("algorithm.advantage=gae",)),
    "algorithm.value_rate_factor": ("2", (), ("algorithm.advantage=gae",)),
    "algorithm.value_clip": ("0.5", (), ("algorithm.advantage=gae",)),
    "algorithm.pass_k": ("2", (), ("algorithm.advantage=pass_at_k",)),
    "algorithm.correct_from": ("0.5", (), ("algorithm.length_coef=0.1",)),
    "algorithm.advantage_eps": ("1e-4", ("algorithm.advantage=leave_one_out",), ()),
    "algorithm.clip_low": ("0.3", ("algorithm.policy_loss=soft_gate",), ()),
    "algorithm.clip_high": (
        "0.3",
        ("algorithm.policy_loss=my.losses:own",),
        ("algorithm.policy_loss=cispo",),
    ),
    "algorithm.gate_positive": ("2", (), ("algorithm.policy_loss=soft_gate",)),
    "algorithm.gate_negative": (
        "2",
        ("algorithm.policy_loss=cispo",),
        ("algorithm.policy_loss=soft_gate",),
    ),
    "algorithm.kl_estimator": ("k2", (), ("algorithm.kl_coef=0.1",)),
    "algorithm.kl_in": ("loss", (), ("algorithm.kl_coef=0.1",)),
    "algorithm.entropy_delta": ("0.1", (), ("algorithm.entropy_target=0.2",)),
    "algorithm.entropy_max": ("0.1", (), ("algorithm.entropy_target=0.2",)),
    "algorithm.resample_rounds": ("5", (), ("algorithm.zero_variance=resample",)),
    "algorithm.distillation.top_k": ("8", (TEACHER,), (TEACHER, f"{TEACHER[:-1]}, form: top_k}}")),
    "algorithm.advantage": ("group_centre", SFT_LIKE, ()),
    "algorithm.overlong_share": ("0.2", SFT_LIKE, ()),
    "algorithm.length_coef": ("0.2", SFT_LIKE, ()),
    "algorithm.policy_loss": ("cispo", SFT_LIKE, (f"{TEACHER[:-1]}, form: sampled}}",)),
    "algorithm.ratio": ("sequence", SFT_LIKE, (f"{TEACHER[:-1]}, advantage_coef: 1}}",)),
    "algorithm.dual_clip": ("3", SFT_LIKE, ()),
    "learner.optimizer.beta1": ("0.8", ("learner.optimizer.name=sgd",), ()),
    "learner.optimizer.beta2": ("0.8", ("learner.optimizer.name=sgd",), ()),
    "learner.optimizer.moments_dtype": ("bfloat16", ("learner.optimizer.name=adafactor",), ()),
    "learner.optimizer.offload": ("true", ("learner.optimizer.name=sgd",), ()),
    "learner.optimizer.eps": ("1e-6", ("learner.optimizer.name=lion",), ()),
    "learner.optimizer.final_fraction": ("0.1", (), ("learner.optimizer.schedule=cosine",)),
    "eval.beside_training": (
        "true",
        (),
        ("rollout.max_staleness=1", "eval.every_steps=2"),
    ),
    "weights.canary_bound": ("0.1", ("weights.canary=false",), ()),
    "checkpoint.keep_best": ("false", (), ("eval.every_steps=2",)),
    "checkpoint.asynchronous": ("false", ("checkpoint.every_steps=0",), ()),
    "checkpoint.export_dtype": ("float32", ("checkpoint.export_hf=false",), ()),
    "log.wandb.project": ("mine", (), ("log.wandb.mode=offline",)),
    "log.wandb.entity": ("me", (), ("log.wandb.mode=offline",)),
    "log.dashboard.host": ("127.0.0.2", ("log.dashboard.enabled=false",), ()),
    "log.dashboard.port": ("9000", ("log.dashboard.enabled=false",), ()),
    "rollout.workers.policy": (
        "balance",
        ("rollout.workers={min: 2, max: 2}",),
        ("rollout.workers={min: 1, max: 2}",),
    ),
    "reward.in_flight": ("4", (), ("reward.functions=[{name: 'my.rewards:score'}]",)),
    "environment.close_after_s": (
        "3",
        (ENVIRONMENT,),
        (ENVIRONMENT[:-1] + ", close_at_least: 2}",),
    ),
    "data.system_prompt": ("Think.", (ENVIRONMENT,), ()),
    "data.question_template": ("'{question}!'", (ENVIRONMENT,), ()),
    "reward.timeout_s": ("3", (ENVIRONMENT,), ()),
    "reward.memory_gb": ("2", (ENVIRONMENT,), ()),
}
"""What a key is set to, with what else it has no effect, and with what else it has one."""

NO_EVALUATION = ("eval.at_start=false", "eval.at_end=false")
COLOCATED = ("placement.mode=colocated", "rollout.workers=1")
GIVEN |= {
    f"eval.{name}": (value, NO_EVALUATION, ())
    for name, value in {
        "prompts": "5",
        "samples_per_prompt": "1",
        "temperature": "0.5",
        "top_k": "2",
        "top_p": "0.5",
        "min_p": "0.1",
        "pass_k": "[1]",
        "correct_from": "0.5",
    }.items()
}
GIVEN |= {
    f"weights.{name}": (value, COLOCATED, ())
    for name, value in {
        "chunk_bytes": "2048",
        "streams": "3",
        "timeout_s": "5",
        "relay_fanout": "1",
        "deltas": "false",
    }.items()
}


def test_calls_of_an_environment_are_under_way_at_once_as_those_of_async_scorers(notes):
    assert not notes(ENVIRONMENT, "reward.in_flight=4")


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return lambda *overrides: unread_settings(load(str(path), overrides))


def test_each_key_of_the_algorithm_is_in_the_table():
    algorithm = [key for key in known_keys() if key.startswith("algorithm.")]
    sections = {key.rpartition(".")[0] for key in algorithm}
    keys = set(algorithm) - sections
    conditional = {key for each in CONDITIONS for key in each.keys}
    assert keys == {key for key in conditional if key in keys} | set(ALWAYS_READ), (
        "say in driver/config/checks/unread_settings.py when a new key of `algorithm` is read"
    )
    assert not conditional & set(ALWAYS_READ)


def test_each_key_of_the_table_is_tried_here():
    conditional = {key for each in CONDITIONS for key in each.keys}
    assert conditional == set(GIVEN) and conditional <= set(known_keys())
    of_sources = {key for each in OF_SOURCES for key in each.keys}
    assert of_sources <= set(SourceConfig.model_fields)


@pytest.mark.parametrize("key", GIVEN)
def test_a_setting_without_effect_is_noted_and_one_with_effect_is_not(notes, key):
    value, without, effective = GIVEN[key]
    (said,) = [one for one in notes(*without, f"{key}={value}") if one.startswith(f"{key}=")]
    assert "has no effect, since it needs " in said and said.endswith("remove it, or set that")
    assert not [one for one in notes(*effective, f"{key}={value}") if one.startswith(f"{key}=")]
    assert notes(*without) == [] or key not in "".join(notes(*without))


def test_defaults_are_not_noted_nor_those_of_a_configuration_that_a_run_wrote(notes, tmp_path):
    assert notes() == []
    path = tmp_path / "written.yaml"
    path.write_text(dump(load(str(tmp_path / "run.yaml"), ["algorithm.gamma=0.5"])))
    (said,) = unread_settings(load(str(path)))
    assert said.startswith("algorithm.gamma=0.5 has no effect, since it needs algorithm.advantage")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_nothing_without_effect(tmp_path, name):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    assert unread_settings(load(str(path), preset_name=name)) == []


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_that_we_ship_set_nothing_without_effect(path):
    assert unread_settings(load(str(path))) == []


@pytest.mark.parametrize(
    "override, where",
    [
        ("data.train.split=test", "data.train: split=test"),
        ("data.train.subset=main", "data.train: subset=main"),
        ("data.train.seed=3", "data.train: seed=3"),
        ("data.eval.seed=3", "data.eval: seed=3"),
        ("data.train=[{source: a.jsonl, split: test}]", "data.train.0 (a): split=test"),
        ("data.eval=[{source: a/b, name: c, seed: 1}]", "data.eval.0 (c): seed=1"),
        (
            "data.train={source: 'reasoning_gym:chain_sum', size: 2, seed: 1, split: test}",
            "data.train: split=test",
        ),
    ],
)
def test_a_key_that_the_kind_of_source_does_not_read_is_noted(notes, override, where):
    (said,) = notes(override)
    assert said.startswith(f"{where} has no effect, since it needs ")


def test_what_a_source_reads_is_not_noted(notes):
    assert notes("data.train={source: openai/gsm8k, split: test, subset: main}") == []
    assert notes("data.train={source: 'reasoning_gym:chain_sum', size: 2, seed: 1}") == []
