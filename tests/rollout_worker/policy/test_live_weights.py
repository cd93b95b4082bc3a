"""Versions that are adapters, from the learner's devices to a worker's: weights, digest, canary."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels.packed_attention.ops import plan_attention
from models.adapter import BASE_DIGEST, adapter_shapes, join
from models.transformer import forward, head_weight, logits, packed_attend
from rollout_worker.canary import BOUNDS, CanaryCheck
from rollout_worker.engine.layout import Layout, make_mesh
from rollout_worker.engine.slots import DecodeSpec
from rollout_worker.policy.live_weights import AdapterOnBase, WeightDigestMismatch
from services.process.phase_clock import PhaseClock
from services.weights.digest import tree_digest
from tests.learner.builders import make_core
from tests.learner.loud_model import MODEL
from tests.learner.loud_model import loud_params as host_params

pytestmark = pytest.mark.slow

F32, BF16 = "float32", "bfloat16"


def learner(compute=F32, strength=0.3, **how):
    """A learner whose adapter has moved by this much."""
    core = make_core(
        lora={"rank": 4, "alpha": 6.0},
        config=MODEL,
        params=host_params(),
        compute_dtype=compute,
        **how,
    )
    rng = np.random.default_rng(1)

    def moved(path, leaf):
        if path[-1].key == "lora_A":
            return leaf
        return jax.device_put(np.float32(rng.normal(0, strength, leaf.shape)), leaf.sharding)

    params = jax.tree_util.tree_map_with_path(moved, core.state.params)
    core.resume(type(core.state)(**{**vars(core.state), "params": params}), policy_version=1)
    return core


def published(core, wire, *, probe=False):
    snapshot = core.snapshot(wire, PhaseClock(), probe=probe)
    named = {name: np.asarray(array) for name, array in snapshot.tensors.items()}
    return named, snapshot.probe and snapshot.probe.record()


def worker(compute=F32, wire=F32, *, data=1, tensor=1, base_dtype=F32, params=None):
    copy_dtype = np.dtype(np.float32 if F32 in (compute, wire) else ml_dtypes.bfloat16)
    mesh = make_mesh(jax.devices()[: data * tensor], data, tensor)
    core = learner()
    layout = Layout(MODEL, mesh, copy_dtype, core._functions.adapter)
    spec = DecodeSpec(
        layout=layout,
        valid_vocab=MODEL.vocab_size - 2,
        compute_dtype=jnp.dtype(compute),
        attention_dtype=jnp.dtype(F32),
        attention_impl="xla",
        prefill_attention=plan_attention("auto", "cpu"),
        slots=4,
        segment_tokens=4,
        wide_cache=True,
    )
    weights = AdapterOnBase(
        layout, params or host_params(), base_dtype=base_dtype, weights_dtype=wire
    )
    return weights, CanaryCheck(spec, PhaseClock()), layout


def logits_of(params, config):
    ids_BT = jnp.asarray(np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 9)))
    position_BT = jnp.broadcast_to(jnp.arange(9), (2, 9))
    attend = packed_attend(jnp.ones_like(ids_BT), operand_dtype=jnp.float32)
    hidden, _ = forward(params, config, ids_BT, position_BT, attend, compute_dtype=jnp.float32)
    return np.asarray(logits(hidden, head_weight(params)))[..., : MODEL.vocab_size]


@pytest.mark.parametrize("data, tensor", [(1, 1), (2, 2), (1, 4)])
def test_a_copy_computes_what_the_learner_does_on_any_mesh(data, tensor):
    core = learner(fsdp=2)
    weights, _, layout = worker(data=data, tensor=tensor)
    named, _ = published(core, F32)
    assert {n: a.shape for n, a in named.items() if n != BASE_DIGEST} == adapter_shapes(
        core._functions.adapter, MODEL
    )
    params = weights.place(named)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    assert shardings == jax.tree.map(lambda leaf: leaf.sharding, layout.abstract_params())
    adapter = jax.device_get(core.state.params)
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (1.5 if path[-1].key == "lora_B" else 1.0), adapter
    )
    expected = logits_of(join(host_params(), scaled), MODEL)
    assert np.abs(expected - logits_of(host_params(), MODEL)).max() > 1
    np.testing.assert_allclose(logits_of(params, layout.config), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "compute, wire, working",
    [(F32, F32, F32), (BF16, BF16, BF16), (BF16, F32, F32), (F32, BF16, F32)],
)
def test_the_digest_is_that_of_the_published_version(compute, wire, working):
    core = learner(compute, fsdp=2)
    named, _ = published(core, wire)
    weights, _, _ = worker(working, wire, tensor=4, base_dtype=compute)
    params = weights.place(named)
    assert weights.digest(params, named) == tree_digest(named)[1]
    # The version after has another digest, and a changed adapter on the device too.
    later, _ = published(learner(compute, strength=0.1), wire)
    assert weights.digest(weights.place(later), later) != tree_digest(named)[1]
    changed = jax.tree.map(lambda leaf: leaf, params)
    pair = changed["layers"][2]["mlp"]["up_proj"]
    pair["lora_B"] = pair["lora_B"].at[0, 0].add(1)
    assert weights.digest(changed, named) != tree_digest(named)[1]


def test_device_arrays_of_the_same_process_are_taken_as_they_are():
    core = learner(fsdp=2)
    weights, _, _ = worker(data=2)
    snapshot = core.snapshot(F32, PhaseClock(), probe=False)
    params = weights.place(snapshot.tensors)
    named, _ = published(core, F32)
    assert weights.digest(params, snapshot.tensors) == tree_digest(named)[1]


def test_an_adapter_of_another_base_is_refused():
    named, _ = published(learner(), F32)
    weights, _, _ = worker(params=host_params(seed=4))
    with pytest.raises(WeightDigestMismatch, match=r"belongs to a model with digest .* model.path"):
        weights.place(named)
    weights, _, _ = worker()
    del named[BASE_DIGEST]
    with pytest.raises(ValueError, match="publishes whole models"):
        weights.place(named)


@pytest.mark.parametrize("compute", [F32, BF16])
@pytest.mark.parametrize("strength", [0.3, 1e-5])
def test_the_canary_passes_with_the_adapter_and_fails_without_however_small_it_is(
    compute, strength
):
    core = learner(compute, strength=strength, fsdp=2)
    named, record = published(core, compute, probe=True)
    weights, canary, _ = worker(compute, compute, tensor=2, base_dtype=compute)
    params = weights.place(named)
    healthy = canary.check_policy(params, record)
    assert healthy.passed and healthy.gap_max < BOUNDS[compute] / 3, healthy

    def without(path, leaf):
        return jnp.zeros_like(leaf) if path[-1].key == "lora_B" else leaf

    ignoring = jax.tree_util.tree_map_with_path(without, params)
    failed = canary.check_policy(ignoring, record)
    assert not failed.passed and failed.first_layer == "layers.0", failed
    one_layer = {**params, "layers": [*params["layers"][:2], ignoring["layers"][2]]}
    one_layer["layers"].append(params["layers"][3])
    assert canary.check_policy(one_layer, record).first_layer in ("layers.2", "")


def test_a_fresh_adapter_needs_no_canary_of_its_own():
    core = learner(strength=0.0)
    named, record = published(core, F32, probe=True)
    weights, canary, _ = worker()
    assert canary.check_policy(weights.place(named), record).passed
    np.testing.assert_array_equal(*np.split(record.logprobs, 2))
