"""Prefill of a long prompt: memory that does not grow with chunk x cache, on a CPU and a TPU."""

import jax
import pytest

from benchmarks.tpu.prefill_memory import prefill_bytes
from kernels.packed_attention.ops import WHOLE_SCORES, plan_attention
from tests.kernels.tpu_compiler import needs_compiler, run_with_compiler

pytestmark = pytest.mark.slow

QUERY_HEADS, CALL_TOKENS = 16, 512


def of_cpu(plan, tokens, chunk):
    return prefill_bytes(jax.devices()[:1], plan, tokens=tokens, chunk=chunk)


def whole_scores_bytes(tokens):
    """In float32, of all chunks of a call."""
    return 4 * QUERY_HEADS * CALL_TOKENS * tokens


@pytest.mark.parametrize("chunk", [512, 32])
def test_it_grows_with_the_cache_at_most_and_holds_no_whole_scores(chunk):
    auto = plan_attention("auto", "cpu")
    small, large = (of_cpu(auto, tokens, chunk) for tokens in (2048, 8192))
    assert large <= 4 * small
    assert large < whole_scores_bytes(8192) / 2
    assert of_cpu(WHOLE_SCORES, 2048, chunk) > whole_scores_bytes(2048), "what is counted"


COMPILE = """
import jax
from benchmarks.tpu.prefill_memory import prefill_bytes
from driver.chip_plan.topology import devices_of, parse_topology
from kernels.packed_attention.ops import plan_attention

auto = plan_attention("auto", "tpu")
one = devices_of(parse_topology("v6e:1x1"), 1)
eight = devices_of(parse_topology("v6e:2x4"), 8)
"""


@needs_compiler
def test_on_a_tpu_it_is_far_below_the_whole_scores():
    bounds = f"""
found = prefill_bytes(one, auto, tokens=8192, chunk=512)
assert found < {whole_scores_bytes(8192) // 4}, found
"""
    run_with_compiler(COMPILE + bounds, timeout_s=1500)


@needs_compiler
def test_it_compiles_for_lanes_that_are_cut_over_chips():
    """First chunks too, so long that they are not whole on a TPU."""
    programs = """
prefill_bytes(eight, auto, tokens=2000, chunk=512, tensor=2)
prefill_bytes(eight, auto, tokens=2000, chunk=512, tensor=8)
prefill_bytes(eight, auto, tokens=2000, chunk=1024, tensor=2, later=False)
"""
    run_with_compiler(COMPILE + programs, timeout_s=1500)
