"""Versions that a worker in the learner's process takes from the publisher, buffers and all."""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from learner.publish.publisher import Publisher
from learner.publish.shared_snapshot import SharedSnapshot
from learner.publish.snapshot import Snapshot
from services.weights.digest import tree_digest
from services.weights.store import WeightStore
from tests.deadlines import HANG_S

PATIENCE_S = HANG_S


@pytest.fixture
def mesh():
    return Mesh(np.asarray(jax.devices()[:2]), ("fsdp",), axis_types=(AxisType.Auto,))


def snapshot_of(mesh, version):
    """A tensor that is cut and one that is whole on each device, filled with the version."""
    put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    return Snapshot(
        policy_version=version,
        tensors={
            "matrix": put(np.full((4, 6), version, np.float32), P(None, "fsdp")),
            "vector": put(np.full(3, version, np.float32), P()),
        },
    )


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_a_version_is_handed_over_once_it_is_visible_in_the_buffers_it_was_copied_from(mesh):
    taken = [snapshot_of(mesh, version) for version in range(2)]
    store, shared, seen = WeightStore("run", keep_versions=2), SharedSnapshot(), []

    def put(snapshot, manifest):
        seen.append((store.current_version, manifest))
        shared.offer_version(snapshot, manifest)

    waiting = iter(taken)
    publisher = Publisher(lambda: next(waiting), store, lambda version, digest: None, share=put)
    for version in range(2):
        publisher.submit(version)
        publisher.wait(version, PATIENCE_S)
        manifest, tensors = shared.wait_for_version(version, 0)
        assert manifest == store.wait_for_version(version).manifest and seen[-1] == (
            version,
            manifest,
        )
        assert tree_digest(tensors)[1] == manifest.digest
        for name, array in taken[version].tensors.items():
            assert pointers(tensors[name]) == pointers(array)
            assert tensors[name].sharding == array.sharding
    publisher.close()
    np.testing.assert_array_equal(taken[0].tensors["matrix"], np.zeros((4, 6)))


def test_a_snapshot_that_is_not_shared_is_freed_as_it_is_copied(mesh):
    snapshot = snapshot_of(mesh, 0)
    publisher = Publisher(
        lambda: snapshot, WeightStore("run", keep_versions=1), lambda version, digest: None
    )
    publisher.submit(0)
    publisher.close()
    assert all(array.is_deleted() for array in snapshot.tensors.values())


def test_every_wait_returns_the_newest_version(mesh):
    store, shared = WeightStore("run", keep_versions=1), SharedSnapshot()
    with pytest.raises(TimeoutError, match=r"no policy version >= 0 in 0.01 s; the newest is -1"):
        shared.wait_for_version(0, 0.01)
    found = []
    waiter = threading.Thread(target=lambda: found.append(shared.wait_for_version(3, PATIENCE_S)))
    waiter.start()
    for version in (2, 3):
        snapshot = snapshot_of(mesh, version)
        shared.offer_version(snapshot, store.publish(version, snapshot.tensors))
    waiter.join(PATIENCE_S)
    assert found[0][0].policy_version == 3
    for _ in range(2):
        manifest, tensors = shared.wait_for_version(0, 0)
        assert manifest.policy_version == 3 and float(tensors["vector"][0]) == 3
    with pytest.raises(TimeoutError, match="version >= 4 .* the newest is 3"):
        shared.wait_for_version(4, 0.01)
