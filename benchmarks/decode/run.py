"""Answers a question: makes the weights and the engines, and lets them run in turn."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.decode.batching import compare_batching
from benchmarks.decode.engine_passes import Bench, interleaved
from benchmarks.decode.group_prefill import group_prefill
from benchmarks.decode.hf_transformers import compare_with_hf
from benchmarks.decode.settings import Question
from benchmarks.decode.token_step import StepBytes, copy_bytes_per_s, step_report
from benchmarks.decode.variants import prompts
from benchmarks.decode.weights import export, random_params, stored_params
from benchmarks.timing import versions
from models.transformer import Params
from rollout_worker.engine.layout import Layout

Progress = Callable[[str], None]


def measure(question: Question, layout: Layout, progress: Progress) -> dict[str, Any]:
    """Measures what was asked.

    Returns:
        the report: plain values, milliseconds and bytes of one device.

    Raises:
        NothingToTime: if no token step could be timed.
    """
    device = layout.mesh.devices.flat[0]
    progress("timing copies")
    copy = copy_bytes_per_s(device)
    progress(f"{copy['bytes_per_s'] / 1e9:.1f} GB/s; making the weights")
    if question.path is None:
        params = random_params(layout, question.seed)
    else:
        params = stored_params(layout, question.path)
    found: dict[str, Any] = {
        "environment": {
            "versions": versions(),
            "device": device.device_kind,
            "platform": device.platform,
            "devices": layout.mesh.size,
            "lanes": layout.mesh.shape["data"],
            "tensor": layout.tensor,
            "copy": copy,
        },
        "question": dataclasses.asdict(question),
        "runs": [],
    }
    for slots in question.slots:
        found["runs"] += _at(question, layout, params, slots, copy["bytes_per_s"], progress)
    if question.against is not None:
        found["against"] = [
            _against(question, layout, params, slots, progress) for slots in question.slots
        ]
    return found


def _at(question, layout, params, slots: int, copy_rate: float, progress) -> list[dict[str, Any]]:
    """The runs with so many slots."""
    if question.is_steady:
        return _token_steps(question, layout, params, slots, copy_rate, progress)
    runs = []
    for name in question.variants:
        bench = _bench(question, layout, params, name, slots)
        if question.lengths is not None:
            progress(f"{name}, {slots} slots: {question.requests} requests both ways")
            count = question.requests
            prompt_QT = prompts(count, question.prompt, question.model.vocab_size, question.seed)
            lengths = question.lengths.draw(count, question.seed)
            report = compare_batching(bench, prompt_QT, lengths, question.repeat)
            runs.append({"name": name, "what": "mix", **report})
        if question.group is not None:
            progress(f"{name}, {slots} slots: prefill of a group of {question.group}")
            prompt_T = prompts(1, question.prompt, question.model.vocab_size, question.seed)[0]
            report = group_prefill(bench, prompt_T, question.group, question.repeat)
            runs.append({"name": name, "what": "group", "slots": slots, **report})
    return runs


def _token_steps(question, layout, params, slots, copy_rate, progress) -> list[dict[str, Any]]:
    """Every variant with so many slots, in turn."""
    prompt_QT = prompts(slots, question.prompt, question.model.vocab_size, question.seed)
    benches = {}
    for name in question.variants:
        progress(f"{name}, {slots} slots: compiling and a first pass")
        bench = benches[name] = _bench(question, layout, params, name, slots)
        bench.run(bench.requests(prompt_QT, [question.new] * slots))
    progress(f"{slots} slots: {question.repeat} passes of each")
    runs = [
        lambda bench=bench: bench.run(bench.requests(prompt_QT, [question.new] * slots))
        for bench in benches.values()
    ]
    passes = dict(zip(benches, interleaved(runs, question.repeat), strict=True))
    reports = []
    for name, bench in benches.items():
        must_move = StepBytes(layout, bench.engine.spec.cache_dtype)
        report = step_report(bench, passes[name], question.prompt, must_move, copy_rate)
        again = sum(one.compilations for one in passes[name])
        reports.append(
            {"name": name, "what": "step", **report, "compilations_after_first_pass": again}
            | {"late_programs": bench.latest_programs(again)}
        )
    for report in reports:
        report["step_ratio"] = report["step_ms"] / reports[0]["step_ms"]
    return reports


def _against(question, layout, params: Params, slots: int, progress) -> dict[str, Any]:
    """The first variant beside transformers."""
    name = next(iter(question.variants))
    progress(f"{slots} slots: {name} against transformers, {question.repeat} batches of each")
    prompt_QT = prompts(slots, question.prompt, question.model.vocab_size, question.seed)
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder) / "model"
        export(layout, params, place)
        bench = _bench(question, layout, params, name, slots)
        report = compare_with_hf(bench, place, prompt_QT, question.new, question.repeat)
    return {"name": name, "slots": slots, **report}


def _bench(question: Question, layout: Layout, params: Params, name: str, slots: int) -> Bench:
    variant = question.variants[name]
    limits = question.limits(variant)
    return Bench(layout, params, variant, limits, slots=slots, seed=question.seed)
