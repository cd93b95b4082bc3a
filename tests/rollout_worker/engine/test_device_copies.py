"""A learner's snapshot as a worker's inference copy: the same buffers where that can be, never the
host, and the bits that the wire would have brought."""

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.config import ModelConfig
from models.files.checkpoint import from_named, to_named
from models.transformer import init_params
from rollout_worker.engine.device_copies import replicate_array
from rollout_worker.engine.layout import Layout, make_mesh
from services.weights.digest import tree_digest

pytestmark = pytest.mark.slow

BFLOAT16: np.dtype = np.dtype(ml_dtypes.bfloat16)
FLOAT32: np.dtype = np.dtype(np.float32)
MODEL = ModelConfig(
    model_type="qwen2",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    qkv_bias=True,
)


def learner_mesh(data: int, fsdp: int) -> Mesh:
    grid = np.asarray(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def published(dtype: np.dtype) -> dict[str, np.ndarray]:
    """What the wire would bring: no two entries are equal."""
    rng = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: init_params(jax.random.key(0), MODEL))
    draw = lambda leaf: rng.normal(scale=0.3, size=leaf.shape).astype(dtype)
    return {
        name: np.asarray(x) for name, x in to_named(jax.tree.map(draw, abstract), MODEL).items()
    }


def on_learner(named: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Matrices cut over fsdp along their longest axis, vectors whole on each device."""

    def spec(array):
        if array.ndim < 2 or mesh.shape["fsdp"] == 1:
            return P()
        longest = int(np.argmax(array.shape))
        return P(*("fsdp" if axis == longest else None for axis in range(array.ndim)))

    return {
        name: jax.device_put(array, NamedSharding(mesh, spec(array)))
        for name, array in named.items()
    }


def pointers(array: jax.Array) -> dict[jax.Device, int]:
    return {s.device: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


@contextlib.contextmanager
def no_host():
    """Neither direction, however it is asked for."""
    with (
        jax.transfer_guard_host_to_device("disallow_explicit"),
        jax.transfer_guard_device_to_host("disallow_explicit"),
    ):
        yield


@pytest.mark.parametrize(
    "data, fsdp, copy", [(1, 1, FLOAT32), (4, 1, BFLOAT16), (2, 4, FLOAT32), (1, 8, BFLOAT16)]
)
def test_the_copy_equals_that_of_the_wire_bit_by_bit_and_the_host_has_no_part(data, fsdp, copy):
    named = published(BFLOAT16)
    layout = Layout(MODEL, make_mesh(jax.devices()[: data * fsdp], data * fsdp, 1), copy)
    expected = layout.to_inference(from_named(named, MODEL, stacked=False))
    snapshot = jax.block_until_ready(on_learner(named, learner_mesh(data, fsdp)))
    with no_host():
        live = jax.block_until_ready(
            layout.to_inference(from_named(snapshot, MODEL, stacked=False))
        )
    for mine, wired in zip(jax.tree.leaves(live), jax.tree.leaves(expected), strict=True):
        assert (mine.dtype, mine.sharding) == (wired.dtype, wired.sharding)
        for shard in mine.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(wired), strict=True)
    dtypes = {name: array.dtype for name, array in snapshot.items()}
    assert tree_digest(layout.from_inference(live, dtypes)) == tree_digest(named)


def test_the_guard_sees_what_the_wire_path_does():
    named = published(FLOAT32)
    layout = Layout(MODEL, make_mesh(jax.devices()[:2], 2, 1), FLOAT32)
    with no_host(), pytest.raises(RuntimeError, match="host-to-device transfer"):
        layout.to_inference(from_named(named, MODEL, stacked=False))


@pytest.mark.parametrize("data", [1, 4])
def test_a_device_that_has_all_of_a_tensor_keeps_its_buffer(data):
    named = published(BFLOAT16)
    snapshot = on_learner(named, learner_mesh(data, 1))
    layout = Layout(MODEL, make_mesh(jax.devices()[:data], data, 1), BFLOAT16)
    live = to_named(layout.to_inference(from_named(snapshot, MODEL, stacked=False)), MODEL)
    assert live.keys() == snapshot.keys()
    for name, array in snapshot.items():
        assert pointers(live[name]) == pointers(array), name


def test_devices_that_hold_nothing_are_brought_all_of_it():
    array = jax.device_put(jnp.arange(12.0).reshape(3, 4), jax.devices()[5])
    layout = Layout(MODEL, make_mesh(jax.devices()[:2], 2, 1), FLOAT32)
    taken = replicate_array(array, NamedSharding(layout.mesh, P()), FLOAT32)
    assert set(pointers(taken)) == set(jax.devices()[:2])
    np.testing.assert_array_equal(taken, np.arange(12.0).reshape(3, 4))


def test_a_cut_along_two_axes_is_refused():
    array = jax.device_put(
        np.zeros((8, 8), np.float32), NamedSharding(learner_mesh(2, 4), P("data", "fsdp"))
    )
    with pytest.raises(ValueError, match="along 2 axes"):
        replicate_array(array, NamedSharding(make_mesh(jax.devices(), 8, 1), P()), FLOAT32)
