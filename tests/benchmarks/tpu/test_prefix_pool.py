"""The prefix pool in a segment that is compiled for a TPU: rows leave and enter it in place."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from benchmarks.compiled_program import program_sizes
from benchmarks.decode.engine_passes import decode_spec
from benchmarks.decode.model_shapes import SHAPES
from benchmarks.decode.variants import Variant
from driver.chip_plan.published_models import with_layers
from driver.chip_plan.topology import devices_of, parse_topology
from rollout_worker.engine.decode_programs import DecodePrograms
from rollout_worker.engine.engine_limits import EngineLimits, geometry_of
from rollout_worker.engine.layout import Layout, make_mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
    ),
]


def test_a_segment_takes_no_memory_for_the_pool(tpu_command):
    tpu_command("decode_segment")
    devices = devices_of(parse_topology("v6e:1x1"), 1)
    model = dataclasses.replace(with_layers(SHAPES["qwen2.5-3b"], 2), vocab_size=2048)
    layout = Layout(model, make_mesh(devices, 1, 1), np.dtype("bfloat16"))
    variant = Variant(compute_dtype="bfloat16", attention="pallas")
    spec = decode_spec(layout, variant, slots=16)
    limits = EngineLimits(
        max_prompt_tokens=1000,
        max_new_tokens=500,
        cache_tokens=1500,
        goes_on=True,
        parked=16,
        prefixes=8,
    )
    programs = DecodePrograms(spec, geometry_of(spec, limits))
    temp = program_sizes(programs.compile_segment(programs.geometry.widths[-1]))["temp_bytes"]
    assert programs.pool_bytes() > 70e6 > 4 * temp
