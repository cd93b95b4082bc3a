"""How far a worker's logprobs are from the learner's under an adapter: merged, and beside its base.

Usage: `python -m benchmarks.adapter_gap --model deploy/demo/model`

The learner's forward pass is the one of an update; the worker's has its dtypes and sums. Adapters
are drawn: A as it starts, B normal with the sizes given (Adam moves B by about its learning rate a
step). Gaps are in nats, over every token of a text.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.adapter import AdapterShape, adapter_shape, init_adapter, join, merge
from models.config import ModelConfig
from models.files.checkpoint import load_model
from models.load_tokenizer import load_tokenizer
from models.transformer import LORA_B, Params, forward, head_weight, logits, packed_attend

TEXT = pathlib.Path(__file__).parents[1] / "README.md"


def logprobs(
    params: Params, config: ModelConfig, ids_T: np.ndarray, compute: str, product: str | None
) -> np.ndarray:
    """float32 [T - 1]: of every token of a text but its first."""
    ids_BT = jnp.asarray(ids_T)[None]
    wide = jnp.dtype("float32" if product else compute)

    @jax.jit
    def run(params):
        hidden_BTD, _ = forward(
            params,
            config,
            ids_BT,
            jnp.arange(ids_BT.shape[1])[None],
            packed_attend(jnp.ones_like(ids_BT), operand_dtype=wide),
            compute_dtype=jnp.dtype(compute),
            product_dtype=None if product is None else jnp.dtype(product),
        )
        log_p = jax.nn.log_softmax(logits(hidden_BTD[0, :-1], head_weight(params)))
        return jnp.take_along_axis(log_p, ids_BT[0, 1:, None], axis=1)[:, 0]

    return np.asarray(run(params))


def drawn(shape: AdapterShape, config: ModelConfig, size: float) -> Params:
    """An adapter whose B, scale included, has this root mean square."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        return np.float32(rng.normal(0, size, leaf.shape)) if path[-1].key == LORA_B else leaf

    return jax.tree_util.tree_map_with_path(draw, init_adapter(shape, config, 0))


def measure(base: Params, config: ModelConfig, ids_T: np.ndarray, rank: int, size: float) -> str:
    """One line of the table: what the adapter changes at all, the gaps of both ways, and that of
    float32 arithmetic between merged bfloat16 weights and the adapter beside its base.
    """
    shape = adapter_shape(("*_proj",), rank=rank, alpha=rank, config=config)
    adapter = drawn(shape, config, size)
    cast = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.bfloat16), tree)
    of = lambda params, product: logprobs(params, config, ids_T, "bfloat16", product)
    learner = of(join(cast(base), cast(adapter)), None)
    beside = of(join(cast(base), cast(adapter)), "float32")
    rounded = cast(merge(join(cast(base), adapter), 1.0))
    merged = of(rounded, "float32")
    exact = lambda tree: logprobs(tree, config, ids_T, "float32", None)
    wide = exact(join(cast(base), adapter))
    gaps = (wide - exact(cast(base)), beside - learner, merged - learner, exact(rounded) - wide)
    shown = [f"{np.abs(gap).mean():9.5f} {np.abs(gap).max():8.4f}" for gap in gaps]
    return f"{size:8.0e} | {' | '.join(shown)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m benchmarks.adapter_gap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="HF folder or .gguf file")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="length of the text")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2])
    given = parser.parse_args(arguments)
    loaded, tokenizer = load_model(given.model), load_tokenizer(given.model)
    message = [{"role": "user", "content": TEXT.read_text(encoding="utf-8")}]
    ids_T = np.asarray(tokenizer.encode_chat(message)[: given.tokens], np.int32)
    sys.stdout.write(
        "bfloat16, mean and largest |gap| in nats\n"
        "  size B | what it changes    | beside the base    | merged             "
        "| lost by merging alone\n"
    )
    for size in given.sizes:
        line = measure(loaded.params, loaded.config, ids_T, given.rank, size)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
