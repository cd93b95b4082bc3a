"""Whole updates with a teacher: what they train, and that no cut of the batch changes them."""

import dataclasses
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear_distillation import reference
from learner.objective import batching
from learner.teacher import TeacherModel, fitted
from models.transformer import forward, head_weight, logits, packed_attend
from services.process.phase_clock import PhaseClock
from tests.learner.builders import (
    TINY,
    host_params,
    make_completion,
    make_core,
    make_group,
    random_groups,
)

pytestmark = pytest.mark.slow

LARGER = dataclasses.replace(
    TINY, hidden_size=24, num_layers=3, num_kv_heads=2, tie_word_embeddings=False
)
"""Of another width and depth, with a head of its own."""
_params = host_params(LARGER, 7)
TEACHER = TeacherModel(
    config=LARGER, params={**_params, "lm_head": {"weight": 8 * _params["lm_head"]["weight"]}}
)
"""Surer of itself than a model that was never trained."""
SAME = TeacherModel(config=TINY, params=host_params())
SGD = {"name": "sgd", "learning_rate": 0.05, "clip_norm": 1e9}
FORMS = {
    "full": {"form": "full", "coef": 0.5},
    "top_k": {"form": "top_k", "top_k": 3},
    "sampled": {"form": "sampled", "coef": 2.0},
    "beside rewards": {"form": "full", "coef": 0.5, "advantage_coef": 1.0},
}


def core_with(form, teacher=TEACHER, **how):
    distillation = {"teacher": "in memory", **FORMS[form]}
    return make_core(
        algorithm={"distillation": distillation, **how.pop("algorithm", {})},
        optimizer=SGD,
        teacher=teacher,
        **how,
    )


def flat(tree):
    return np.concatenate([np.ravel(np.float64(leaf)) for leaf in jax.tree.leaves(tree)])


def change_of(core, groups=None):
    """How an update changes the parameters, and its metrics."""
    metrics = core.update(random_groups(5, seed=3) if groups is None else groups, PhaseClock())
    assert metrics["train/update_skipped"] == 0
    return flat(core.state.params) - flat(host_params()), metrics


def logits_of(params, config, group, completion):
    """At each of the completion's tokens, [N, V]; of one unpacked sequence, in float32."""
    tokens = np.concatenate([group.prompt_token_ids, completion.token_ids])[None]
    N = tokens.shape[1] - 1
    hidden, _ = forward(
        params,
        config,
        tokens[:, :-1],
        jnp.arange(N)[None],
        packed_attend(jnp.ones((1, N), jnp.int32), operand_dtype=jnp.float32),
        compute_dtype=jnp.float32,
    )
    return logits(hidden, head_weight(params))[0, len(group.prompt_token_ids) - 1 :]


def logprobs_of(params, config, group, completion):
    tempered = logits_of(params, config, group, completion)[:, : TINY.vocab_size - 2] / 0.8
    at = np.arange(len(completion.token_ids)), completion.token_ids
    return np.float64(jax.nn.log_softmax(tempered)[at])


def literal_change(groups, top_k, coef):
    """The same for the divergence alone, with whole logits."""

    def total(params):
        found, count = 0.0, 0
        for group in groups:
            for completion in group.completions:
                each = reference.divergence(
                    logits_of(params, TINY, group, completion),
                    logits_of(TEACHER.params, LARGER, group, completion),
                    top_k=top_k,
                    temperature=0.8,
                    valid_vocab=TINY.vocab_size - 2,
                )
                found, count = found + each.sum(), count + len(each)
        return coef * found / count, found / count

    gradient, mean = jax.grad(total, has_aux=True)(jax.tree.map(jnp.asarray, host_params()))
    return -SGD["learning_rate"] * flat(gradient), float(mean)


@pytest.mark.parametrize("form, top_k, coef", [("full", None, 0.5), ("top_k", 3, 1.0)])
def test_an_update_follows_the_gradient_of_the_divergence(form, top_k, coef):
    groups = random_groups(2, 2, seed=5)
    actual, metrics = change_of(core_with(form), groups)
    expected, mean = literal_change(groups, top_k, coef)
    size = np.linalg.norm(expected)
    assert size > 1e-4 and np.linalg.norm(actual - expected) < 1e-4 * size
    assert metrics["train/distillation_kl"] == pytest.approx(mean, rel=1e-4)
    assert metrics["train/loss"] == pytest.approx(coef * mean, rel=1e-4)


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_a_teacher_that_is_the_policy_changes_nothing(form):
    change, metrics = change_of(core_with(form, SAME))
    assert np.abs(change).max() < 1e-7
    assert abs(metrics["train/distillation_kl"]) < 1e-6


@pytest.mark.parametrize("form", ["full", "top_k", "sampled"])
def test_groups_of_equal_rewards_train_and_rewards_are_only_measured(form):
    equal = [
        make_group(0, [1, 2], [make_completion([3, 4, 5], 1.0), make_completion([6], 1.0, index=1)])
    ]
    change, metrics = change_of(core_with(form), equal)
    assert np.linalg.norm(change) > 1e-4
    assert metrics["rollout/zero_variance_fraction"] == 1 and metrics["train/groups"] == 1
    assert metrics["reward/total/mean"] == 1.0
    assert metrics["funnel/nonzero_advantage"] == 4

    other = [make_group(0, [1, 2], [make_completion([3, 4, 5], 0.0), make_completion([6], 1.0)])]
    np.testing.assert_array_equal(change_of(core_with(form), other)[0], change)
    assert np.any(change_of(core_with("beside rewards"), other)[0] != change)


def test_the_sampled_form_clips_the_teachers_advantage_as_any_other():
    groups = random_groups(2, 2, seed=5)
    losses, gaps = [], []
    for group in groups:
        for completion in group.completions:
            sampled = completion.behavior_logprobs
            gap = sampled - logprobs_of(TEACHER.params, LARGER, group, completion)
            ratio = np.exp(logprobs_of(host_params(), TINY, group, completion) - sampled)
            losses.append(-np.minimum(ratio * -2 * gap, np.clip(ratio, 0.8, 1.2) * -2 * gap))
            gaps.append(gap)
    _, metrics = change_of(core_with("sampled"), groups)
    assert metrics["train/distillation_kl"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)
    assert metrics["train/loss"] == pytest.approx(np.concatenate(losses).mean(), rel=1e-4)


def test_rows_beyond_the_shared_tokens_are_no_difference():
    """Models of one family are padded differently: only tokens that can be sampled count."""
    wider = dataclasses.replace(LARGER, vocab_size=TINY.vocab_size + 8)
    added = host_params(wider, 3)
    own = {
        **TEACHER.params,
        **{
            name: {
                "weight": np.concatenate(
                    [TEACHER.params[name]["weight"][:22], added[name]["weight"][22:]]
                )
            }
            for name in ("embed_tokens", "lm_head")
        },
    }
    cut = fitted(TeacherModel(config=wider, params=own), TINY.vocab_size)
    assert cut.config.vocab_size == TINY.vocab_size
    narrower = dataclasses.replace(LARGER, vocab_size=22)
    short = {
        **own,
        **{name: {"weight": own[name]["weight"][:22]} for name in ("embed_tokens", "lm_head")},
    }
    padded = fitted(TeacherModel(config=narrower, params=short), TINY.vocab_size)
    expected, _ = change_of(core_with("full"))
    for teacher in (cut, padded):
        np.testing.assert_array_equal(change_of(core_with("full", teacher))[0], expected)


def test_a_teacher_is_given_where_the_algorithm_names_one_and_only_there():
    with pytest.raises(ValueError, match="a teacher is given where algorithm.distillation is"):
        core_with("full", None)
    with pytest.raises(ValueError, match="a teacher is given where algorithm.distillation is"):
        make_core(teacher=TEACHER)


MESHES = [(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 2, 2)]
"""(data, fsdp, context)."""
SPLITS = [192, 64, 16]
CUTS = [(*mesh, split, packed) for mesh in MESHES for split in SPLITS for packed in (True, False)]
PLAIN = (1, 1, 1, 192, False)
CASES = [
    ("full", (2, 2, 1, 16, True)),
    ("full", (1, 4, 1, 64, False)),
    ("full", (1, 2, 2, 16, True)),
    ("top_k", (1, 4, 1, 16, True)),
    ("top_k", (2, 1, 4, 16, True)),
    ("sampled", (2, 2, 1, 16, True)),
    ("sampled", (1, 1, 4, 16, True)),
    ("beside rewards", (4, 1, 1, 16, True)),
]
if os.environ.get("TANDEM_EVERY_CUT"):
    CASES = [case for case in itertools.product(FORMS, CUTS) if case[1] != PLAIN]


@pytest.fixture(scope="module")
def change():
    """How two updates on one batch change the parameters, for a form and a cut."""
    found = {}

    def of(form, cut):
        if (form, cut) not in found:
            data, fsdp, context, tokens, packed = cut
            core = core_with(
                form,
                data=data,
                fsdp=fsdp,
                context=context,
                microbatch_tokens=tokens,
                updates_per_batch=2,
            )
            with pytest.MonkeyPatch.context() as patched:
                if not packed:
                    alone = lambda lengths, capacity: [[i] for i in range(len(lengths))]
                    patched.setattr(batching, "first_fit_decreasing", alone)
                found[form, cut], _ = change_of(core)
        return found[form, cut]

    return of


@pytest.mark.parametrize("form, cut", CASES, ids=str)
def test_any_cut_gives_the_same_update(form, cut, change):
    expected, actual = change(form, PLAIN), change(form, cut)
    size = np.linalg.norm(expected)
    assert size > 1e-4 and np.linalg.norm(actual - expected) < 1e-5 * size
