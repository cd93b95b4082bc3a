"""Answers a settings: makes the weights and the engines, and lets them run in turn."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.decode.batching import compare_batching
from benchmarks.decode.engine_passes import Bench, interleaved
from benchmarks.decode.group_prefill import group_prefill
from benchmarks.decode.hf_transformers import compare_with_hf
from benchmarks.decode.random_requests import prompts
from benchmarks.decode.settings import DecodeSettings
from benchmarks.decode.token_step import StepBytes, copy_bytes_per_s, step_report
from benchmarks.decode.weights import export, random_params, stored_params
from benchmarks.report_file import versions
from models.transformer import Params
from rollout_worker.engine.layout import Layout

Progress = Callable[[str], None]


def measure(settings: DecodeSettings, layout: Layout, progress: Progress) -> dict[str, Any]:
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
    if settings.path is None:
        params = random_params(layout, settings.seed)
    else:
        params = stored_params(layout, settings.path)
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
        "question": dataclasses.asdict(settings),
        "runs": [],
    }
    for slots in settings.slots:
        found["runs"] += _at(settings, layout, params, slots, copy["bytes_per_s"], progress)
    if settings.against is not None:
        found["against"] = [
            _against(settings, layout, params, slots, progress) for slots in settings.slots
        ]
    return found


def _at(settings, layout, params, slots: int, copy_rate: float, progress) -> list[dict[str, Any]]:
    """The runs with this number of slots."""
    if settings.is_steady:
        return _token_steps(settings, layout, params, slots, copy_rate, progress)
    runs = []
    for name in settings.variants:
        bench = _bench(settings, layout, params, name, slots)
        if settings.lengths is not None:
            progress(f"{name}, {slots} slots: {settings.requests} requests both ways")
            count = settings.requests
            prompt_QT = prompts(count, settings.prompt, settings.model.vocab_size, settings.seed)
            lengths = settings.lengths.draw(count, settings.seed)
            report = compare_batching(bench, prompt_QT, lengths, settings.repeat)
            runs.append({"name": name, "what": "mix", **report})
        if settings.group is not None:
            progress(f"{name}, {slots} slots: prefill of a group of {settings.group}")
            prompt_T = prompts(1, settings.prompt, settings.model.vocab_size, settings.seed)[0]
            report = group_prefill(bench, prompt_T, settings.group, settings.repeat)
            runs.append({"name": name, "what": "group", "slots": slots, **report})
    return runs


def _token_steps(settings, layout, params, slots, copy_rate, progress) -> list[dict[str, Any]]:
    """Every variant with this number of slots, in turn."""
    prompt_QT = prompts(slots, settings.prompt, settings.model.vocab_size, settings.seed)
    benches = {}
    for name in settings.variants:
        progress(f"{name}, {slots} slots: compiling and a first pass")
        bench = benches[name] = _bench(settings, layout, params, name, slots)
        bench.run(bench.requests(prompt_QT, [settings.new] * slots))
    progress(f"{slots} slots: {settings.repeat} passes of each")
    runs = [
        lambda bench=bench: bench.run(bench.requests(prompt_QT, [settings.new] * slots))
        for bench in benches.values()
    ]
    passes = dict(zip(benches, interleaved(runs, settings.repeat), strict=True))
    reports = []
    for name, bench in benches.items():
        must_move = StepBytes(layout, bench.engine.spec.cache_dtype)
        report = step_report(bench, passes[name], settings.prompt, must_move, copy_rate)
        again = sum(one.compilations for one in passes[name])
        reports.append(
            {"name": name, "what": "step", **report, "compilations_after_first_pass": again}
            | {"late_programs": bench.latest_programs(again)}
        )
    for report in reports:
        report["step_ratio"] = report["step_ms"] / reports[0]["step_ms"]
    return reports


def _against(settings, layout, params: Params, slots: int, progress) -> dict[str, Any]:
    """The first variant beside transformers."""
    name = next(iter(settings.variants))
    progress(f"{slots} slots: {name} against transformers, {settings.repeat} batches of each")
    prompt_QT = prompts(slots, settings.prompt, settings.model.vocab_size, settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model"
        export(layout, params, path)
        bench = _bench(settings, layout, params, name, slots)
        report = compare_with_hf(bench, path, prompt_QT, settings.new, settings.repeat)
    return {"name": name, "slots": slots, **report}


def _bench(
    settings: DecodeSettings, layout: Layout, params: Params, name: str, slots: int
) -> Bench:
    variant = settings.variants[name]
    limits = settings.limits(variant)
    return Bench(layout, params, variant, limits, slots=slots, seed=settings.seed)
