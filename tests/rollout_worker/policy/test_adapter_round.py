"""An adapter's way round: learner, wire, worker, relay, and back as groups that train."""

import jax
import numpy as np
import pytest

from learner.actor import LearnerActor
from learner.config import LearnerConfig, LoraConfig, OptimizerConfig
from learner.publish.shared_snapshot import SharedSnapshot
from models.adapter import adapter_parameters
from models.files.checkpoint import read_model_config
from rollout_worker.actor import RolloutActor
from rollout_worker.policy.live_weights import WeightDigestMismatch
from rollout_worker.worker_records import Orders
from services.wire.tls import RunAuthority
from tests.learner.tiny_learner import learner_spec
from tests.rollout_worker.test_actor import (
    held_out,
    leases,
    on_loop,
    outcomes,
    rollout,
    worker_spec,
)
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

LEARNER = LearnerConfig(
    microbatch_tokens=256,
    compute_dtype="float32",
    optimizer=OptimizerConfig(learning_rate=3e-2),
    lora=LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "v_proj", "down_proj")),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def authority():
    return RunAuthority.create("run")


def make_learner(model, authority, folder, share=None, **changes):
    settings = {"learner": LEARNER, "weights_dtype": "float32", **changes}
    return LearnerActor(learner_spec(model, authority, folder, **settings), share)


def spec_of(learner, model, authority, **changes):
    adapter = learner._learner._core._functions.adapter
    address = learner.describe().address
    return worker_spec(model, authority, address, adapter=adapter, **changes)


def test_only_the_adapter_travels_and_what_was_sampled_with_it_trains(model, authority, tmp_path):
    learner = make_learner(model, authority, tmp_path)
    spec = spec_of(learner, model, authority)
    worker = RolloutActor(spec)
    try:
        learner.publish()
        first = rollout(worker, leases(0, 1))
        learner.update(sorted(first), [], 60.0)
        second = rollout(worker, leases(2, 3, version=1))
        update = learner.update(sorted(second), [], 60.0)
        assert set(update.outcomes.values()) == {"trained"}
        # Both sides compute in float32, the worker with the published s B.
        assert update.metrics["offpolicy/logprob_gap_max"] < 1e-4
        third = rollout(worker, leases(4, version=2))
        assert outcomes(third) == outcomes(first)
        digest = learner.digest(2, 60.0)
        assert worker._core.worker.weight_digest == digest
        bytes_of_adapter = 4 * adapter_parameters(spec.adapter, read_model_config(str(model)))
        assert learner._learner._publisher.last_stats.nbytes == bytes_of_adapter + 32
        # Another worker, which gets its bytes from the first one.
        other = RolloutActor(spec_of(learner, model, authority, name="rollout-1"))
        try:
            sources = (worker.describe().address, learner.describe().address)
            other.order(Orders(sources=sources))
            items = other.evaluate(held_out(3, 2))
            assert other._core.worker.weight_digest == digest
            same = worker.evaluate(held_out(3, 2))
            assert [item.completion for item in items] == [item.completion for item in same]
        finally:
            other.close()
    finally:
        worker.close()
        learner.close()


def test_a_worker_with_another_base_samples_nothing(model, authority, tmp_path):
    learner = make_learner(model, authority, tmp_path)
    other = write_tiny_model(tmp_path / "other", seed=1)
    worker = RolloutActor(spec_of(learner, other, authority))
    try:
        learner.publish()
        with pytest.raises(WeightDigestMismatch, match="copy its files from the learner's host"):
            on_loop(worker, lambda: None)
        assert worker._core.worker.policy_version == -1
    finally:
        worker.close()
        learner.close()


def test_beside_the_learner_nothing_travels(model, authority, tmp_path):
    shared = SharedSnapshot()
    learner = make_learner(model, authority, tmp_path, shared.offer_version)
    worker = RolloutActor(spec_of(learner, model, authority), shared.wait_for_version)
    try:
        learner.publish()
        first = rollout(worker, leases(0, 1))
        learner.update(sorted(first), [], 60.0)
        second = rollout(worker, leases(2, version=1))
        update = learner.update(sorted(second), [], 60.0)
        assert update.metrics["offpolicy/logprob_gap_max"] < 1e-4
        base = jax.tree.leaves(worker._core.worker._current.params)
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in base)
    finally:
        worker.close()
        learner.close()
