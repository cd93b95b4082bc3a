"""The programs that `python -m kernels.tpu_report` compiles: kernels and their alternatives.

Each is for one chip, with bfloat16 in. Losses over a vocabulary with their gradients:

    token_logprob/SHAPE/IMPL: from given logits, whose gradient it returns beside them.
    probe/SHAPE/IMPL: the same with an entropy bonus, at the size of a small probe.
    head/SHAPE/IMPL: from hidden vectors and head; the float32 gradient of the head is donated and
        added to.
    head_chunk/SHAPE/IMPL: the same for the tokens of one chunk.

and one layer's attention from one new token per row, its cache donated:

    decode_attention/SHAPE/IMPL: how much the TPU kernel reads depends on the rows. Its cycles are
        those of one round of its loop, which is 1 MB of cache, and its bytes those of full rows
        in and out. `_prefix` is where rows may begin alike: one round of either kind, every branch
        taken.

    packed_attention/SHAPE/IMPL: of whole rows, with its gradients in query, key and value. Its
        cycles are those of the blocks of one sequence that fills the row; loops whose rounds the
        segments decide, as XLA's, count one.

IMPL is an implementation, with a schedule where there is a head, or `log_softmax`: what one writes
without this package, differentiated by jax. It keeps the logits whole and returns the head's
gradient in bfloat16.

Dimension key:
    B: sequences, or rows of a cache
    T: tokens of each
    D: model width
    V: vocabulary
    N: query heads
    K: key/value heads
    S: positions of the cache
    H: head size
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.kernels.case import LOG_SOFTMAX
from benchmarks.random_problems import GrpoData, grpo_objective
from kernels import choose
from kernels.decode_attention.ops import decode_attention
from kernels.linear_objective import schedule
from kernels.packed_attention.ops import packed_attention
from kernels.token_logprob.ops import token_logprob
from kernels.token_logprob.reference import TokenLogprob

LOGITS_SHAPES = ((1, 4096, 151643), (4, 1024, 151643), (1, 4096, 151936), (4, 1024, 151936))
"""Tokens in one sequence and in four; of a tokenizer, and of a model that pads it to lanes."""
PROBE_SHAPE = (8, 1024, 16384)
HEAD_SHAPE = (8192, 4096, 151936)
ATTENTION_TOKENS = (2048, 8192, 32768)
"""Of one row; the heads are those of Qwen2.5-3B."""
DECODE_SHAPES = ((16, 640), (128, 512))
"""Rows and positions; the heads are those of Qwen2.5-3B."""
PREFIX = "_prefix"
IMPLS = (LOG_SOFTMAX, choose.XLA, choose.PALLAS_TPU)
HEAD_IMPLS = tuple(
    (impl, each) for impl in (choose.XLA, choose.PALLAS_TPU) for each in schedule.SCHEDULES
)


Lower = Callable[[jax.Device], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True)
class KernelProgram:
    """One program to compile."""

    name: str
    lower: Lower
    fast: bool
    """Whether it is one of the few that a quick check compiles."""


def programs() -> dict[str, KernelProgram]:
    """All of them by name."""
    found = []
    for shape in LOGITS_SHAPES:
        found += _logits_programs("token_logprob", shape, 0.0)
    found += _logits_programs("probe", PROBE_SHAPE, 0.01)
    T, D, V = HEAD_SHAPE
    name = f"head/t{T}_d{D}_v{V}"
    whole = functools.partial(lower_whole_logits, HEAD_SHAPE)
    found.append(KernelProgram(f"{name}/{LOG_SOFTMAX}", whole, fast=False))
    for impl, each in HEAD_IMPLS:
        lower = functools.partial(lower_head, impl, each)
        options = schedule.HeadOptions(schedule=each, impl=impl)
        chunk = schedule.chunk_size(T, (V, D), jnp.dtype(jnp.bfloat16), options, masked=False)
        run = functools.partial(lower, HEAD_SHAPE)
        once = functools.partial(lower, (chunk, D, V))
        found += [
            KernelProgram(f"{name}/{impl}_{each}", run, fast=False),
            KernelProgram(f"head_chunk/d{D}_v{V}/{impl}_{each}", once, fast=True),
        ]
    for B, S in DECODE_SHAPES:
        for impl, prefix in (
            (choose.XLA, ""),
            (choose.PALLAS_TPU, ""),
            (choose.PALLAS_TPU, PREFIX),
        ):
            run = functools.partial(lower_decode_attention, impl, prefix, (B, 16, 2, S, 128))
            found.append(
                KernelProgram(f"decode_attention/b{B}_s{S}/{impl}{prefix}", run, fast=True)
            )
    for T in ATTENTION_TOKENS:
        for impl in (choose.REFERENCE, choose.XLA, choose.PALLAS_TPU):
            if impl == choose.REFERENCE and T > 8192:  # 64 GiB of scores
                continue
            run = functools.partial(lower_packed_attention, impl, (1, T, 16, 2, 128))
            fast = T == 8192 and impl != choose.REFERENCE
            found.append(KernelProgram(f"packed_attention/t{T}/{impl}", run, fast=fast))
    return {program.name: program for program in found}


def _logits_programs(
    kind: str, shape: tuple[int, int, int], entropy_coef: float
) -> list[KernelProgram]:
    B, T, V = shape
    found = []
    for impl in IMPLS:
        run = functools.partial(lower_logits, impl, entropy_coef, shape)
        found.append(KernelProgram(f"{kind}/b{B}_t{T}_v{V}/{impl}", run, fast=impl != LOG_SOFTMAX))
    return found


def lower_logits(
    impl: str, entropy_coef: float, shape: tuple[int, int, int], device: jax.Device
) -> jax.stages.Lowered:
    """(logits [B, T, V], ids, data) -> loss, d_logits."""
    objective = functools.partial(grpo_objective, entropy_coef=entropy_coef)

    def loss(logits_BTV, ids_BT, data):
        if impl == LOG_SOFTMAX:
            scored = _log_softmax(logits_BTV, ids_BT)
        else:
            scored = token_logprob(logits_BTV, ids_BT, impl=impl)
        return objective(scored.logprob, scored.entropy, data).sum()

    struct = _structs_on(device)
    per_token = struct(shape[:2], jnp.float32)
    return jax.jit(jax.value_and_grad(loss)).lower(
        struct(shape, jnp.bfloat16),
        struct(shape[:2], jnp.int32),
        GrpoData(per_token, per_token),
    )


def lower_head(
    impl: str, each: str, shape: tuple[int, int, int], device: jax.Device
) -> jax.stages.Lowered:
    """(head_grad [V, D], hidden [T, D], head [V, D], ids, data) -> scores and gradients."""
    T, D, V = shape
    objective = functools.partial(grpo_objective, entropy_coef=0.0)
    options = schedule.HeadOptions(schedule=each, impl=impl)

    def run(head_grad_VD, hidden_TD, head_VD, ids_T, data):
        return schedule.value_and_gradients(
            hidden_TD, head_VD, ids_T, None, data, objective, options, head_grad_VD=head_grad_VD
        )

    struct = _structs_on(device)
    return jax.jit(run, donate_argnums=0).lower(
        struct((V, D), jnp.float32), *_head_arguments(struct, T, D, V)
    )


def lower_whole_logits(shape: tuple[int, int, int], device: jax.Device) -> jax.stages.Lowered:
    """(hidden [T, D], head [V, D], ids, data) -> loss, d_hidden, d_head."""
    objective = functools.partial(grpo_objective, entropy_coef=0.0)

    def loss(hidden_TD, head_VD, ids_T, data):
        scored = _log_softmax(jnp.matmul(hidden_TD, head_VD.T), ids_T)
        return objective(scored.logprob, scored.entropy, data).sum()

    arguments = _head_arguments(_structs_on(device), *shape)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments)


def lower_decode_attention(
    impl: str, prefix: str, shape: tuple[int, int, int, int, int], device: jax.Device
) -> jax.stages.Lowered:
    """(query [B, N, H], new key [B, K, H], new value, key cache [B, K, S, H], value cache,
    positions; with a prefix leaders and shared columns) -> output [B, N, H] and the caches.
    """
    B, N, K, S, H = shape
    struct = _structs_on(device)
    query, new = (struct((B, heads, H), jnp.bfloat16) for heads in (N, K))
    cache = struct((B, K, S, H), jnp.bfloat16)
    row = struct((B,), jnp.int32)
    run = functools.partial(decode_attention, impl=impl, operand_dtype=jnp.bfloat16)
    shares = {"leader_B": row, "shared_B": row} if prefix else {}
    return jax.jit(run, donate_argnums=(3, 4)).lower(query, new, new, cache, cache, row, **shares)


def lower_packed_attention(
    impl: str, shape: tuple[int, int, int, int, int], device: jax.Device
) -> jax.stages.Lowered:
    """(query [B, T, N, H], key [B, T, K, H], value, segments, d_out [B, T, N, H]) -> output and
    the three gradients.
    """
    B, T, N, K, H = shape
    struct = _structs_on(device)
    query, key = (struct((B, T, heads, H), jnp.bfloat16) for heads in (N, K))

    def run(query, key, value, segment, d_out):
        attend = functools.partial(packed_attention, impl=impl, operand_dtype=jnp.bfloat16)
        of = lambda query, key, value: attend(query, key, value, segment)
        out, pull = jax.vjp(of, query, key, value)
        return out, pull(d_out)

    return jax.jit(run).lower(query, key, key, struct((B, T), jnp.int32), query)


def _log_softmax(logits, ids) -> TokenLogprob:
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    logprob = jnp.take_along_axis(log_p, ids[..., None], axis=-1)[..., 0]
    return TokenLogprob(logprob, jnp.zeros_like(logprob), -(jnp.exp(log_p) * log_p).sum(axis=-1))


def _head_arguments(struct, T: int, D: int, V: int) -> tuple[Any, ...]:
    per_token = struct((T,), jnp.float32)
    return (
        struct((T, D), jnp.bfloat16),
        struct((V, D), jnp.bfloat16),
        struct((T,), jnp.int32),
        GrpoData(per_token, per_token),
    )


def _structs_on(device: jax.Device) -> Callable[..., Any]:
    sharding = SingleDeviceSharding(device)
    # Typed as the array it stands for.
    return lambda shape, dtype: cast(Any, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
