"""Memory of one layer, forward and backward, grows with the row, by XLA's own count."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compiled_program import program_sizes
from kernels.packed_attention import reference, xla
from tests.kernels.tpu_compiler import needs_compiler, run_with_compiler

pytestmark = pytest.mark.slow


def temp_bytes(operation, T):
    query = jax.ShapeDtypeStruct((1, T, 4, 32), jnp.float32)
    key = jax.ShapeDtypeStruct((1, T, 2, 32), jnp.float32)
    segment = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(query, key, value, segment):
        return (operation(query, key, value, segment, operand_dtype=jnp.float32) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    compiled = gradient.lower(query, key, key, segment).compile()
    return program_sizes(compiled)["temp_bytes"]


def test_in_xla_it_grows_with_the_row_and_not_with_its_square():
    small, large = (temp_bytes(xla.packed_attention, T) for T in (2048, 32768))
    # The scores of one pair of blocks do not grow, so that it is less than 16 times as much.
    assert large <= 16 * small
    assert temp_bytes(reference.packed_attention, 2048) > 2 * large / 16


COMPILE = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from kernels.packed_attention.ops import packed_attention

topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4")
devices = np.array(topology.devices).reshape(2, 2, 2)
mesh = Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
rows, heads = P(("data", "fsdp")), P(("data", "fsdp"), None, "tensor")

def peak_bytes(impl, T, dtype, rows_of_a_chip=1, **options):
    local = functools.partial(packed_attention, impl=impl, operand_dtype=dtype, **options)
    over_chips = jax.shard_map(
        local, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
    )
    loss = lambda *arrays: (over_chips(*arrays).astype(jnp.float32) ** 2).sum()

    def struct(spec, dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    B = 4 * rows_of_a_chip
    key = struct(heads, dtype, B, T, 2, 128)
    compiled = jax.jit(jax.value_and_grad(jax.checkpoint(loss), argnums=(0, 1, 2))).lower(
        struct(heads, dtype, B, T, 8, 128), key, key, struct(rows, jnp.int32, B, T)
    ).compile()
    return compiled.memory_analysis().peak_memory_in_bytes
"""


@needs_compiler
def test_the_tpu_kernel_compiles_on_a_mesh_in_memory_that_grows_with_the_row():
    bounds = """
small, large = (peak_bytes("pallas_tpu", T, jnp.bfloat16) for T in (2048, 32768))
assert large <= 16 * small, (small, large)
peak_bytes("pallas_tpu", 2000, jnp.bfloat16, rows_of_a_chip=2, window=300, soft_cap=30.0)
peak_bytes("pallas_tpu", 2048, jnp.float32)
"""
    run_with_compiler(COMPILE + bounds, timeout_s=1500)


@needs_compiler
def test_the_blocks_of_xla_compile_for_a_tpu_in_memory_that_grows_with_the_row():
    bounds = """
small, large = (peak_bytes("xla", T, jnp.bfloat16) for T in (2048, 32768))
assert large <= 16 * small, (small, large)
"""
    run_with_compiler(COMPILE + bounds, timeout_s=1500)


CHUNKS = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from kernels.packed_attention.ops import packed_attention

topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4")
devices = np.array(topology.devices).reshape(2, 4)
mesh = Mesh(devices, ("fsdp", "context"), axis_types=(AxisType.Auto,) * 2)
tokens = P("fsdp", "context")

def local(query, key, value, segment):
    whole = lambda array: jax.lax.all_gather(array, "context", axis=1, tiled=True)
    early = jax.lax.axis_index("context")
    start_C = jnp.stack([early, 7 - early]) * (query.shape[1] // 2)
    return packed_attention(
        query, whole(key), whole(value), whole(segment), start_C=start_C, impl="pallas_tpu",
        operand_dtype=jnp.bfloat16, window=300, soft_cap=30.0,
    )

def struct(dtype, *dims):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, tokens))

over_chips = jax.shard_map(
    local, mesh=mesh, in_specs=(tokens,) * 4, out_specs=tokens, check_vma=False
)
loss = lambda *arrays: (over_chips(*arrays).astype(jnp.float32) ** 2).sum()
key = struct(jnp.bfloat16, 2, 4000, 2, 128)
jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(
    struct(jnp.bfloat16, 2, 4000, 4, 128), key, key, struct(jnp.int32, 2, 4000)
).compile()
"""


@needs_compiler
def test_the_tpu_kernel_compiles_for_chunks_of_a_row_that_chips_share():
    """Chunks of 500 tokens: no multiple of a block."""
    run_with_compiler(CHUNKS, timeout_s=1500)
