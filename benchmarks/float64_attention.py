"""Packed attention and its gradient in float64 numpy: what errors are measured against.

Both are written out from the definition in kernels/packed_attention/reference.py, a row and a head
at a time, so that nothing here goes through an implementation that is being checked.

Dimension key: that of kernels/packed_attention/reference.py.
"""

from typing import Any, NamedTuple

import numpy as np


class AttentionGradients(NamedTuple):
    """The output and, for a given cotangent of it, the gradients; float64, shaped as the arrays."""

    out: Any
    query: Any
    key: Any
    value: Any


def value_and_gradients(
    query_BTNH: np.ndarray,
    key_BTKH: np.ndarray,
    value_BTKH: np.ndarray,
    segment_BT: np.ndarray,
    d_out_BTNH: np.ndarray,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> AttentionGradients:
    """The exact output, and the gradients of its inner product with `d_out`."""
    query, key, value, d_out = (
        np.asarray(array).astype(np.float64)
        for array in (query_BTNH, key_BTKH, value_BTKH, d_out_BTNH)
    )
    B, T, N, _ = query.shape
    heads_per_key = N // key.shape[2]
    found = AttentionGradients(*(np.zeros_like(each) for each in (query, query, key, value)))
    place_T = np.arange(T)
    distance_TS = place_T[:, None] - place_T
    for b in range(B):
        segment_T = np.asarray(segment_BT[b])
        seen_TS = (segment_T[:, None] == segment_T) & (segment_T != 0) & (distance_TS >= 0)
        if window is not None:
            seen_TS &= distance_TS < window
        for n in range(N):
            k = n // heads_per_key
            one = _one_head(
                query[b, :, n], key[b, :, k], value[b, :, k], seen_TS, d_out[b, :, n], soft_cap
            )
            found.out[b, :, n], found.query[b, :, n] = one.out, one.query
            found.key[b, :, k] += one.key
            found.value[b, :, k] += one.value
    return found


def _one_head(query_TH, key_SH, value_SH, seen_TS, d_out_TH, soft_cap) -> AttentionGradients:
    scale = query_TH.shape[1] ** -0.5
    score_TS = query_TH @ key_SH.T * scale
    slope_TS = np.full_like(score_TS, scale)
    if soft_cap is not None:
        slope_TS = scale / np.cosh(score_TS / soft_cap) ** 2
        score_TS = soft_cap * np.tanh(score_TS / soft_cap)
    top_T = np.where(seen_TS, score_TS, -np.inf).max(axis=1, initial=-1e30)
    weight_TS = np.where(seen_TS, np.exp(np.where(seen_TS, score_TS - top_T[:, None], 0.0)), 0.0)
    weight_TS /= np.maximum(weight_TS.sum(axis=1, keepdims=True), 1e-300)
    d_weight_TS = d_out_TH @ value_SH.T
    inner_T = (d_weight_TS * weight_TS).sum(axis=1)
    d_product_TS = weight_TS * (d_weight_TS - inner_T[:, None]) * slope_TS
    return AttentionGradients(
        weight_TS @ value_SH,
        d_product_TS @ key_SH,
        d_product_TS.T @ query_TH,
        weight_TS.T @ d_out_TH,
    )
