"""`token_logprob` with the implementation chosen by an argument."""

import jax
import jax.numpy as jnp

from kernels.token_logprob import reference, xla
from kernels.token_logprob.reference import TokenLogprob

__all__ = ["IMPLEMENTATIONS", "TokenLogprob", "token_logprob"]

IMPLEMENTATIONS = {
    "auto": xla.token_logprob,
    "reference": reference.token_logprob,
    "xla": xla.token_logprob,
}


def token_logprob(
    logits: jax.Array,
    ids: jax.Array,
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    impl: str = "auto",
) -> TokenLogprob:
    """Same contract as reference.token_logprob, with its arguments checked.

    Args:
        impl: `reference`, `xla`, or `auto` for the fastest measured.

    Raises:
        ValueError: if shapes, dtype, temperature, support or implementation do not fit.
    """
    V = logits.shape[-1]
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {sorted(IMPLEMENTATIONS)}, got {impl!r}")
    if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"ids must be integers of shape {logits.shape[:-1]}, one per row of the logits "
            f"{logits.shape}; got {ids.dtype} {ids.shape}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}: greedy has no logprob")
    if valid_vocab is not None and not 1 <= valid_vocab <= V:
        raise ValueError(
            f"valid_vocab must lie in 1..{V} (columns of the logits), got {valid_vocab}"
        )
    return IMPLEMENTATIONS[impl](logits, ids, temperature=temperature, valid_vocab=valid_vocab)
