"""Small groups and learners that the tests of this folder share."""

import contextlib
import functools
from unittest import mock

import jax
import numpy as np

from learner.compiled_functions import make_learner_functions
from learner.config import (
    AlgorithmConfig,
    LearnerConfig,
    MeshConfig,
    OptimizerConfig,
    TrainingSettings,
)
from learner.core import LearnerCore
from learner.objective.advantages import AdvantageRule
from learner.objective.batching import SelectionRules
from models.config import ModelConfig
from models.transformer import init_params
from services.wire.messages import Completion, FinishReason, Group

RULES = SelectionRules(
    advantage=AdvantageRule("group_norm"),
    aggregation="token_mean",
    zero_variance="keep",
    truncated="keep",
    max_completion_tokens=16,
)
TINY = ModelConfig(
    model_type="qwen2",
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
    qkv_bias=True,
)


def make_completion(
    ids,
    reward,
    *,
    index=0,
    logprobs=None,
    finish=FinishReason.STOP,
    error="",
    segments=(),
    starts=(),
):
    ids = np.array(ids, np.int32)
    sampled = sum(segments[::2]) if segments else len(ids)
    return Completion(
        sample_index=index,
        token_ids=ids,
        behavior_logprobs=np.full(sampled, -3.0, np.float32)
        if logprobs is None
        else np.array(logprobs, np.float32),
        finish_reason=finish,
        rewards={} if error else {"answer": reward},
        total_reward=float("nan") if error else reward,
        reward_error=error,
        segment_tokens=tuple(segments),
        record_starts=tuple(starts),
    )


def make_group(number, prompt, completions, *, policy_version=0):
    return Group(
        run_id="run",
        group_id=f"g{number}",
        attempt=0,
        prompt_id=number,
        epoch=0,
        policy_version=policy_version,
        weight_digest="",
        worker="w0",
        prompt_token_ids=np.array(prompt, np.int32),
        completions=tuple(completions),
        phase_s={},
    )


def random_segments(rng, T):
    """Lengths of the segments of an episode of T tokens; none where it has one turn."""
    count = 1 + 2 * int(rng.integers(0, (T - 1) // 2 + 1))
    if count == 1:
        return ()
    cuts = np.sort(rng.choice(np.arange(1, T), count - 1, replace=False))
    return tuple(np.diff([0, *cuts, T]).tolist())


def random_groups(
    count=4, size=4, *, seed=0, max_completion=9, vocab=20, episodes=False, records=False
):
    """Groups with prompts of 1-5 and completions of 1..max_completion tokens, rewards 0 or 1.

    Args:
        episodes: whether an environment wrote a part of some completions.
        records: whether some of these have several records.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        completions = []
        for index in range(size):
            T = int(rng.integers(1, max_completion + 1))
            segments = random_segments(rng, T) if episodes else ()
            sampled = sum(segments[::2]) if segments else T
            places = range(1, len(segments), 2) if records else ()
            starts = [place for place in places if rng.random() < 0.5]
            completions.append(
                make_completion(
                    rng.integers(0, vocab, T),
                    float(index % 2),
                    index=index,
                    logprobs=-3.0 + rng.normal(0, 0.3, sampled),
                    segments=segments,
                    starts=starts,
                )
            )
        groups.append(make_group(number, rng.integers(0, vocab, rng.integers(1, 6)), completions))
    return groups


@functools.cache
def host_params(config=TINY, seed=0):
    init = jax.jit(init_params, static_argnums=1)
    return jax.tree.map(np.array, init(jax.random.key(seed), config))


def make_core(
    *,
    reward_weights=None,
    data=1,
    fsdp=1,
    context=1,
    microbatch_tokens=64,
    algorithm=None,
    optimizer=None,
    config=TINY,
    params=None,
    total_steps=10,
    teacher=None,
    **learner,
):
    learner = {"compute_dtype": "float32", "remat": False, **learner}
    settings = TrainingSettings(
        algorithm=AlgorithmConfig(**(algorithm or {})),
        learner=LearnerConfig(
            microbatch_tokens=microbatch_tokens,
            mesh=MeshConfig(data=data, fsdp=fsdp, context=context),
            optimizer=OptimizerConfig(**{"learning_rate": 1e-2, **(optimizer or {})}),
            **learner,
        ),
        total_steps=total_steps,
        temperature=0.8,
        valid_vocab=config.vocab_size - 2,
        max_completion_tokens=16,
        reward_weights=reward_weights or {},
    )
    params = host_params(config) if params is None else params
    made_for = _compiled_for(settings, config, params, teacher and teacher.config)
    with functions_made_once(_FUNCTIONS.setdefault(made_for, [])):
        devices = jax.devices()[: data * fsdp * context]
        core = LearnerCore(settings, config, params, devices=devices, teacher=teacher)
    core._programs.compiled = _COMPILED.setdefault(made_for, core._programs.compiled)
    return core


@contextlib.contextmanager
def functions_made_once(made: list):
    """Learners that are made meanwhile differ in nothing that their functions depend on.

    Args:
        made: the functions are kept in it.
    """

    def make(*arguments, **how):
        if not made:
            made.append(make_learner_functions(*arguments, **how))
        return made[0]

    with mock.patch("learner.core.make_learner_functions", make):
        yield


_FUNCTIONS = {}
"""The functions of learners, shared by those that would make the same."""
_COMPILED = {}
"""What learners have compiled, shared as well."""


def _compiled_for(settings, config, params, teacher):
    """All that the functions of a learner depend on, beside shapes of its batches.

    Modules that compile in a way of their own, by a replaced `compile`, share nothing with others.
    """
    algorithm, learner = settings.algorithm, settings.learner
    on_the_host = {"advantage", "advantage_eps", "pass_k", "correct_from", "overlong_share"}
    on_the_host |= {"length_coef", "aggregation", "zero_variance", "resample_rounds", "truncated"}
    on_the_host |= {"off_policy", "gamma", "gae_lambda"}
    return (
        jax.stages.Lowered.compile,
        config,
        teacher,
        algorithm.model_dump_json(exclude=on_the_host),
        algorithm.has_critic,
        learner.model_dump_json(exclude={"updates_per_batch", "microbatch_tokens"}),
        settings.total_steps * learner.updates_per_batch,
        settings.temperature,
        settings.valid_vocab,
        str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)),
    )
