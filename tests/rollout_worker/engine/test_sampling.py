"""Draws against the exact distribution, the one definition of the logprob, and each other."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.stats import chi2

from kernels.token_logprob import reference
from rollout_worker.engine.sampling import Sampling, _pick, draw_tokens, row_keys

pytestmark = pytest.mark.slow

OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
OPTIONS = {
    "plain": {},
    "temperature": dict(temperature=0.6),
    "top-k": dict(top_k=7),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.08),
    "top-k-then-top-p": dict(top_k=12, top_p=0.7),
    "all": dict(temperature=1.3, top_k=30, top_p=0.9, min_p=0.1),
}
# Blocks of five ids, sixteen of them, and ids that are no tokens; a prime, which must be padded.
SIZES = {"blocks": (80, 77), "prime": (101, 98)}


def settings(rows):
    """A Sampling of one row per dict; what a dict leaves out is off."""
    column = lambda name, dtype: jnp.asarray([{**OFF, **row}[name] for row in rows], dtype)
    return Sampling(
        temperature_B=column("temperature", jnp.float32),
        top_k_B=column("top_k", jnp.int32),
        top_p_B=column("top_p", jnp.float32),
        min_p_B=column("min_p", jnp.float32),
    )


def key_data(B, seed=0):
    zeros = jnp.zeros(B, jnp.int32)
    return jax.random.key_data(row_keys(jax.random.key(seed), zeros, zeros, jnp.arange(B)))


@jax.jit
def drawn(key_data_B, count_B, logits_BV, sampling, valid_vocab):
    return draw_tokens(key_data_B, count_B, logits_BV, sampling, valid_vocab=valid_vocab)


def draws(logits_BV, rows, *, valid_vocab=None, count=0):
    """Tokens and logprobs of such rows. Rows and ids are filled up to one shape, which is compiled
    once; the ids that come to it are no tokens, and likelier than all others."""
    logits_BV = np.asarray(logits_BV, np.float32)
    B, V = logits_BV.shape
    more_B = 640 - B
    logits_BV = np.pad(logits_BV, ((0, more_B), (0, max(0, 320 - V))), constant_values=50.0)
    count_B = jnp.full(640, count, jnp.int32)
    sampling = settings([*rows, *[{}] * more_B])
    token_B, logprob_B = drawn(key_data(640), count_B, logits_BV, sampling, valid_vocab or V)
    return np.asarray(token_B)[:B], np.asarray(logprob_B)[:B]


def exact(logits_V, valid_vocab, *, temperature, top_k, top_p, min_p):
    """The distribution of one row, literally, in float64."""
    z = np.asarray(logits_V, np.float64)[:valid_vocab] / temperature
    p = np.exp(z - z.max())
    if top_k:
        p = np.where(z >= np.sort(z)[-top_k], p, 0)
    if top_p < 1:
        p /= p.sum()
        falling = np.argsort(-p)
        held = np.cumsum(p[falling])
        assert abs(held - top_p).min() > 1e-4, "too near the border for float32"
        p[falling[(held >= top_p).argmax() + 1 :]] = 0
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


def row_logits(V):
    return np.random.default_rng(V).normal(size=V).astype(np.float32) * 1.5


def on_mesh(logits_BV, devices):
    """A jitted draw whose logits are cut over so many devices, where they are made."""
    mesh = jax.make_mesh(
        (devices,), ("tensor",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    cut = NamedSharding(mesh, P(None, "tensor"))
    whole = NamedSharding(mesh, P())

    def program(key_data_B, count_B, logits_BV, sampling, valid_vocab):
        logits_BV = jax.lax.with_sharding_constraint(logits_BV, cut)
        return draw_tokens(key_data_B, count_B, logits_BV, sampling, valid_vocab=valid_vocab)

    jitted = jax.jit(program, static_argnums=4, out_shardings=(whole, whole))
    divides = logits_BV.shape[1] % devices == 0
    return mesh, jitted, jax.device_put(logits_BV, cut if divides else whole)


@pytest.mark.parametrize("size, devices", [("blocks", 2), ("prime", 1)])
def test_draws_follow_the_exact_distribution(size, devices):
    """Chi-square of 4,096 draws for every option, all options as rows of one batch."""
    V, valid_vocab = SIZES[size]
    N = 4096
    rows = [options for options in OPTIONS.values() for _ in range(N)]
    logits_BV = jnp.tile(row_logits(V), (len(rows), 1))
    mesh, program, logits_BV = on_mesh(logits_BV, devices)
    with jax.set_mesh(mesh):
        count_B = jnp.zeros(len(rows), jnp.int32)
        inputs = (key_data(len(rows)), count_B, logits_BV, settings(rows))
        token_B, logprob_B = map(np.asarray, program(*inputs, valid_vocab))
    for i, (name, options) in enumerate(OPTIONS.items()):
        token_N, logprob_N = token_B[i * N : (i + 1) * N], logprob_B[i * N : (i + 1) * N]
        p_V = exact(row_logits(V), valid_vocab, **{**OFF, **options})
        observed_V = np.bincount(token_N, minlength=valid_vocab)
        assert len(observed_V) == valid_vocab and observed_V[p_V == 0].sum() == 0, name
        # Rare ids share a cell, so that every cell expects the five draws that the test needs.
        rare_V = N * p_V < 5
        cells = lambda of_V, rare_V=rare_V: np.append(of_V[~rare_V], of_V[rare_V].sum())
        expected, observed = cells(N * p_V), cells(observed_V)
        expected, observed = expected[expected > 0], observed[expected > 0]
        statistic = ((observed - expected) ** 2 / expected).sum()
        assert statistic < chi2.ppf(0.999, len(expected) - 1), name
        # float32 logits of size 10, and their float32 sum, are good to 1e-6.
        np.testing.assert_allclose(logprob_N, np.log(p_V[token_N]), atol=2e-6, err_msg=name)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_logprob_is_that_of_the_one_definition(temperature):
    rng = np.random.default_rng(0)
    logits_BV = rng.normal(size=(64, 320)).astype(np.float32) * 3
    logits_BV[:, ::7] = -np.inf
    token_B, logprob_B = draws(logits_BV, [dict(temperature=temperature)] * 64, valid_vocab=300)
    expected = reference.token_logprob(
        jnp.asarray(logits_BV), jnp.asarray(token_B), temperature=temperature, valid_vocab=300
    )
    assert len(set(token_B.tolist())) > 30
    np.testing.assert_allclose(logprob_B, expected.logprob, atol=1e-6, rtol=1e-6)


def test_greedy_takes_the_first_of_the_most_likely_under_the_whole_distribution():
    logits_BV = np.random.default_rng(1).normal(size=(32, 320)).astype(np.float32) * 3
    logits_BV[:, [50, 200, 310]] = 20.0
    rows = [dict(temperature=0.0), dict(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)] * 16
    token_B, logprob_B = draws(logits_BV, rows, valid_vocab=300)
    np.testing.assert_array_equal(token_B, 50)
    expected = reference.token_logprob(
        jnp.asarray(logits_BV), jnp.asarray(token_B), valid_vocab=300
    )
    np.testing.assert_allclose(logprob_B, expected.logprob, atol=1e-6)


@pytest.mark.parametrize("options", [dict(top_k=1), dict(top_p=0.3), dict(min_p=1.0)])
def test_ties_at_the_border_are_kept(options):
    logits_V = np.zeros(320, np.float32)
    logits_V[[3, 100, 250]] = 9.0
    token_B, logprob_B = draws(np.tile(logits_V, (64, 1)), [options] * 64)
    assert set(token_B.tolist()) == {3, 100, 250}
    np.testing.assert_allclose(logprob_B, -math.log(3), rtol=1e-6)


def test_more_than_there_are_keeps_all():
    token_B, logprob_B = draws(np.zeros((640, 320)), [dict(top_k=10**9)] * 640, valid_vocab=40)
    assert token_B.max() < 40 and len(set(token_B.tolist())) == 40
    np.testing.assert_allclose(logprob_B, -math.log(40), rtol=1e-6)


def test_a_row_is_the_same_beside_any_others():
    """To the last bit: truncation of one row must not change another."""
    logits_BV = np.random.default_rng(2).normal(size=(14, 320)).astype(np.float32) * 3
    mixed = [*OPTIONS.values()] * 2
    everything = draws(logits_BV, mixed)
    for i in range(7):
        alike = draws(logits_BV, [mixed[i]] * 14)
        for all_B, alike_B in zip(everything, alike, strict=True):
            np.testing.assert_array_equal(all_B[[i, i + 7]], alike_B[[i, i + 7]])
    alone = drawn(key_data(1), jnp.zeros(1, jnp.int32), logits_BV[:1], settings(mixed[:1]), 320)
    np.testing.assert_array_equal(alone[0], everything[0][:1])
    np.testing.assert_allclose(alone[1], everything[1][:1], rtol=1e-6)


def test_a_cut_vocabulary_draws_the_same_and_is_not_gathered():
    B, V, valid_vocab = 64, 4096, 4000
    rows = [*OPTIONS.values(), dict(temperature=0.0)] * 8
    logits_BV = jax.random.normal(jax.random.key(3), (B, V)) * 3
    expected = drawn(key_data(B), jnp.zeros(B, jnp.int32), logits_BV, settings(rows), valid_vocab)
    mesh, program, cut_BV = on_mesh(logits_BV, 8)
    with jax.set_mesh(mesh):
        inputs = (key_data(B), jnp.zeros(B, jnp.int32), cut_BV, settings(rows))
        compiled = program.lower(*inputs, valid_vocab).compile()
        for actual, single in zip(compiled(*inputs), expected, strict=True):
            np.testing.assert_array_equal(actual, single)
    moved = exchanged(compiled.as_text())
    assert {kind for kind, _ in moved} == {"all-gather", "all-reduce"}
    # A number per block or per id of one block, and no exchange for each step of a sum.
    assert max(size for _, size in moved) == B * 128
    assert len(moved) <= 8


def exchanged(text):
    """(kind, elements of the result) of every collective of a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= \(?\w+\[([\d,]*)\]\S* ({kinds})(?:-start)?\(", text)
    return [(kind, math.prod(int(n) for n in shape.split(",") if n)) for shape, kind in found]


def test_inside_shard_map_over_the_rows_the_vocabulary_may_be_cut_too():
    B, V = 16, 320
    rows = [*OPTIONS.values(), dict(temperature=0.0)] * 2
    logits_BV = jax.random.normal(jax.random.key(4), (B, V)) * 3
    expected = draws(logits_BV, rows)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    program = jax.shard_map(
        functools.partial(draw_tokens, valid_vocab=V),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    cut_BV = jax.device_put(logits_BV, NamedSharding(mesh, P("data", "tensor")))
    actual = jax.jit(program)(key_data(B), jnp.zeros(B, jnp.int32), cut_BV, settings(rows))
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


def test_a_vocabulary_that_the_mesh_does_not_divide_draws_the_same():
    logits_BV = jax.random.normal(jax.random.key(5), (8, 101)) * 3
    rows = [*OPTIONS.values(), dict(temperature=0.0)]
    mesh, program, logits_BV = on_mesh(logits_BV, 4)
    inputs = (key_data(8), jnp.zeros(8, jnp.int32), logits_BV, settings(rows))
    with jax.set_mesh(mesh):
        actual = program(*inputs, 98)
    expected = drawn(*inputs, 98)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


def test_impossible_tokens_are_never_drawn():
    logits_BV = np.full((640, 320), -np.inf, np.float32)
    rng = np.random.default_rng(5)
    possible = [rng.choice(300, 2, replace=False) for _ in range(640)]
    for row_V, ids in zip(logits_BV, possible, strict=True):
        row_V[ids] = rng.normal(size=2) * 30
        row_V[300:] = 1000.0
    rows = [*OPTIONS.values(), dict(temperature=0.0)] * 80
    token_B, logprob_B = draws(logits_BV, rows, valid_vocab=300)
    assert all(token in ids for token, ids in zip(token_B, possible, strict=True))
    assert np.isfinite(logprob_B).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_row_that_is_not_finite_harms_only_itself(value, temperature):
    logits_BV = np.random.default_rng(6).normal(size=(7, 320)).astype(np.float32)
    rows = [{**options, "temperature": temperature} for options in OPTIONS.values()]
    healthy = draws(logits_BV, rows, valid_vocab=300)
    logits_BV[::2, 123] = value
    token_B, logprob_B = draws(logits_BV, rows, valid_vocab=300)
    assert ((token_B >= 0) & (token_B < 300)).all()
    assert np.isnan(logprob_B[::2]).all()
    np.testing.assert_array_equal(token_B[1::2], healthy[0][1::2])
    np.testing.assert_array_equal(logprob_B[1::2], healthy[1][1::2])


def test_a_row_without_any_possible_token_says_so():
    token_B, logprob_B = draws(np.full((7, 80), -np.inf), [*OPTIONS.values()])
    assert ((token_B >= 0) & (token_B < 80)).all()
    np.testing.assert_array_equal(logprob_B, -np.inf)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-24, 1.0])
def test_rounding_never_picks_an_index_without_weight(uniform):
    """Up to a uniform of 1, which the generator does not give: u times the total may round up."""
    rng = np.random.default_rng(7)
    weight_BX = rng.random((500, 37)).astype(np.float32) * (rng.random((500, 37)) < 0.3)
    weight_BX[:, 0], weight_BX[:, -1] = 0.0, 0.0
    weight_BX[:, 17] = 1e-30
    no_B = jnp.zeros(500, bool)
    index_B, total_B = _pick(
        jnp.asarray(weight_BX), jnp.full(500, uniform), no_B, jnp.zeros((500, 37), bool)
    )
    assert (weight_BX[np.arange(500), np.asarray(index_B)] > 0).all()
    np.testing.assert_allclose(total_B, weight_BX.sum(axis=1), rtol=1e-6)


def test_each_position_draws_anew_and_only_by_its_number():
    at = lambda count: draws(np.zeros((640, 320)), [{}] * 640, count=count)[0]
    np.testing.assert_array_equal(at(3), at(3))
    assert (at(3) == at(4)).mean() < 0.05, "one in 320 agrees by chance"


# Public cases


def test_case_s03_temperature_zero_is_greedy_and_finite(cases):
    case = cases("sampling")["S03"]
    token_B, logprob_B = draws(case["input"]["logits"], [dict(temperature=0.0)] * 3)
    np.testing.assert_array_equal(token_B, case["expected"]["tokens"])
    assert np.isfinite(logprob_B).all()


def test_case_s06_padded_vocabulary_is_never_drawn_and_not_in_the_normaliser(cases):
    case = cases("sampling")["S06"]
    size = case["input"]["tokenizer_size"]
    logits_BV = np.tile(case["input"]["logits"], (64, 1))
    rows = [dict(temperature=0.0), *[{}] * 63]
    token_B, logprob_B = draws(logits_BV, rows, valid_vocab=size)
    assert token_B[0] == case["expected"]["greedy_token"]
    np.testing.assert_allclose(logprob_B[0], case["expected"]["logprob_over_real_vocab"], rtol=1e-5)
    assert token_B.max() < size and len(set(token_B.tolist())) > 4


def test_case_s07_every_sample_has_a_stream_of_its_own():
    """Identity, not worker or slot, makes the key: all of (seed, prompt, epoch, sample) enter."""
    data = lambda seed, prompt, epoch: {
        tuple(key)
        for key in np.asarray(
            jax.random.key_data(
                row_keys(
                    jax.random.key(seed),
                    prompt_id_B=jnp.full(8, prompt),
                    epoch_B=jnp.full(8, epoch),
                    sample_index_B=jnp.arange(8),
                )
            )
        ).tolist()
    }
    first = data(0, 0, 0)
    assert len(first) == 8 and first == data(0, 0, 0)
    for seed, prompt, epoch in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        assert first.isdisjoint(data(seed, prompt, epoch))
