"""What prefill takes beside weights and pool, with whole scores and as a worker attends.

    python -m benchmarks.tpu.prefill_memory
    python -m benchmarks.tpu.prefill_memory --platform cpu --tokens 2048 --tokens 8192

The engine's own program for a later chunk of a long prompt, in bfloat16, compiled for one chip of a
TPU v6e, which need not be there, or for a CPU. The model is two layers of Qwen2.5-3B, of which the
last needs no attention, and next to no vocabulary. Nothing is executed, so there are no times.
"""

import argparse
import dataclasses
import os
import sys

from driver.chip_plan.chips import LIBTPU_ENVIRONMENT

os.environ.update(LIBTPU_ENVIRONMENT)  # libtpu reads it when it starts

import jax
import numpy as np

from benchmarks.compiled_program import program_sizes
from benchmarks.decode.engine_passes import decode_spec
from benchmarks.decode.model_shapes import SHAPES
from benchmarks.decode.variants import Variant
from driver.chip_plan.published_models import with_layers
from driver.chip_plan.topology import devices_of, parse_topology
from kernels.packed_attention.ops import WHOLE_SCORES, AttentionPlan, plan_attention
from rollout_worker.engine.decode_programs import DecodePrograms
from rollout_worker.engine.engine_limits import EngineLimits, geometry_of
from rollout_worker.engine.layout import Layout, make_mesh

VOCABULARY = 2048
TOKENS = (2048, 8192, 32767)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    on_tpu = arguments.platform == "tpu"
    device = devices_of(parse_topology("v6e:1x1"), 1)[0] if on_tpu else jax.devices("cpu")[0]
    auto = plan_attention("auto", device.platform)
    print(f"{arguments.platform}; heap in MB of one later chunk; `auto` is {auto}")
    print(f"{'prompt':>8}{'chunk':>8}{'whole scores':>14}{'auto':>8}", flush=True)
    for tokens in arguments.tokens or TOKENS:
        for chunk in arguments.chunk or (512,):
            whole, found = (
                prefill_bytes([device], plan, tokens=tokens, chunk=chunk) / 1e6
                for plan in (WHOLE_SCORES, auto)
            )
            print(f"{tokens:>8}{chunk:>8}{whole:>14.0f}{found:>8.0f}", flush=True)
    return 0


def prefill_bytes(
    devices: list[jax.Device],
    plan: AttentionPlan,
    *,
    tokens: int,
    chunk: int,
    tensor: int = 1,
    later: bool = True,
) -> int:
    """Heap of one device in bytes, for one call of as many chunks as 512 tokens hold.

    Args:
        devices: any number of lanes over `tensor` of them each.
        tokens: of the longest prompt.
        chunk: a size that the engine has.
    """
    model = dataclasses.replace(with_layers(SHAPES["qwen2.5-3b"], 2), vocab_size=VOCABULARY)
    lanes = len(devices) // tensor
    layout = Layout(model, make_mesh(devices, lanes, tensor), np.dtype("bfloat16"))
    spec = decode_spec(layout, Variant(), slots=4 * lanes)
    spec = dataclasses.replace(spec, prefill_attention=plan)
    limits = EngineLimits(
        max_prompt_tokens=tokens,
        max_new_tokens=1,
        cache_tokens=tokens + 1,
        prefill_tokens=max(512, chunk),
    )
    programs = DecodePrograms(spec, geometry_of(spec, limits))
    return program_sizes(programs.compile_prefill(chunk, later=later))["temp_bytes"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu.prefill_memory",
        description="What prefill of long prompts takes beside weights and pool.",
    )
    parser.add_argument("--platform", choices=("tpu", "cpu"), default="tpu")
    parser.add_argument(
        "--tokens", type=int, action="append", help=f"of the longest prompt ({TOKENS})"
    )
    parser.add_argument(
        "--chunk", type=int, action="append", choices=(32, 64, 128, 256, 512), help="(512)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
