"""Decode attention cut over a mesh, inside an outer `shard_map` too, and as the TPU compiles it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import choose
from kernels.decode_attention import ops
from tests.kernels.decode_attention import test_shared_prefixes as prefixed
from tests.kernels.decode_attention.test_decode_attention import (
    F32,
    IMPLS,
    TIGHT,
    assert_same,
    attend,
    problem,
)
from tests.kernels.tpu_compiler import needs_compiler, run_with_compiler

pytestmark = pytest.mark.slow

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def cut_problem():
    return problem(B=4, N=4, K=2, position=[0, 47, 20, 33])


def make_mesh(rows, heads):
    devices = np.array(jax.devices()[: rows * heads]).reshape(rows, heads)
    return Mesh(devices, ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)


def on_mesh(impl, mesh):
    return functools.partial(
        ops.decode_attention,
        impl=impl,
        operand_dtype=F32,
        mesh=mesh,
        rows_axis="rows",
        heads_axis="heads",
    )


def in_lanes(impl, mesh):
    """As an engine has it: an outer `shard_map` over rows alone, a loop in it, then the heads."""

    def lane(query, new_key, new_value, key, value, position):
        def step(state):
            out = ops.decode_attention(
                *(query, new_key, new_value, *state[2:], position),
                impl=impl,
                operand_dtype=F32,
                heads_axis="heads",
            )
            return state[0] + 1, *out

        # The same token twice: what the first round wrote the second finds.
        state = (0, jnp.zeros_like(query), key, value)
        return ops.Attended(*jax.lax.while_loop(lambda s: s[0] < 2, step, state)[1:])

    return jax.shard_map(
        lane,
        mesh=mesh,
        in_specs=P("rows"),
        out_specs=P("rows"),
        axis_names={"rows"},
        check_vma=False,
    )


@pytest.mark.parametrize(
    "impl, cut, shape",
    [
        *((impl, on_mesh, (4, 2)) for impl in IMPLS),
        *((impl, in_lanes, (2, 2)) for impl in IMPLS),
        (choose.XLA, in_lanes, (4, 1)),
    ],
)
def test_every_device_attends_for_its_own_rows_and_heads(impl, cut, shape):
    mesh = make_mesh(*shape)
    arguments = cut_problem()
    expected = attend(arguments, choose.REFERENCE)
    placed = [
        jax.device_put(x, NamedSharding(mesh, P("rows", "heads") if x.ndim > 1 else P("rows")))
        for x in arguments
    ]
    compiled = jax.jit(cut(impl, mesh)).lower(*placed).compile()
    assert_same(compiled(*placed), expected, **TIGHT)
    text = compiled.as_text() or ""
    assert [name for name in COLLECTIVES if name in text] == []


@pytest.mark.parametrize("inside", [False, True])
def test_leaders_are_rows_of_the_same_device(inside):
    """Followers hold something else where they are read from their leader."""
    mesh = make_mesh(2, 2)
    lanes = [prefixed.problem([(4, 40)], B=6, S=48, N=4, K=2, seed=seed) for seed in (0, 1)]
    join = lambda lanes: {name: np.concatenate([x[name] for x in lanes]) for name in lanes[0]}
    arguments = join([prefixed.spoilt(lane) for lane in lanes])
    spec = {name: P("rows") for name in arguments}

    def run(around, arguments):
        named = {name: arguments[name] for name in prefixed.NAMES[:6]}
        prefix = {f"{name}_B": arguments[name] for name in prefixed.NAMES[6:]}
        how = dict(impl=choose.PALLAS_INTERPRET, operand_dtype=F32, heads_axis="heads")
        return ops.decode_attention(*named.values(), **prefix, **how, **around)

    if inside:
        cut = jax.shard_map(
            functools.partial(run, {}),
            mesh=mesh,
            in_specs=(spec,),
            out_specs=P("rows"),
            axis_names={"rows"},
            check_vma=False,
        )
    else:
        cut = functools.partial(run, {"mesh": mesh, "rows_axis": "rows"})
    found = jax.jit(cut)(arguments).out_BNH
    np.testing.assert_allclose(found, prefixed.expected(join(lanes)).out_BNH, **TIGHT)


def test_what_the_mesh_cannot_cut_is_refused():
    arguments = cut_problem()
    with pytest.raises(ValueError, match="4 rows cannot be cut into 8 equal parts over 'rows'"):
        on_mesh(choose.XLA, make_mesh(8, 1))(*arguments)
    with pytest.raises(ValueError, match="2 key/value heads cannot be cut into 4 equal parts"):
        on_mesh(choose.XLA, make_mesh(2, 4))(*arguments)
    with pytest.raises(ValueError, match="'tensor' is not among the mesh axes"):
        ops.decode_attention(*arguments, mesh=make_mesh(2, 2), heads_axis="tensor")
    with pytest.raises(ValueError, match="'heads' is not among the mesh axes"):
        ops.decode_attention(*arguments, heads_axis="heads")


PROGRAM = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from kernels.decode_attention import ops

devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices
mesh = Mesh(np.array(devices).reshape(4, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
B, N, K, H, layers = 64, 16, 2, 128, 2

def check(S, dtype, operand, shares):
    def lane(query, new_key, new_value, caches, position, leader, shared):
        prefix = dict(leader_B=leader, shared_B=shared) if shares else {}
        def step(state):
            count, query, caches, position = state
            written = []
            for cache in caches:
                query, *cache = ops.decode_attention(
                    query, new_key, new_value, *cache, position,
                    impl="pallas_tpu", operand_dtype=operand, heads_axis="heads", **prefix)
                written.append(cache)
            return count + 1, query, written, position + 1
        return jax.lax.while_loop(lambda s: s[0] < 9, step, (0, query, caches, position))[1:3]

    cut = jax.shard_map(lane, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"),
                        axis_names={"rows"}, check_vma=False)

    def struct(shape, dtype):
        spec = P("rows", "heads") if len(shape) > 1 else P("rows")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    new, cache = struct((B, K, H), "bfloat16"), struct((B, K, S, H), dtype)
    row = struct((B,), "int32")
    compiled = jax.jit(cut, donate_argnums=3).lower(
        struct((B, N, H), "bfloat16"), new, new, [[cache, cache]] * layers, row, row, row
    ).compile()
    memory = compiled.memory_analysis()
    cache_bytes = cache.dtype.itemsize * B * K * S * H // 8
    assert memory.alias_size_in_bytes == 2 * layers * cache_bytes, memory
    assert memory.temp_size_in_bytes < cache_bytes / 2, memory
    text = compiled.as_text()
    found = re.findall(rf"\\[16,1,{S},128\\]\\S* copy\\S*\\(", text)
    assert not found, found
    assert not re.findall("all-gather|all-reduce|all-to-all|collective-permute", text)

check(640, "bfloat16", "bfloat16", False)
check(328, "float32", "bfloat16", False)
check(272, "bfloat16", "float32", False)
check(640, "bfloat16", "bfloat16", True)
check(328, "float32", "float32", True)
"""


@needs_compiler
@pytest.mark.slow
def test_the_tpu_compiles_it_inside_lanes_without_a_copy_of_the_cache():
    run_with_compiler(PROGRAM)
