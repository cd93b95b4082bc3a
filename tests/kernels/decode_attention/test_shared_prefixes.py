"""Decode attention of rows that share a prefix: it is read once, and the results are the same.

Tolerances are those of test_decode_attention.py: sharing changes the order of sums alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import choose
from kernels.decode_attention import ops, pallas_tpu
from kernels.decode_attention.shared_prefixes import find_prefixes, most_pieces
from tests.kernels.decode_attention.test_decode_attention import F32, TIGHT, assert_same
from tests.kernels.decode_attention.test_decode_attention import attend as attend_alone

pytestmark = pytest.mark.slow

B, S, BLOCK, TILE = 48, 80, 32, 8
"""The last block of a row begins at 48, inside the one before it."""
NAMES = ("query", "new_key", "new_value", "key", "value", "position", "leader", "shared")


def problem(groups, *, B=B, S=S, N=3, K=1, H=16, dtype=F32, seed=0):
    """Rows of groups, given as (rows, shared columns), scattered over the slots, as are leaders.

    Of each group one row has its new column right behind the shared ones, and one at the end. The
    slots that are left stand anywhere, two of them idle.
    """
    rng = np.random.default_rng(seed)
    key, value = rng.normal(size=(2, B, K, S, H))
    slots = rng.permutation(B)
    leader, shared, position = np.arange(B), np.zeros(B, int), rng.integers(0, S, B)
    position[slots[-2:]] = 0
    for rows, columns in groups:
        members, slots = slots[:rows], slots[rows:]
        first = rng.choice(members)
        leader[members], shared[members] = first, columns
        for cache in (key, value):
            cache[members, :, :columns] = cache[first, :, :columns]
        position[members] = rng.integers(columns, S, rows)
        position[members[0]], position[members[-1]] = columns, S - 1
    new = rng.normal(size=(2, B, K, H))
    floats = [x.astype(dtype) for x in (rng.normal(size=(B, N, H)), *new, key, value)]
    integers = [x.astype(np.int32) for x in (position, leader, shared)]
    return dict(zip(NAMES, floats + integers, strict=True))


@functools.cache
def program(operand_dtype):
    def run(query, new_key, new_value, key, value, position, leader, shared):
        return pallas_tpu.decode_attention(
            *(query, new_key, new_value, key, value, position),
            leader_B=leader,
            shared_B=shared,
            operand_dtype=operand_dtype,
            block_S=BLOCK,
            chains=4,
            interpret=True,
        )

    return jax.jit(run)


def attend(arguments, operand_dtype=F32):
    return program(operand_dtype)(**arguments)


def expected(arguments, operand_dtype=F32):
    alone = [arguments[name] for name in NAMES[:6]]
    return attend_alone(alone, choose.REFERENCE, operand_dtype)


def spoilt(arguments, tile=TILE):
    """The caches of followers hold something else in all that the leader is read for."""
    leader, shared = arguments["leader"], arguments["shared"]
    follows = (leader != np.arange(leader.size))[:, None]
    read = np.arange(arguments["key"].shape[2]) < (shared // tile * tile)[:, None]
    hidden = (follows & read)[:, None, :, None]
    spoil = lambda cache: np.where(hidden, cache.dtype.type(1e4), cache)
    return arguments | {name: spoil(arguments[name]) for name in ("key", "value")}


@pytest.mark.parametrize(
    "groups",
    [
        [(1, 30), (3, 40), (16, 33), (20, 16)],
        [(3, 31), (4, 32), (5, 33), (6, 63), (7, 64), (8, 65), (3, 79)],  # at the blocks' borders
        [(33, 72)],  # three times ROWS, and one more
        [(3, 7), (9, 0)],  # less than a tile
        [],
    ],
)
def test_rows_of_a_group_attend_as_if_alone(groups):
    arguments = problem(groups)
    assert_same(attend(arguments), expected(arguments), **TIGHT)


def test_what_is_shared_is_read_from_the_leader_alone():
    arguments = problem([(3, 72), (4, 33), (17, 64), (20, 16)])
    assert not np.allclose(expected(spoilt(arguments)).out_BNH, expected(arguments).out_BNH)
    found = attend(spoilt(arguments)).out_BNH
    np.testing.assert_allclose(found, expected(arguments).out_BNH, **TIGHT)


def test_two_rows_read_each_its_own():
    arguments = spoilt(problem([(2, 40)]))
    assert_same(attend(arguments), expected(arguments), **TIGHT)


def test_any_row_of_a_group_may_lead():
    """As when the leader has ended, and its slot belongs to a row of another prompt."""
    arguments = problem([(6, 40), (5, 33)])
    leader = arguments["leader"].copy()
    old = leader[np.flatnonzero(leader != np.arange(B))[0]]
    heirs = np.flatnonzero((leader == old) & (np.arange(B) != old))
    leader[heirs], leader[old] = heirs[-1], old
    arguments["shared"][old] = 0
    for name in ("key", "value"):
        arguments[name][old] *= -3
    arguments["leader"] = leader
    assert_same(attend(arguments), expected(arguments), **TIGHT)


def test_scores_far_below_zero_are_no_nothing():
    """They are near -400, which leaves them an absolute error of 400 * 2**-23, and e to it one
    relative to the output that is several times that."""
    arguments = problem([(6, 40)])
    arguments["query"][..., 0] = -40
    for name in ("key", "new_key"):
        arguments[name][..., 0] = 40
    assert_same(attend(arguments), expected(arguments), rtol=5e-4, atol=5e-4)


def test_a_leader_may_write_into_a_block_that_others_read():
    """The leader's new column lies in the block that others read, right behind what they share."""
    arguments = problem([(5, 40)])
    leader = arguments["leader"][np.argmax(arguments["shared"])]
    arguments["position"][leader] = 40
    found, wanted = attend(arguments), expected(arguments)
    assert_same(found, wanted, **TIGHT)
    after = arguments | {"key": found.key_BKSH, "value": found.value_BKSH}
    assert_same(attend(after), expected(after), **TIGHT)


def test_bfloat16_stays_within_its_noise():
    """The bound is that of test_decode_attention.py. Every lane is taken, and heads are two."""
    arguments = problem([(18, 70)], B=20, N=16, K=2, dtype=jnp.bfloat16)
    as_f32 = lambda attended: jax.tree.map(lambda x: np.asarray(x).astype(np.float32), attended)
    found = as_f32(attend(arguments, jnp.bfloat16))
    wanted = as_f32(expected(arguments, jnp.bfloat16))
    assert_same(found, wanted, rtol=2**-8, atol=4 * 2**-8)
    once = as_f32(attend(spoilt(arguments, tile=16), jnp.bfloat16))
    np.testing.assert_array_equal(once.out_BNH, found.out_BNH)


def test_pieces_come_in_the_order_of_their_places():
    """A turn of ROWS places reaches over rows of later groups, which must not have begun."""
    arguments = problem([(3, 40), (20, 64), (18, 9), (2, 50)])
    most = most_pieces(B, S, BLOCK)
    find = functools.partial(find_prefixes, tile=TILE, block_S=BLOCK, most=most)
    found = jax.jit(find)(*(arguments[name] for name in ("position", "leader", "shared")))
    count = int(found.total[0])
    assert count == 2 + 2 * 2 + 2 * 1
    place, own = np.asarray(found.place_M)[:count], np.asarray(found.own_M)[:count]
    assert (np.diff(place) >= 0).all() and (own[np.flatnonzero(np.diff(place)) + 1] == 0).all()
    shares = np.asarray(found.first_B) > 0
    assert sorted(np.asarray(found.place_B)[shares]) == list(range(3 + 20 + 18))


@pytest.mark.parametrize("impl", [choose.REFERENCE, choose.XLA])
def test_other_implementations_ignore_it(impl):
    arguments = problem([(5, 40)])
    leader, shared = arguments["leader"], arguments["shared"]
    alone = [arguments[name] for name in NAMES[:6]]
    attend = jax.jit(functools.partial(ops.decode_attention, impl=impl))
    plain = attend(*alone)
    found = attend(*alone, leader_B=leader, shared_B=shared)
    np.testing.assert_array_equal(found.out_BNH, plain.out_BNH)


def test_half_of_it_or_other_shapes_are_refused():
    arguments = problem([])
    alone = [arguments[name] for name in NAMES[:6]]
    leader, shared = arguments["leader"], arguments["shared"]
    with pytest.raises(ValueError, match="given together"):
        ops.decode_attention(*alone, leader_B=leader)
    with pytest.raises(ValueError, match=r"shared must be integers of shape \(48,\), got float32"):
        ops.decode_attention(*alone, leader_B=leader, shared_B=shared.astype(F32))
    with pytest.raises(ValueError, match=r"leader must be .* \(47,\)"):
        ops.decode_attention(*alone, leader_B=leader[1:], shared_B=shared)
