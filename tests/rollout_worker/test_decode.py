"""Decoding: against a full forward pass, against itself in other batches, and the public cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig
from models.transformer import (
    forward,
    head_weight,
    init_params,
    logits,
    packed_attend,
    unstack_layers,
)
from rollout_worker.decode import DecodeSpec, DecodeState, pad_left, prefill, record, unfinished
from rollout_worker.engine import Engine, Request, prompt_buckets
from rollout_worker.kv_cache import check_geometry
from rollout_worker.sampling import row_keys, sample
from services.phase_clock import PhaseClock

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
NEW_TOKENS = 10
STOP_IDS = (5, 9)
VALID_VOCAB = 60


def make_spec(**changes):
    settings = dict(
        config=MODEL,
        max_new_tokens=NEW_TOKENS,
        stop_ids=STOP_IDS,
        pad_id=0,
        valid_vocab=VALID_VOCAB,
        compute_dtype=jnp.float32,
        attention_dtype=jnp.float32,
    )
    return DecodeSpec(**{**settings, **changes})


@pytest.fixture(scope="module")
def params():
    """Large enough weights that the distributions are far from uniform."""
    scaled = jax.tree.map(lambda leaf: 4.0 * leaf, init_params(jax.random.key(3), MODEL))
    return unstack_layers(scaled)


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(0)
    return [
        Request(token_ids=rng.integers(10, 60, n).astype(np.int32), prompt_id=i, epoch=1)
        for i, n in enumerate([2, 4, 5, 33])
    ]


@functools.cache
def make_engine(*, spec=None, loop="while", batch_rows=16, devices=1, copy=0):
    """An engine, the same one for the same arguments: compiling is what these tests pay for."""
    return Engine(
        spec or make_spec(),
        batch_rows=batch_rows,
        max_prompt_tokens=64,
        loop=loop,
        devices=jax.devices()[:devices],
        clock=PhaseClock(),
    )


def generate(engine, params, requests, samples=4, *, temperature=1.0, seed=0):
    placed = jax.device_put(params, engine.replicated)
    return engine.generate(
        placed, requests, samples, base_key=jax.random.key(seed), temperature=temperature
    )


@jax.jit
def full_logits(params, ids, segments):
    attend = packed_attend(segments, operand_dtype=jnp.float32)
    positions = jnp.arange(ids.shape[1])[None]
    hidden, _ = forward(params, MODEL, ids, positions, attend, compute_dtype=jnp.float32)
    return logits(hidden, head_weight(params))


def full_logprobs(params, prompt, completion):
    """Behaviour logprobs by one forward pass over prompt and completion, float32."""
    ids = np.zeros((1, 48), np.int32)  # one shape, so that one compilation serves all rows
    segments = np.zeros((1, 48), np.int32)
    length = len(prompt) + len(completion)
    ids[0, :length] = np.concatenate([prompt, completion])
    segments[0, :length] = 1
    scores = np.asarray(full_logits(params, ids, segments))[0, :, :VALID_VOCAB]
    scores = scores - scores.max(axis=1, keepdims=True)
    logprobs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    first = len(prompt) - 1
    return np.array([logprobs[first + t, token] for t, token in enumerate(completion)])


@pytest.fixture(scope="module")
def decoded(params, requests):
    return generate(make_engine(), params, requests)


def rows(completions):
    return [
        (tokens[:length], logprobs[:length])
        for tokens, logprobs, length in zip(
            completions.tokens_BN, completions.logprobs_BN, completions.length_B, strict=True
        )
    ]


def test_logprobs_equal_those_of_a_full_forward_pass(params, requests, decoded):
    for row, (tokens, logprobs) in enumerate(rows(decoded)):
        expected = full_logprobs(params, requests[row // 4].token_ids, tokens)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_rows_end_with_their_first_stop_token_and_not_before(decoded):
    assert decoded.stopped_B.any() and not decoded.stopped_B.all(), "the test needs both kinds"
    for (tokens, _), stopped in zip(rows(decoded), decoded.stopped_B, strict=True):
        assert not np.isin(tokens[:-1], STOP_IDS).any()
        assert np.isin(tokens[-1], STOP_IDS) == stopped
        assert stopped or len(tokens) == NEW_TOKENS


@pytest.mark.parametrize(
    "changes",
    [dict(loop="python"), dict(batch_rows=32), dict(devices=4), dict(loop="python", devices=4)],
)
def test_draws_do_not_depend_on_loop_batch_or_devices(params, requests, decoded, changes):
    other = generate(make_engine(**changes), params, requests)
    np.testing.assert_array_equal(other.tokens_BN, decoded.tokens_BN)
    np.testing.assert_allclose(other.logprobs_BN, decoded.logprobs_BN, atol=1e-5)


def test_a_row_alone_equals_the_row_in_a_padded_batch(params, requests, decoded):
    for i, request in enumerate(requests):
        alone = generate(make_engine(batch_rows=4), params, [request])
        np.testing.assert_array_equal(alone.length_B, decoded.length_B[4 * i : 4 * i + 4])
        for (tokens, logprobs), (expected, expected_logprobs) in zip(
            rows(alone), rows(decoded)[4 * i : 4 * i + 4], strict=True
        ):
            np.testing.assert_array_equal(tokens, expected)
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)


def test_the_order_of_the_prompts_only_moves_the_rows(params, requests, decoded):
    turned = generate(make_engine(), params, requests[::-1])
    for i in range(len(requests)):
        there = slice(4 * (len(requests) - 1 - i), 4 * (len(requests) - i))
        np.testing.assert_array_equal(turned.tokens_BN[there], decoded.tokens_BN[4 * i : 4 * i + 4])


def test_a_sample_does_not_depend_on_how_many_are_drawn(params, requests, decoded):
    two = generate(make_engine(), params, requests, samples=2)
    for i in range(len(requests)):
        np.testing.assert_array_equal(
            two.tokens_BN[2 * i : 2 * i + 2], decoded.tokens_BN[4 * i : 4 * i + 2]
        )


def test_temperature_zero_takes_the_most_likely_token(params, requests):
    greedy = generate(make_engine(), params, requests, samples=1, temperature=0.0)
    for (tokens, logprobs), request in zip(rows(greedy), requests, strict=True):
        np.testing.assert_allclose(
            logprobs, full_logprobs(params, request.token_ids, tokens), atol=1e-4
        )
        for t in range(len(tokens)):
            others = [
                full_logprobs(params, request.token_ids, np.append(tokens[:t], token))[-1]
                for token in (tokens[t], 10, 11, 12)
            ]
            assert others[0] == max(others)


def test_new_weights_leave_no_trace_of_the_old(params, requests):
    changed = jax.tree.map(lambda leaf: leaf * 1.1, params)
    used = make_engine()
    before = generate(used, params, requests, temperature=0.0)
    after = generate(used, changed, requests, temperature=0.0)
    fresh = generate(make_engine(copy=1), changed, requests, temperature=0.0)
    np.testing.assert_array_equal(after.tokens_BN, fresh.tokens_BN)
    np.testing.assert_array_equal(after.logprobs_BN, fresh.logprobs_BN)
    assert not np.array_equal(before.logprobs_BN, after.logprobs_BN)


def test_bf16_attention_stays_near_f32(params, requests):
    spec = make_spec(attention_dtype=jnp.bfloat16)
    coarse = generate(make_engine(spec=spec), params, requests)
    for row, (tokens, logprobs) in enumerate(rows(coarse)):
        expected = full_logprobs(params, requests[row // 4].token_ids, tokens)
        np.testing.assert_allclose(logprobs, expected, atol=0.2)


def test_a_prompt_bucket_compiles_once(params, requests):
    engine = make_engine(copy=2)
    generate(engine, params, requests[:2])
    compiled = engine.compilations
    generate(engine, params, requests[:3])
    assert engine.compilations == compiled
    generate(engine, params, requests)
    assert engine.compilations > compiled, "33 tokens need the next bucket"


@pytest.mark.parametrize("batch_rows, samples, devices", [(12, 8, 1), (16, 4, 8)])
def test_rows_that_do_not_divide_are_refused_with_the_numbers(batch_rows, samples, devices):
    engine = make_engine(batch_rows=batch_rows, devices=devices)
    with pytest.raises(ValueError, match=f"batch_rows={batch_rows} must be a multiple of"):
        engine.batch_prompts(samples)


def test_a_prompt_over_the_limit_is_refused(params):
    long = Request(token_ids=np.ones(65, np.int32), prompt_id=0, epoch=0)
    with pytest.raises(ValueError, match="65 tokens exceeds max_prompt_tokens=64"):
        generate(make_engine(), params, [long])


def test_buckets_double_up_to_the_longest_prompt():
    assert prompt_buckets(96) == (48, 96)
    assert prompt_buckets(512) == (32, 64, 128, 256, 512)
    assert prompt_buckets(20) == (20,)


# Public cases


def scripted_logits(tokens, logprobs, vocabulary=1000):
    """float32 [B, V] whose most likely tokens are these, with these logprobs."""
    probability = np.exp(np.array(logprobs, np.float64))
    logits_BV = np.repeat(np.log((1 - probability) / (vocabulary - 1))[:, None], vocabulary, 1)
    logits_BV[np.arange(len(tokens)), tokens] = logprobs
    return jnp.asarray(logits_BV, jnp.float32)


def run_script(case_input, chosen):
    """Feeds scripted tokens to the recorder until it says that all rows have ended."""
    spec = make_spec(
        stop_ids=tuple(case_input["eos_ids"]),
        pad_id=case_input["pad_id"],
        max_new_tokens=case_input["max_new_tokens"],
        valid_vocab=1000,
    )
    B, N = len(chosen), spec.max_new_tokens
    state = DecodeState(
        count=jnp.int32(0),
        token_B=jnp.zeros(B, jnp.int32),
        done_B=jnp.zeros(B, bool),
        length_B=jnp.zeros(B, jnp.int32),
        stopped_B=jnp.zeros(B, bool),
        tokens_BN=jnp.full((B, N), spec.pad_id, jnp.int32),
        logprobs_BN=jnp.zeros((B, N), jnp.float32),
        cache=[],
    )
    keys_B = row_keys(jax.random.key(0), *(jnp.arange(B),) * 3)
    while unfinished(state, spec):
        step = int(state.count)
        tokens = [case_input["next_tokens_by_row"][row][step] for row in chosen]
        logprobs = [case_input["step_logprobs_by_row"][row][step] for row in chosen]
        # -9 stands where the row has ended; the recorder must not look at it.
        logits_BV = scripted_logits(tokens, [max(value, -2.0) for value in logprobs])
        state = record(state, logits_BV, keys_B, jnp.float32(0.0), spec)
    return state


def test_case_s01_any_stop_id_ends_a_row_and_the_loop_ends_with_the_last(cases):
    case = cases("sampling")["S01"]
    expected = case["expected"]
    state = run_script(case["input"], range(5))
    np.testing.assert_array_equal(state.tokens_BN, expected["tokens"])
    np.testing.assert_array_equal(state.length_B, expected["lengths"])
    np.testing.assert_allclose(state.logprobs_BN, expected["logprobs"], atol=1e-5)
    reasons = ["stop" if stopped else "length" for stopped in state.stopped_B]
    assert reasons == expected["finish_reason"]
    assert int(state.count) == expected["decode_steps_run"]
    some = run_script(case["input"], [0, 3, 4])
    assert int(some.count) == expected["decode_steps_run_if_only_rows_0_3_4"]


def test_case_s02_positions_count_real_tokens_only(cases, params):
    masks = np.array(cases("sampling")["S02"]["input"]["attention_mask"])
    lengths = masks.sum(axis=1)
    prompts = [np.arange(20, 20 + n, dtype=np.int32) for n in lengths]
    prompt_PT, length_P = pad_left(prompts, masks.shape[1], pad_id=0)
    np.testing.assert_array_equal(prompt_PT != 0, masks == 1)
    batch = prefill(params, prompt_PT, length_P, make_spec())
    np.testing.assert_array_equal(masks.shape[1] - batch.pad_P, lengths)
    for row, prompt in enumerate(prompts):
        alone = prefill(params, prompt[None], np.array([len(prompt)]), make_spec())
        np.testing.assert_allclose(batch.logits_PV[row], alone.logits_PV[0], atol=1e-4)


def test_case_s03_temperature_zero_is_greedy_and_finite(cases):
    case = cases("sampling")["S03"]
    logits_BV = jnp.asarray(case["input"]["logits"], jnp.float32)
    keys_B = row_keys(jax.random.key(0), *(jnp.arange(3),) * 3)
    token_B, logprob_B = sample(
        keys_B, jnp.int32(0), logits_BV, temperature=jnp.float32(0.0), valid_vocab=3
    )
    np.testing.assert_array_equal(token_B, case["expected"]["tokens"])
    assert np.isfinite(logprob_B).all()


@pytest.mark.parametrize(
    "prompt, new, cache, positions, message",
    [
        (5, 4, 8, 64, "need 9 positions, but the KV cache holds 8"),
        (5, 3, 8, 64, None),
        (32, 0, 64, 64, "nothing to generate"),
        (16, 16, 32, 24, "max_position_embeddings=24"),
    ],
)
def test_case_s05_geometry_is_refused_with_the_numbers(prompt, new, cache, positions, message):
    geometry = dict(
        prompt_tokens=prompt,
        completion_tokens=new,
        cache_tokens=cache,
        max_position_embeddings=positions,
    )
    if message is None:
        check_geometry(**geometry)
        return
    with pytest.raises(ValueError, match=message):
        check_geometry(**geometry)


def test_case_s06_padded_vocabulary_is_never_drawn_and_not_in_the_normaliser(cases):
    case = cases("sampling")["S06"]
    B = 500
    row = jnp.asarray(case["input"]["logits"], jnp.float32)
    keys_B = row_keys(jax.random.key(0), *(jnp.arange(B),) * 3)
    draw = lambda temperature: sample(
        keys_B,
        jnp.int32(0),
        jnp.tile(row, (B, 1)),
        temperature=jnp.float32(temperature),
        valid_vocab=case["input"]["tokenizer_size"],
    )
    token_B, logprob_B = draw(0.0)
    assert int(token_B[0]) == case["expected"]["greedy_token"]
    np.testing.assert_allclose(logprob_B[0], case["expected"]["logprob_over_real_vocab"], rtol=1e-5)
    drawn = np.asarray(draw(1.0)[0])
    assert drawn.max() < case["input"]["tokenizer_size"] and len(set(drawn.tolist())) > 4


def test_case_s07_every_sample_has_a_stream_of_its_own():
    """Identity, not worker or slot, makes the key: all of (seed, prompt, epoch, sample) enter."""
    same = dict(prompt_id_B=jnp.zeros(8, int), epoch_B=jnp.zeros(8, int))
    first = row_keys(jax.random.key(0), sample_index_B=jnp.arange(8), **same)
    data = {tuple(key) for key in np.asarray(jax.random.key_data(first)).tolist()}
    assert len(data) == 8
    again = row_keys(jax.random.key(0), sample_index_B=jnp.arange(8), **same)
    np.testing.assert_array_equal(jax.random.key_data(first), jax.random.key_data(again))
    for seed, prompt, epoch in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        other = row_keys(
            jax.random.key(seed),
            prompt_id_B=jnp.full(8, prompt),
            epoch_B=jnp.full(8, epoch),
            sample_index_B=jnp.arange(8),
        )
        assert data.isdisjoint(
            tuple(key) for key in np.asarray(jax.random.key_data(other)).tolist()
        )


def test_draws_follow_the_distribution_at_the_temperature():
    """Chi-square of 20,000 draws of one row against softmax(logits / 0.7)."""
    B = 20_000
    row = jnp.asarray([0.3, 1.2, -0.4, 0.0, 2.1, 0.7], jnp.float32)
    keys_B = row_keys(jax.random.key(7), jnp.arange(B), jnp.zeros(B, int), jnp.zeros(B, int))
    token_B, logprob_B = sample(
        keys_B, jnp.int32(3), jnp.tile(row, (B, 1)), temperature=jnp.float32(0.7), valid_vocab=6
    )
    expected = B * np.asarray(jax.nn.softmax(row / 0.7))
    observed = np.bincount(np.asarray(token_B), minlength=6)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 20.5, "99.9 % quantile with 5 degrees of freedom"
    np.testing.assert_allclose(
        np.asarray(logprob_B), np.log(expected / B)[np.asarray(token_B)], rtol=1e-5
    )
