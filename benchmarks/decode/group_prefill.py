"""What the completions of one prompt cost before their first token, beside a single one."""

import statistics
from typing import Any

import numpy as np

from benchmarks.decode.engine_passes import Bench, interleaved


def group_prefill(bench: Bench, prompt_T: np.ndarray, group: int, repeat: int) -> dict[str, Any]:
    """Time to the first token of a whole group and of one completion, prompt by prompt.

    From both the time of a token step is taken off, as a prompt of a single token has it, whose
    prefill is empty. What remains is the prefill and the copies of its cache into the slots.

    Args:
        prompt_T: int32, at least 2 tokens.
        group: completions, at most as many as there are slots.
    """

    def first_tokens(prompt_T, samples):
        requests = bench.requests(prompt_T[None], [1], samples=samples)
        return lambda: bench.run(requests)

    runs = [
        first_tokens(prompt_T, 1),
        first_tokens(prompt_T, group),
        first_tokens(prompt_T[:1], 1),
    ]
    interleaved(runs, 1)
    single, whole, step = (
        statistics.median(1e3 * one.seconds for one in own) for own in interleaved(runs, repeat)
    )
    return {
        "group": group,
        "prompt_tokens": len(prompt_T),
        "single_ms": single - step,
        "group_ms": whole - step,
        "step_ms": step,
        "ratio": (whole - step) / (single - step),
        "ms_per_completion": (whole - step) / group,
        **bench.programs_report(),
    }
