"""How a token is drawn, and the logprob that is recorded with it.

The random key of a token is a pure function of (seed, prompt, epoch, sample, position), and a row's
draw reads that row's logits alone. Worker, slot and batch do not enter: the same completion is
drawn wherever it is decoded, also after the number of workers has changed, and a resumed run draws
what the first one would have drawn.

`draw_tokens` inverts the cumulative distribution in two levels, first over blocks of the
vocabulary, then inside the drawn block. It reads the logits twice, for the maxima and for the sums
of the blocks, and does nothing else over the vocabulary: logits that are sharded over a mesh axis
stay where they are.

Dimension key:
    B: rows
    V: vocabulary
    C: blocks of the vocabulary
    W: ids of a block
    X: the entries of one draw (blocks, or the ids of a block)
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kernels.token_logprob.statistics import Statistics, Support, finish

MOST_BLOCKS = 128
FEWEST_BLOCKS = 16
LOG_SMALLEST_WEIGHT = -87.0
"""Below it exp gives subnormal float32 numbers, which some devices flush to zero and others do not.
Whether a token has weight is therefore decided by comparing logits, the same on every device."""


class Sampling(NamedTuple):
    """How each row is drawn. The options apply in this order; ties at a threshold are kept."""

    temperature_B: jax.Array
    """float32: divides the logits; 0 takes the most likely token, whatever the other options."""
    top_k_B: jax.Array
    """int32: keeps this many of the most likely tokens; 0 keeps all."""
    top_p_B: jax.Array
    """float32 in (0, 1]: keeps the smallest set of most likely tokens that holds this share of
    what top_k left; 1 keeps all."""
    min_p_B: jax.Array
    """float32 in [0, 1]: keeps tokens at least this times as likely as the most likely; 0 keeps
    all."""


def row_keys(
    base_key: jax.Array, prompt_id_B: jax.Array, epoch_B: jax.Array, sample_index_B: jax.Array
) -> jax.Array:
    """One typed key per row; `draw_tokens` folds the position in.

    Args:
        base_key: key of the run's seed (and, for evaluation, of its own stream).
        prompt_id_B, epoch_B, sample_index_B: int32.
    """

    def fold(prompt_id, epoch, sample_index):
        key = jax.random.fold_in(base_key, prompt_id)
        return jax.random.fold_in(jax.random.fold_in(key, epoch), sample_index)

    return jax.vmap(fold)(prompt_id_B, epoch_B, sample_index_B)


def draw_tokens(
    key_data_B: jax.Array,
    count_B: jax.Array,
    logits_BV: jax.Array,
    sampling: Sampling,
    *,
    valid_vocab: int,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per row.

    Rows do not influence each other, not even in the last bit. A logit of -inf is never drawn. A
    row with NaN draws some id below valid_vocab, with logprob NaN.

    Args:
        key_data_B: uint32 [B, 2]; `jax.random.key_data` of `row_keys`.
        count_B: int32; index of the token within its completion.
        logits_BV: float32. V may be sharded over a mesh axis that is left to the compiler; it is
            not gathered if the size of the axis divides gcd(V, 128) and that is at least 16. The
            sums of the blocks are exchanged at once if the mesh is in context (`jax.set_mesh`, or
            inside a `shard_map` over other axes), and in many small steps otherwise.
        sampling: the values must be in the documented ranges, which is not checked here.
        valid_vocab: 1..V; ids from here on are padding of the embedding and are never drawn.

    Returns:
        token ids int32 [B], and their logprobs float32 [B], in nats, under the distribution that
        was sampled: after temperature and over what the options left; at temperature 0 under
        softmax(logits). Both are over the valid ids alone.
    """
    greedy_B = sampling.temperature_B == 0
    logits_BCW = _in_blocks(logits_BV)
    _, C, W = logits_BCW.shape
    id_CW = jnp.arange(C * W, dtype=jnp.int32).reshape(C, W)
    scaled_BCW = _scaled(logits_BCW, id_CW, sampling, valid_vocab)
    # Without the barrier XLA computes top_B from the logits again, in a pass of its own.
    peak_BC = jax.lax.optimization_barrier(_together(scaled_BCW.max(axis=2)))
    top_B = peak_BC.max(axis=1)
    floor_B = _floor(logits_BCW, id_CW, top_B, sampling, valid_vocab)
    mass_BC = _together(_weights(scaled_BCW, top_B, floor_B).sum(axis=2))

    uniform_B2 = _uniforms(key_data_B, count_B)
    is_top_BC = peak_BC == top_B[:, None]
    block_B, total_B = _pick(mass_BC, uniform_B2[:, 0], greedy_B, is_top_BC)

    block_BW = jnp.take_along_axis(logits_BCW, block_B[:, None, None], axis=1)[:, 0]
    id_BW = block_B[:, None] * W + jnp.arange(W, dtype=jnp.int32)
    scaled_BW = _scaled(block_BW, id_BW, sampling, valid_vocab)
    weight_BW = _weights(scaled_BW, top_B, floor_B)
    place_B, _ = _pick(weight_BW, uniform_B2[:, 1], greedy_B, scaled_BW == top_B[:, None])

    token_B = block_B * W + place_B
    chosen_B = jnp.take_along_axis(scaled_BW, place_B[:, None], axis=1)[:, 0]
    # The third field enters the entropy alone, which is not used here.
    whole = Statistics(top_B, total_B, jnp.zeros_like(top_B), chosen_B)
    return token_B, finish(whole, token_B, Support(1.0, valid_vocab)).logprob


def _in_blocks(logits_BV: jax.Array) -> jax.Array:
    """The logits as [B, C, W]: a view where V has a fitting divisor, a padded copy elsewhere."""
    B, V = logits_BV.shape
    C = math.gcd(V, MOST_BLOCKS)
    if C < FEWEST_BLOCKS:
        C = MOST_BLOCKS
        logits_BV = jnp.pad(logits_BV, ((0, 0), (0, -V % C)))
    return logits_BV.reshape(B, C, -1)


def _along(row_B: jax.Array, like: jax.Array) -> jax.Array:
    return row_B.reshape(-1, *(1,) * (like.ndim - 1))


def _scaled(logits: jax.Array, ids: jax.Array, sampling: Sampling, valid_vocab: int) -> jax.Array:
    """Logits [B, ..] over the temperature; -inf at ids that are no tokens."""
    # A product, not a quotient: XLA turns a division by a row's constant into this product in some
    # places and not in others, and a logit is compared with thresholds that were found among such
    # values: all must be rounded alike.
    factor_B = 1.0 / jnp.where(sampling.temperature_B == 0, 1.0, sampling.temperature_B)
    scaled = logits.astype(jnp.float32) * _along(factor_B, logits)
    return jnp.where(ids < valid_vocab, scaled, -jnp.inf)


def _weights(scaled: jax.Array, top_B: jax.Array, floor_B: jax.Array) -> jax.Array:
    """exp(scaled - top) of the entries that are kept, 0 elsewhere; NaN stays NaN."""
    shifted = scaled - _along(jnp.where(top_B == -jnp.inf, 0.0, top_B), scaled)
    dropped = (shifted <= LOG_SMALLEST_WEIGHT) | (scaled < _along(floor_B, scaled))
    return jnp.where(dropped, 0.0, jnp.exp(shifted))


def _uniforms(key_data_B: jax.Array, count_B: jax.Array) -> jax.Array:
    """Two float32 in [0, 1) per row, one for each level."""

    def uniforms(key_data, count):
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), count)
        return jax.random.uniform(key, (2,), jnp.float32)

    return jax.vmap(uniforms)(key_data_B, count_B)


def _pick(
    weight_BX: jax.Array, uniform_B: jax.Array, greedy_B: jax.Array, is_top_BX: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """An index of each row with probability weight / total, or its first top; and the total.

    Rounding never leads to an index without weight; where there is no weight the index is 0.
    """
    index_X = jnp.arange(weight_BX.shape[1], dtype=jnp.int32)
    running_BX, total_B = _running(weight_BX)
    has_weight_BX = weight_BX > 0
    reached_BX = has_weight_BX & (running_BX > (uniform_B * total_B)[:, None])
    reached_BX = jnp.where(greedy_B[:, None], is_top_BX, reached_BX)
    first_B = jnp.where(reached_BX, index_X, len(index_X)).min(axis=1)
    last_B = jnp.where(has_weight_BX, index_X, 0).max(axis=1)
    return jnp.minimum(first_B, last_B), total_B


def _together(of_block_BC: jax.Array) -> jax.Array:
    """The same numbers, replicated over the mesh axes that are left to the compiler.

    One small exchange; without it each step of `_running` would need one.
    """
    if AxisType.Auto not in jax.sharding.get_abstract_mesh().axis_types:
        return of_block_BC
    return jax.lax.with_sharding_constraint(of_block_BC, P(P.UNCONSTRAINED, None))


def _running(weight_BX: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Running sums and the total.

    The additions are written out, so that their bits do not depend on how X is sharded: the order
    of the sums in a cumsum is up to the compiler.
    """
    running_BX, span = weight_BX, 1
    while span < weight_BX.shape[1]:
        running_BX += jnp.pad(running_BX[:, :-span], ((0, 0), (span, 0)))
        span *= 2
    return running_BX, running_BX[:, -1]


def _floor(
    logits_BCW: jax.Array,
    id_CW: jax.Array,
    top_B: jax.Array,
    sampling: Sampling,
    valid_vocab: int,
) -> jax.Array:
    """Smallest scaled logit that the options keep, float32 [B]; -inf where they keep all."""
    drawn_B = sampling.temperature_B != 0
    some_k_B = drawn_B & (sampling.top_k_B > 0)
    some_p_B = drawn_B & (sampling.top_p_B < 1)
    # Branches take the logits themselves, which exist anyway, and not the scaled ones.
    scaled = lambda logits_BCW: _scaled(logits_BCW, id_CW, sampling, valid_vocab)

    no_floor_B = jnp.full_like(top_B, -jnp.inf)
    keep = lambda logits_BCW, floor_B: floor_B

    def top_k_floor(logits_BCW, floor_B):
        return jnp.where(some_k_B, _top_k_floor(scaled(logits_BCW), sampling.top_k_B), floor_B)

    def top_p_floor(logits_BCW, floor_B):
        found_B = _top_p_floor(scaled(logits_BCW), top_B, floor_B, sampling.top_p_B)
        return jnp.where(some_p_B, found_B, floor_B)

    def truncation_floor(logits_BCW):
        floor_B = jax.lax.cond(some_k_B.any(), top_k_floor, keep, logits_BCW, no_floor_B)
        return jax.lax.cond(some_p_B.any(), top_p_floor, keep, logits_BCW, floor_B)

    # One outer condition for both options: on a GPU each condition synchronises with the host.
    some = (some_k_B | some_p_B).any()
    floor_B = jax.lax.cond(some, truncation_floor, lambda _: no_floor_B, logits_BCW)
    min_p_floor_B = jnp.where(drawn_B, top_B + jnp.log(sampling.min_p_B), -jnp.inf)
    return jnp.maximum(floor_B, min_p_floor_B)


def _top_k_floor(scaled_BCW: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """The k-th largest; -inf where there are fewer."""

    def enough(floor_B):
        return (scaled_BCW >= floor_B[:, None, None]).sum(axis=(1, 2)) >= top_k_B

    return _largest(enough, top_k_B)


def _top_p_floor(
    scaled_BCW: jax.Array, top_B: jax.Array, floor_B: jax.Array, top_p_B: jax.Array
) -> jax.Array:
    """The least likely of the fewest that hold a share of top_p of what the floor keeps."""

    def kept(floor_B):
        _, total_B = _running(_together(_weights(scaled_BCW, top_B, floor_B).sum(axis=2)))
        return total_B

    wanted_B = top_p_B * kept(floor_B)
    found_B = _largest(lambda at_B: kept(jnp.maximum(at_B, floor_B)) >= wanted_B, top_B)
    return jnp.maximum(jnp.minimum(found_B, top_B), floor_B)


def _largest(holds, like_B: jax.Array) -> jax.Array:
    """Largest float32 [B] at which `holds` is true, bit by bit; -inf where it never is.

    A binary search over the bits of float32, mapped to integers in the order of the numbers. The
    result is exact: the threshold itself, which is one of the numbers that `holds` compares with.

    Args:
        holds: of float32 [B], bool [B]; if true somewhere, true below.
        like_B: any 32-bit array of the rows.
    """

    def number(order_B):
        sign = jnp.uint32(1 << 31)
        bits_B = jnp.where(order_B >= sign, order_B ^ sign, ~order_B)
        return jax.lax.bitcast_convert_type(bits_B, jnp.float32)

    def try_bit(i, order_B):
        higher_B = order_B | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(number(higher_B)), higher_B, order_B)

    # Zeros that vary over the mesh axes that the rows do, as what the loop makes of them will.
    none_B = jax.lax.bitcast_convert_type(like_B, jnp.uint32) & 0
    found_B = number(jax.lax.fori_loop(0, 32, try_bit, none_B))
    return jnp.where(jnp.isnan(found_B), -jnp.inf, found_B)
