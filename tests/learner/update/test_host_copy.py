"""Arrays of the devices on the host: each once, and apart from what the devices do with theirs."""

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from learner.update.host_copy import begin_transfer, copy_to_host, own_handle


@pytest.fixture
def put():
    """Places an array on a mesh of 2 x 4 devices."""
    devices = np.asarray(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    return lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))


def test_a_copy_has_every_bit_however_the_array_lies(put):
    rng = np.random.default_rng(0)
    host = {
        "rows": rng.normal(size=(8, 6)).astype(np.float32),
        "columns": rng.normal(size=(3, 8)).astype(ml_dtypes.bfloat16),
        "both": rng.integers(0, 9, (4, 8), dtype=np.int32),
        "whole": rng.normal(size=5).astype(np.float32),
        "number": np.int32(7),
    }
    specs = {"rows": ("fsdp",), "columns": (None, "fsdp"), "both": ("data", "fsdp")}
    placed = {name: put(array, *specs.get(name, ())) for name, array in host.items()}
    copied = copy_to_host(placed)
    assert copied.keys() == host.keys()
    for name, array in host.items():
        assert type(copied[name]) is np.ndarray and copied[name].dtype == array.dtype
        assert copied[name].tobytes() == array.tobytes()
    assert copy_to_host({}) == {}


def test_what_an_update_does_with_the_buffers_does_not_reach_the_copy():
    state = {"weight": jnp.arange(2.0**16), "count": jnp.int32(1)}
    copied = copy_to_host(state)
    for name, leaf in state.items():
        assert not np.shares_memory(copied[name], np.asarray(leaf))
    update = jax.jit(lambda old: jax.tree.map(lambda leaf: leaf - 1, old), donate_argnums=0)
    jax.block_until_ready(update(state))
    assert copied["weight"].tobytes() == np.arange(2.0**16, dtype=np.float32).tobytes()
    assert copied["count"] == 1


def test_moments_that_are_kept_on_the_host_are_copied_too(put):
    placed = put(np.arange(8, dtype=np.float32), "fsdp")
    kept = jax.device_put(placed, placed.sharding.with_memory_kind("pinned_host"))
    copied = copy_to_host(kept)
    assert own_handle(kept).sharding.memory_kind == "pinned_host"
    assert copied.tobytes() == np.arange(8, dtype=np.float32).tobytes()
    for shard in kept.addressable_shards:
        assert not np.shares_memory(copied, np.asarray(shard.data))


def test_an_array_is_brought_to_the_host_once_whatever_devices_have_of_it(put):
    shards = begin_transfer(put(np.arange(8.0), "fsdp"))
    assert sorted(shard.index[0].start for shard in shards) == [0, 2, 4, 6]
    assert len(begin_transfer(put(np.arange(8.0)))) == 1


def test_a_handle_names_the_same_buffers(put):
    array = put(np.arange(8.0), "fsdp")
    handle = own_handle(array)
    assert handle is not array and handle.sharding == array.sharding
    pointers = [
        [shard.data.unsafe_buffer_pointer() for shard in one.addressable_shards]
        for one in (array, handle)
    ]
    assert pointers[0] == pointers[1]


def test_the_host_has_one_copy_and_the_arrays_keep_none(put):
    leaf_bytes = 2**20
    arrays = [put(np.full(leaf_bytes // 4, n, np.float32), "fsdp") for n in range(8)]
    jax.block_until_ready(arrays)
    tracemalloc.start()
    try:
        copied = copy_to_host(arrays)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    whole = len(copied) * leaf_bytes
    assert whole <= held < whole + leaf_bytes
    assert peak < whole + 2 * leaf_bytes
