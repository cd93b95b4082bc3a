"""The canary from end to end: scores of the learner when it publishes, scores of a worker from its
live copy, and the name of the layer where they diverge."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels.packed_attention.ops import plan_attention
from learner.publish.canary import ScoredProbe, make_canary
from learner.publish.publisher import Publisher
from learner.publish.snapshot import PUBLISH_DTYPES
from learner.update.head import HeadPlan
from learner.update.mesh import make_mesh as learner_mesh
from learner.update.sharding import param_specs
from learner.update.state import place_params
from models.files.checkpoint import from_named
from models.probe import (
    ProbeScores,
    compare,
    probe_direction,
    probe_tokens,
    score_probe,
    whole_head,
)
from models.transformer import forward, head_weight, logits, packed_attend
from rollout_worker.canary import BOUNDS, CanaryCheck
from rollout_worker.engine.layout import Layout, make_mesh
from rollout_worker.engine.slots import DecodeSpec
from services.process.phase_clock import PhaseClock
from services.weights import codec
from services.weights.store import WeightStore
from tests.learner.builders import TINY, make_core
from tests.learner.loud_model import MODEL
from tests.learner.loud_model import loud_params as host_params

pytestmark = pytest.mark.slow

VALID_VOCAB = 60
F32, BF16 = "float32", "bfloat16"


@functools.cache
def published(compute=F32, wire=F32, *, data=1, fsdp=1, context=1, lm_head="fast"):
    devices = jax.devices()[: data * fsdp * context]
    mesh = learner_mesh(data=data, fsdp=fsdp, context=context, devices=devices)
    specs = param_specs(host_params(), fsdp * context)
    canary = make_canary(
        mesh,
        specs,
        MODEL,
        head=HeadPlan(lm_head, "xla", temperature=0.7, valid_vocab=VALID_VOCAB),
        compute_dtype=jnp.dtype(compute),
        wire_dtype=PUBLISH_DTYPES[wire],
    )
    params = place_params(host_params(), mesh, specs, jnp.float32)
    scores = jax.jit(canary).lower(params).compile()(params)
    return ScoredProbe(scores=scores, valid_vocab=VALID_VOCAB, precision=compute).record()


@functools.cache
def worker(compute=F32, wire=F32, *, data=1, tensor=1, model=MODEL, valid_vocab=VALID_VOCAB):
    """A canary and the layout of its inference copies."""
    copy_dtype = np.dtype(np.float32 if F32 in (compute, wire) else ml_dtypes.bfloat16)
    mesh = make_mesh(jax.devices()[: data * tensor], data, tensor)
    spec = DecodeSpec(
        layout=Layout(model, mesh, copy_dtype),
        valid_vocab=valid_vocab,
        compute_dtype=jnp.dtype(compute),
        attention_dtype=jnp.dtype(F32),
        attention_impl="xla",
        prefill_attention=plan_attention("auto", "cpu"),
        slots=4,
        segment_tokens=4,
        wide_cache=True,
    )
    return CanaryCheck(spec, PhaseClock()), spec.layout


def live_copy(layout, wire=F32):
    wired = jax.tree.map(lambda leaf: leaf.astype(PUBLISH_DTYPES[wire]), host_params())
    return layout.to_inference(wired)


@pytest.fixture(scope="module")
def exact():
    """A float32 worker of two devices, and its copy."""
    canary, layout = worker(compute=F32, wire=F32, tensor=2)
    return canary, live_copy(layout)


def with_leaf(params, path, change):
    """The tree with one leaf changed, on the host and back; layers are listed."""
    key, *rest = path
    if rest:
        changed = with_leaf(params[key], rest, change)
    else:
        changed = jax.device_put(change(np.array(params[key])), params[key].sharding)
    if isinstance(params, list):
        return [changed if i == key else item for i, item in enumerate(params)]
    return {**params, key: changed}


@pytest.mark.parametrize(
    "learner, working",
    [
        (dict(data=2, fsdp=2), dict(compute=F32, wire=F32, tensor=2)),
        (dict(fsdp=2, context=2), dict(compute=F32, wire=F32)),
        (dict(compute=BF16, wire=BF16, fsdp=2), dict(compute=BF16, wire=BF16, tensor=2)),
        (dict(compute=F32, wire=BF16, lm_head="logits"), dict(compute=BF16, wire=BF16)),
    ],
)
def test_healthy_sides_agree_whatever_their_meshes_and_dtypes(learner, working):
    canary, layout = worker(**working)
    record = published(**learner)
    result = canary.check_policy(live_copy(layout, working.get("wire", F32)), record)
    assert result.passed and result.first_layer == ""
    exact = learner.get("compute", F32) == working.get("compute", F32) == F32
    assert result.bound == BOUNDS[F32 if exact else BF16]
    assert result.gap_mean <= result.gap_max < result.bound / 4


FLIPS = [
    (("layers", 0, "self_attn", "q_proj", "weight"), "layers.0"),
    (("layers", 1, "self_attn", "o_proj", "weight"), "layers.1"),
    (("layers", 2, "mlp", "down_proj", "weight"), "layers.2"),
    (("layers", 3, "mlp", "up_proj", "weight"), "layers.3"),
    (("norm", "weight"), "head"),
    (("lm_head", "weight"), "head"),
]


@pytest.mark.parametrize("path, layer", FLIPS)
def test_one_flipped_weight_of_the_live_tree_is_found_and_its_layer_named(exact, path, layer):
    canary, params = exact

    def flip(leaf):
        leaf[(5, 3)[: leaf.ndim]] *= -1
        return leaf

    result = canary.check_policy(with_leaf(params, path, flip), published())
    assert not result.passed and result.gap_max > result.bound
    assert result.first_layer == layer


def test_flipped_embedding_row_is_found_where_the_probe_meets_it(exact):
    canary, params = exact
    token = int(published().token_ids[0, 0])

    def flip(leaf):
        leaf[token] *= -1
        return leaf

    result = canary.check_policy(with_leaf(params, ("embed_tokens", "weight"), flip), published())
    assert not result.passed and result.first_layer == "embedding"


@pytest.mark.parametrize(
    "how, cut", [(dict(compute=F32, wire=F32), {}), (dict(compute=BF16, wire=BF16), dict(fsdp=2))]
)
def test_swapped_layers_are_named(how, cut):
    canary, layout = worker(**how, tensor=2)
    params = live_copy(layout, how["wire"])
    first, second, third, fourth = params["layers"]
    swapped = {**params, "layers": [first, third, second, fourth]}
    record = published(**how, **cut)
    assert canary.check_policy(params, record).passed
    result = canary.check_policy(swapped, record)
    assert not result.passed and result.first_layer == "layers.1"


def test_copy_of_every_lane_is_looked_at():
    canary, layout = worker(data=2)
    params = live_copy(layout)
    assert canary.check_policy(params, published()).passed

    tree = params["layers"][2]["self_attn"]["v_proj"]
    leaf = tree["weight"]
    shards = [shard.data for shard in leaf.addressable_shards]
    shards[1] = jax.device_put(-np.asarray(shards[1]), shards[1].device)
    tree["weight"] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
    result = canary.check_policy(params, published())
    assert not result.passed and result.first_layer == "layers.2"


def test_learner_scores_what_is_published_and_not_its_float32_masters():
    rounded = jax.tree.map(
        lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32), host_params()
    )
    expected = whole_scores(rounded)
    for how in (dict(fsdp=2), dict(lm_head="logits")):
        record = published(F32, BF16, **how)
        np.testing.assert_allclose(record.logprobs, expected.logprob_BT, atol=1e-4)
        np.testing.assert_allclose(record.fingerprints, expected.fingerprint_LB2, atol=1e-4)
    assert np.abs(expected.logprob_BT - whole_scores(host_params()).logprob_BT).max() > 1e-2


@jax.jit
def whole_program(params):
    ids = probe_tokens(VALID_VOCAB)
    return score_probe(
        params,
        MODEL,
        ids,
        probe_direction(ids.shape[1], MODEL.hidden_size),
        compute_dtype=jnp.dtype(F32),
        operand_dtype=jnp.dtype(F32),
        score_tokens=whole_head(VALID_VOCAB),
    )


def whole_scores(params):
    """The probe on one device, in float32."""
    return ProbeScores(*map(np.asarray, whole_program(params)))


def test_probe_is_the_forward_pass_of_the_model():
    params, ids = host_params(), probe_tokens(VALID_VOCAB)
    B, T = ids.shape
    assert (B, T) == (8, 16) and ids.min() >= 0 and ids.max() < VALID_VOCAB
    hidden, _ = jax.jit(
        lambda params: forward(
            params,
            MODEL,
            ids,
            np.broadcast_to(np.arange(T), ids.shape),
            packed_attend(jnp.ones_like(ids), operand_dtype=jnp.dtype(F32)),
            compute_dtype=jnp.dtype(F32),
        )
    )(params)
    logits_BTV = np.asarray(logits(hidden, head_weight(params)), np.float64)[..., :VALID_VOCAB]
    log_p = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    expected = np.take_along_axis(log_p[:, :-1], ids[:, 1:, None], -1)[..., 0]
    scores = whole_scores(params)
    np.testing.assert_allclose(scores.logprob_BT, expected, atol=1e-5)

    rows = params["embed_tokens"]["weight"][ids].astype(np.float64)
    rms = np.sqrt((rows**2).mean(-1))
    direction = probe_direction(T, MODEL.hidden_size)
    projection = ((rows / rms[..., None]) * direction).sum((1, 2))
    np.testing.assert_allclose(scores.fingerprint_LB2[0, :, 0], rms.mean(1), rtol=1e-5)
    np.testing.assert_allclose(scores.fingerprint_LB2[0, :, 1], projection, atol=1e-5)


def scores_of(logprob=-3.0, fingerprints=(1.0, 1.0, 1.0)):
    fingerprint_LB2 = np.zeros((3, 2, 2), np.float32)
    fingerprint_LB2[..., 0] = np.array(fingerprints)[:, None]
    return ProbeScores(np.full((2, 3), logprob, np.float32), fingerprint_LB2)


@pytest.mark.parametrize(
    "live, passed, layer",
    [
        (scores_of(-3.09), True, ""),
        (scores_of(-3.09, (1, 2, 1)), True, ""),  # the logprobs decide
        (scores_of(-3.3, (1, 1.2, 1)), False, "layers.0"),
        (scores_of(-3.3, (1, 1.05, 0.5)), False, "layers.1"),
        (scores_of(-3.3, (0.5, 1, 1)), False, "embedding"),
        (scores_of(-3.3), False, "head"),
        (scores_of(np.nan, (1, np.nan, np.nan)), False, "layers.0"),
    ],
)
def test_comparison_judges_by_logprobs_and_names_by_fingerprints(live, passed, layer):
    # The mean gap may be a fifth of the bound of a single one: 0.1.
    result = compare(scores_of(), live, bound=0.5, tolerance=0.1)
    assert (result.passed, result.first_layer) == (passed, layer)


def test_a_single_gap_beyond_the_bound_fails_though_the_mean_is_small():
    live = scores_of()
    live.logprob_BT[1, 2] -= 0.55
    result = compare(scores_of(), live, bound=0.5, tolerance=0.1)
    assert not result.passed
    assert "up to 0.55 nats apart and 0.0917 in the mean, where 0.5 and 0.1 pass" in result.gaps


def test_probe_of_another_model_or_tokenizer_is_refused(exact):
    canary, params = exact
    record = published()
    with pytest.raises(ValueError, match=r"for 4 layers has fingerprints \[5, 8, 2\].*\[4, 8, 2\]"):
        canary.check_policy(
            params, dataclasses.replace(record, fingerprints=record.fingerprints[1:])
        )
    ids = record.token_ids.copy()
    ids[0, 0] = VALID_VOCAB
    with pytest.raises(ValueError, match="0..59, got 0..60"):
        canary.check_policy(params, dataclasses.replace(record, token_ids=ids))


def test_canary_rides_with_every_published_version_to_the_worker():
    core = make_core(fsdp=2)
    store = WeightStore("run", keep_versions=2)
    publisher = Publisher(
        lambda: core.snapshot(F32, PhaseClock()), store, lambda version, digest: None
    )
    canary, layout = worker(model=TINY, valid_vocab=TINY.vocab_size - 2)
    for version in range(2):
        publisher.submit(version)
        publisher.wait(version, 60)
        message = codec.encode_manifest(
            store.wait_for_version(version).manifest
        ).SerializeToString()
        manifest = codec.decode_manifest(codec.weights_pb2.WeightManifest.FromString(message))
        named = core.named_weights(F32)
        live = layout.to_inference(from_named(named, TINY, stacked=False))
        assert canary.check_policy(live, manifest.canary).passed
        if version == 0:
            before = manifest.canary
            moved = lambda leaf: jax.device_put(1.1 * np.asarray(leaf), leaf.sharding)
            params = jax.tree.map(moved, core.state.params)
            core.resume(dataclasses.replace(core.state, params=params), policy_version=1)
    late = canary.check_policy(live, before)
    assert not late.passed, "the weights of another version do not pass"
    publisher.close()
