"""Publication beside the training thread: the bytes are those of the named version, whatever comes
after it, and errors reach the training thread."""

import dataclasses
import threading
import traceback
import types

import jax
import numpy as np
import pytest

from learner.publish.publisher import Publisher, PublishFailed, copy_tensor
from services.process import failpoints
from services.process.phase_clock import PhaseClock
from services.weights.digest import tree_digest, wire_dtype
from services.weights.publication import Publication
from services.weights.store import WeightStore
from services.wire.messages import NO_VERSION
from tests.deadlines import HANG_S
from tests.learner.builders import make_core, random_groups

pytestmark = pytest.mark.slow

PATIENCE_S = HANG_S


@pytest.fixture(scope="module")
def core():
    """Matrices cut over four of eight devices, vectors whole on each; with a reference policy."""
    return make_core(data=2, fsdp=4, algorithm={"kl_coef": 0.05})


@pytest.fixture
def failpoint_folder(tmp_path):
    failpoints.install(tmp_path)
    yield tmp_path
    failpoints.install(None)


def held_tensors(store, version):
    held = store.held(version)
    return {
        spec.name: held.stream[spec.offset : spec.offset + spec.nbytes]
        .view(wire_dtype(spec.dtype))
        .reshape(spec.shape)
        for spec in held.manifest.tensors
    }


def publisher_of(core, store, on_issued=lambda version, digest: None, dtype="bfloat16", **how):
    return Publisher(lambda: core.snapshot(dtype, PhaseClock()), store, on_issued, **how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_published_bytes_are_those_of_the_version_while_the_next_steps_run_K05(core, dtype):
    store, gate = WeightStore("run", keep_versions=3), threading.Event()
    frozen = jax.device_get(core._reference)
    issued, expected = {}, {}

    def on_issued(version, digest):
        assert gate.wait(PATIENCE_S) and store.current_version < version
        issued[version] = digest

    publisher = publisher_of(core, store, on_issued, dtype)
    for _ in range(2):
        expected[core.policy_version] = core.named_weights(dtype)
        publisher.submit(core.policy_version)
        core.update(random_groups(8, seed=core.policy_version), PhaseClock())
    assert store.current_version == NO_VERSION, "nothing is visible before it is issued"
    gate.set()
    publisher.wait(core.policy_version - 1, PATIENCE_S)

    for version, named in expected.items():
        assert issued[version] == store.held(version).manifest.digest == tree_digest(named)[1]
        tensors = held_tensors(store, version)
        assert tensors.keys() == named.keys()
        for name, array in named.items():
            np.testing.assert_array_equal(tensors[name], array, strict=True)
    first, second = expected.values()
    assert any((first[name] != second[name]).any() for name in first)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(core._reference), frozen)
    stats = publisher.last_stats
    assert stats.policy_version == core.policy_version - 1
    assert stats.nbytes == store.held(stats.policy_version).manifest.nbytes
    publisher.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_snapshot_shares_no_buffer_with_the_parameters(core, dtype):
    def addresses(tree):
        shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
        return {shard.data.unsafe_buffer_pointer() for shard in shards}

    snapshot = core.snapshot(dtype, PhaseClock(), probe=False)
    assert not addresses(snapshot.tensors) & addresses(core.state.params)
    before = jax.device_get(core.state.params)
    for array in snapshot.tensors.values():
        array.delete()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(core.state.params), before)


def test_shards_of_a_snapshot_stay_where_the_parameters_are_and_are_copied_once(core):
    snapshot = core.snapshot("bfloat16", PhaseClock(), probe=False)
    name = "model.layers.1.mlp.down_proj.weight"
    array, written = snapshot.tensors[name], []
    publication = types.SimpleNamespace(
        write=lambda name, index, shard: written.append((index, shard.nbytes))
    )
    copy_tensor(name, array, publication)
    parts = {(index[0].indices(16)[:2], index[1].indices(32)[:2]) for index, _ in written}
    assert parts == {((0, 16), (start, start + 8)) for start in (0, 8, 16, 24)}
    assert sum(nbytes for _, nbytes in written) == 16 * 32 * 2
    assert array.is_deleted()


def numbered(core, store, on_issued=lambda version, digest: None, **how):
    """A publisher of the same weights, without a probe, under versions that count by themselves."""
    versions = iter(range(100))
    take = lambda: dataclasses.replace(
        core.snapshot("bfloat16", PhaseClock(), probe=False), policy_version=next(versions)
    )
    return Publisher(take, store, on_issued, **how)


def test_one_snapshot_waits_beside_the_one_that_is_copied_and_no_more(core):
    store, gate = WeightStore("run", keep_versions=3), threading.Event()
    publisher = numbered(
        core, store, lambda version, digest: gate.wait(PATIENCE_S) or None, timeout_s=0.3
    )
    publisher.submit(0)
    publisher.submit(1)
    with pytest.raises(TimeoutError, match=r"snapshot 2 waited 0.3 s .* at policy version 0, issu"):
        publisher.submit(2)
    with pytest.raises(TimeoutError, match="policy version 1 waited 0.1 s"):
        publisher.wait(1, 0.1)
    with pytest.raises(ValueError, match="2 was not submitted; 1 is the newest"):
        publisher.wait(2, 0.1)
    gate.set()
    publisher.close(PATIENCE_S)
    assert store.current_version == 1 and store.wait_for_version().manifest.canary is None


def failing_write(monkeypatch, part):
    whole = Publication.write

    def write(self, name, index, array):
        if part in name:
            raise MemoryError("no room")
        whole(self, name, index, array)

    monkeypatch.setattr(Publication, "write", write)


def test_failed_copy_reaches_every_later_call_with_its_tensor_and_its_traceback(core, monkeypatch):
    store = WeightStore("run", keep_versions=3)
    publisher = numbered(core, store)
    publisher.submit(0)
    publisher.wait(0, PATIENCE_S)
    publisher.raise_failure()
    failing_write(monkeypatch, "layers.1.mlp.up_proj")
    publisher.submit(1)
    message = r"version 1 .*tensor 'model.layers.1.mlp.up_proj.weight': MemoryError: no room"
    with pytest.raises(PublishFailed, match=message) as failure:
        publisher.wait(1, PATIENCE_S)
    frames = traceback.extract_tb(failure.value.__cause__.__traceback__)
    assert "copy_tensor" in [frame.name for frame in frames]
    for call in (lambda: publisher.submit(2), publisher.raise_failure, publisher.close):
        with pytest.raises(PublishFailed, match="version 1"):
            call()
    assert store.current_version == 0


def test_version_is_not_seen_where_issuing_it_or_the_failpoint_before_its_commit_fails(
    core, failpoint_folder
):
    def refuse(version, digest):
        raise OSError("disk full")

    store = WeightStore("run", keep_versions=3)
    publisher = numbered(core, store, refuse)
    publisher.submit(0)
    with pytest.raises(PublishFailed, match="issuing its digest: OSError: disk full"):
        publisher.wait(0, PATIENCE_S)
    failpoints.arm(failpoint_folder, "learner.publish", "raise broken")
    publisher = numbered(core, store)
    publisher.submit(0)
    with pytest.raises(PublishFailed, match="about to commit it: FailpointRaised: broken"):
        publisher.wait(0, PATIENCE_S)
    assert store.current_version == NO_VERSION


def test_only_the_current_version_can_be_submitted(core):
    publisher = publisher_of(core, WeightStore("run", keep_versions=1))
    for other in (core.policy_version - 1, core.policy_version + 1):
        message = f"publish policy version {other}, but the policy is at {core.policy_version}"
        with pytest.raises(ValueError, match=message):
            publisher.submit(other)
    publisher.close()
