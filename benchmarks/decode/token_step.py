"""A token step with all slots busy: its time, and the time in which its bytes could move.

In a token step every weight must be read once, and of the cache the columns in use.
The share of the roofline is the time in which the device can move as many bytes, by a copy that
is timed in the same run, over the time of the step.
"""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compiled_program import memory_in_use
from benchmarks.decode.engine_passes import Bench, Pass, full_turns
from benchmarks.decode.weights import weight_bytes
from rollout_worker.engine.layout import Layout

COPY_BYTES = {"cpu": 2**28}
"""Far beyond any cache; 1 GiB where the platform is not named."""
COPIES = 11


def copy_bytes_per_s(device: jax.Device) -> dict[str, float]:
    """How fast a device reads a large array and writes it back, by the median.

    In place, so that no page is touched for the first time within a timed copy.
    """
    size = COPY_BYTES.get(device.platform, 2**30)
    array = jax.device_put(np.zeros(size // 4, np.float32), device)
    step = jax.jit(lambda array: array + 1, donate_argnums=0)
    seconds = []
    for _ in range(COPIES + 1):
        started = time.perf_counter()
        array = jax.block_until_ready(step(array))
        seconds.append(time.perf_counter() - started)
    return {"array_bytes": size, "bytes_per_s": 2 * size / statistics.median(seconds[1:])}


class NothingToTime(Exception):
    """The requests were over before a token step could be timed."""


class StepBytes:
    """What a device must move in a token step."""

    def __init__(self, layout: Layout, cache_dtype: jnp.dtype):
        config = layout.config
        value = cache_dtype.itemsize
        heads = config.num_kv_heads // layout.tensor
        self.weights = weight_bytes(layout)
        self.per_column = 2 * config.num_layers * heads * config.head_dim * value
        self._lanes = layout.mesh.shape["data"]

    def of(self, columns: float) -> float:
        """Args:
        columns: of the cache in use, in all slots of all lanes together.
        """
        return self.weights + columns / self._lanes * self.per_column


def step_report(
    bench: Bench, passes: list[Pass], prompt_tokens: int, must_move: StepBytes, copy_rate: float
) -> dict[str, Any]:
    """Medians over the full turns of all passes.

    Raises:
        NothingToTime: if there is no such turn.
    """
    milliseconds, floors, columns = [], [], []
    for one in passes:
        for turn in full_turns(one, bench.slots):
            steps = turn.token_steps
            # Every slot has its prompt, and its completion up to the token that is being run.
            drawn = turn.tokens_so_far - turn.tokens + bench.slots * (steps - 1) / 2
            columns.append(bench.slots * prompt_tokens + drawn)
            milliseconds.append(1e3 * turn.seconds / steps)
            floors.append(1e3 * must_move.of(columns[-1]) / copy_rate)
    if not milliseconds:
        raise NothingToTime(
            "no segment ran with all slots busy and nothing else to do: raise --new, or lower "
            "--segment-tokens"
        )
    shares = [floor / ms for floor, ms in zip(floors, milliseconds, strict=True)]
    device = bench.engine.spec.layout.mesh.devices.flat[0]
    median = functools.partial(_median_of, passes)
    return {
        "slots": bench.slots,
        "turns": len(milliseconds),
        "step_ms": statistics.median(milliseconds),
        "step_p90_ms": float(np.percentile(milliseconds, 90)),
        "roofline_ms": statistics.median(floors),
        "roofline_share": statistics.median(shares),
        "step_bytes": round(must_move.of(statistics.median(columns))),
        "weight_bytes": must_move.weights,
        "tokens_per_s": median(lambda one: one.tokens_per_s),
        "prefill_ms": median(lambda one: 1e3 * one.prefill_s),
        "occupancy": median(lambda one: one.counts.occupancy),
        "allocator": memory_in_use(device),
        **bench.programs_report(),
    }


def _median_of(passes: list[Pass], what) -> float:
    return statistics.median(what(one) for one in passes)
