"""The canary's probe: fixed tokens that learner and worker must score alike.

The learner scores the probe when it publishes a version, a rollout worker after it has swapped to
it. The digest proves that the bytes are the same; the probe shows that both sides compute the same
model from them: that no layer is laid out, cut or computed differently. Besides the logprobs there
are two numbers for the hidden states of each sequence after each layer, so that a gap names the
layer where it begins.

Dimension key:
    B: sequences of the probe
    T: tokens
    D: model width
    V: vocabulary
    L: layers
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from kernels.token_logprob.reference import token_logprob
from models.adapter import LAYERS, has_adapter, with_strong_adapter
from models.config import ModelConfig
from models.rope import rotary
from models.transformer import (
    Block,
    Embed,
    Gather,
    Params,
    RMSNorm,
    head_weight,
    logits,
    look_up,
    packed_attend,
)

SEQUENCES, TOKENS = 8, 16
_SEED = 135
MEAN_SHARE = 0.2
"""The mean gap may be this share of the bound of a single one: rounding averages out, where a wrong
layer shifts every token. Healthy bfloat16 sides have a seventh of their largest gap as mean."""
ADAPTER_STRENGTH = 1.0
"""Of the adapters in the second half of the probe. On the demo's model in bfloat16, whose healthy
sides are up to 0.08 nats apart with it as without, an adapter that is left out makes 4 to 6 nats
and 1.6 to 2.6 in the mean; at its own strength, after a few steps, as little as 0.05."""
_SMALLEST = 1e-20
"""Keeps the division by a root mean square finite; far below that of any hidden state."""

ScoreTokens = Callable[[Params, jax.Array, jax.Array], jax.Array]
"""(params, hidden_BTD after the final norm, ids_BT) -> logprob_BT, float32."""


class ProbeScores(NamedTuple):
    """The scores of the probe on one side; the fields may also be partition specs."""

    logprob_BT: Any
    """float32 [B, T - 1]: of every token but the first of its sequence, at temperature 1."""
    fingerprint_LB2: Any
    """float32 [L + 1, B, 2]: of the embedding and of each layer's output, the mean over the
    sequence's tokens of their root mean squares; and the projection of the tokens, each divided
    by its own, on a fixed random direction, which has unit variance for unrelated hidden
    states."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryResult:
    """How much the scores of two sides differ."""

    gap_max: float
    """Nats; nan where a logprob is."""
    gap_mean: float
    bound: float
    passed: bool
    first_layer: str
    """Where a failed comparison first differs: `embedding`, `layers.3`, or `head` where every
    layer agrees (the final norm or the output matrix). Empty where it passed."""

    @property
    def gaps(self) -> str:
        """Both gaps and their bounds, for a message."""
        return (
            f"the logprobs of the probe are up to {self.gap_max:.3g} nats apart and "
            f"{self.gap_mean:.3g} in the mean, where {self.bound:g} and "
            f"{MEAN_SHARE * self.bound:g} pass"
        )


def probe_tokens(valid_vocab: int) -> np.ndarray:
    """int32 [SEQUENCES, TOKENS]: the same ids for the same vocabulary, everywhere."""
    rng = np.random.default_rng(_SEED)
    return rng.integers(0, valid_vocab, (SEQUENCES, TOKENS), dtype=np.int32)


def policy_probe(valid_vocab: int, *, adapter: bool) -> np.ndarray:
    """`probe_tokens`, and of a policy with an adapter the same once more."""
    token_ids = probe_tokens(valid_vocab)
    return np.concatenate([token_ids, token_ids]) if adapter else token_ids


def precision(compute_dtype: jnp.dtype, platform: str) -> str:
    """What matrix products round to, `bfloat16` or `float32`.

    TPUs and GPUs round the operands of a float32 product unless told otherwise; some bits less or
    more, they are no nearer to each other than bfloat16 may be.
    """
    exact = compute_dtype == jnp.float32 and platform == "cpu"
    return "float32" if exact else "bfloat16"


def probe_direction(tokens: int, hidden_size: int) -> np.ndarray:
    """float32 [T, D]: the fixed direction of the fingerprints."""
    rng = np.random.default_rng(_SEED + 1)
    direction = rng.standard_normal((tokens, hidden_size)) / np.sqrt(tokens * hidden_size)
    return direction.astype(np.float32)


def score_probe(
    params: Params,
    config: ModelConfig,
    token_ids_BT: jax.Array,
    direction_TD: jax.typing.ArrayLike,
    *,
    compute_dtype: jnp.dtype,
    operand_dtype: jnp.dtype,
    score_tokens: ScoreTokens,
    product_dtype: jnp.dtype | None = None,
    gather: Gather = lambda name, tree: tree,
    embed: Embed | None = None,
) -> ProbeScores:
    """Scores the probe as `models.transformer.forward` would, with fingerprints of every layer.

    Where the parameters have an adapter, which may move the logprobs by less than rounding does,
    the second half of the sequences is scored with each adapter at ADAPTER_STRENGTH, so that one
    that is left out, or not used, shows.

    Args:
        params: layers stacked or listed.
        token_ids_BT: as `policy_probe` gives them.
        direction_TD: of `probe_direction`.
        operand_dtype: of the attention's products.
        score_tokens: the head; `whole_head` has it on one device.
        compute_dtype, product_dtype, gather, embed: as `forward` takes them.
    """
    score = functools.partial(
        _score_sequences,
        params,
        config,
        direction_TD=direction_TD,
        compute_dtype=compute_dtype,
        operand_dtype=operand_dtype,
        score_tokens=score_tokens,
        product_dtype=product_dtype,
        embed=embed,
    )
    if not has_adapter(params):
        return score(token_ids_BT, gather=gather)

    def strong(name, tree):
        whole = gather(name, tree)
        return with_strong_adapter(whole, ADAPTER_STRENGTH) if name == LAYERS else whole

    plain_BT, strong_BT = jnp.split(token_ids_BT, 2)
    halves = score(plain_BT, gather=gather), score(strong_BT, gather=strong)
    logprobs, fingerprints = zip(*halves, strict=True)
    return ProbeScores(jnp.concatenate(logprobs), jnp.concatenate(fingerprints, axis=1))


def _score_sequences(
    params: Params,
    config: ModelConfig,
    token_ids_BT: jax.Array,
    *,
    direction_TD: jax.typing.ArrayLike,
    compute_dtype: jnp.dtype,
    operand_dtype: jnp.dtype,
    score_tokens: ScoreTokens,
    product_dtype: jnp.dtype | None,
    gather: Gather,
    embed: Embed | None,
) -> ProbeScores:
    position_BT = jnp.broadcast_to(jnp.arange(token_ids_BT.shape[1]), token_ids_BT.shape)
    attend = packed_attend(jnp.ones_like(token_ids_BT), operand_dtype=operand_dtype)
    cos_sin = rotary(position_BT, config)
    if embed is None:
        x_BTD = look_up(gather("embed_tokens", params["embed_tokens"]), token_ids_BT)
    else:
        x_BTD = embed(params["embed_tokens"], token_ids_BT)
    x_BTD = x_BTD.astype(compute_dtype)
    first_B2 = fingerprint(x_BTD, direction_TD)

    def layer(x_BTD, layer_params):
        block = Block(config, product_dtype)
        tree = {"params": gather("layers", layer_params)}
        x_BTD, _ = block.apply(tree, x_BTD, cos_sin, attend, None)
        return x_BTD, fingerprint(x_BTD, direction_TD)

    if isinstance(params["layers"], list):
        later = []
        for layer_params in params["layers"]:
            x_BTD, layer_B2 = layer(x_BTD, layer_params)
            later.append(layer_B2)
        later_LB2 = jnp.stack(later)
    else:
        x_BTD, later_LB2 = jax.lax.scan(layer, x_BTD, params["layers"])
    norm = {"params": gather("norm", params["norm"])}
    hidden_BTD = cast(jax.Array, RMSNorm(config.rms_norm_eps).apply(norm, x_BTD))
    logprob_BT = score_tokens(params, hidden_BTD[:, :-1], token_ids_BT[:, 1:])
    return ProbeScores(logprob_BT, jnp.concatenate([first_B2[None], later_LB2]))


def fingerprint(x_BTD: jax.Array, direction_TD: jax.typing.ArrayLike) -> jax.Array:
    """float32 [B, 2]: as ProbeScores has it."""
    x_BTD = x_BTD.astype(jnp.float32)
    rms_BT = jnp.sqrt(jnp.mean(x_BTD * x_BTD, axis=-1))
    unit_BTD = x_BTD / jnp.maximum(rms_BT, _SMALLEST)[..., None]
    projection_B = jnp.sum(unit_BTD * direction_TD, axis=(1, 2))
    return jnp.stack([rms_BT.mean(axis=1), projection_B], axis=-1)


def whole_head(valid_vocab: int | None) -> ScoreTokens:
    """The head that has all logits at once, over the ids below valid_vocab."""

    def score(params, hidden_BTD, ids_BT):
        logits_BTV = logits(hidden_BTD, head_weight(params))
        return token_logprob(logits_BTV, ids_BT, valid_vocab=valid_vocab).logprob

    return score


def compare(
    published: ProbeScores, live: ProbeScores, *, bound: float, tolerance: float
) -> CanaryResult:
    """Decides by the logprobs; the fingerprints say where a gap begins.

    Args:
        published, live: numpy arrays of the two sides.
        bound: largest gap of a logprob that passes, in nats; of their mean it is MEAN_SHARE of it.
        tolerance: largest difference of a fingerprint that is not called one: relative for the
            root mean square, absolute for the projection.
    """
    gap_BT = np.abs(np.asarray(published.logprob_BT) - np.asarray(live.logprob_BT))
    passed = bool(gap_BT.max() <= bound and gap_BT.mean() <= MEAN_SHARE * bound)  # a nan is not
    return CanaryResult(
        gap_max=float(gap_BT.max()),
        gap_mean=float(gap_BT.mean()),
        bound=bound,
        passed=passed,
        first_layer="" if passed else _first_difference(published, live, tolerance),
    )


def fingerprint_gaps(published: ProbeScores, live: ProbeScores) -> np.ndarray:
    """float32 [L + 1]: the largest difference of each layer's fingerprints, as `compare` has it."""
    ours_LB2, theirs_LB2 = np.asarray(published.fingerprint_LB2), np.asarray(live.fingerprint_LB2)
    gap_LB2 = np.abs(ours_LB2 - theirs_LB2)
    gap_LB2[..., 0] /= np.maximum(np.abs(ours_LB2[..., 0]), _SMALLEST)
    return gap_LB2.max(axis=(1, 2))


def _first_difference(published: ProbeScores, live: ProbeScores, tolerance: float) -> str:
    within_L = fingerprint_gaps(published, live) <= tolerance
    if within_L.all():
        return "head"
    first = int(np.argmin(within_L))
    return "embedding" if first == 0 else f"layers.{first - 1}"
