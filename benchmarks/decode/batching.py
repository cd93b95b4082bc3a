"""Completions of unequal lengths: slots that refill themselves, beside static batches.

Static batching submits as many requests as there are slots, waits for the last of them to end and
submits the next ones. It is run by the same engine and the same programs, so that nothing differs
but when a request may enter: what continuous batching gains is what a slot no longer waits.
"""

import statistics
from typing import Any

import numpy as np

from benchmarks.decode.engine_passes import Bench, Pass, interleaved

STATIC, CONTINUOUS = "static", "continuous"


def compare_batching(
    bench: Bench, prompt_QT: np.ndarray, new_tokens: np.ndarray, repeat: int
) -> dict[str, Any]:
    """Decodes the same requests both ways, in turn, after a first pass that compiles.

    Returns:
        Medians of each, their ratio, and how much was compiled after the first pass.
    """
    requests = bench.requests(prompt_QT, new_tokens)
    ways = {
        STATIC: lambda: bench.run(requests, batch=bench.slots),
        CONTINUOUS: lambda: bench.run(requests),
    }
    for way in ways.values():
        way()
    passes = dict(zip(ways, interleaved(list(ways.values()), repeat), strict=True))
    report: dict[str, Any] = {
        "requests": len(requests),
        "slots": bench.slots,
        "completion_tokens": int(new_tokens.sum()),
        "mean_tokens": float(new_tokens.mean()),
        "longest_tokens": int(new_tokens.max()),
    }
    for name, own in passes.items():
        report[name] = {
            "tokens_per_s": statistics.median(one.tokens_per_s for one in own),
            "seconds": statistics.median(one.seconds for one in own),
            "token_steps": own[0].counts.token_steps,
            "prefill_calls": own[0].counts.prefill_calls,
            "segments": own[0].counts.segments,
            "occupancy": statistics.median(one.counts.occupancy for one in own),
        }
    report[CONTINUOUS]["occupancy_until_queue_empty"] = statistics.median(
        occupancy_while_waiting(one, len(requests), bench.slots) for one in passes[CONTINUOUS]
    )
    report["ratio"] = report[CONTINUOUS]["tokens_per_s"] / report[STATIC]["tokens_per_s"]
    report["compilations_after_first_pass"] = sum(
        one.compilations for own in passes.values() for one in own
    )
    late = bench.latest_programs(report["compilations_after_first_pass"])
    return report | {"late_programs": late} | bench.programs_report()


def occupancy_while_waiting(one: Pass, requests: int, slots: int) -> float:
    """Share of the slots' token steps that drew a token while a request was waiting for a slot.

    Up to the end of the segment in which the last one entered, so some of its draining counts.
    """
    for turn in one.turns:
        if requests - turn.finished <= slots:
            return turn.tokens_so_far / turn.slot_steps_so_far
    return one.counts.occupancy
