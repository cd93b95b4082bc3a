"""`token_logprob` with the implementation chosen by an argument, and its derivative."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels import choose
from kernels.token_logprob import pallas_tpu, reference, xla
from kernels.token_logprob.reference import TokenLogprob
from kernels.token_logprob.statistics import Support, finish, merge_over, slopes

__all__ = ["TokenLogprob", "token_logprob"]

PASSES = {
    choose.XLA: (xla.statistics, xla.logits_gradient),
    choose.PALLAS_TPU: (pallas_tpu.statistics, pallas_tpu.logits_gradient),
    choose.PALLAS_INTERPRET: (
        functools.partial(pallas_tpu.statistics, interpret=True),
        functools.partial(pallas_tpu.logits_gradient, interpret=True),
    ),
}
"""Implementation -> its pass for the statistics, its pass for the gradient."""


class Options(NamedTuple):
    """Static while a program is compiled."""

    support: Support
    impl: str
    vocab_axis: str | None


def token_logprob(
    logits: jax.Array,
    ids: jax.Array,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    impl: str = choose.XLA,
    vocab_axis: str | None = None,
) -> TokenLogprob:
    """Same contract as reference.token_logprob, with its arguments checked.

    Args:
        impl: one of `kernels.choose.IMPLEMENTATIONS`.
        vocab_axis: inside `shard_map`, the mesh axis over which the last axis of the logits is
            cut, in equal parts. `ids` and `valid_vocab` count over the whole vocabulary; the
            outputs are those of the whole, the same on every device of the axis, and so must
            their cotangents be. Differentiate inside the `shard_map`, or take
            `kernels.token_logprob.sharded`.

    Raises:
        ValueError: if shapes, dtype, temperature, support or implementation do not fit.
    """
    if impl not in choose.IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {choose.IMPLEMENTATIONS}, got {impl!r}")
    if impl == choose.REFERENCE and vocab_axis is not None:
        raise ValueError("the reference needs the whole vocabulary: take another impl")
    if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"ids must be integers of shape {logits.shape[:-1]}, one per row of the logits "
            f"{logits.shape}; got {ids.dtype} {ids.shape}"
        )
    shards = 1 if vocab_axis is None else jax.lax.axis_size(vocab_axis)
    support = make_support(logits.shape[-1] * shards, temperature, valid_vocab)
    if impl == choose.REFERENCE:
        return reference.token_logprob(
            logits, ids, temperature=temperature, valid_vocab=valid_vocab
        )
    outputs: Any = _token_logprob(Options(support, impl, vocab_axis), logits, ids)
    return TokenLogprob(*outputs)


def make_support(V: int, temperature: float, valid_vocab: int | None) -> Support:
    """The distribution that the arguments describe, over V columns in all.

    Raises:
        ValueError: if the temperature or the support does not fit.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: greedy has no logprob")
    if valid_vocab is not None and not 1 <= valid_vocab <= V:
        raise ValueError(
            f"valid_vocab must lie in 1..{V} (columns of the logits), got {valid_vocab}"
        )
    return Support(temperature, V if valid_vocab is None else valid_vocab)


def first_column(columns: int, vocab_axis: str | None) -> jax.Array | int:
    """Number of the first of this device's columns in the whole vocabulary."""
    return 0 if vocab_axis is None else jax.lax.axis_index(vocab_axis) * columns


def forward(options: Options, logits: jax.Array, ids: jax.Array) -> TokenLogprob:
    """The outputs of the whole vocabulary, on every device that holds a part of it."""
    statistics, _ = PASSES[options.impl]
    first = first_column(logits.shape[-1], options.vocab_axis)
    found = statistics(logits, ids, options.support, first_column=first)
    if options.vocab_axis is not None:
        found = merge_over(options.vocab_axis, found)
    return finish(found, ids, options.support)


def backward(
    options: Options,
    logits: jax.Array,
    ids: jax.Array,
    outputs: TokenLogprob,
    cotangents: TokenLogprob,
) -> jax.Array:
    """The gradient in this device's logits."""
    _, logits_gradient = PASSES[options.impl]
    return logits_gradient(
        logits,
        ids,
        slopes(outputs, cotangents, options.support),
        options.support,
        first_column=first_column(logits.shape[-1], options.vocab_axis),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprob(options, logits, ids):
    return forward(options, logits, ids)


def _forward(options, logits, ids):
    outputs = forward(options, logits, ids)
    return outputs, (logits, ids, outputs)


def _backward(options, residuals, cotangents):
    gradient = backward(options, *residuals, TokenLogprob(*cotangents))
    return gradient, np.zeros(residuals[1].shape, jax.dtypes.float0)


_token_logprob.defvjp(_forward, _backward)
