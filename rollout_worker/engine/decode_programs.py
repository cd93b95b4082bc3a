"""The device programs of an engine, and the shapes of the arrays that they take.

Compiling needs shapes alone, no weights and no data: a plan and a check without devices use the
same code as a worker. There are four programs: `empty` makes slots and pool, `prefill` computes
chunks of prompts into the pool, `segment` decodes, `resize` changes the width of the cache.

Dimension key: as in slots.py and prefill.py, with leading axes over all lanes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from models.device_memory import HOST_MEMORY
from models.transformer import Params
from rollout_worker.engine.kv_cache import LayerCache, allocate_cache, resize
from rollout_worker.engine.prefill import Chunks, prefill
from rollout_worker.engine.sampling import Sampling
from rollout_worker.engine.slots import (
    DecodeSpec,
    Rows,
    SegmentTokens,
    Slots,
    idle_slots,
    over_lanes,
    segment,
)

WIDTH, CHUNK, LATER = "cache width", "chunk", "later chunk"
"""Names of the sizes by which programs differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one lane's arrays."""

    places: int
    """Rows in a lane's table, queued or in a slot."""
    prefixes: int
    """Entries of the prefix pool for prompts whose rows wait for a slot."""
    parked: int
    """Further entries of the pool, for episodes between their turns; 0 parks none."""
    longest_prefix: int
    """Tokens of the longest prompt without its last one."""
    pool_width: int
    """Columns of the pool, which hold the longest prefix."""
    widths: tuple[int, ...]
    """Columns that the cache may have, rising; the last holds the longest sequence."""
    chunks: tuple[int, ...]
    """Padded lengths of a prefill chunk, rising."""
    chunk_tokens: int
    """Tokens of one prefill call of a lane, padding included."""
    stop_ids: int
    """Most stop ids of a row."""
    stop_states: int
    """States of the stop automaton; 0 where there is none."""

    def chunk_prompts(self, size: int) -> int:
        """Prompts of a prefill call with chunks of this size."""
        return max(1, self.chunk_tokens // size)

    @property
    def entries(self) -> int:
        """Of the prefix pool; those of episodes come last."""
        return self.prefixes + self.parked

    @property
    def has_later_chunks(self) -> bool:
        """Whether a prompt may need more than one chunk, or a chunk behind what was parked."""
        return self.longest_prefix > self.chunks[-1] or self.parked > 0


class DecodePrograms:
    """Compiles each program for given sizes."""

    def __init__(self, spec: DecodeSpec, geometry: Geometry):
        self.spec = spec
        self.geometry = geometry
        self.by_lane = NamedSharding(spec.layout.mesh, PartitionSpec("data"))
        self.replicated = NamedSharding(spec.layout.mesh, PartitionSpec())

    def planned(self) -> Iterator[tuple[str, dict[str, int], Callable[[], jax.stages.Compiled]]]:
        """Name, sizes and compiling function of every program that the engine can need."""
        g = self.geometry
        yield "empty", {}, self.compile_empty
        for size in g.chunks:
            yield (
                "prefill",
                {CHUNK: size, LATER: 0},
                partial(self.compile_prefill, size, later=False),
            )
        if g.has_later_chunks:
            for size in g.chunks:
                yield (
                    "prefill",
                    {CHUNK: size, LATER: 1},
                    partial(self.compile_prefill, size, later=True),
                )
        for width in g.widths:
            yield "segment", {WIDTH: width}, partial(self.compile_segment, width)
        for old in g.widths:
            for new in g.widths:
                if old != new:
                    yield "resize", {"from": old, "to": new}, partial(self.compile_resize, old, new)

    def compile_empty(self) -> jax.stages.Compiled:
        """() -> slots of the narrowest cache and the pool, all zero and idle."""
        return self.lower_empty().compile()

    def lower_empty(self) -> jax.stages.Lowered:
        """`compile_empty` before the compiler."""
        spec, g = self.spec, self.geometry
        config, lanes = spec.layout.config, spec.lanes

        def build():
            heads, size = config.num_kv_heads, config.head_dim
            make = partial(allocate_cache, config.num_layers, dtype=spec.cache_dtype)
            cache = make(shape=(lanes * spec.slots, heads, g.widths[0], size))
            slots = idle_slots(lanes * spec.slots, cache)
            pool = make(shape=(lanes * g.entries, heads, g.pool_width, size))
            return slots._replace(head=jnp.zeros((lanes,), jnp.int32)), pool

        shardings = self._shardings(jax.eval_shape(build))
        return jax.jit(build, out_shardings=shardings).lower()

    def compile_prefill(self, size: int, *, later: bool) -> jax.stages.Compiled:
        """(params, pool, chunks) -> pool in place, and a marker that is ready when the pool is."""
        return self.lower_prefill(size, later=later).compile()

    def lower_prefill(self, size: int, *, later: bool) -> jax.stages.Lowered:
        """`compile_prefill` before the compiler."""
        local = partial(prefill, spec=self.spec, first=not later)
        function = over_lanes(local, self.spec, (None, 0, 0), (0, 0))
        pool = self.pool_struct()
        jitted = jax.jit(
            function, donate_argnums=1, out_shardings=(self._shardings(pool), self.by_lane)
        )
        return jitted.lower(self.params_struct(), pool, self.chunks_struct(size))

    def compile_segment(self, width: int) -> jax.stages.Compiled:
        """(params, slots, rows, pool, stop table, floor) -> slots in place, the tokens, and the
        pool in place; None where nothing is parked.
        """
        return self.lower_segment(width).compile()

    def lower_segment(self, width: int) -> jax.stages.Lowered:
        """`compile_segment` before the compiler."""
        local = partial(segment, spec=self.spec)
        slot_axis: Any = 1
        lane_axis: Any = 0
        tokens_axes = SegmentTokens(*[slot_axis] * 4, steps=lane_axis)
        function = over_lanes(local, self.spec, (None, 0, 0, 0, None, 0), (0, tokens_axes, 0))
        slots = self.slots_struct(width)
        by_slot: Any = NamedSharding(self.spec.layout.mesh, PartitionSpec(None, "data"))
        by_lane: Any = self.by_lane
        tokens = SegmentTokens(*[by_slot] * 4, steps=by_lane)
        pool = self.pool_struct()
        parks = self.geometry.parked > 0
        jitted = jax.jit(
            function,
            donate_argnums=(1, 3) if parks else 1,
            out_shardings=(
                self._shardings(slots),
                tokens,
                self._shardings(pool) if parks else None,
            ),
        )
        arguments = (
            self.params_struct(),
            slots,
            self.rows_struct(),
            pool,
            self.stop_struct(),
            self._struct((self.spec.lanes,), jnp.int32),
        )
        # In the context of the mesh, `draw_tokens` can state how a sharded vocabulary is exchanged.
        with jax.set_mesh(self.spec.layout.mesh):
            return jitted.lower(*arguments)

    def compile_resize(self, old: int, new: int) -> jax.stages.Compiled:
        """(cache) -> the cache in another width."""
        return self.lower_resize(old, new).compile()

    def lower_resize(self, old: int, new: int) -> jax.stages.Lowered:
        """`compile_resize` before the compiler."""
        cache = self.slots_struct(old).cache
        shardings = self._shardings(self.slots_struct(new).cache)
        jitted = jax.jit(partial(resize, width=new), out_shardings=shardings)
        return jitted.lower(cache)

    def params_struct(self) -> Params:
        """The policy."""
        return self.spec.layout.abstract_params()

    def slots_struct(self, width: int) -> Slots:
        """Slots of all lanes around a cache of this width."""
        total = self.spec.lanes * self.spec.slots
        integer_B: Any = self._struct((total,), jnp.int32)
        head: Any = self._struct((self.spec.lanes,), jnp.int32)
        return Slots(head, *[integer_B] * 5, cache=self._cache_struct(total, width))

    def pool_struct(self) -> list[LayerCache]:
        """The prefix pools of all lanes."""
        entries = self.spec.lanes * self.geometry.entries
        return self._cache_struct(entries, self.geometry.pool_width)

    def rows_struct(self) -> Rows:
        """The table of all lanes."""
        R = self.spec.lanes * self.geometry.places
        integer = partial(self._struct, dtype=jnp.int32)
        top_k: Any = integer((R,))
        setting: Any = self._struct((R,), jnp.float32)
        arrays: dict[str, Any] = dict(
            order_R=integer((R,)),
            tail=integer((self.spec.lanes,)),
            prefix_R=integer((R,)),
            group_R=integer((R,)),
            token_R=integer((R,)),
            position_R=integer((R,)),
            drawn_R=integer((R,)),
            limit_R=integer((R,)),
            base_key_R2=self._struct((R, 2), jnp.uint32),
            identity_R3=integer((R, 3)),
            sampling=Sampling(
                temperature_B=setting, top_k_B=top_k, top_p_B=setting, min_p_B=setting
            ),
            stop_ids_RE=integer((R, self.geometry.stop_ids)),
            stop_state_R=integer((R,)),
            aborted_R=self._struct((R,), jnp.bool_),
            parking_R=integer((R,)) if self.geometry.parked else None,
        )
        return Rows(**arrays)

    def chunks_struct(self, size: int) -> Chunks:
        """The chunks of one prefill call of all lanes, padded to this size."""
        Q = self.spec.lanes * self.geometry.chunk_prompts(size)
        integer: Any = partial(self._struct, dtype=jnp.int32)
        return Chunks(integer((Q, size)), integer((Q,)), integer((Q,)))

    def stop_struct(self) -> jax.ShapeDtypeStruct | None:
        """The table of the stop automaton; None where there is none."""
        if not self.geometry.stop_states:
            return None
        shape = (self.geometry.stop_states, self.spec.layout.config.vocab_size)
        return jax.ShapeDtypeStruct(shape, jnp.int16, sharding=self.replicated)

    def cache_bytes(self, width: int) -> int:
        """Of the slots' cache of one device, of this width."""
        return device_bytes(self.slots_struct(width).cache)

    def pool_bytes(self) -> int:
        """Of the prefix pool of one device, parked episodes included."""
        return device_bytes(self.pool_struct())

    def _cache_struct(self, rows: int, width: int) -> list[LayerCache]:
        config = self.spec.layout.config
        leaf: Any = jax.ShapeDtypeStruct(
            (rows, config.num_kv_heads, width, config.head_dim),
            self.spec.cache_dtype,
            sharding=self.spec.layout.cache_sharding,
        )
        return [LayerCache(leaf, leaf) for _ in range(config.num_layers)]

    def _struct(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.by_lane)

    def _shardings(self, tree):
        """Caches by lane and key/value head, everything else by lane."""
        cut = self.spec.layout.cache_sharding
        return jax.tree.map(lambda leaf: cut if len(leaf.shape) == 4 else self.by_lane, tree)


def device_bytes(structs) -> int:
    """Bytes that shape structs with shardings take on each device; None takes none, and neither
    does what lies in the memory of the host.
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(structs)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )
