"""The loop over chunks of tokens that scores the head and forms its gradients, in two schedules.

For each chunk: score it against the head, finish its logprobs, pull the objective back through
them, and form the gradients at once. `fast` keeps the chunk's logits between scoring and gradient
(three matrix products), `lean` multiplies again (four products, least memory). The head's gradient
is added straight into a float32 buffer, which may be the accumulator of several batches. Tokens
that are not active are compacted away first (chunks.py).

Dimension key:
    T: tokens
    C: tokens of one chunk
    D: model width
    V: rows of the head given, which may be one shard of the vocabulary
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels import choose
from kernels.linear_objective import pallas_tpu, xla
from kernels.linear_objective.arguments import check_arrays, check_objective
from kernels.linear_objective.chunks import TokenChunks, even_size
from kernels.linear_objective.reference import Objective
from kernels.linear_objective.vmem_plan import LANES
from kernels.token_logprob.ops import VocabAxis, check_tpu_dtype, first_column, make_support
from kernels.token_logprob.reference import TokenLogprob
from kernels.token_logprob.statistics import Support, finish, merge_over, slopes

SCHEDULES = ("fast", "lean")
MASKED_CHUNKS = 8
"""Least number of chunks of a batch with inactive tokens. The last may have half the size, so that
at most a sixteenth of the whole is padding."""
LEAST_MASKED_TOKENS = 512
"""Chunks are not made smaller than this for it: each reads and writes the head's gradient."""


class Passes(NamedTuple):
    """One implementation: see xla.py for the contract of each."""

    score: Callable
    gradient: Callable
    chunk_tokens: Callable[..., int]
    chunk_multiple: int
    """Tokens that a chunk is padded to a multiple of, or computed best in multiples of."""


PASSES = {
    choose.XLA: Passes(xla.score, xla.gradient, xla.chunk_tokens, 8),
    choose.PALLAS_TPU: Passes(
        pallas_tpu.score,
        pallas_tpu.gradient,
        lambda V, D, keep, dtype: pallas_tpu.chunk_tokens(D, dtype),
        LANES,
    ),
    choose.PALLAS_INTERPRET: Passes(
        functools.partial(pallas_tpu.score, interpret=True),
        functools.partial(pallas_tpu.gradient, interpret=True),
        lambda V, D, keep, dtype: pallas_tpu.chunk_tokens(D, dtype),
        LANES,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How the head is computed; static while a program is compiled."""

    schedule: str = "fast"
    """`fast` or `lean`."""
    impl: str = choose.XLA
    """One of `kernels.choose.IMPLEMENTATIONS`, the reference excepted."""
    temperature: float = 1.0
    valid_vocab: int | None = None
    """As `token_logprob` has these two."""
    chunk_tokens: int | None = None
    """Upper bound on the tokens of a chunk; None uses that of the implementation."""
    vocab_axis: VocabAxis = None
    """Inside `shard_map`: the mesh axis, or axes, over which the head is cut by rows, in equal
    parts. All else is then the same on every device of them."""

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, got {self.schedule!r}")
        if self.impl not in PASSES:
            raise ValueError(f"impl must be one of {tuple(PASSES)}, got {self.impl!r}")
        chunk = self.chunk_tokens
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(f"chunk_tokens must be a whole number of at least 1, got {chunk!r}")


class HeadGradients(NamedTuple):
    """Of a sum over the active tokens, in hidden and in this device's rows of the head."""

    scores: TokenLogprob
    """Logprob, logsumexp and entropy of each token, float32 [T]; zeros where not active."""
    hidden_TD: jax.Array
    """In the dtype of hidden. With a vocab_axis float32, and one device's part of a sum over that
    axis, which is the caller's to take."""
    head_VD: jax.Array | None
    """float32; added to what was given. None of a head that is frozen."""


def score(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    ids_T: jax.Array,
    active_T: jax.Array | None,
    options: HeadOptions,
) -> TokenLogprob:
    """Scores every active token: one product, and no gradient.

    Args:
        as `reference.linear_objective`; the dtype of hidden is that of the product's operands.

    Returns:
        TokenLogprob of float32 [T]; zeros where not active.

    Raises:
        ValueError: if the arrays do not belong together.
    """
    check_arrays(hidden_TD, head_VD, ids_T, active_T)
    head = _Head(head_VD, hidden_TD.dtype, options)
    chunks = head.chunks((hidden_TD, ids_T.astype(jnp.int32)), active_T)

    def step(place, scores):
        (hidden_CD, ids_C), _ = chunks.chunk_at(place)
        scored, _ = head.score(hidden_CD, ids_C, keep=False)
        return chunks.store(scores, place, scored)

    scores = TokenLogprob(*[chunks.zeros((), jnp.float32)] * 3)
    return chunks.restore(chunks.walk(step, scores))


def value_and_gradients(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    ids_T: jax.Array,
    active_T: jax.Array | None,
    data: Any,
    objective: Objective,
    options: HeadOptions,
    *,
    head_grad_VD: jax.Array | None = None,
    frozen_head: bool = False,
) -> HeadGradients:
    """Scores every active token and forms the gradients of the summed objective on the way.

    Args:
        hidden_TD .. objective: as `reference.linear_objective`; the dtype of hidden is that of the
            operands of every product, and sums are float32.
        head_grad_VD: float32, to be added to; None for zeros.
        frozen_head: forms no gradient of the head, which is one product less. It is XLA then,
            whatever `options` name.

    Returns:
        HeadGradients; `reference.sum_objective` makes the loss of its scores.

    Raises:
        ValueError: if the arrays or the objective do not belong together.
    """
    check_arrays(hidden_TD, head_VD, ids_T, active_T, data)
    check_objective(objective, data)

    def pull(scored, data_C):
        value = lambda logprob, entropy: objective(logprob, entropy, data_C).sum()
        d_logprob, d_entropy = jax.grad(value, argnums=(0, 1))(scored.logprob, scored.entropy)
        return TokenLogprob(d_logprob, jnp.zeros_like(d_logprob), d_entropy)

    if frozen_head:
        options = dataclasses.replace(options, impl=choose.XLA)
    elif head_grad_VD is None:
        head_grad_VD = jnp.zeros(head_VD.shape, jnp.float32)
    return _gradients(hidden_TD, head_VD, ids_T, active_T, data, pull, options, head_grad_VD)


def pull_back(
    hidden_TD: jax.Array,
    head_VD: jax.Array,
    ids_T: jax.Array,
    active_T: jax.Array | None,
    cotangents: TokenLogprob,
    options: HeadOptions,
) -> HeadGradients:
    """The gradients for given cotangents of the scores, float32 [T] each."""
    check_arrays(hidden_TD, head_VD, ids_T, active_T, cotangents)
    pull = lambda scored, cotangents_C: cotangents_C
    zeros_VD = jnp.zeros(head_VD.shape, jnp.float32)
    return _gradients(hidden_TD, head_VD, ids_T, active_T, cotangents, pull, options, zeros_VD)


def _gradients(hidden_TD, head_VD, ids_T, active_T, data, pull, options, head_grad_VD):
    """The loop; `pull(scores, data)` gives the cotangents of a chunk's scores.

    Args:
        head_grad_VD: as `xla.gradient` takes it.
    """
    head = _Head(head_VD, hidden_TD.dtype, options)
    chunks = head.chunks((hidden_TD, ids_T.astype(jnp.int32), data), active_T)
    hidden_dtype = hidden_TD.dtype if options.vocab_axis is None else jnp.float32

    def step(place, carry):
        scores, d_hidden, head_grad_VD = carry
        (hidden_CD, ids_C, data_C), counts_C = chunks.chunk_at(place)
        scored, kept = head.score(hidden_CD, ids_C, keep=head.keeps)
        cotangents = TokenLogprob(
            *(jnp.where(counts_C, each, 0.0) for each in pull(scored, data_C))
        )
        d_hidden_CD, head_grad_VD = head.gradient(
            hidden_CD, ids_C, scored, cotangents, head_grad_VD, kept
        )
        scores = chunks.store(scores, place, scored)
        return scores, chunks.store(d_hidden, place, d_hidden_CD), head_grad_VD

    start = (
        TokenLogprob(*[chunks.zeros((), jnp.float32)] * 3),
        chunks.zeros(hidden_TD.shape[1:], hidden_dtype),
        head_grad_VD,
    )
    scores, d_hidden, head_grad_VD = chunks.walk(step, start)
    return HeadGradients(chunks.restore(scores), chunks.restore(d_hidden), head_grad_VD)


def chunk_size(
    T: int, head_shape: tuple[int, ...], dtype: jnp.dtype, options: HeadOptions, *, masked: bool
) -> int:
    """Tokens of each chunk of T, for a head [V, D] and hidden states of this dtype.

    Args:
        masked: whether some tokens may be inactive.
    """
    V, D = head_shape
    passes = PASSES[options.impl]
    at_most = options.chunk_tokens
    if at_most is None:
        at_most = passes.chunk_tokens(V, D, keep=options.schedule == "fast", dtype=dtype)
        if masked:
            at_most = min(at_most, max(LEAST_MASKED_TOKENS, -(-T // MASKED_CHUNKS)))
    return even_size(T, at_most, passes.chunk_multiple)


class _Head:
    """This device's rows of the head, with the passes that work on them."""

    def __init__(self, head_VD: jax.Array, dtype: jnp.dtype, options: HeadOptions):
        V = head_VD.shape[0]
        axis = options.vocab_axis
        shards = 1 if axis is None else jax.lax.axis_size(axis)
        self._head_VD = head_VD
        self._passes = PASSES[options.impl]
        self._axis = axis
        self._first = first_column(V, axis)
        self._support: Support = make_support(V * shards, options.temperature, options.valid_vocab)
        self.keeps = options.schedule == "fast"
        self._options = options
        if options.impl == choose.PALLAS_TPU:
            check_tpu_dtype(dtype)

    def chunks(self, arrays, active_T) -> TokenChunks:
        """These arrays, hidden states [T, D] first, in chunks that suit the passes."""
        T, dtype = arrays[0].shape[0], arrays[0].dtype
        masked = active_T is not None
        size = chunk_size(T, self._head_VD.shape, dtype, self._options, masked=masked)
        multiple = self._passes.chunk_multiple
        return TokenChunks(
            arrays, active_T, size=size, last_size=-(-size // 2 // multiple) * multiple
        )

    def score(self, hidden_CD, ids_C, *, keep):
        """The scores over the whole vocabulary, and what the gradient may reuse."""
        found, kept = self._passes.score(
            hidden_CD, self._head_VD, ids_C, self._support, first_column=self._first, keep=keep
        )
        if self._axis is not None:
            found = merge_over(self._axis, found)
        return finish(found, ids_C, self._support), kept

    def gradient(self, hidden_CD, ids_C, scored, cotangents, head_grad_VD, kept):
        """The part of these rows in the gradient of hidden, and head_grad with theirs added."""
        return self._passes.gradient(
            hidden_CD,
            self._head_VD,
            ids_C,
            slopes(scored, cotangents, self._support),
            self._support,
            head_grad_VD,
            kept,
            first_column=self._first,
        )
