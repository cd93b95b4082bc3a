"""Which tokens of a row a device has, and that chunks of it may be attended by themselves."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from learner.config import CONTEXT_SIZES
from learner.objective.batching import row_buckets
from learner.update.context import in_order, spread
from learner.update.mesh import TOKENS, make_mesh
from services.process.phase_clock import PhaseClock
from tests.learner.builders import make_core, random_groups


def mesh_of(context, data=1):
    return make_mesh(data=data, fsdp=1, context=context, devices=jax.devices()[: data * context])


@pytest.mark.parametrize("context", [2, 4, 8])
def test_each_device_has_one_early_and_one_late_chunk(context):
    mesh, row_S = mesh_of(context), np.arange(48, dtype=np.int32)[None]
    chunks = row_S.reshape(2 * context, -1)
    placed = jax.device_put(spread(row_S, mesh), NamedSharding(mesh, TOKENS))
    of_device = {shard.device: np.asarray(shard.data)[0] for shard in placed.addressable_shards}
    for i, device in enumerate(mesh.devices.flat):
        expected = np.concatenate([chunks[i], chunks[2 * context - 1 - i]])
        np.testing.assert_array_equal(of_device[device], expected)


@pytest.mark.parametrize("context", [1, 2, 8])
def test_the_order_of_the_row_comes_back(context):
    mesh = mesh_of(context)
    batch = {"ids": np.arange(96).reshape(2, 48), "none": None, "wide": np.ones((2, 48, 3))}
    found = spread(batch, mesh)
    assert found["none"] is None and found["wide"].shape == (2, 48, 3)
    np.testing.assert_array_equal(in_order(found["ids"], mesh), batch["ids"])


def test_causal_attention_is_equal_work_for_all_devices():
    """A token at place p looks at p + 1 tokens."""
    work_S = np.arange(64)[None] + 1
    of_device = spread(work_S, mesh_of(4)).reshape(4, -1).sum(axis=1)
    assert set(of_device.tolist()) == {64 * 65 // 2 // 4}


def test_every_row_that_may_be_compiled_can_be_cut():
    for context in CONTEXT_SIZES:
        for budget in (16, 62, 64, 8190, 10_000):
            for row_tokens in row_buckets(budget * context):
                assert row_tokens % (2 * context) == 0


def test_a_row_that_cannot_be_cut_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="rows of 60 tokens cannot be cut into 2 x 4 equal"):
        spread(np.zeros((2, 60)), mesh_of(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "context, algorithm, how",
    [
        (
            8,
            {"kl_coef": 0.1, "entropy_target": 2.9, "entropy_coef": 0.001},
            {"remat": True, "attention": "reference"},
        ),
        (4, {"advantage": "gae", "off_policy": {"token_truncate": 1.5}}, {"attention": "xla"}),
        (2, {"ratio": "sequence"}, {"attention": "xla", "lm_head": "lean"}),
        (4, {"kl_coef": 0.1}, {"lora": {"rank": 4}}),
    ],
    ids=["entropy", "critic", "sequence ratio", "adapter"],
)
def test_an_update_reports_what_one_device_reports(context, algorithm, how):
    """Chunks of 4 to 16 tokens, which the packed sequences cross."""
    made = [
        make_core(
            context=N, microbatch_tokens=128 // N, algorithm=algorithm, updates_per_batch=2, **how
        )
        for N in (1, context)
    ]
    alone, shared = (core.update(random_groups(), PhaseClock()) for core in made)
    assert shared["train/microbatches"] == alone["train/microbatches"]
    for name, value in alone.items():
        if not name.startswith(("throughput/", "mem/")):
            # Second updates go on from float32 sums in another order.
            assert shared[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
