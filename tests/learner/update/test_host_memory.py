"""Moments in the memory of the host: the same updates, and nothing of them on the devices."""

import dataclasses

import jax
import numpy as np
import pytest

from learner.durable.checkpoint import CheckpointFolder
from learner.durable.checkpoint_writer import copy_to_host
from learner.update.state import check_host_memory
from models.device_memory import HOST_MEMORY
from services.process.phase_clock import PhaseClock
from tests.learner.builders import make_core, random_groups

pytestmark = pytest.mark.slow


def memory_kinds(core):
    """Kinds of memory of the moments, and those of all else of the state."""
    state = core.state
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.params)}
    leaves = jax.tree.leaves(state.opt_state)
    kinds = lambda leaves: {leaf.sharding.memory_kind for leaf in leaves}
    others = [leaf for leaf in leaves if leaf.shape not in shapes]
    return (
        kinds(leaf for leaf in leaves if leaf.shape in shapes),
        kinds([*jax.tree.leaves(state.params), *others]),
    )


@pytest.mark.parametrize(
    "optimizer", [{}, {"name": "muon", "moments_dtype": "bfloat16"}], ids=["adamw", "muon"]
)
def test_updates_are_the_same_bit_for_bit(optimizer):
    plain = make_core(fsdp=2, optimizer=optimizer)
    offloaded = make_core(fsdp=2, optimizer={**optimizer, "offload": True})
    assert memory_kinds(offloaded) == ({HOST_MEMORY}, {"device"})
    for seed in range(3):
        groups = random_groups(seed=seed)
        expected, actual = (core.update(groups, PhaseClock()) for core in (plain, offloaded))
        assert actual["train/grad_norm"] == expected["train/grad_norm"]
    assert memory_kinds(offloaded) == ({HOST_MEMORY}, {"device"})
    before, after = jax.device_get((plain.state, offloaded.state))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_a_platform_without_such_memory_is_named():
    class Device:
        platform = "rocm"

        def addressable_memories(self):
            return [type("Memory", (), {"kind": "device"})()]

    with pytest.raises(ValueError, match="offload=true: devices of rocm .* pinned_host, only dev"):
        check_host_memory(Device())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("before, after", [(True, False), (False, True)])
@pytest.mark.parametrize("copied", [False, True], ids=["from devices", "from a copy"])
def test_a_checkpoint_resumes_where_moments_lie_elsewhere(tmp_path, before, after, copied):
    one, other = (make_core(fsdp=2, optimizer={"offload": offload}) for offload in (before, after))
    one.update(random_groups(), PhaseClock())
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, copy_to_host(one.state) if copied else one.state, {})
    other.resume(folder.restore(other.abstract_state).state, policy_version=1)
    assert memory_kinds(other)[0] == {HOST_MEMORY if after else "device"}
    for core in (one, other):
        core.update(random_groups(seed=1), PhaseClock())
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((one.state, other.state)))


def test_an_update_that_is_skipped_leaves_the_moments_where_and_as_they_were():
    core = make_core(fsdp=2, optimizer={"offload": True})
    core.update(random_groups(), PhaseClock())
    poisoned = jax.tree.map(lambda leaf: leaf * np.nan, core.state.params)
    core._state = dataclasses.replace(core.state, params=poisoned)
    before = jax.device_get(core.state.opt_state)
    metrics = core.update(random_groups(seed=1), PhaseClock())
    assert metrics["train/update_skipped"] == 1.0 and memory_kinds(core)[0] == {HOST_MEMORY}
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(core.state.opt_state))
