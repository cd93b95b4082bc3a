"""What the operation refuses, and which implementation a choice means for a row."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from kernels import choose
from kernels.packed_attention.block_ranges import QueryBlocks, block_ranges
from kernels.packed_attention.ops import WHOLE_TOKENS, packed_attention, plan_attention


def attend(*, query=(2, 8, 4, 16), key=(2, 8, 2, 16), value=None, segment=(2, 8), **options):
    return packed_attention(
        jnp.zeros(query, options.pop("dtype", jnp.float32)),
        jnp.zeros(key),
        jnp.zeros(key if value is None else value),
        jnp.zeros(segment, options.pop("segment_dtype", jnp.int32)),
        **({"operand_dtype": jnp.float32} | options),
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            {"query": (2, 8, 64)},
            r"query must be \[B, T, heads, H\], none of them 0, got \(2, 8, 64",
        ),
        ({"key": (2, 8, 0, 16)}, r"key must be .* got \(2, 8, 0, 16\)"),
        ({"key": (2, 8, 3, 16)}, r"\[2, 8, a divisor of 4, 16\] alike .* got \(2, 8, 3, 16\)"),
        ({"value": (2, 7, 2, 16)}, r"alike .* got \(2, 8, 2, 16\) and \(2, 7, 2, 16\)"),
        ({"segment": (2, 7)}, r"segment must be integers of shape \(2, 8\), got int32 \(2, 7\)"),
        ({"segment_dtype": bool}, "segment must be integers .* got bool"),
        ({"dtype": jnp.int32}, "query must be floating point, got int32"),
        ({"operand_dtype": jnp.float16}, "bfloat16 or float32, got float16"),
        ({"window": 0}, "window must be None or a whole number of at least 1, got 0"),
        ({"window": 1.5}, "whole number of at least 1, got 1.5"),
        ({"soft_cap": 0.0}, "soft_cap must be None or finite and above 0, got 0.0"),
        ({"soft_cap": float("nan")}, "finite and above 0, got nan"),
        ({"impl": "cudnn"}, "impl must be one of .* got 'cudnn'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        attend(**wrong)


@pytest.mark.parametrize(
    "choice, platform, long, short",
    [
        ("auto", "cpu", choose.XLA, choose.REFERENCE),
        ("auto", "gpu", choose.XLA, choose.REFERENCE),
        ("auto", "tpu", choose.PALLAS_TPU, choose.REFERENCE),
        ("xla", "cpu", choose.XLA, choose.XLA),
        ("pallas", "tpu", choose.PALLAS_TPU, choose.PALLAS_TPU),
        ("reference", "gpu", choose.REFERENCE, choose.REFERENCE),
    ],
)
def test_auto_keeps_the_scores_of_short_rows_whole(choice, platform, long, short):
    plan = plan_attention(choice, platform)
    assert plan.impl_for(WHOLE_TOKENS[platform] + 1) == long
    assert plan.impl_for(WHOLE_TOKENS[platform]) == short


def test_a_few_queries_of_a_longer_row_have_as_many_scores_as_a_short_row():
    plan = plan_attention("auto", "cpu")
    assert plan.impl_for(128, queries=32) == choose.REFERENCE
    assert plan.impl_for(129, queries=32) == choose.XLA


def literal_ranges(segment_JL, window):
    """Which blocks hold a pair of tokens of which one sees the other, by looking at every pair."""
    J, L = segment_JL.shape
    segment_T = segment_JL.reshape(-1)
    meet_JJ = np.zeros((J, J), bool)
    for query, key in np.ndindex(J * L, J * L):
        near = 0 <= query - key < (window or J * L)
        if near and segment_T[query] == segment_T[key] != 0:
            meet_JJ[query // L, key // L] = True
    return meet_JJ


@pytest.mark.parametrize("window", [None, 1, 4, 5, 9])
def test_ranges_are_the_blocks_that_meet_where_segments_are_numbered_along_the_row(window):
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 12, 12)
        row = np.repeat(np.arange(1, 13), lengths)[:24]
        row = np.pad(row[: rng.integers(0, 25)], (0, 24))[:24].astype(np.int32)
        meet_JJ = literal_ranges(row.reshape(6, 4), window)
        found = block_ranges(jnp.asarray(row.reshape(1, 6, 4)), window=window)
        for ranges, meets in ((found.keys, meet_JJ), (found.queries, meet_JJ.T)):
            for block in range(6):
                visited = range(int(ranges.first[0, block]), int(ranges.stop[0, block]))
                assert list(visited) == np.flatnonzero(meets[block]).tolist()


def test_ranges_miss_no_block_whatever_the_numbers():
    rng = np.random.default_rng(1)
    for _ in range(20):
        row = np.repeat(rng.integers(0, 5, 12), 2).astype(np.int32)
        meet_JJ = literal_ranges(row.reshape(6, 4), None)
        found = block_ranges(jnp.asarray(row.reshape(1, 6, 4)))
        for ranges, meets in ((found.keys, meet_JJ), (found.queries, meet_JJ.T)):
            for block in range(6):
                visited = range(int(ranges.first[0, block]), int(ranges.stop[0, block]))
                assert set(np.flatnonzero(meets[block])) <= set(visited)


@pytest.mark.parametrize("window", [None, 5, 9])
def test_ranges_of_blocks_of_some_queries_are_those_that_meet(window):
    """Blocks of two chunks, that begin within blocks of keys."""
    rng = np.random.default_rng(2)
    start_Q = np.array([2, 6, 14, 18])
    for _ in range(20):
        row = np.repeat(np.arange(1, 13), rng.integers(1, 12, 12))[:24]
        row = np.pad(row[: rng.integers(0, 25)], (0, 24))[:24].astype(np.int32)
        places = start_Q[:, None] + np.arange(4)
        meet_QJ = np.zeros((4, 6), bool)
        for (q, i), key in itertools.product(np.ndindex(4, 4), range(24)):
            near = 0 <= places[q, i] - key < (window or 24)
            meet_QJ[q, key // 4] |= near and row[places[q, i]] == row[key] != 0
        found = block_ranges(
            jnp.asarray(row.reshape(1, 6, 4)),
            QueryBlocks(jnp.asarray(row[places][None]), jnp.asarray(start_Q)),
            window=window,
        )
        for ranges, meets in ((found.keys, meet_QJ), (found.queries, meet_QJ.T)):
            for block, meeting in enumerate(meets):
                visited = range(int(ranges.first[0, block]), int(ranges.stop[0, block]))
                # A block of a few tokens beside a border may look near to one that none sees.
                assert set(np.flatnonzero(meeting)) <= set(visited)
                assert len(visited) <= meeting.sum() + 2
