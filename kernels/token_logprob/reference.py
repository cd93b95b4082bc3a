"""Log-probability, normaliser and entropy of a token distribution: the definition.

Both sides of the system call this operation: the rollout worker for the behaviour logprob it
records, the learner for the logprob it differentiates. Everything that shapes the distribution
(temperature, the part of the vocabulary a tokenizer can produce) is therefore an argument here
and nowhere else.

Dimension key:
    V: vocabulary (columns of the logits; may exceed the tokenizer's size)
    ..: any leading dimensions
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenLogprob(NamedTuple):
    """What one call returns; all float32, in nats, with the leading dimensions of the logits."""

    logprob: jax.Array
    """log p(id)."""
    logsumexp: jax.Array
    """log of the sum of exp(logits / temperature) over the support."""
    entropy: jax.Array
    """-sum over the support of p log p."""


def token_logprob(
    logits: jax.Array,
    ids: jax.Array,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> TokenLogprob:
    """Scores `ids` under softmax(logits / temperature), restricted to the support.

    The support is the first `valid_vocab` columns. An id outside it (negative, or not below
    `valid_vocab`), or one whose logit is -inf, has logprob -inf, and that logprob passes no
    gradient; its normaliser and entropy are those of the row. A row whose support is -inf
    throughout has logprob -inf, logsumexp -inf and entropy 0, and passes no gradient. Nothing
    else is hidden: a NaN or +inf logit inside the support gives NaN.

    Args:
        logits: float [.., V]; statistics are float32 whatever the dtype.
        ids: int [..].
        temperature: above 0; divides the logits.
        valid_vocab: size of the support, 1..V; None takes all V columns.

    Returns:
        float32 [..] each, in nats.
    """
    V = logits.shape[-1]
    column_V = jnp.arange(V)
    in_support_V = column_V < (V if valid_vocab is None else valid_vocab)
    scaled = jnp.where(in_support_V, logits.astype(jnp.float32) / temperature, -jnp.inf)
    possible = in_support_V & (scaled != -jnp.inf)
    has_support = possible.any(axis=-1)

    # Columns without probability are replaced before each exp and log, so that their derivative
    # is an exact zero and not 0 * inf.
    top = jax.lax.stop_gradient(jnp.where(has_support, scaled.max(axis=-1), 0.0))
    shifted = jnp.where(possible, scaled - top[..., None], 0.0)
    total = jnp.where(possible, jnp.exp(shifted), 0.0).sum(axis=-1)
    log_total = jnp.log(jnp.where(has_support, total, 1.0))
    logsumexp = jnp.where(has_support, log_total + top, -jnp.inf)

    log_p = shifted - log_total[..., None]
    p_log_p = jnp.where(possible, jnp.exp(log_p) * log_p, 0.0)
    entropy = jnp.where(has_support, -p_log_p.sum(axis=-1), 0.0)

    is_id = (column_V == ids[..., None]) & possible
    chosen = jnp.where(is_id, log_p, 0.0).sum(axis=-1)
    logprob = jnp.where(is_id.any(axis=-1), chosen, -jnp.inf)
    return TokenLogprob(logprob, logsumexp, entropy)
