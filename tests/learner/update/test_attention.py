"""The gradient of a whole model on packed rows is the same, whatever attends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.packed_attention.ops import AttentionPlan
from learner.objective import loss as loss_lib
from learner.objective.batching import MicroBatch
from learner.update.head import HeadPlan
from learner.update.mesh import ROWS as ROW_AXES
from learner.update.mesh import MeshShape, make_mesh
from learner.update.sharding import param_specs
from learner.update.state import place_params
from learner.update.train_step import (
    PolicyOptions,
    make_accumulate,
    make_empty_accumulator,
    make_score,
)
from models.layer_scan import Remat
from tests.learner.builders import TINY, host_params

pytestmark = pytest.mark.slow

T = 608
"""Of a row: three blocks, the last not full; divisible by 16."""
ROWS = ((255, 1, 1, 256, 40), (608,), (), (300, 200))
"""Segments by length: at the border of a block (256), across it, of one token; and no segment."""
DENSE, XLA, PALLAS = (AttentionPlan(i) for i in ("reference", "xla", "pallas_interpret"))


def packed_rows() -> MicroBatch:
    """Rows of random tokens; all of a segment but its first half are in the loss."""
    rng = np.random.default_rng(0)
    segments, positions, weights = (np.zeros((len(ROWS), T)) for _ in range(3))
    for row, lengths in enumerate(ROWS):
        start = 0
        for number, length in enumerate(lengths, 1):
            mine = slice(start, start + length)
            segments[row, mine], positions[row, mine] = number, np.arange(length)
            weights[row, mine] = np.arange(length) >= length // 2
            start += length
    integers = lambda array: array.astype(np.int32)
    random = lambda: rng.normal(0, 1, segments.shape).astype(np.float32)
    tokens = rng.integers(0, 22, (2, *segments.shape))
    return MicroBatch(
        token_ids=integers(tokens[0]),
        target_ids=integers(tokens[1]),
        positions=integers(positions),
        segments=integers(segments),
        old_logprobs=-3 + 0.1 * random(),
        advantages=random(),
        weights=weights.astype(np.float32),
    )


@functools.cache
def gradient(plan: AttentionPlan, *, data=1, fsdp=1, context=1, remat=Remat.NONE, schedule="fast"):
    """Gradient of the summed loss, sums of the metrics, and the logprobs [B, T]."""
    devices = jax.devices()[: data * fsdp * context]
    mesh = make_mesh(data=data, fsdp=fsdp, context=context, devices=devices)
    specs = param_specs(host_params(), MeshShape.of(mesh).shards)
    params = place_params(host_params(), mesh, specs, jnp.float32)
    options = PolicyOptions(
        head=HeadPlan(schedule=schedule, impl="xla", temperature=1.0, valid_vocab=22),
        attention=plan,
        compute_dtype=jnp.dtype("float32"),
        remat=remat,
    )
    objective = loss_lib.Objective(0.2, 0.28, 0.0, "k3", 0.01)
    accumulate = make_accumulate(mesh, specs, TINY, objective, options)
    batch = jax.device_put(packed_rows(), NamedSharding(mesh, P(ROW_AXES)))
    accumulator, logprob_BT = accumulate(
        params, None, make_empty_accumulator(mesh, specs)(params), batch
    )
    scored_BT = make_score(mesh, specs, TINY, options)(params, batch)
    np.testing.assert_allclose(
        np.asarray(scored_BT)[batch.weights > 0],
        np.asarray(logprob_BT)[batch.weights > 0],
        rtol=1e-6,
    )
    return *jax.device_get(accumulator), np.asarray(logprob_BT)


@pytest.mark.parametrize(
    "plan, how",
    [
        (XLA, {}),
        (XLA, {"remat": Remat.LAYER, "data": 2, "fsdp": 2}),
        (XLA, {"remat": Remat.OFFLOAD, "fsdp": 2, "context": 2}),
        (XLA, {"remat": Remat.ATTENTION, "data": 2, "context": 2}),
        (XLA, {"remat": Remat.DOTS, "data": 2, "fsdp": 2}),
        (PALLAS, {"remat": Remat.LAYER, "data": 2, "fsdp": 2}),
        (DENSE, {"remat": Remat.LAYER}),
        (DENSE, {"context": 4}),
        (XLA, {"context": 2, "schedule": "logits"}),
        (XLA, {"context": 4, "remat": Remat.LAYER}),
        (XLA, {"context": 8}),
        (XLA, {"remat": Remat.LAYER, "data": 2, "fsdp": 2, "context": 2, "schedule": "lean"}),
        (PALLAS, {"remat": Remat.LAYER, "fsdp": 2, "context": 4}),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_whole_scores(plan, how):
    expected, expected_sums, expected_logprob_BT = gradient(DENSE)
    found, sums, logprob_BT = gradient(plan, **how)
    active_BT = packed_rows().weights > 0
    np.testing.assert_allclose(
        logprob_BT[active_BT], expected_logprob_BT[active_BT], rtol=1e-5, atol=1e-5
    )
    for name, total in expected_sums.items():
        assert sums[name] == pytest.approx(total, rel=1e-5, abs=1e-5), name
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # A thousand tokens add up to it, in float32 and in another order.
        assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)


def test_a_token_of_another_segment_changes_no_logprob():
    params = host_params()
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    specs = param_specs(params, 1)
    options = PolicyOptions(
        head=HeadPlan(schedule="fast", impl="xla", temperature=1.0, valid_vocab=22),
        attention=XLA,
        compute_dtype=jnp.dtype("float32"),
        remat=Remat.NONE,
    )
    score = make_score(mesh, specs, TINY, options)
    batch = packed_rows()
    other = batch.segments[0] == 4
    ids = batch.token_ids.copy()
    ids[0, other] = (ids[0, other] + 1) % 22
    one, two = (
        np.asarray(score(params, batch._replace(token_ids=i))) for i in (batch.token_ids, ids)
    )
    kept = (batch.weights[0] > 0) & ~other
    assert kept.sum() > 100
    np.testing.assert_array_equal(one[0, kept], two[0, kept])
    assert (one[0, other & (batch.weights[0] > 0)] != two[0, other & (batch.weights[0] > 0)]).all()
