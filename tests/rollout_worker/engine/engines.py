"""A tiny model with sharp distributions, and engines over it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels.packed_attention.ops import plan_attention
from models.config import ModelConfig
from models.transformer import (
    forward,
    head_weight,
    init_params,
    logits,
    packed_attend,
)
from rollout_worker.engine.decode_request import DecodeRequest
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.engine_limits import EngineLimits
from rollout_worker.engine.layout import Layout, make_mesh
from rollout_worker.engine.slots import DecodeSpec
from services.process.phase_clock import PhaseClock

MODEL = ModelConfig(
    model_type="qwen2",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    tie_word_embeddings=True,
)
PROMPT_TOKENS, NEW_TOKENS = 40, 12
STOP_IDS = (5, 9)
VALID_VOCAB = 60
PREFILL = plan_attention("auto", "cpu")
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def unstack_layers(params):
    """Turns the stacked layer tree into a list of per-layer trees; others pass unchanged."""
    L = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(L)]
    return {**params, "layers": layers}


@functools.cache
def policy(scale: float = 4.0):
    """Host parameters with so large weights that no distribution is near uniform."""
    params = init_params(jax.random.key(3), MODEL)
    return unstack_layers(jax.tree.map(lambda leaf: np.asarray(scale * leaf), params))


def make_engine(
    *,
    data=1,
    tensor=1,
    slots=4,
    segment_tokens=4,
    loop="while",
    attention=F32,
    attention_impl="xla",
    prefill_attention=PREFILL,
    dtype=F32,
    wide_cache=False,
    stops=None,
    valid_vocab=VALID_VOCAB,
    version=0,
    warn=print,
    **limits,
):
    """An engine that holds `policy()` as the given version."""
    mesh = make_mesh(jax.devices()[: data * tensor], data, tensor)
    layout = Layout(MODEL, mesh, np.dtype(dtype))
    spec = DecodeSpec(
        layout=layout,
        valid_vocab=valid_vocab,
        compute_dtype=dtype,
        wide_cache=wide_cache,
        attention_dtype=attention,
        attention_impl=attention_impl,
        prefill_attention=prefill_attention,
        slots=slots,
        segment_tokens=segment_tokens,
    )
    sizes = dict(
        max_prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS,
        cache_tokens=PROMPT_TOKENS + NEW_TOKENS,
    )
    engine = Engine(
        spec,
        EngineLimits(**{**sizes, **limits}),
        loop=loop,
        stop_ids=STOP_IDS,
        clock=PhaseClock(),
        stops=stops,
        warn=warn,
    )
    swap(engine, policy(), version)
    return engine


@functools.cache
def shared_engine(**how):
    """The same engine for the same arguments: compiling is what these tests pay for."""
    return make_engine(**how)


def swap(engine, params, version):
    engine.swap_policy(engine.spec.layout.to_inference(params), version)


def key_data(seed=0):
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def make_request(tokens, prompt_id=0, samples=4, samples_=None, **changes):
    settings = dict(
        request_id=str(prompt_id),
        token_ids=np.asarray(tokens, np.int32),
        prompt_id=prompt_id,
        epoch=1,
        samples=tuple(range(samples)) if samples_ is None else samples_,
        max_new_tokens=NEW_TOKENS,
        key_data=key_data(),
    )
    return DecodeRequest(**{**settings, **changes})


@functools.cache
def make_requests():
    """Prompts from one token to the longest that fits."""
    rng = np.random.default_rng(0)
    lengths = [2, 1, 5, 33, PROMPT_TOKENS]
    return tuple(make_request(rng.integers(10, 60, n), i) for i, n in enumerate(lengths))


def run_to_end(engine):
    """Yields rows as they end, until none is left."""
    while engine.pending:
        yield from engine.step()


def run(engine, requests, **changes):
    """Finished rows by request and sample."""
    engine.submit_requests(list(requests))
    rows = {}
    for row in run_to_end(engine):
        assert (row.request_id, row.sample_index) not in rows
        rows[row.request_id, row.sample_index] = row
    assert len(rows) == sum(len(request.samples) for request in requests)
    return rows


def assert_same_rows(actual, expected, atol=5e-5):
    """Equal draws; logprobs by the rounding of logits that reach 40."""
    assert actual.keys() == expected.keys()
    for key, row in actual.items():
        np.testing.assert_array_equal(row.token_ids, expected[key].token_ids)
        np.testing.assert_allclose(row.logprobs, expected[key].logprobs, atol=atol)
        assert row.finish_reason is expected[key].finish_reason


@jax.jit
def _full_logits(params, ids, segments):
    attend = packed_attend(segments, operand_dtype=F32)
    positions = jnp.arange(ids.shape[1])[None]
    hidden, _ = forward(params, MODEL, ids, positions, attend, compute_dtype=F32)
    return logits(hidden, head_weight(params))


def full_logprobs(params, prompt, completion):
    """float32 [T, valid vocabulary] of every completion token, by one pass over the sequence."""
    ids = np.zeros((1, PROMPT_TOKENS + NEW_TOKENS), np.int32)
    segments = np.zeros_like(ids)
    length = len(prompt) + len(completion)
    ids[0, :length] = np.concatenate([prompt, completion])
    segments[0, :length] = 1
    scores = np.asarray(_full_logits(params, ids, segments))[0, :, :VALID_VOCAB]
    scores = scores - scores.max(axis=1, keepdims=True)
    logprobs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return logprobs[len(prompt) - 1 : length - 1]


def chosen(logprobs_TV, completion):
    """The logprob of each token that was drawn."""
    return logprobs_TV[np.arange(len(completion)), completion]
