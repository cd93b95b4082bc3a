"""Prompts in, completions out: one prefill per prompt, then a jitted loop over all rows.

Dimension key:
    P: prompts in the batch
    G: completions per prompt
    B: rows (B = P G, a prompt's rows adjacent)
    T: prompt slots, padded on the left
    N: most new tokens
    S: cache slots
    V: vocabulary
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.transformer import Params, forward, head_weight, logits
from rollout_worker.kv_cache import LayerCache, decode_attend, grow_and_fork, prefill_attend
from rollout_worker.sampling import row_keys, sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """What is fixed for the life of an engine: every field is a constant of the programs."""

    config: ModelConfig
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    """A row ends with any of these, which it keeps."""
    pad_id: int
    """Fills prompts on the left and ended rows on the right; never read back."""
    valid_vocab: int
    compute_dtype: jnp.dtype
    attention_dtype: jnp.dtype


class Prefilled(NamedTuple):
    """What decoding needs of the prompts; leading axis P."""

    logits_PV: jax.Array
    """float32: of the first new token."""
    pad_P: jax.Array
    cache: list[LayerCache]


class RowInputs(NamedTuple):
    """Identity of every row, and which rows are only there to fill the batch."""

    prompt_id_B: jax.Array
    epoch_B: jax.Array
    sample_index_B: jax.Array
    filler_B: jax.Array


class DecodeState(NamedTuple):
    """Everything that changes from one new token to the next."""

    count: jax.Array
    """int32 scalar: tokens drawn so far."""
    token_B: jax.Array
    done_B: jax.Array
    length_B: jax.Array
    """int32: tokens of the completion, the stop token included."""
    stopped_B: jax.Array
    """bool: ended by a stop id."""
    tokens_BN: jax.Array
    logprobs_BN: jax.Array
    cache: list[LayerCache]


def prefill(params: Params, prompt_PT: jax.Array, length_P: jax.Array, spec: DecodeSpec):
    """Runs the prompts once; the head is applied to the last position only.

    Args:
        prompt_PT: int32, padded on the left.
        length_P: int32 >= 1: real tokens of every prompt.
    """
    T = prompt_PT.shape[1]
    pad_P = T - length_P
    position_PT = jnp.maximum(jnp.arange(T)[None] - pad_P[:, None], 0)
    hidden_PTD, cache = forward(
        params,
        spec.config,
        prompt_PT,
        position_PT,
        prefill_attend(pad_P, T, operand_dtype=spec.attention_dtype),
        compute_dtype=spec.compute_dtype,
    )
    return Prefilled(logits(hidden_PTD[:, -1], head_weight(params)), pad_P, cache)


def record(state: DecodeState, logits_BV, keys_B, temperature, spec: DecodeSpec) -> DecodeState:
    """Draws the next token of every row and writes it down where the row has not ended."""
    token_B, logprob_B = sample(
        keys_B, state.count, logits_BV, temperature=temperature, valid_vocab=spec.valid_vocab
    )
    live_B = ~state.done_B
    token_B = jnp.where(live_B, token_B, spec.pad_id)
    stop_B = live_B & jnp.isin(token_B, jnp.asarray(spec.stop_ids, jnp.int32))
    column = partial(jax.lax.dynamic_update_slice_in_dim, start_index=state.count, axis=1)
    return state._replace(
        count=state.count + 1,
        token_B=token_B,
        done_B=state.done_B | stop_B,
        length_B=state.length_B + live_B,
        stopped_B=state.stopped_B | stop_B,
        tokens_BN=column(state.tokens_BN, token_B[:, None]),
        logprobs_BN=column(state.logprobs_BN, jnp.where(live_B, logprob_B, 0.0)[:, None]),
    )


def begin(
    prefilled: Prefilled,
    rows: RowInputs,
    base_key: jax.Array,
    temperature: jax.Array,
    spec: DecodeSpec,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Forks every prompt into its rows and draws their first token.

    Returns:
        the state, the rows' keys, and pad_B.
    """
    P = prefilled.pad_P.shape[0]
    B = rows.prompt_id_B.shape[0]
    N = spec.max_new_tokens
    S = prefilled.cache[0].key_BSKH.shape[1] + N
    keys_B = row_keys(base_key, rows.prompt_id_B, rows.epoch_B, rows.sample_index_B)
    state = DecodeState(
        count=jnp.int32(0),
        token_B=jnp.full((B,), spec.pad_id, jnp.int32),
        done_B=rows.filler_B,
        length_B=jnp.zeros((B,), jnp.int32),
        stopped_B=jnp.zeros((B,), bool),
        tokens_BN=jnp.full((B, N), spec.pad_id, jnp.int32),
        logprobs_BN=jnp.zeros((B, N), jnp.float32),
        cache=grow_and_fork(prefilled.cache, S, B // P),
    )
    logits_BV = jnp.repeat(prefilled.logits_PV, B // P, axis=0)
    pad_B = jnp.repeat(prefilled.pad_P, B // P)
    return record(state, logits_BV, keys_B, temperature, spec), keys_B, pad_B


def advance(params: Params, state: DecodeState, keys_B, pad_B, temperature, spec: DecodeSpec):
    """Runs the last token of every row through the model and draws the next."""
    S = state.cache[0].key_BSKH.shape[1]
    slot = S - spec.max_new_tokens + state.count - 1
    hidden_B1D, cache = forward(
        params,
        spec.config,
        state.token_B[:, None],
        (slot - pad_B)[:, None],
        decode_attend(pad_B, slot, operand_dtype=spec.attention_dtype),
        compute_dtype=spec.compute_dtype,
        cache=state.cache,
    )
    logits_BV = logits(hidden_B1D[:, 0], head_weight(params))
    return record(state._replace(cache=cache), logits_BV, keys_B, temperature, spec)


def unfinished(state: DecodeState, spec: DecodeSpec) -> jax.Array:
    """bool scalar: some row has neither ended nor reached its last token."""
    return ~jnp.all(state.done_B) & (state.count < spec.max_new_tokens)


class Completions(NamedTuple):
    """Host arrays of one decoded batch; token and logprob rows are valid up to their length."""

    tokens_BN: np.ndarray
    logprobs_BN: np.ndarray
    length_B: np.ndarray
    stopped_B: np.ndarray
    steps: int
    """Tokens drawn by the longest row."""


def decode_while(params, prefilled, rows, base_key, temperature, *, spec: DecodeSpec):
    """The whole decode as one program: no host in the loop."""
    state, keys_B, pad_B = begin(prefilled, rows, base_key, temperature, spec)
    state = jax.lax.while_loop(
        lambda state: unfinished(state, spec),
        lambda state: advance(params, state, keys_B, pad_B, temperature, spec),
        state,
    )
    return state._replace(cache=[])


def pad_left(prompts: list[np.ndarray], T: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Stacks prompts of at most T tokens into int32 [P, T], with their lengths int32 [P]."""
    padded_PT = np.full((len(prompts), T), pad_id, np.int32)
    for row, prompt in zip(padded_PT, prompts, strict=True):
        row[T - len(prompt) :] = prompt
    return padded_PT, np.array([len(prompt) for prompt in prompts], np.int32)
