"""`token_logprob` with the implementation chosen by an argument, and its derivative."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels import choose
from kernels.token_logprob import pallas_tpu, reference, xla
from kernels.token_logprob.reference import TokenLogprob
from kernels.token_logprob.statistics import Support, finish, merge_over, slopes

__all__ = ["TokenLogprob", "token_logprob"]


SMALLEST_TEMPERATURE = 1e-6
"""Below it float32 logits leave the range of exp whatever they are."""


VocabAxis = str | tuple[str, ...] | None
"""The mesh axis, or axes, over which a vocabulary is cut."""


class Options(NamedTuple):
    """Static while a program is compiled."""

    support: Support
    impl: str
    minor: str | None
    vocab_axis: VocabAxis
    mesh: Mesh | None
    token_axes: tuple[str, ...]


def token_logprob(
    logits: jax.Array,
    ids: jax.Array,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    impl: str = choose.XLA,
    minor: str | None = None,
    vocab_axis: VocabAxis = None,
    mesh: Mesh | None = None,
    token_axes: tuple[str, ...] = (),
) -> TokenLogprob:
    """Same contract as reference.token_logprob, with its arguments checked.

    Args:
        impl: one of `kernels.choose.IMPLEMENTATIONS`.
        minor: `vocab` or `time`, for the Pallas kernels: the order in which the logits lie, so that
            they are not copied. None is right for an array that enters the program; for logits
            that a product in it makes, `vocab` is.
        vocab_axis: the mesh axis over which the last axis of the logits is cut, in equal parts.
            `ids` and `valid_vocab` count over the whole vocabulary; the outputs are those of the
            whole, the same on every device of the axis.
        mesh: given where the call stands outside `shard_map`. Without it a vocab_axis means that
            it stands inside one, with this device's part of the logits: it is to be
            differentiated there too, with the same cotangents on every device of the axis.
        token_axes: with a mesh, the axes over which the first axis of logits and ids is cut.

    Raises:
        ValueError: if shapes, dtype, temperature, support, implementation or mesh do not fit.
    """
    if impl not in choose.IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {choose.IMPLEMENTATIONS}, got {impl!r}")
    if impl == choose.REFERENCE and (vocab_axis or token_axes):
        raise ValueError("the reference runs on one device: take another impl")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if impl == choose.PALLAS_TPU:
        check_tpu_dtype(logits.dtype)
    if minor not in (None, "vocab", "time"):
        raise ValueError(f"minor must be vocab, time or None, got {minor!r}")
    check_apart(token_axes, vocab_axis)
    if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"ids must be integers of shape {logits.shape[:-1]}, one per row of the logits "
            f"{logits.shape}; got {ids.dtype} {ids.shape}"
        )
    if mesh is not None:
        check_divides(mesh, "vocabulary", logits.shape[-1], axis_names(vocab_axis))
        check_divides(mesh, "first axis of the logits", logits.shape[0], token_axes)
    shards = 1 if vocab_axis is None or mesh is not None else jax.lax.axis_size(vocab_axis)
    support = make_support(logits.shape[-1] * shards, temperature, valid_vocab)
    if impl == choose.REFERENCE:
        return reference.token_logprob(
            logits, ids, temperature=temperature, valid_vocab=valid_vocab
        )
    ids = ids.astype(jnp.int32)  # a narrow type cannot be compared with the vocabulary
    if ids.size == 0:
        impl = choose.XLA
    options = Options(support, impl, minor, vocab_axis, mesh, token_axes)
    outputs: Any = _token_logprob(options, logits, ids)
    return TokenLogprob(*outputs)


def make_support(V: int, temperature: float, valid_vocab: int | None) -> Support:
    """The distribution that the arguments describe, over V columns in all.

    Raises:
        ValueError: if the temperature or the support does not fit.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: greedy has no logprob")
    if not SMALLEST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            f"temperature must be finite and at least {SMALLEST_TEMPERATURE}, got {temperature}"
        )
    if valid_vocab is not None and (
        isinstance(valid_vocab, bool) or valid_vocab != int(valid_vocab)
    ):
        raise ValueError(f"valid_vocab must be a whole number, got {valid_vocab!r}")
    if valid_vocab is not None and not 1 <= valid_vocab <= V:
        raise ValueError(
            f"valid_vocab must lie in 1..{V} (columns of the logits), got {valid_vocab}"
        )
    return Support(float(temperature), V if valid_vocab is None else valid_vocab)


def check_tpu_dtype(dtype: jnp.dtype) -> None:
    """Refuses what the TPU kernels do not compile for.

    Raises:
        ValueError: with the dtype.
    """
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the TPU kernels take bfloat16 and float32, got {dtype}: cast it")


def axis_names(vocab_axis: VocabAxis) -> tuple[str, ...]:
    """Each of these axes."""
    if isinstance(vocab_axis, tuple):
        return vocab_axis
    return () if vocab_axis is None else (vocab_axis,)


def check_apart(token_axes: tuple[str, ...], vocab_axis: VocabAxis) -> None:
    """Refuses a mesh axis that would cut tokens and vocabulary at once.

    Raises:
        ValueError: with the axis.
    """
    if set(axis_names(vocab_axis)) & set(token_axes):
        raise ValueError(
            f"vocab_axis={vocab_axis!r} is among token_axes={token_axes}: an axis cuts one of them"
        )


def first_column(columns: int, vocab_axis: VocabAxis) -> jax.Array | int:
    """Number of the first of this device's columns in the whole vocabulary."""
    return 0 if vocab_axis is None else jax.lax.axis_index(vocab_axis) * columns


def check_divides(mesh: Mesh, what: str, size: int, axes: tuple[str, ...]) -> None:
    """Refuses a size that mesh axes cannot cut into equal parts.

    Raises:
        ValueError: with the size and the axes.
    """
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown:
        raise ValueError(f"mesh axes {unknown} are not among {tuple(mesh.axis_names)}")
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts:
        raise ValueError(f"{what} of {size} cannot be cut into {parts} equal parts over {axes}")


def _passes(options: Options):
    """The implementation's pass for the statistics, and its pass for the gradient."""
    if options.impl == choose.XLA:
        return xla.statistics, xla.logits_gradient
    details = {"minor": options.minor, "interpret": options.impl == choose.PALLAS_INTERPRET}
    return (
        functools.partial(pallas_tpu.statistics, **details),
        functools.partial(pallas_tpu.logits_gradient, **details),
    )


def _statistics_pass(options: Options, logits, ids) -> TokenLogprob:
    """The outputs of the whole vocabulary, on every device that holds a part of it."""
    statistics, _ = _passes(options)
    first = first_column(logits.shape[-1], options.vocab_axis)
    found = statistics(logits, ids, options.support, first_column=first)
    if options.vocab_axis is not None:
        found = merge_over(options.vocab_axis, found)
    return finish(found, ids, options.support)


def _gradient_pass(options: Options, logits, ids, outputs, cotangents) -> jax.Array:
    """The gradient in this device's logits."""
    _, logits_gradient = _passes(options)
    return logits_gradient(
        logits,
        ids,
        slopes(outputs, cotangents, options.support),
        options.support,
        first_column=first_column(logits.shape[-1], options.vocab_axis),
    )


def _on_mesh(options: Options, function, ndim: int, *, in_logits: bool):
    """The pass over each device's part. The derivative of `shard_map` itself is never taken:
    it would divide the cotangents of what is the same on every device of the vocabulary axis.
    """
    function = functools.partial(function, options)
    if options.mesh is None:
        return function
    tokens = P(options.token_axes)
    whole = P(options.token_axes, *[None] * (ndim - 2), options.vocab_axis)
    return jax.shard_map(
        function,
        mesh=options.mesh,
        in_specs=(whole, tokens, tokens, tokens) if in_logits else (whole, tokens),
        out_specs=whole if in_logits else tokens,
        check_vma=False,  # a Pallas call says nothing of what varies over which axis
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprob(options, logits, ids):
    return _on_mesh(options, _statistics_pass, logits.ndim, in_logits=False)(logits, ids)


def _forward(options, logits, ids):
    outputs = _token_logprob(options, logits, ids)
    return outputs, (logits, ids, outputs)


def _backward(options, residuals, cotangents):
    logits, ids, outputs = residuals
    pull = _on_mesh(options, _gradient_pass, logits.ndim, in_logits=True)
    gradient = pull(logits, ids, outputs, TokenLogprob(*cotangents))
    return gradient, np.zeros(ids.shape, jax.dtypes.float0)


_token_logprob.defvjp(_forward, _backward)
