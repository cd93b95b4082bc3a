"""Real text for the gradient check: hidden states, head and next tokens of a model.

Dimension key:
    B: sequences, one here
    T: tokens of the text
    N: tokens that have a next one
    D: model width
    V: vocabulary
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.files.checkpoint import load_model
from models.load_tokenizer import load_tokenizer
from models.transformer import forward, head_weight, packed_attend

TEXT = (
    "A farmer has 17 sheep, and all but 9 run away. How many are left? Think step by step. "
    "The phrase 'all but 9' means that 9 sheep stay behind, so the answer is 9. Now the farmer "
    "buys twice as many sheep as are left, which makes 18 more, and sells 5 of them at the market "
    "on Tuesday for 42 dollars each. How many sheep does the farmer have, and how much was earned?"
)


class ModelTokens(NamedTuple):
    """What a model makes of the text; float32."""

    hidden_ND: np.ndarray
    head_VD: np.ndarray
    """The embedding where the head is tied."""
    ids_N: np.ndarray
    """The text's own next tokens."""


def model_tokens(path: str, *, tokens: int) -> ModelTokens:
    """Runs the trunk over real text, in float32.

    Args:
        path: HF folder, .gguf file, or hub id.
        tokens: largest number returned.

    Raises:
        ValueError: if the model or its tokenizer cannot be read.
    """
    text_ids = load_tokenizer(path).encode_chat([{"role": "user", "content": TEXT}])
    text_ids = text_ids[: tokens + 1]
    loaded = load_model(path)
    params = jax.tree.map(jnp.asarray, loaded.params)
    ids_BT = jnp.asarray([text_ids], jnp.int32)

    @jax.jit
    def trunk(params, ids_BT):
        hidden_BTD, _ = forward(
            params,
            loaded.config,
            ids_BT,
            jnp.arange(ids_BT.shape[1])[None],
            packed_attend(jnp.ones_like(ids_BT), operand_dtype=jnp.dtype("float32")),
            compute_dtype=jnp.dtype("float32"),
        )
        return hidden_BTD[0]

    hidden_TD = np.asarray(trunk(params, ids_BT))
    head_VD = np.asarray(head_weight(loaded.params)).astype(np.float32)
    return ModelTokens(hidden_TD[:-1], head_VD, np.array(text_ids[1:]))
