"""Moments in the memory of the host: the same updates, and nothing of them on the devices."""

import jax
import numpy as np
import pytest

from learner.update.state import HOST_MEMORY, check_host_memory
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
