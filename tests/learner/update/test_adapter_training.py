"""An adapter in place of the model: its gradient is the model's, projected, and only it changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.compiled_functions import make_learner_functions
from learner.config import AlgorithmConfig, LearnerConfig, LoraConfig, TrainingSettings
from learner.objective.batching import pack, select_sequences
from learner.update.mesh import SHARDS
from learner.update.value_head import policy_params
from models.adapter import (
    BASE_DIGEST,
    adapter_leaves,
    adapter_parameters,
    adapter_shape,
    join,
    merge,
    to_named_adapter,
)
from models.config import ModelConfig
from models.files.checkpoint import to_named
from models.transformer import abstract_params
from services.process.phase_clock import PhaseClock
from services.weights.digest import tree_digest
from tests.learner import builders
from tests.learner.builders import TINY, host_params, make_core, random_groups

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 6.0}
SMOLLM2 = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
)


def moved_adapter(core, seed=1):
    """The core's own state, with an adapter of which neither matrix is 0."""
    rng = np.random.default_rng(seed)
    moved = jax.tree.map(lambda leaf: np.float32(rng.normal(0, 0.2, leaf.shape)), core.state.params)
    placed = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding), moved, core.state.params
    )
    core.resume(type(core.state)(**{**vars(core.state), "params": placed}), policy_version=0)
    return moved


def gradient_of(core, groups):
    """Undivided gradient and sums of a batch."""
    selection = select_sequences(groups, builders.RULES, vocab_size=TINY.vocab_size)
    accumulator = core._functions.empty(core.state.params)
    for batch in pack(selection.sequences, core._packing):
        batch = jax.device_put(batch, core._functions.batch_sharding)
        accumulator, _ = core._functions.accumulate(
            core.state.params, core._reference_in_loss, accumulator, batch, None, None, core._base
        )
    return jax.device_get(accumulator)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"remat": True, "lm_head": "logits"},
        {"data": 2, "fsdp": 2, "lm_head": "lean"},
        {"fsdp": 4},
        {"data": 2, "loss_impl": "pallas"},
        {"fsdp": 2, "context": 4, "remat": True},
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_whole_model_projected(how):
    groups = random_groups(4)
    adapted = make_core(lora=LORA, algorithm={"entropy_coef": 0.01}, **how)
    adapter = moved_adapter(adapted)
    scale = adapted._functions.adapter.scale
    assert scale == 1.5
    full = make_core(
        algorithm={"entropy_coef": 0.01}, params=merge(join(host_params(), adapter), scale)
    )
    ours, theirs = gradient_of(adapted, groups), gradient_of(full, groups)
    assert ours.sums["loss"] == pytest.approx(theirs.sums["loss"], rel=1e-4)
    d_weights = theirs.grads["layers"]
    for module, pair in adapter_leaves(ours.grads).items():
        part, name = module.split(".")
        d_w = np.float64(d_weights[part][name]["weight"])
        a, b = (np.float64(adapter_leaves(adapter)[module][m]) for m in ("lora_A", "lora_B"))
        expected_b = scale * d_w @ a.swapaxes(1, 2)
        expected_a = scale * b.swapaxes(1, 2) @ d_w
        assert np.abs(expected_a).max() > 1e-2 and np.abs(expected_b).max() > 1e-2
        # Float32 sums in another order, of gradients up to 10.
        np.testing.assert_allclose(pair["lora_B"], expected_b, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(pair["lora_A"], expected_a, rtol=1e-4, atol=1e-5)


def test_only_the_adapter_is_trained_and_has_a_state():
    core = make_core(lora={**LORA, "targets": ["q_proj", "down_proj"]})
    shapes = {leaf.shape for leaf in jax.tree.leaves(core.state.params)}
    assert shapes == {(2, 4, 16), (2, 16, 4), (2, 4, 32)}
    moments = [leaf for leaf in jax.tree.leaves(core.state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(
        leaf.size for leaf in jax.tree.leaves(core.state.params)
    )
    before = jax.device_get((core.state.params, core._base))
    core.update(random_groups(), PhaseClock())
    core.update(random_groups(seed=1), PhaseClock())
    after = jax.device_get((core.state.params, core._base))
    jax.tree.map(np.testing.assert_array_equal, before[1], after[1])
    for leaf, moved in zip(*map(jax.tree.leaves, (before[0], after[0])), strict=True):
        assert (leaf != moved).any()


def test_the_base_is_held_in_the_compute_dtype_and_cut_as_before():
    wide = make_core(lora=LORA, fsdp=2)
    narrow = make_core(lora=LORA, fsdp=2, compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(wide._base)} == {np.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow._base)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow.state.params)} == {np.dtype("float32")}
    plain = make_core(fsdp=2)
    cut = lambda tree: jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
    assert cut(narrow._base) == cut(plain.state.params)
    for pair in adapter_leaves(narrow.state.params).values():
        assert all(SHARDS in leaf.sharding.spec for leaf in pair.values())


def test_a_base_in_bfloat16_is_not_widened():
    """What a model was stored in is exact, and half the bytes."""
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), host_params())
    core = make_core(lora=LORA, params=stored)
    assert {leaf.dtype for leaf in jax.tree.leaves(core._base)} == {jnp.dtype("bfloat16")}
    core.update(random_groups(), PhaseClock())


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_reference_is_the_base_itself(kl_in):
    """Of the same weights a penalty of a whole second model, at no memory."""
    algorithm = {"kl_coef": 0.3, "kl_estimator": "k1", "kl_in": kl_in}
    core = make_core(lora=LORA, algorithm=algorithm)
    assert core._reference is core._base
    moved_adapter(core)
    metrics = core.update(random_groups(), PhaseClock())
    other = make_core(lora=LORA, algorithm=algorithm)
    adapter = moved_adapter(other)
    merged = merge(join(host_params(), adapter), other._functions.adapter.scale)
    full = make_core(algorithm=algorithm)  # the reference is host_params()
    place = lambda leaf, like: jax.device_put(leaf, like.sharding)
    placed = jax.tree.map(place, merged, full.state.params)
    full.resume(type(full.state)(**{**vars(full.state), "params": placed}), policy_version=0)
    expected = full.update(random_groups(), PhaseClock())
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-3, abs=1e-5)
    if kl_in == "loss":
        assert metrics["train/kl"] == pytest.approx(expected["train/kl"], rel=1e-4)
        assert abs(metrics["train/kl"]) > 1e-2


def test_a_critic_trains_beside_the_adapter():
    core = make_core(lora=LORA, algorithm={"advantage": "gae"})
    core.update(random_groups(), PhaseClock())
    metrics = core.update(random_groups(seed=1), PhaseClock())
    assert not metrics["train/update_skipped"] and metrics["train/value_mean"] != 0
    assert set(policy_params(core.state.params)) == {"layers"}
    assert jax.device_get(core.state.params["value_head"]["weight"]).any()


def test_a_version_is_the_adapter_and_the_digest_of_its_base():
    core = make_core(lora=LORA, fsdp=2)
    adapter = moved_adapter(core)
    scale = core._functions.adapter.scale
    with pytest.raises(ValueError, match="lora_A"):
        core.named_weights("float32")
    sent = core.snapshot("bfloat16", PhaseClock(), probe=False).tensors
    for name, leaf in to_named_adapter(adapter).items():
        published = leaf * (scale if "lora_B" in name else 1)
        np.testing.assert_array_equal(sent.pop(name), published.astype(jnp.bfloat16))
    base = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), host_params())
    _, digest = tree_digest(to_named(base, TINY))
    assert [(name, np.asarray(leaf).tobytes().hex()) for name, leaf in sent.items()] == [
        (BASE_DIGEST, digest)
    ]


def test_a_version_is_a_few_percent_of_the_model_at_the_shape_of_smollm2():
    whole = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(SMOLLM2)))
    share = lambda *targets: (
        adapter_parameters(adapter_shape(targets, rank=16, alpha=16, config=SMOLLM2), SMOLLM2)
        / whole
    )
    assert share("*_proj") < 0.037 and share("self_attn.*") < 0.014 and share("[qv]_proj") < 0.007


def test_the_same_seed_starts_the_same_adapter():
    leaves = [jax.tree.leaves(make_core(lora=LORA).state.params) for _ in range(2)]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)


def state_bytes(lora) -> int:
    """Of all that an update holds: parameters, frozen ones too, moments and gradients."""
    settings = TrainingSettings(
        algorithm=AlgorithmConfig(kl_coef=0.1),
        learner=LearnerConfig(lora=lora and LoraConfig(**lora)),
        total_steps=1,
        temperature=1.0,
        valid_vocab=None,
        max_completion_tokens=16,
    )
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_params(SMOLLM2)
    )
    made = make_learner_functions(params, SMOLLM2, settings, devices=jax.devices()[:1])
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    gradients = size(made.abstract_state.params)
    frozen = size(params)  # the base, or the reference of a model that trains itself
    return size(made.abstract_state) + gradients + frozen


def test_the_learner_holds_less_than_45_percent_at_the_shape_of_smollm2():
    assert state_bytes({"rank": 16}) < 0.2 * state_bytes(None)
