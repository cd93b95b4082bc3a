"""The learner as its actor sees it: groups in, metrics and a new version out."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

from learner.durable.checkpoint import CheckpointFolder
from learner.objective.batching import pack
from models.files.checkpoint import from_named
from services.process.phase_clock import PhaseClock
from services.wire.messages import FinishReason
from tests.learner.builders import (
    TINY,
    host_params,
    make_completion,
    make_core,
    make_group,
    random_groups,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def core():
    """With a KL penalty, so that a reference policy is kept beside the donated weights."""
    return make_core(algorithm={"kl_coef": 0.05, "zero_variance": "mask"})


def test_update_reports_and_makes_the_next_version(core):
    groups = [
        *random_groups(3),
        make_group(7, [1, 2], [make_completion([3], 0.35, index=i) for i in range(4)]),
        make_group(
            8,
            [1, 2],
            [
                make_completion([3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 1.0, finish=FinishReason.LENGTH),
                make_completion([3], 0.0, index=1, error="answer: timed out"),
                make_completion([3], 0.0, index=2),
                make_completion([4], 0.5, index=3),
            ],
            policy_version=-2,
        ),
    ]
    clock, version = PhaseClock(), core.policy_version
    before = core.named_weights("float32")
    metrics = core.update(groups, clock)
    seconds = clock.take_timing().seconds

    assert core.policy_version == version + 1
    assert core.outcomes == {
        "g0": "trained",
        "g1": "trained",
        "g2": "trained",
        "g7": "dropped_zero_variance",
        "g8": "trained",
    }
    after = core.named_weights("float32")
    assert any((after[name] != before[name]).any() for name in before)
    # 12 rewards of 0 or 1 in halves, 4 of 0.35, and 1, 0, 0.5: the failed one is in no mean.
    np.testing.assert_allclose(metrics["reward/total/mean"], (6 + 1.4 + 1.5) / 19)
    np.testing.assert_allclose(metrics["reward/answer/mean"], metrics["reward/total/mean"])
    assert metrics["reward_error/count"] == 1
    assert metrics["rollout/zero_variance_fraction"] == 0.2
    assert metrics["rollout/truncated_fraction"] == 1 / 20
    assert metrics["rollout/completion_len_max"] == 10
    assert metrics["offpolicy/staleness_max"] == 2 + version
    assert metrics["train/sequences"] == 15
    assert metrics["train/update_skipped"] == 0
    assert metrics["train/learning_rate"] == pytest.approx(1e-2)
    assert metrics["offpolicy/is_weight_raw_max"] >= metrics["offpolicy/is_weight_raw_mean"] > 0
    assert metrics["throughput/train/valid_tokens_per_s_update"] > 0
    assert metrics["throughput/train/model_tflops_per_chip_update"] > 0
    assert "throughput/train/mfu_update" not in metrics  # no peak is known of a CPU
    # A distribution over 22 ids, not far from uniform yet.
    assert 0.8 * np.log(22) < metrics["train/entropy"] <= np.log(22)
    assert all(np.isfinite(value) for value in metrics.values())
    assert seconds["compile"] > seconds["forward_backward"] > 0 and seconds["optimizer"] > 0


def test_known_shape_compiles_once(core):
    clock = PhaseClock()
    core.update(random_groups(), clock)
    clock.take_timing()
    core.update(random_groups(), clock)
    assert clock.take_timing().seconds["compile"] == 0


def test_published_weights_and_the_reference_survive_a_donating_step_K05(core):
    named = core.named_weights("float32")
    frozen = jax.device_get(core._reference)
    kept = {name: array.copy() for name, array in named.items()}
    core.update(random_groups(seed=3), PhaseClock())
    for name in named:
        np.testing.assert_array_equal(named[name], kept[name])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(core._reference), frozen)
    jax.tree.map(np.testing.assert_array_equal, frozen, host_params())


def test_named_weights_are_the_float32_masters_rounded_once(core):
    masters, sent = core.named_weights("float32"), core.named_weights("bfloat16")
    assert masters.keys() == sent.keys()
    for name, array in sent.items():
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array, masters[name].astype(ml_dtypes.bfloat16))
    tree = from_named(masters, TINY, stacked=True)
    jax.tree.map(np.testing.assert_array_equal, tree, jax.device_get(core.state.params))
    with pytest.raises(ValueError, match="float16"):
        core.named_weights("float16")


def test_batch_that_is_not_finite_is_kept_aside_and_changes_nothing(core):
    groups = random_groups(seed=1)
    first = groups[0].completions[0]
    broken = dataclasses.replace(
        first, behavior_logprobs=np.full_like(first.behavior_logprobs, np.nan)
    )
    groups[0] = dataclasses.replace(groups[0], completions=(broken, *groups[0].completions[1:]))
    before, version = jax.device_get(core.state), core.policy_version
    metrics = core.update(groups, PhaseClock())
    assert metrics["train/update_skipped"] == 1
    assert [group.group_id for group in core.rejected] == ["g0", "g1", "g2", "g3"]
    assert set(core.outcomes.values()) == {"dropped_error"}, "nothing was trained"
    assert core.policy_version == version + 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(core.state), before)
    metrics = core.update(random_groups(), PhaseClock())
    assert metrics["train/update_skipped"] == 0 and np.isfinite(metrics["train/loss"])
    assert core.rejected == () and set(core.outcomes.values()) == {"trained"}


def test_nothing_to_train_on_is_a_skipped_update(core):
    groups = [make_group(0, [1], [make_completion([3], 1.0, index=i) for i in range(4)])]
    before = jax.device_get(core.state)
    metrics = core.update(groups, PhaseClock())
    assert metrics["train/update_skipped"] == 1 and "train/loss" not in metrics
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(core.state), before)
    with pytest.raises(ValueError, match="at least 1 group"):
        core.update([], PhaseClock())


def test_second_update_on_a_batch_is_off_policy():
    core = make_core(updates_per_batch=2, optimizer={"learning_rate": 0.05}, total_steps=1)
    metrics = core.update(random_groups(), PhaseClock())
    assert core.policy_version == 1 and core.state.update_count == 2
    single = make_core(optimizer={"learning_rate": 0.05}, total_steps=2)
    first = single.update(random_groups(), PhaseClock())
    second = single.update(random_groups(), PhaseClock())
    np.testing.assert_allclose(
        metrics["train/loss"], (first["train/loss"] + second["train/loss"]) / 2, rtol=1e-4
    )
    assert second["train/loss"] < first["train/loss"]


def test_resume_on_another_mesh_continues_exactly_C05_C07(tmp_path):
    optimizer = {"schedule": "cosine", "warmup_steps": 2}
    options = dict(optimizer=optimizer, microbatch_tokens=32)
    core = make_core(data=2, fsdp=4, **options)
    for seed in range(3):
        core.update(random_groups(seed=seed), PhaseClock())
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(3, core.state, {"policy_version": core.policy_version})
    expected = core.update(random_groups(seed=3), PhaseClock())
    weights = core.named_weights("float32")
    # Past the warm-up of 2: cosine over 8 updates at count 3, not 0.
    rate = 1e-2 * 0.5 * (1 + np.cos(np.pi / 8))
    np.testing.assert_allclose(expected["train/learning_rate"], rate, rtol=1e-5)
    other = make_core(fsdp=2, context=2, **options)
    found = folder.restore(other.abstract_state)
    other.resume(found.state, policy_version=found.record["policy_version"])
    assert other.policy_version == 3 and other.state.update_count == 3
    actual = other.update(random_groups(seed=3), PhaseClock())
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "train/entropy"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4, err_msg=name)
    for name, array in other.named_weights("float32").items():
        np.testing.assert_allclose(array, weights[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_schedule_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="warmup_steps=20 must be below the 10 updates"):
        make_core(optimizer={"warmup_steps": 20})


ALGORITHMS = {
    "clip, KL and entropy": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "KL in the reward": {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "critic": {"advantage": "gae"},
    "ratio of the sequence, corrected": {
        "ratio": "sequence",
        "off_policy": {"token_truncate": 1.5, "sequence_low": 0.1, "sequence_high": 10.0},
    },
}


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_what_an_environment_said_is_no_target(algorithm, monkeypatch):
    groups = random_groups(episodes=True)
    made = []
    for garbled in (False, True):
        if garbled:
            for module in ("core", "group_selection"):
                monkeypatch.setattr(f"learner.{module}.pack", pack_garbled)
        core = make_core(algorithm=algorithm)
        metrics = core.update(groups, PhaseClock())
        made.append((jax.device_get(core.state.params), metrics))
    (params, metrics), (garbled_params, garbled_metrics) = made
    assert metrics["train/update_skipped"] == 0 and metrics["train/grad_norm"] > 0
    jax.tree.map(np.testing.assert_array_equal, params, garbled_params)
    same = {name for name in metrics if not name.startswith(("throughput/", "mem/"))}
    assert {n: metrics[n] for n in same} == {n: garbled_metrics[n] for n in same}


def pack_garbled(sequences, packing):
    """Packs with other targets, logprobs and values wherever a token is not the model's."""
    rng = np.random.default_rng(3)

    def garbled(sequence):
        changed = {"target_ids": rng.integers(0, 20, len(sequence.weights), np.int32)}
        for name in ("old_logprobs", "behavior_logprobs", "values", "returns"):
            if getattr(sequence, name) is not None:
                changed[name] = rng.normal(-9, 4, len(sequence.weights)).astype(np.float32)
        return dataclasses.replace(
            sequence,
            **{
                name: np.where(sequence.active, getattr(sequence, name), other)
                for name, other in changed.items()
            },
        )

    return pack([garbled(sequence) for sequence in sequences], packing)
