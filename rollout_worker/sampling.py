"""How a token is drawn, and the logprob that is recorded with it.

The key of a token is a pure function of (seed, prompt, epoch, sample, position): worker, slot and
batch do not enter, so the same completion is drawn wherever it is decoded.

Dimension key:
    B: rows
    V: vocabulary
"""

import jax
import jax.numpy as jnp

from kernels.token_logprob.ops import token_logprob


def row_keys(
    base_key: jax.Array, prompt_id_B: jax.Array, epoch_B: jax.Array, sample_index_B: jax.Array
) -> jax.Array:
    """One typed key per row; `sample` folds the position in.

    Args:
        base_key: key of the run's seed (and, for evaluation, of its own stream).
        prompt_id_B, epoch_B, sample_index_B: int32.
    """

    def fold(prompt_id, epoch, sample_index):
        key = jax.random.fold_in(base_key, prompt_id)
        return jax.random.fold_in(jax.random.fold_in(key, epoch), sample_index)

    return jax.vmap(fold)(prompt_id_B, epoch_B, sample_index_B)


def sample(
    key_B: jax.Array,
    position: jax.Array,
    logits_BV: jax.Array,
    *,
    temperature: jax.Array,
    valid_vocab: int,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per row by the Gumbel-max rule.

    Args:
        key_B: keys of `row_keys`.
        position: int32 scalar; index of the token within its completion.
        logits_BV: float32.
        temperature: float32 scalar; 0 takes the most likely token.
        valid_vocab: ids from here on are padding of the embedding and are never drawn.

    Returns:
        token ids int32 [B], and their logprobs float32 [B] under softmax(logits / temperature)
        over the valid ids; at temperature 0 under softmax(logits).
    """
    greedy = temperature == 0
    scaled_BV = logits_BV / jnp.where(greedy, 1.0, temperature)
    allowed_V = jnp.arange(logits_BV.shape[1]) < valid_vocab
    noise_BV = jax.vmap(
        lambda key: jax.random.gumbel(
            jax.random.fold_in(key, position), (logits_BV.shape[1],), jnp.float32
        )
    )(key_B)
    score_BV = scaled_BV + jnp.where(greedy, 0.0, noise_BV)
    token_B = jnp.argmax(jnp.where(allowed_V, score_BV, -jnp.inf), axis=1).astype(jnp.int32)
    scored = token_logprob(scaled_BV, token_B, valid_vocab=valid_vocab)
    return token_B, scored.logprob
