"""Settings that were given and that nothing reads under the others: one table of conditions.

A key of `algorithm` that is in neither `CONDITIONS` nor `ALWAYS_READ` fails a test.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from driver.config.checks.data_checks import train_keys
from driver.config.run_config import RunConfig
from rollout_worker.config.data_config import SourceConfig


class Condition(NamedTuple):
    """When keys are read."""

    keys: tuple[str, ...]
    needs: str
    """What has to be set, as a message says it."""
    holds: Callable[[Any], bool]
    """Of the configuration, or of a source."""


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _trains_on_rewards(run: RunConfig) -> bool:
    distillation = run.algorithm.distillation
    return distillation is None or distillation.advantage_coef > 0


def _has_policy_term(run: RunConfig) -> bool:
    distillation = run.algorithm.distillation
    return _trains_on_rewards(run) or (distillation is not None and distillation.form == "sampled")


def _evaluates(run: RunConfig) -> bool:
    return bool(run.eval.every_steps or run.eval.at_start or run.eval.at_end)


def _has_async_scorer(run: RunConfig) -> bool:
    rewards = [run.reward, *(each.reward for each in run.held_out_sets)]
    names = [one.name for reward in rewards for one in reward.functions]
    return "judge" in names or any(":" in name for name in names)


_REWARDS = "no algorithm.distillation, or its advantage_coef above 0"
_POLICY_TERM = f"{_REWARDS}, or its form sampled"

CONDITIONS = (
    Condition(
        _keys("algorithm", "gamma gae_lambda value_coef value_rate_factor value_clip"),
        "algorithm.advantage=gae",
        lambda run: run.algorithm.has_critic,
    ),
    Condition(
        ("algorithm.pass_k",),
        "algorithm.advantage=pass_at_k",
        lambda run: run.algorithm.advantage == "pass_at_k",
    ),
    Condition(
        ("algorithm.correct_from",),
        "algorithm.advantage=pass_at_k, or length_coef above 0",
        lambda run: run.algorithm.advantage == "pass_at_k" or run.algorithm.length_coef > 0,
    ),
    Condition(
        ("algorithm.advantage_eps",),
        "another algorithm.advantage, which divides by a standard deviation",
        lambda run: run.algorithm.advantage not in ("group_centre", "leave_one_out", "pass_at_k"),
    ),
    Condition(
        _keys("algorithm", "clip_low clip_high"),
        "algorithm.policy_loss=clip or cispo",
        lambda run: run.algorithm.policy_loss in ("clip", "cispo"),
    ),
    Condition(
        ("algorithm.dual_clip",),
        "algorithm.policy_loss=clip",
        lambda run: run.algorithm.policy_loss == "clip",
    ),
    Condition(
        _keys("algorithm", "gate_positive gate_negative"),
        "algorithm.policy_loss=soft_gate",
        lambda run: run.algorithm.policy_loss == "soft_gate",
    ),
    Condition(
        _keys("algorithm", "kl_estimator kl_in"),
        "algorithm.kl_coef above 0",
        lambda run: run.algorithm.kl_coef > 0,
    ),
    Condition(
        _keys("algorithm", "entropy_delta entropy_max"),
        "algorithm.entropy_target",
        lambda run: run.algorithm.entropy_target is not None,
    ),
    Condition(
        ("algorithm.resample_rounds",),
        "algorithm.zero_variance=resample",
        lambda run: run.algorithm.zero_variance == "resample",
    ),
    Condition(
        ("algorithm.distillation.top_k",),
        "algorithm.distillation.form=top_k",
        lambda run: run.algorithm.distillation.form == "top_k",
    ),
    Condition(
        _keys(
            "algorithm",
            "advantage advantage_eps pass_k correct_from overlong_share length_coef",
        ),
        _REWARDS,
        _trains_on_rewards,
    ),
    Condition(
        _keys(
            "algorithm",
            "policy_loss ratio clip_low clip_high dual_clip gate_positive gate_negative",
        ),
        _POLICY_TERM,
        _has_policy_term,
    ),
    Condition(
        _keys("learner.optimizer", "beta1 beta2 moments_dtype"),
        "learner.optimizer.name=adamw, lion or muon",
        lambda run: run.learner.optimizer.name in ("adamw", "lion", "muon"),
    ),
    Condition(
        ("learner.optimizer.offload",),
        "learner.optimizer.name other than sgd, which has no moments",
        lambda run: run.learner.optimizer.name != "sgd",
    ),
    Condition(
        ("learner.optimizer.eps",),
        "learner.optimizer.name=adamw or muon",
        lambda run: run.learner.optimizer.name in ("adamw", "muon"),
    ),
    Condition(
        ("learner.optimizer.final_fraction",),
        "learner.optimizer.schedule=linear or cosine",
        lambda run: run.learner.optimizer.schedule != "constant",
    ),
    Condition(
        _keys(
            "eval",
            "prompts samples_per_prompt temperature top_k top_p min_p pass_k correct_from "
            "beside_training",
        ),
        "an evaluation: eval.every_steps above 0, at_start or at_end",
        _evaluates,
    ),
    Condition(
        ("eval.beside_training",),
        "rollout.max_staleness above 0, placement.mode=separate and eval.every_steps above 1",
        lambda run: not run.eval.beside_training or run.evaluates_beside_training,
    ),
    Condition(
        _keys("weights", "chunk_bytes streams timeout_s relay_fanout deltas"),
        "placement.mode=separate",
        lambda run: run.placement.mode == "separate",
    ),
    Condition(("weights.canary_bound",), "weights.canary=true", lambda run: run.weights.canary),
    Condition(
        ("checkpoint.keep_best",), "eval.every_steps above 0", lambda run: run.eval.every_steps > 0
    ),
    Condition(
        ("checkpoint.asynchronous",),
        "checkpoint.every_steps above 0",
        lambda run: run.checkpoint.every_steps > 0,
    ),
    Condition(
        ("checkpoint.export_dtype",),
        "checkpoint.export_hf=true",
        lambda run: run.checkpoint.export_hf,
    ),
    Condition(
        _keys("log.wandb", "project entity"),
        "log.wandb.mode=online or offline",
        lambda run: run.log.wandb.mode != "disabled",
    ),
    Condition(
        _keys("log.dashboard", "host port"),
        "log.dashboard.enabled=true",
        lambda run: run.log.dashboard.enabled,
    ),
    Condition(
        ("rollout.workers.policy",),
        "rollout.workers.min below its max",
        lambda run: run.rollout.workers.min < run.rollout.workers.max,
    ),
    Condition(
        ("reward.in_flight",),
        "an environment, or an async scorer, such as judge",
        lambda run: run.environment is not None or _has_async_scorer(run),
    ),
    Condition(
        ("environment.close_after_s",),
        "environment.close_at_least",
        lambda run: run.close_at_least is not None,
    ),
    Condition(
        _keys("data", "system_prompt question_template"),
        "prompts in place of the environment, which writes all messages of its episodes",
        lambda run: run.environment is None,
    ),
    Condition(
        ("reward.timeout_s",),
        "scorers in place of the environment, which environment.timeout_s bounds",
        lambda run: run.environment is None,
    ),
    Condition(
        ("reward.memory_gb",),
        "scorers in place of the environment, which environment.memory_gb bounds",
        lambda run: run.environment is None,
    ),
)
"""A key in several rows is read where all of them hold."""

ALWAYS_READ = _keys(
    "algorithm",
    "aggregation kl_coef entropy_coef entropy_target zero_variance truncated "
    "off_policy.token_truncate off_policy.sequence_low off_policy.sequence_high "
    "distillation.teacher distillation.form distillation.coef distillation.advantage_coef",
)
"""The other keys of `algorithm`."""

OF_SOURCES = (
    Condition(("split", "subset"), "an HF dataset", lambda source: source.is_dataset),
    Condition(("seed",), "a reasoning_gym task", lambda source: source.is_procedural),
)
"""The same for keys of each source."""


def unread_settings(run: RunConfig) -> list[str]:
    """One line for each setting that was given and has no effect.

    A section that is written whole, as in the config.yaml of a run, is taken to give only what
    differs from the defaults.
    """
    found = _unread(run, dict(_given(run)), CONDITIONS)
    sources = list(zip(train_keys(run.data), run.data.train_sources, strict=True))
    sources += zip(run.data.eval_keys, run.data.eval_sources, strict=True)
    for where, source in sources:
        found += _unread(source, dict(_given(source)), OF_SOURCES, f"{where}: ")
    return found


def _unread(
    settings: RunConfig | SourceConfig,
    given: dict[str, Any],
    conditions: tuple[Condition, ...],
    where: str = "",
) -> list[str]:
    found: dict[str, str] = {}
    for condition in conditions:
        for key in condition.keys:
            if key in given and not condition.holds(settings):
                found.setdefault(
                    key,
                    f"{where}{key}={given[key]} has no effect, since it needs {condition.needs}: "
                    "remove it, or set that",
                )
    return list(found.values())


def _given(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    fields = type(section).model_fields
    whole = section.model_fields_set >= set(fields)
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _given(value, f"{prefix}{name}.")
        elif not (whole and value == fields[name].get_default(call_default_factory=True)):
            yield f"{prefix}{name}", value
