"""The decode loop on the device: slots, the queue that refills them, and one segment of tokens.

A slot is one row of the KV cache together with the state of the completion ("row") that is decoded
in it. A token step runs the model once for all slots, and costs about the same whether they are
busy or idle: the weights are read either way. Completions differ in length, so a batch that waited
for its longest completion would mostly run idle slots. Therefore a slot whose row has ended takes
the next row of the queue before the very next token step, and the device does this by itself: the
host would need a round trip for each.

A row enters a slot by a copy. The keys and values of its prompt were computed once, into an entry
of the prefix pool, for all completions of the prompt; they are copied into the slot's columns of
the cache. The last prompt token is left out of the prefill and run as the row's first token step,
so that its first draw is a token step like all others and prefill needs no output head.

A row of an episode leaves its slot by a copy, back into an entry of the pool that the host has
named, before another row can enter. The next turn starts from there: what the environment said is
prefilled behind it as one more chunk, with the last token drawn, which was never run.

What is drawn does not depend on the slot: the key of a token is made of the row's identity and the
token's position (`sampling.py`), and a slot's computations read that slot's columns alone.

Arrays, all on the device: `Slots` changes with every token and stays from one segment to the next;
`Rows` is the host's table, constant within a segment; the pool is only read here, but for the rows
that are parked; `SegmentTokens` is what the host gets back.

All arrays are those of one lane (one `data` index of the mesh); `over_lanes` runs the lanes side by
side.

Dimension key:
    B: slots
    R: places of the table of rows, waiting or decoding
    E: stop ids of a row, filled up with -1
    X: states of the stop automaton
    V: vocabulary
    K: key/value heads
    S: columns of the cache
    H: head size
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kernels.packed_attention.ops import AttentionPlan
from models.transformer import Params, forward, head_weight, logits
from rollout_worker.engine.kv_cache import LayerCache, copy_prefixes, decode_attend, park_rows
from rollout_worker.engine.layout import Layout, embed
from rollout_worker.engine.sampling import Sampling, draw_tokens, row_keys
from rollout_worker.engine.stop_strings import ACCEPT

IDLE = -1
NOT_PARKED = -1
GOES_ON, STOPPED, FULL, ABORTED = range(4)
"""State of a row after a token: it goes on, or has ended by a stop token or stop string, by its
length limit, or because its request was aborted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """What is fixed for the life of an engine: every field is a constant of the programs."""

    layout: Layout
    valid_vocab: int
    """Ids from here on are padding of the embedding, and never drawn."""
    compute_dtype: jnp.dtype
    """Of activations."""
    attention_dtype: jnp.dtype
    """Of the operands of attention's products; its scores and sums are float32."""
    attention_impl: str
    """Of a new token over the cache; one of `kernels.choose.IMPLEMENTATIONS`."""
    prefill_attention: AttentionPlan
    """Of the chunks of a prompt."""
    slots: int
    """Of each lane."""
    segment_tokens: int
    """Most token steps of a segment."""
    wide_cache: bool = False
    """Keys and values in float32: XLA:CPU takes many times as long to write narrower ones."""

    @property
    def cache_dtype(self) -> jnp.dtype:
        """Of keys and values in cache and pool."""
        return jnp.dtype("float32") if self.wide_cache else self.compute_dtype

    @property
    def lanes(self) -> int:
        """Copies of the policy, each with slots of its own."""
        return self.layout.mesh.shape["data"]


class Rows(NamedTuple):
    """The rows that the host has queued, by place; constant within a segment."""

    order_R: jax.Array
    """int32: the queue, a ring. The place of the n-th row ever queued stands at n modulo R."""
    tail: jax.Array
    """int32 [1]: rows ever queued, the end of the queue. `Slots.head` is its beginning."""
    prefix_R: jax.Array
    """int32: entry of the pool that holds the row's prompt."""
    group_R: jax.Array
    """int32 >= 0: the same for rows that were forked from the same keys and values, no others."""
    token_R: jax.Array
    """int32: last prompt token."""
    position_R: jax.Array
    """int32: of that token."""
    drawn_R: jax.Array
    """int32: completion tokens that an earlier policy version drew."""
    limit_R: jax.Array
    """int32: most tokens of the completion."""
    base_key_R2: jax.Array
    """uint32: data of the request's key."""
    identity_R3: jax.Array
    """int32: prompt id, epoch and sample index, which are folded into that key."""
    sampling: Sampling
    stop_ids_RE: jax.Array
    stop_state_R: jax.Array
    """int32: where the stop automaton starts."""
    aborted_R: jax.Array
    """bool: to be ended at the next token."""
    parking_R: jax.Array | None = None
    """int32: entry of the pool in which the row is parked when it has ended; NOT_PARKED for those
    that are not. None where nothing is ever parked."""


class Slots(NamedTuple):
    """Everything that changes from one token to the next."""

    head: jax.Array
    """int32 [1]: rows that ever entered a slot."""
    place_B: jax.Array
    """int32: place of the row in the slot; IDLE where there is none."""
    token_B: jax.Array
    """int32: the token to be run next."""
    position_B: jax.Array
    """int32: its position, which is also the column of the cache that it will write."""
    drawn_B: jax.Array
    """int32: completion tokens so far."""
    stop_state_B: jax.Array
    cache: list[LayerCache]


class SegmentTokens(NamedTuple):
    """What a segment drew.

    The leading axis has `segment_tokens` token steps, of which the first `steps` were run.
    """

    place: jax.Array
    """int32 [.., B]: place of the row that was in the slot; IDLE where none was."""
    token: jax.Array
    logprob: jax.Array
    ended: jax.Array
    """int8 [.., B]: GOES_ON, STOPPED, FULL or ABORTED."""
    steps: jax.Array
    """int32 [1]."""


def idle_slots(slots: int, cache: list[LayerCache]) -> Slots:
    """Slots without a row."""
    zero_B = jnp.zeros((slots,), jnp.int32)
    return Slots(
        head=jnp.zeros((1,), jnp.int32),
        place_B=jnp.full((slots,), IDLE, jnp.int32),
        token_B=zero_B,
        position_B=zero_B,
        drawn_B=zero_B,
        stop_state_B=zero_B,
        cache=cache,
    )


def admit_rows(slots: Slots, rows: Rows, pool: list[LayerCache]) -> Slots:
    """Moves the next rows of the queue, in their order, into the slots that are free."""
    # The i-th free slot takes the i-th row after the head, where the queue has that many.
    free_B = slots.place_B == IDLE
    number_B = slots.head[0] + jnp.cumsum(free_B) - 1
    take_B = free_B & (number_B < rows.tail[0])
    waiting_B = rows.order_R[number_B % rows.order_R.shape[0]]
    place_B = jnp.where(take_B, waiting_B, slots.place_B)

    def entering(row_R, slot_B):
        return jnp.where(take_B, row_R[waiting_B], slot_B)

    return Slots(
        head=slots.head + jnp.sum(take_B, dtype=jnp.int32),
        place_B=place_B,
        token_B=entering(rows.token_R, slots.token_B),
        position_B=entering(rows.position_R, slots.position_B),
        drawn_B=entering(rows.drawn_R, slots.drawn_B),
        stop_state_B=entering(rows.stop_state_R, slots.stop_state_B),
        cache=copy_prefixes(pool, slots.cache, take_B, rows.prefix_R[waiting_B]),
    )


def token_step(
    params: Params, slots: Slots, rows: Rows, key_R2: jax.Array, stop_XV: Any, spec: DecodeSpec
) -> tuple[Slots, tuple[jax.Array, ...]]:
    """Runs every slot's token through the model and draws the next one.

    Shapes are fixed, so an idle slot is run as well and its results are ignored. It writes column 0
    of its cache, which the prompt of the next row replaces.

    Returns:
        the slots, and (place, token, logprob, ended) of every slot.
    """
    hidden_B1D, cache = forward(
        params,
        spec.layout.config,
        slots.token_B[:, None],
        slots.position_B[:, None],
        decode_attend(
            slots.position_B,
            impl=spec.attention_impl,
            operand_dtype=spec.attention_dtype,
            **_shared_prefixes(slots, rows, spec),
            **mesh_arguments(spec),
        ),
        compute_dtype=spec.compute_dtype,
        product_dtype=jnp.dtype("float32"),
        cache=slots.cache,
        embed=embed,
    )
    place_B = slots.place_B
    active_B = place_B != IDLE
    token_B, logprob_B = draw_tokens(
        key_R2[place_B],
        slots.drawn_B,
        logits(hidden_B1D[:, 0], head_weight(params)),
        jax.tree.map(lambda leaf_R: leaf_R[place_B], rows.sampling),
        valid_vocab=spec.valid_vocab,
    )
    drawn_B = slots.drawn_B + active_B
    stop_B = jnp.any(token_B[:, None] == rows.stop_ids_RE[place_B], axis=1)
    stop_state_B = slots.stop_state_B
    if stop_XV is not None:
        stop_state_B = stop_XV[stop_state_B, token_B].astype(jnp.int32)
        stop_B |= stop_state_B == ACCEPT
    ended_B = jnp.where(drawn_B >= rows.limit_R[place_B], FULL, GOES_ON)
    ended_B = jnp.where(stop_B, STOPPED, ended_B)
    ended_B = jnp.where(rows.aborted_R[place_B], ABORTED, ended_B)
    ended_B = jnp.where(active_B, ended_B, GOES_ON)
    over_B = ~active_B | (ended_B != GOES_ON)
    after = Slots(
        head=slots.head,
        place_B=jnp.where(over_B, IDLE, place_B),
        token_B=jnp.where(over_B, 0, token_B),
        position_B=jnp.where(over_B, 0, slots.position_B + 1),
        drawn_B=jnp.where(over_B, 0, drawn_B),
        stop_state_B=stop_state_B,
        cache=cache,
    )
    return after, (place_B, token_B, logprob_B, ended_B.astype(jnp.int8))


def _shared_prefixes(slots: Slots, rows: Rows, spec: DecodeSpec) -> dict[str, jax.Array]:
    """Which slots hold the same prompt, for the kernel that reads it once for all of them."""
    if not spec.attention_impl.startswith("pallas"):
        return {}
    active_B = slots.place_B != IDLE
    alone_B = -1 - jnp.arange(spec.slots, dtype=jnp.int32)
    group_B = jnp.where(active_B, rows.group_R[slots.place_B], alone_B)
    leader_B = jnp.argmax(group_B[:, None] == group_B, axis=1).astype(jnp.int32)
    # A row starts at its last prompt token: the columns before it are those of the pool.
    shared_B = jnp.where(active_B, rows.position_R[slots.place_B], 0)
    return {"leader_B": leader_B, "shared_B": shared_B}


def mesh_arguments(spec: DecodeSpec) -> dict[str, Any]:
    """The mesh arguments of attention inside a lane."""
    mesh = spec.layout.mesh
    if mesh.size == 1:
        return {}
    # Inside `over_lanes` the mesh is the one around, of which `tensor` is left.
    return {"heads_axis": "tensor", "mesh": mesh if spec.lanes == 1 else None}


def segment(
    params: Params,
    slots: Slots,
    rows: Rows,
    pool: list[LayerCache],
    stop_XV: Any,
    floor: jax.Array,
    *,
    spec: DecodeSpec,
) -> tuple[Slots, SegmentTokens, list[LayerCache] | None]:
    """Decodes until every row has ended, after `segment_tokens` token steps, or when too few slots
    are busy.

    One `while_loop`: each round lets queued rows into free slots, runs one token step, and writes
    what was drawn into the step's row of the output.

    Args:
        floor: int32 [1]; with fewer rows than this, in slots or queued, the segment ends after its
            first token step, since the host has more prompts.

    Returns:
        the slots, what was drawn, and the pool with the rows that were parked; None where nothing
        ever is.
    """
    most, B = spec.segment_tokens, spec.slots
    # The key of a row, once per segment; each token step folds the position in.
    fold = jax.vmap(lambda data, ids: row_keys(jax.random.wrap_key_data(data), *ids[:, None])[0])
    key_R2 = jax.random.key_data(fold(rows.base_key_R2, rows.identity_R3))
    empty = SegmentTokens(
        place=jnp.full((most, B), IDLE, jnp.int32),
        token=jnp.zeros((most, B), jnp.int32),
        logprob=jnp.zeros((most, B), jnp.float32),
        ended=jnp.zeros((most, B), jnp.int8),
        steps=jnp.zeros((1,), jnp.int32),
    )

    def goes_on(carry):
        slots, out, _ = carry
        left = jnp.sum(slots.place_B != IDLE) + rows.tail[0] - slots.head[0]
        step = out.steps[0]
        mine = (step < most) & (left > 0) & ((step == 0) | (left >= floor[0]))
        if spec.lanes > 1 and spec.layout.tensor > 1:
            # Devices that exchange data inside a round must all run the same number of rounds:
            # the lane with the most goes on, the others run idle slots.
            return jax.lax.pmax(mine.astype(jnp.int32), "data") > 0
        return mine

    def body(carry):
        slots, out, parked = carry
        slots = admit_rows(slots, rows, pool if parked is None else parked)
        slots, drawn = token_step(params, slots, rows, key_R2, stop_XV, spec)
        if parked is not None and rows.parking_R is not None:
            place_B, _, _, ended_B = drawn
            entry_B = rows.parking_R[place_B]
            whole_B = (ended_B == STOPPED) | (ended_B == FULL)
            parked = park_rows(slots.cache, parked, whole_B & (entry_B != NOT_PARKED), entry_B)
        written = [
            jax.lax.dynamic_update_slice_in_dim(all_, one[None], out.steps[0], axis=0)
            for all_, one in zip(out[:-1], drawn, strict=True)
        ]
        return slots, SegmentTokens(*written, steps=out.steps + 1), parked

    carried = None if rows.parking_R is None else pool
    return jax.lax.while_loop(goes_on, body, (slots, empty, carried))


def over_lanes(function, spec: DecodeSpec, in_axes: tuple, out_axes):
    """Runs a lane's function on every data index of the mesh.

    Args:
        in_axes, out_axes: for each argument (or output), a tree prefix of the axis that lanes cut,
            None where they share it.
    """
    if spec.lanes == 1:
        return function

    def spec_of(axis):
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")

    def specs(axes):
        return jax.tree.map(spec_of, axes, is_leaf=lambda leaf: leaf is None)

    return jax.shard_map(
        function,
        mesh=spec.layout.mesh,
        in_specs=specs(in_axes),
        out_specs=specs(out_axes),
        axis_names={"data"},
        check_vma=False,
    )
