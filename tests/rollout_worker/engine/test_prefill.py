"""Attention of the chunks of a prompt: against float64, and in engines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.packed_attention.ops import WHOLE_SCORES, AttentionPlan
from models.transformer import forward, head_weight, logits, packed_attend
from rollout_worker.engine.decode_request import SamplingSettings
from rollout_worker.engine.kv_cache import LayerCache, first_attend, next_attend
from tests.rollout_worker.engine.engines import (
    BF16,
    F32,
    MODEL,
    VALID_VOCAB,
    assert_same_rows,
    chosen,
    make_engine,
    make_request,
    policy,
    run,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs_compiled_once")]

N, K, H, S, ENTRIES = 4, 2, 16, 300, 5
UNUSED = ENTRIES
PLANS = {
    "whole": WHOLE_SCORES,
    "whole, a prompt at a time": AttentionPlan("xla", whole_tokens=S - 1),
    "xla": AttentionPlan("xla"),
    "pallas": AttentionPlan("pallas_interpret"),
}
CHUNKS = {
    32: ((3, 280, 20), (0, 64, 32), (UNUSED, 0, 0), (4, 1, 7)),
    100: ((1, 250, 50), (2, 100, 100), (0, 13, 100)),
    256: ((2, 299, 1), (4, 44, 256)),
}
"""By padded length: (entry, start, tokens) of each chunk of a call; some end where the pool does,
so that their padding passes its end."""


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prompts(C, dtype=F32):
    """Query, key and value of a whole row for every chunk of the call, [Q, S, heads, H].

    float32 arrays that the dtype holds exactly.
    """
    Q = len(CHUNKS[C])
    arrays = normal(Q, S, N, H), normal(Q, S, K, H, seed=1), normal(Q, S, K, H, seed=2)
    return [each.astype(dtype).astype(np.float32) for each in arrays]


def exact(query_SNH, key_SKH, value_SKH):
    """Causal attention of a whole row in float64."""
    S = len(query_SNH)
    query_SKGH = query_SNH.astype(np.float64).reshape(S, K, N // K, H)
    score_KGTS = np.einsum("tkgh,skh->kgts", query_SKGH, key_SKH.astype(np.float64)) * H**-0.5
    score_KGTS[..., np.triu(np.ones((S, S), bool), 1)] = -np.inf
    weight_KGTS = np.exp(score_KGTS - score_KGTS.max(axis=-1, keepdims=True))
    weight_KGTS /= weight_KGTS.sum(axis=-1, keepdims=True)
    out_SKGH = np.einsum("kgts,skh->tkgh", weight_KGTS, value_SKH.astype(np.float64))
    return out_SKGH.reshape(S, N, H)


def padded_chunks(C, chunks, whole_QS):
    """The chunks' own tokens of each row, padded to C with large numbers."""
    padded_QC = np.full((len(chunks), C, *whole_QS.shape[2:]), 50.0, np.float32)
    for q, (_, start, tokens) in enumerate(chunks):
        padded_QC[q, :tokens] = whole_QS[q, start : start + tokens]
    return padded_QC


def pool_of(chunks, whole_QS):
    """[ENTRIES, K, S, H] with the columns before each chunk; NaN in all that was never written."""
    pool_BKSH = np.full((ENTRIES, K, S, H), np.nan, np.float32)
    for (entry, start, _), row_SKH in zip(chunks, whole_QS, strict=True):
        if entry != UNUSED:
            pool_BKSH[entry, :, :start] = row_SKH[:start].swapaxes(0, 1)
    return pool_BKSH


@functools.cache
def later_chunks(C, plan, dtype=F32):
    """Results and pool of one call, beside what is true.

    Args:
        dtype: of all arrays and of the operands.
    """
    chunks, (query, key, value) = CHUNKS[C], prompts(C, dtype)
    entry_Q, start_Q, _ = (jnp.asarray(each, jnp.int32) for each in zip(*chunks, strict=True))
    attend = next_attend(entry_Q, start_Q, operand_dtype=dtype, plan=plan)
    arrays = [padded_chunks(C, chunks, each).astype(dtype) for each in (query, key, value)]
    pool = LayerCache(*(pool_of(chunks, each).astype(dtype) for each in (key, value)))
    out, pool = jax.tree.map(np.asarray, jax.jit(attend)(*arrays, pool))
    right = [exact(*row) for row in zip(query, key, value, strict=True)]
    return out, pool, right


def rel_l2(found, right):
    return np.linalg.norm(found - right) / np.linalg.norm(right)


def gaps(C, plan, dtype=F32):
    """Relative error of each chunk that is used."""
    out, _, right = later_chunks(C, plan, dtype)
    return [
        rel_l2(out[q, :tokens].astype(np.float64), right[q][start : start + tokens])
        for q, (entry, start, tokens) in enumerate(CHUNKS[C])
        if entry != UNUSED
    ]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("C", CHUNKS)
def test_later_chunks_with_starts_of_their_own_are_exact(C, plan):
    # Sums of at most 300 terms of float32.
    assert max(gaps(C, plan)) < 1e-6


@pytest.mark.parametrize("name", ["xla", "pallas"])
@pytest.mark.parametrize("C", CHUNKS)
def test_in_bfloat16_they_have_the_noise_of_whole_scores(C, name):
    noise = max(gaps(C, PLANS["whole, a prompt at a time"], BF16))
    assert 1e-3 < noise < 1e-2
    assert max(gaps(C, PLANS[name], BF16)) < 1.5 * noise


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("C", CHUNKS)
def test_the_pool_gets_the_chunk_and_keeps_the_rest(C, plan):
    chunks, (_, key, value) = CHUNKS[C], prompts(C)
    out, pool, _ = later_chunks(C, plan)
    assert np.isfinite(out).all(), "an unused chunk and padding too"
    for found, whole, before in zip(
        pool, (key, value), (pool_of(chunks, key), pool_of(chunks, value)), strict=True
    ):
        for q, (entry, start, tokens) in enumerate(chunks):
            if entry != UNUSED:
                end = start + tokens
                written = found[entry, :, :end].swapaxes(0, 1)
                np.testing.assert_array_equal(written, whole[q, :end])
                assert np.isfinite(found[entry]).all()
        others = sorted(set(range(ENTRIES)) - {entry for entry, _, _ in chunks})
        np.testing.assert_array_equal(found[others], before[others])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("C", [32, 100, 300])
def test_first_chunks_attend_to_themselves(C, plan):
    query, key, value = normal(2, C, N, H), normal(2, C, K, H, seed=1), normal(2, C, K, H, seed=2)
    before = np.full((ENTRIES, K, S, H), np.nan, np.float32)
    attend = first_attend(jnp.asarray([UNUSED, 1]), operand_dtype=F32, plan=plan)
    out, pool = jax.jit(attend)(query, key, value, LayerCache(before, before))
    for q in range(2):
        assert rel_l2(np.asarray(out)[q], exact(query[q], key[q], value[q])) < 1e-6
    for found, new in zip(pool, (key, value), strict=True):
        found = np.array(found)
        np.testing.assert_array_equal(found[1, :, :C].swapaxes(0, 1), new[1])
        found[1, :, :C] = np.nan
        assert np.isnan(found).all()


def test_a_short_row_is_attended_bit_by_bit_as_whole_scores_are():
    same = later_chunks(100, AttentionPlan("xla", whole_tokens=S))
    np.testing.assert_array_equal(same[0], later_chunks(100, WHOLE_SCORES)[0])
    others = later_chunks(100, AttentionPlan("xla", whole_tokens=99))
    assert (others[0] != same[0]).any(), "the comparison sees a difference in rounding"


LONG, NEW = 290, 8


def long_engine(**how):
    sizes = dict(max_prompt_tokens=LONG, max_new_tokens=NEW, cache_tokens=LONG + NEW)
    return make_engine(prefill_tokens=64, **sizes, **how)


@functools.cache
def long_requests():
    """Of one chunk, and of up to five, the last of one of which is but a token long."""
    rng = np.random.default_rng(0)
    greedy = dict(sampling=SamplingSettings(temperature=0.0), samples=1, max_new_tokens=NEW)
    lengths = [LONG, 20, 64 + 1 + 1, 200, 258]
    return [make_request(rng.integers(10, 60, n), i, **greedy) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def with_whole_scores():
    return run(long_engine(prefill_attention=WHOLE_SCORES), long_requests())


@functools.partial(jax.jit, static_argnums=2)
def _logprobs(params, ids_T, start):
    attend = packed_attend(jnp.ones((1, len(ids_T)), jnp.int32), operand_dtype=F32)
    places = jnp.arange(len(ids_T))[None]
    hidden, _ = forward(params, MODEL, ids_T[None], places, attend, compute_dtype=F32)
    scores = logits(hidden[0, start - 1 : -1], head_weight(params))[:, :VALID_VOCAB]
    return jax.nn.log_softmax(scores, axis=-1)


def test_whole_scores_draw_what_one_pass_over_the_sequence_finds_likeliest(with_whole_scores):
    for row in with_whole_scores.values():
        prompt = long_requests()[int(row.request_id)].token_ids
        ids = np.concatenate([prompt, row.token_ids])
        right = np.asarray(_logprobs(policy(), ids, len(prompt)))
        np.testing.assert_array_equal(row.token_ids, right.argmax(axis=1))
        # float32 sums of another order; the logits reach 40.
        np.testing.assert_allclose(row.logprobs, chosen(right, row.token_ids), atol=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(prefill_attention=PLANS["xla"], tensor=2),
        dict(prefill_attention=PLANS["pallas"]),
        dict(prefill_attention=PLANS["pallas"], tensor=4),
        dict(prefill_attention=PLANS["pallas"], data=2, tensor=2),
        dict(prefill_attention=PLANS["whole, a prompt at a time"], data=2),
    ],
    ids=str,
)
def test_prompts_of_several_chunks_draw_the_same(with_whole_scores, how):
    assert_same_rows(run(long_engine(**how), long_requests()), with_whole_scores)
