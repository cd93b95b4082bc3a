import functools
import hashlib
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from services.weights.digest import tree_digest
from services.weights.store import UnknownVersion, WeightStore
from services.wire.messages import NO_VERSION
from tests.deadlines import HANG_S


def tensors(value: float) -> dict[str, np.ndarray]:
    return {
        "b.weight": np.full((2, 3), value, ml_dtypes.bfloat16),
        "a.bias": np.full(5, value, np.float32),
    }


def test_stream_is_the_tensors_in_manifest_order():
    store = WeightStore("r", 1)
    manifest = store.publish(0, tensors(1.0))
    assert store.read(0, 0, manifest.nbytes) == b"\0\0\x80\x3f" * 5 + b"\x80\x3f" * 6
    assert store.read(0, 18, 4) == b"\x80\x3f\x80\x3f"
    specs, digest = tree_digest(tensors(1.0))
    assert (manifest.tensors, manifest.digest) == (specs, digest)
    assert (store.held(0).manifest.digest, store.current_version) == (digest, 0)


def test_k05_changed_source_does_not_change_a_published_version():
    store = WeightStore("r", 1)
    source = tensors(1.0)
    manifest = store.publish(3, source)
    view = store.read(3, 0, manifest.nbytes)
    for array in source.values():
        array[...] = 7.0
    assert tree_digest(tensors(1.0))[1] == manifest.digest
    for spec in manifest.tensors:
        raw = view[spec.offset : spec.offset + spec.nbytes]
        assert hashlib.sha256(raw).hexdigest() == spec.checksum
    with pytest.raises(TypeError):
        view[0] = 1


def test_k05_donated_buffers_do_not_change_a_published_version():
    @functools.partial(jax.jit, donate_argnums=0)
    def update(params):
        return jax.tree.map(lambda value: value * 2 + 1, params)

    store = WeightStore("r", 2)
    params = {name: jnp.asarray(value) for name, value in tensors(1.0).items()}
    for version in range(3):
        before = {name: np.array(value) for name, value in params.items()}
        store.publish(version, params)
        params = jax.block_until_ready(update(params))
        expected = b"".join(before[name].tobytes() for name in sorted(before))
        assert store.read(version, 0, len(expected)) == expected


def test_versions_must_rise():
    store = WeightStore("r", 2)
    with pytest.raises(ValueError, match="got -1 after none"):
        store.publish(-1, tensors(0))
    store.publish(4, tensors(0))
    for version in (4, 3):
        with pytest.raises(ValueError, match=f"got {version} after 4"):
            store.publish(version, tensors(0))


def test_old_versions_are_dropped_but_their_digest_stays_and_views_live_on():
    store = WeightStore("r", 2)
    store.publish(0, tensors(1.0))
    view = store.read(0, 0, 4)
    store.publish(1, tensors(2.0))
    store.read(0, 0, 4)
    store.publish(2, tensors(3.0))
    with pytest.raises(UnknownVersion, match=r"version 0 is not held; these are: \[1, 2\]"):
        store.read(0, 0, 4)
    assert view == b"\0\0\x80\x3f"


@pytest.mark.parametrize("offset, length", [(-1, 2), (0, 33), (32, 1), (5, -1), (40, 0)])
def test_range_outside_the_version_is_refused(offset, length):
    store = WeightStore("r", 1)
    store.publish(0, tensors(1.0))
    with pytest.raises(ValueError, match="do not lie within the 32"):
        store.read(0, offset, length)
    assert len(store.read(0, 32, 0)) == 0


def test_manifest_waits_for_a_version_new_enough():
    store = WeightStore("r", 2)
    got = []
    waiter = threading.Thread(target=lambda: got.append(store.wait_for_version(2, 10.0).manifest))
    waiter.start()
    store.publish(1, tensors(1.0))
    time.sleep(0.05)
    assert not got
    published = store.publish(3, tensors(3.0))
    waiter.join(HANG_S)
    assert got == [published]


def test_manifest_that_does_not_come_times_out_and_says_what_there_is():
    store = WeightStore("run-x", 2)
    assert store.current_version == NO_VERSION
    with pytest.raises(TimeoutError, match="'run-x' has no policy version >= 0 .* newest is none"):
        store.wait_for_version(0, 0.01)
    store.publish(1, tensors(1.0))
    with pytest.raises(TimeoutError, match="version >= 2 after 0.01 s; the newest is 1"):
        store.wait_for_version(2, 0.01)


def test_abandoned_wait_ends_when_woken():
    store = WeightStore("r", 1)
    gone = threading.Event()
    errors = []

    def wait():
        try:
            store.wait_for_version(0, HANG_S, abandoned=gone.is_set)
        except TimeoutError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    gone.set()
    store.wake()
    waiter.join(HANG_S)
    assert len(errors) == 1


def test_store_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        WeightStore("r", 0)
