"""What a pass over logits keeps of each token, and what follows from it.

Every implementation reads the logits twice: once for these statistics, once for the gradient. The
statistics of parts of the vocabulary (tiles, chunks, shards of a mesh axis) merge into those of
the whole. Everything is float32 [..] with the leading dimensions of the logits, and z are the
logits divided by the temperature.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.token_logprob.reference import TokenLogprob


class Support(NamedTuple):
    """How logits become a distribution; static while a program is compiled."""

    temperature: float
    columns: int
    """Size of the support, which is the first columns of the whole vocabulary."""


class Statistics(NamedTuple):
    """Of the part of the vocabulary that was seen."""

    top: jax.Array
    """The largest z of the support; -inf where there is none."""
    total: jax.Array
    """Sum of exp(z - top); 0 where top is -inf."""
    weighted: jax.Array
    """Sum of exp(z - top) (z - top); 0 where top is -inf."""
    chosen: jax.Array
    """z of the token's own id; 0 where the part does not hold it."""


class Slopes(NamedTuple):
    """What the gradient of each token needs beside its logits.

    d/d logit_v = p_v (shared - entropy log p_v) + [v = id] chosen, with log p_v = z_v - logsumexp:
    the cotangents of all three outputs and the 1 / temperature are in the coefficients.
    """

    logsumexp: jax.Array
    """Finite; where the support is empty, where no p_v is positive, any number."""
    shared: jax.Array
    entropy: jax.Array
    chosen: jax.Array


def merge(parts: Statistics) -> Statistics:
    """Statistics of the whole from those of its parts, stacked along the first axis."""
    top = parts.top.max(axis=0)
    total, weighted = _rescaled(parts, top)
    return Statistics(top, total.sum(axis=0), weighted.sum(axis=0), parts.chosen.sum(axis=0))


def merge_over(axis_name: str | tuple[str, ...], part: Statistics) -> Statistics:
    """Statistics of the whole on every device of the mesh axes that shard the vocabulary."""
    top = jax.lax.pmax(part.top, axis_name)
    rest = jnp.stack([*_rescaled(part, top), part.chosen])
    return Statistics(top, *jax.lax.psum(rest, axis_name))


def _rescaled(part: Statistics, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Total and weighted of a part, relative to the top of the whole."""
    # A maximum may pass over NaN where the sums do not.
    seen = (part.top != -jnp.inf) | jnp.isnan(part.total)
    drop = jnp.where(seen, part.top - top, 0.0)
    factor = jnp.exp(drop)
    total = jnp.where(seen, factor * part.total, 0.0)
    weighted = jnp.where(seen, factor * (part.weighted + drop * part.total), 0.0)
    return total, weighted


def finish(whole: Statistics, ids: jax.Array, support: Support) -> TokenLogprob:
    """The outputs of `reference.token_logprob`, from the statistics of the whole vocabulary."""
    empty = (whole.top == -jnp.inf) & ~jnp.isnan(whole.total)
    top = jnp.where(empty, 0.0, whole.top)
    total = jnp.where(empty, 1.0, whole.total)
    log_total = jnp.log(total)
    inside = (ids >= 0) & (ids < support.columns) & ~empty
    return TokenLogprob(
        logprob=jnp.where(inside, whole.chosen - top - log_total, -jnp.inf),
        logsumexp=jnp.where(empty, -jnp.inf, log_total + top),
        entropy=jnp.where(empty, 0.0, log_total - whole.weighted / total),
    )


def slopes(outputs: TokenLogprob, cotangents: TokenLogprob, support: Support) -> Slopes:
    """Coefficients of the gradient for these cotangents of the outputs.

    With p = softmax(z) and H the entropy:

        d logprob / dz_v   = [v = id] - p_v
        d logsumexp / dz_v = p_v
        d H / dz_v         = -p_v (log p_v + H)

    A logprob of -inf (an impossible id, an empty support) passes no gradient.
    """
    d_logprob = jnp.where(outputs.logprob == -jnp.inf, 0.0, cotangents.logprob)
    shared = cotangents.logsumexp - d_logprob - cotangents.entropy * outputs.entropy
    return Slopes(
        logsumexp=jnp.where(outputs.logsumexp == -jnp.inf, 0.0, outputs.logsumexp),
        shared=shared / support.temperature,
        entropy=cotangents.entropy / support.temperature,
        chosen=d_logprob / support.temperature,
    )
