"""What each value of `learner.remat` takes: the layers of a model, forward and backward.

    python -m benchmarks.tpu.remat_memory
    python -m benchmarks.tpu.remat_memory --compile --platform cpu --tokens 2048

What is kept follows from the shapes alone. With --compile it compiles for one chip of a TPU v6e,
which need not be there, or for a CPU. One row of tokens, the layers of Qwen2.5-3B, next to no
vocabulary; weights and sums of gradients are arguments, and not counted. Nothing is executed, so
there are no times.
"""

import argparse
import dataclasses
import os
import sys

from driver.chip_plan.chips import LIBTPU_ENVIRONMENT

os.environ.update(LIBTPU_ENVIRONMENT)  # libtpu reads it when it starts

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled_program import accessed_bytes, program_sizes
from benchmarks.decode.model_shapes import SHAPES
from driver.chip_plan.topology import devices_of, parse_topology
from kernels.packed_attention.ops import plan_attention
from models.config import ModelConfig
from models.layer_scan import Backward, Remat, kept_bytes
from models.rope import rotary
from models.transformer import Block, abstract_params, forward, packed_attend

VOCABULARY = 256
COMPILED_HEADER = f"{'beside GB':>11}{'host GB':>9}{'TFLOP':>8}{'accessed GB':>13}"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    model = dataclasses.replace(
        SHAPES["qwen2.5-3b"], vocab_size=VOCABULARY, num_layers=arguments.layers
    )
    on_tpu = arguments.platform == "tpu"
    device = devices_of(parse_topology("v6e:2x4"), 1)[0] if on_tpu else jax.devices("cpu")[0]
    print(f"{arguments.layers} layers, one row of {arguments.tokens} tokens, {arguments.platform}")
    print(f"{'remat':<11}{'kept GB':>8}" + COMPILED_HEADER * arguments.compile, flush=True)
    for remat in arguments.remat or list(Remat):
        kept = arguments.layers * layer_kept_bytes(model, arguments.tokens, remat, device.platform)
        line = f"{remat:<11}{kept / 1e9:>8.2f}"
        if arguments.compile:
            line += _figures(compile_layers(model, arguments.tokens, remat, device))
        print(line, flush=True)
    return 0


def layer_kept_bytes(model: ModelConfig, tokens: int, remat: Remat, platform: str) -> int:
    """What is kept of one layer for the backward pass, in bytes."""
    plan, dtype = plan_attention("auto", platform), jnp.dtype("bfloat16")
    weights = abstract_params(model)["layers"]
    found = 0

    def run(x_BTD, row_BT):
        nonlocal found
        attend = packed_attend(row_BT, operand_dtype=dtype, plan=plan)
        cos_sin = rotary(row_BT, model)
        layer = lambda x, weights: Block(model).apply(
            {"params": weights}, x, cos_sin, attend, None
        )[0]
        backward = Backward(Remat(remat), weights, lambda grads: grads)
        found = kept_bytes(layer, x_BTD, weights, _narrow, backward)
        return x_BTD

    shape = jax.ShapeDtypeStruct
    jax.eval_shape(run, shape((1, tokens, model.hidden_size), dtype), shape((1, tokens), jnp.int32))
    return found


def _narrow(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


def compile_layers(
    model: ModelConfig, tokens: int, remat: Remat, device: jax.Device
) -> jax.stages.Compiled:
    """The gradient of a sum of the hidden states, added to sums of gradients."""
    plan = plan_attention("auto", device.platform)
    at = SingleDeviceSharding(device)
    struct = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
    params = jax.tree.map(struct, abstract_params(model))
    row = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=at)

    def summed(so_far, params, ids, segments):
        attend = packed_attend(segments, operand_dtype=jnp.bfloat16, plan=plan)
        hidden_BTD, _ = forward(
            params,
            model,
            ids,
            jnp.arange(tokens)[None],
            attend,
            compute_dtype=jnp.dtype("bfloat16"),
            gather=lambda _, tree: _narrow(tree),
            backward=Backward(Remat(remat), so_far, lambda grads: grads),
        )
        return hidden_BTD.astype(jnp.float32).sum()

    added = jax.jit(jax.grad(summed), donate_argnums=0)
    return added.lower(params["layers"], params, row, row).compile()


def _figures(compiled: jax.stages.Compiled) -> str:
    """Memory beside the arguments, at most; work of one layer, as a loop's body is counted once."""
    sizes, stats = program_sizes(compiled), compiled.memory_analysis()
    # XLA:CPU's peak lacks the heap.
    beside = max(sizes["peak_bytes"] - sizes["argument_bytes"], 0) or sizes["temp_bytes"]
    host = 0 if stats is None else stats.host_temp_size_in_bytes
    flops = (compiled.cost_analysis() or {}).get("flops", 0)
    moved = accessed_bytes(compiled)
    return f"{beside / 1e9:>11.2f}{host / 1e9:>9.2f}{flops / 1e12:>8.2f}{moved / 1e9:>13.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu.remat_memory",
        description="What each value of learner.remat takes for a model's layers.",
    )
    parser.add_argument("--platform", choices=("tpu", "cpu"), default="tpu")
    parser.add_argument("--compile", action="store_true", help="ask the compiler as well; minutes")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=8192, help="of the row (%(default)s)")
    parser.add_argument("--remat", action="append", choices=list(Remat), help="this one only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
