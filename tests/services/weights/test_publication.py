"""Begin, write, commit: a version is visible whole or not at all."""

import concurrent.futures
import gc
import itertools
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from services.weights.buffer_pool import BufferPool
from services.weights.delta import apply_delta
from services.weights.digest import layout, tree_digest
from services.weights.publication import PublicationClosed, PublicationIncomplete
from services.weights.store import UnknownDelta, UnknownVersion, WeightStore
from services.wire.messages import NO_VERSION

ALL = ()


def tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "bias": rng.normal(size=5).astype(np.float32),
        "embedding": rng.normal(size=(64, 48)).astype(ml_dtypes.bfloat16),
        "scale": np.array(seed, np.float32),
        "void": np.zeros((0, 3), np.float32),
    }


def opened(store: WeightStore, version: int, values: dict[str, np.ndarray]):
    return store.begin(version, layout(values))


def test_version_is_visible_from_its_commit_on():
    store = WeightStore("r", 1)
    values = tensors(1)
    publication = opened(store, 3, values)
    for name, tensor in values.items():
        publication.write(name, ALL, tensor)
        assert store.current_version == NO_VERSION
    seen = []
    manifest = publication.commit(before_visible=lambda m: seen.append((m, store.current_version)))
    assert seen == [(manifest, NO_VERSION)]
    assert store.wait_for_version(3).manifest == manifest
    assert (manifest.tensors, manifest.digest) == tree_digest(values)
    expected = b"".join(values[name].tobytes() for name in sorted(values))
    assert store.read(3, 0, manifest.nbytes) == expected


def test_shards_of_many_threads_make_the_same_version_as_one_call():
    values = tensors(2)
    store, other = WeightStore("r", 1), WeightStore("r", 1)
    rows, columns = [slice(0, 20), slice(20, 64)], [slice(0, 1), slice(1, 40), slice(40, None)]
    pieces = [
        *(("embedding", index) for index in itertools.product(rows, columns)),
        *(("bias", (part,)) for part in (slice(3, 5), slice(0, 3))),
        ("scale", ALL),
    ]
    publication = opened(store, 0, values)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: publication.write(*p, values[p[0]][p[1]]), pieces))
    assert publication.commit() == other.publish(0, values)


def test_shards_of_a_device_mesh_go_where_jax_says():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    values = {"w": np.arange(64 * 48, dtype=np.float32).reshape(64, 48).astype(ml_dtypes.bfloat16)}
    array = jax.device_put(values["w"], NamedSharding(mesh, P("y", None)))
    store = WeightStore("r", 1)
    publication = opened(store, 0, values)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            publication.write("w", shard.index, shard.data)
    assert publication.commit().digest == tree_digest(values)[1]


@pytest.mark.parametrize(
    "name, index, array, message",
    [
        ("nothing", ALL, np.zeros(5, np.float32), "has no tensor 'nothing'"),
        ("bias", ALL, np.zeros(5, np.float64), "has float32 .5,. at .*; got float64"),
        ("bias", ALL, np.zeros(4, np.float32), "got float32 .4,."),
        ("bias", (slice(0, 2),), np.zeros(3, np.float32), "has float32 .2,. at"),
        ("bias", (slice(0, 4, 2),), np.zeros(2, np.float32), "slices of step 1"),
        ("bias", (2,), np.zeros((), np.float32), "slices of step 1"),
        ("bias", (slice(None),) * 2, np.zeros(5, np.float32), "one for each leading axis"),
        ("embedding", (slice(9, 11),), np.zeros((2, 48), ml_dtypes.bfloat16), "written before"),
        ("embedding", ALL, np.zeros((64, 48), ml_dtypes.bfloat16), "once, whatever number"),
    ],
)
def test_shard_that_does_not_fit_is_refused(name, index, array, message):
    publication = opened(WeightStore("r", 1), 0, tensors(0))
    publication.write("embedding", (slice(0, 10),), np.zeros((10, 48), ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match=message):
        publication.write(name, index, array)


def test_version_that_lacks_an_element_is_not_committed_and_names_the_tensor():
    store = WeightStore("r", 1)
    publication = opened(store, 0, {"a": np.zeros(1), "b": np.zeros(10)})
    publication.write("a", ALL, np.zeros(1))
    publication.write("b", (slice(1, 10),), np.zeros(9))
    with pytest.raises(PublicationIncomplete, match="elements of 1 of 2 tensors, first of 'b'"):
        publication.commit()
    assert store.current_version == NO_VERSION
    publication.write("b", (slice(0, 1),), np.zeros(1))
    assert publication.commit().policy_version == store.current_version == 0


def test_aborted_publication_leaves_nothing_and_its_number_free():
    store = WeightStore("r", 2)
    first = store.publish(0, tensors(0))
    publication = opened(store, 1, tensors(1))
    publication.write("bias", ALL, tensors(1)["bias"])
    publication.abort()
    for call in (publication.commit, lambda: publication.write("scale", ALL, np.float32(1))):
        with pytest.raises(PublicationClosed, match="policy version 1 has ended"):
            call()
    assert store.wait_for_version().manifest == first
    with pytest.raises(UnknownVersion):
        store.held(1)
    assert store.publish(1, tensors(1)).policy_version == 1


def test_error_inside_the_block_aborts_and_a_commit_that_is_refused_shows_nothing():
    store = WeightStore("r", 1)

    def refuse(manifest):
        raise OSError("no space for the record")

    with pytest.raises(OSError, match="no space"), opened(store, 0, {"a": np.ones(3)}) as failed:
        failed.write("a", ALL, np.ones(3))
        failed.commit(before_visible=refuse)
    assert store.current_version == NO_VERSION
    with pytest.raises(PublicationClosed):
        failed.commit()
    bad = {"a": np.ones(3), "b": np.array([object()])}
    with pytest.raises(ValueError, match="does not travel"):
        store.publish(0, bad)
    assert store.current_version == NO_VERSION


def test_of_two_publications_the_lower_version_loses():
    store = WeightStore("r", 2)
    slow = opened(store, 1, {"a": np.ones(3)})
    slow.write("a", ALL, np.ones(3))
    store.publish(2, {"a": np.zeros(3)})
    with pytest.raises(ValueError, match="got 1 after 2"):
        slow.commit()
    assert store.current_version == 2


def test_store_of_a_restored_learner_publishes_old_versions_anew():
    store = WeightStore("r", 3)
    for version in (4, 5, 6):
        store.publish(version, tensors(version))
    store.reset(5)
    assert store.current_version == 4
    for version in (5, 6):
        with pytest.raises(UnknownVersion):
            store.held(version)
    again = store.publish(5, tensors(50))
    assert store.held(5).manifest.digest == again.digest == tree_digest(tensors(50))[1]


def delta_of(store: WeightStore, version: int, base: int):
    return store.delta(version, base, store.held(base).manifest.digest, 10.0)


def test_each_version_has_the_way_from_the_one_before():
    store = WeightStore("r", 2)
    values = {"w": np.zeros((100, 100), ml_dtypes.bfloat16)}
    first = store.publish(0, values)
    base = bytes(store.read(0, 0, 20_000))
    values["w"][7, 7] = 3
    manifest = store.publish(1, values)
    delta = delta_of(store, 1, 0)
    assert apply_delta(base, delta, manifest.tensors).tobytes() == values["w"].tobytes()
    assert store.read_delta(1, 0, 0, delta.nbytes) == delta.stream.tobytes()
    values["w"][8, 8] = 3
    store.publish(2, values)
    with pytest.raises(UnknownDelta, match="no delta leads from 0 to 2"):
        store.delta(2, 0, first.digest, 10.0)
    with pytest.raises(UnknownDelta):
        store.delta(2, 1, "0" * 64, 10.0)  # of another run's version 1
    with pytest.raises(UnknownVersion):
        store.delta(0, 0, "", 1.0)


@pytest.mark.parametrize(
    "after",
    [
        {"w": np.ones((100, 100), np.float32)},  # all is new
        {"w": np.zeros((100, 99), np.float32)},
        {"v": np.zeros((100, 100), np.float32)},
    ],
)
def test_delta_that_would_not_pay_or_cannot_be_is_not_offered(after):
    store = WeightStore("r", 2)
    store.publish(0, {"w": np.zeros((100, 100), np.float32)})
    store.publish(1, after)
    with pytest.raises(UnknownDelta, match="no delta leads|more than the 20000 allowed"):
        delta_of(store, 1, 0)


def test_memory_is_used_again_only_when_no_view_of_it_is_left():
    pool = BufferPool(keep=1)
    first = pool.take_buffer(5000)
    first[:] = 7
    view, raw = first[10:20].view(np.int16), first.data[5:9]
    first_address = first.ctypes.data
    del first
    assert pool.take_buffer(5000).ctypes.data != first_address  # and goes at once
    del view
    assert pool.take_buffer(5000).ctypes.data != first_address
    assert raw == b"\7\7\7\7"
    del raw
    again = pool.take_buffer(5000)
    assert again.ctypes.data == first_address
    del again
    assert pool.take_buffer(4999).nbytes == 4999 and pool.take_buffer(0).nbytes == 0


def test_memory_of_a_dropped_version_is_kept_from_a_device_array_that_aliases_it():
    store = WeightStore("r", 1, deltas=False)
    values = {"w": np.full(4096, 1.0, np.float32)}
    store.publish(0, values)
    held = store.held(0).stream
    gone = weakref.ref(held)
    alias = jax.device_put(held.view(np.float32))
    del held
    for version in (1, 2, 3):
        store.publish(version, {"w": np.full(4096, version + 1.0, np.float32)})
    assert np.all(np.asarray(alias) == 1.0)
    del alias
    jax.device_put(np.zeros(1)).block_until_ready()  # JAX lets go of host memory at a later call
    gc.collect()
    assert gone() is None
