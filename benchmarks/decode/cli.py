"""Times the decode engine: token steps, unequal lengths, groups, and transformers beside it.

    python -m rollout_worker.bench --shape qwen2.5-3b --random-weights --slots 16,128 \\
        --compare loop=python,attention=f32 --json decode.json
    python -m rollout_worker.bench --shape demo --random-weights --slots 128 \\
        --lengths lognormal:mean=220,max=1024 --requests 512
    python -m rollout_worker.bench --shape smollm2 --random-weights --group 16 --prompt 1024
    python -m rollout_worker.bench --shape smollm2 --random-weights --against hf

Variants are run in turn, the compiler's time is not counted, and times are medians. A token step
counts where every slot was busy and nothing else ran; `roofline` is the share that the bytes which
must move take of it, by a copy timed in the same run. Completions end by their length alone. Exits
with 1 where a second pass over the same requests compiled anything, with 2 when the arguments are
wrong.
"""

import argparse
import importlib.util
import sys
from typing import Any

import jax

from benchmarks.decode.model_shapes import SHAPES
from benchmarks.decode.random_requests import parse_lengths
from benchmarks.decode.run import measure
from benchmarks.decode.settings import HF, DecodeSettings, check_settings
from benchmarks.decode.token_step import NothingToTime
from benchmarks.decode.variants import ATTENTIONS, DTYPES, LOOPS, Variant, parse_variants
from benchmarks.report_file import STDOUT, aligned, check_report_file, json_values, write_report
from driver.chip_plan.published_models import with_layers
from models.config import ModelConfig
from models.files.checkpoint import check_model_files, read_model_config


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        check_report_file(arguments.json)
        settings = read_settings(arguments)
        layout = settings.layout(jax.devices())
        check_settings(settings, layout)
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    try:
        found = json_values(measure(settings, layout, lambda line: print(line, file=sys.stderr)))
    except NothingToTime as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    write_report(found, arguments.json, table(found))
    late = [
        f"{run['name']}: {program}"
        for run in found["runs"]
        for program in run.get("late_programs", ())
    ]
    if late:
        print(f"bench: compiled in a later pass: {', '.join(late)}", file=sys.stderr)
    return 1 if late else 0


def read_settings(arguments: argparse.Namespace) -> DecodeSettings:
    """The settings of a command line; `check_settings` has the rules across them.

    Raises:
        ValueError: naming the value, the rule and what to write instead.
    """
    base = Variant(
        loop=arguments.loop,
        attention=arguments.attention,
        compute_dtype=arguments.compute_dtype,
        segment_tokens=arguments.segment_tokens,
        prefill_tokens=arguments.prefill_tokens,
    )
    model = _model(arguments)
    needed = {HF: ("torch", "transformers")}.get(arguments.against, ())
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"--against {HF} needs {' and '.join(missing)}: pip install '.[test]'")
    return DecodeSettings(
        shape=arguments.shape or arguments.model,
        model=model,
        path=None if arguments.random_weights else arguments.model,
        dtype=arguments.dtype,
        variants=parse_variants(base, arguments.compare),
        slots=tuple(_slots(text) for text in arguments.slots.split(",")),
        tensor=arguments.tensor,
        prompt=arguments.prompt,
        new=arguments.new,
        cache=arguments.cache,
        repeat=arguments.repeat,
        seed=arguments.seed,
        lengths=None if arguments.lengths is None else parse_lengths(arguments.lengths),
        requests=arguments.requests,
        group=arguments.group,
        against=arguments.against,
    )


def _model(arguments: argparse.Namespace) -> ModelConfig:
    if arguments.shape is not None:
        if not arguments.random_weights:
            raise ValueError(
                f"--shape {arguments.shape} has no weights: add --random-weights, or name a --model"
            )
        model = SHAPES.get(arguments.shape, SHAPES.get(f"qwen2.5-{arguments.shape}"))
        if model is None:
            raise ValueError(f"--shape {arguments.shape!r} must be one of {', '.join(SHAPES)}")
    elif arguments.random_weights:
        model = read_model_config(arguments.model)
    else:
        if arguments.layers is not None:
            raise ValueError("--layers cuts a random model: add --random-weights")
        check_model_files(arguments.model)
        return read_model_config(arguments.model)
    return with_layers(model, arguments.layers)


def _slots(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"--slots takes whole numbers with commas between them, got {text!r}")
    return int(text)


def table(found: dict[str, Any]) -> list[str]:
    """The report for a person, as lines."""
    environment = found["environment"]
    lines = [
        f"{found['question']['shape']} on {environment['devices']} x {environment['device']} "
        f"({environment['lanes']} lanes, tensor={environment['tensor']}), copies at "
        f"{environment['copy']['bytes_per_s'] / 1e9:.1f} GB/s"
    ]
    for what, columns in _COLUMNS.items():
        runs = [run for run in found["runs"] if run["what"] == what]
        if runs:
            lines += _columns_of(columns, runs)
    for run in found["runs"]:
        if run["what"] == "mix":
            lines.append(_mix_text(run))
    for one in found.get("against", ()):
        lines.append(
            f"{one['slots']} slots, greedy, prefill included: {one['name']} {one['ours_ms']:.2f} "
            f"ms a token, transformers {one['hf_float32_ms']:.2f} in float32 and "
            f"{one['hf_bfloat16_ms']:.2f} in bfloat16: {one['ratio']:.2f}x its best"
        )
    return lines


_COLUMNS = {
    "step": {
        "slots": ("slots", "d", 1),
        "step_ms": ("step ms", ".3f", 1),
        "step_ratio": ("ratio", ".2f", 1),
        "roofline_ms": ("roofline ms", ".3f", 1),
        "roofline_share": ("roofline", ".1%", 1),
        "tokens_per_s": ("tokens/s", ".0f", 1),
        "prefill_ms": ("prefill ms", ".1f", 1),
        "occupancy": ("occupancy", ".1%", 1),
        "compilations": ("programs", "d", 1),
        "compile_s": ("compile s", ".1f", 1),
        "peak_bytes": ("peak GB", ".3f", 1e9),
    },
    "group": {
        "slots": ("slots", "d", 1),
        "prompt_tokens": ("prompt", "d", 1),
        "group": ("group", "d", 1),
        "single_ms": ("single ms", ".1f", 1),
        "group_ms": ("group ms", ".1f", 1),
        "ratio": ("ratio", ".2f", 1),
        "ms_per_completion": ("ms each", ".2f", 1),
        "step_ms": ("step ms", ".2f", 1),
        "compilations": ("programs", "d", 1),
        "compile_s": ("compile s", ".1f", 1),
    },
}
"""By kind of run: figure, title, format, and what the figure is divided by."""


def _mix_text(run: dict[str, Any]) -> str:
    static, continuous = run["static"], run["continuous"]
    return (
        f"{run['name']}, {run['requests']} requests of {run['mean_tokens']:.0f} tokens (at most "
        f"{run['longest_tokens']}) over {run['slots']} slots: static batches "
        f"{static['tokens_per_s']:.0f} tokens/s at {static['occupancy']:.1%} occupancy, continuous "
        f"{continuous['tokens_per_s']:.0f} at {continuous['occupancy']:.1%} "
        f"({continuous['occupancy_until_queue_empty']:.1%} until the queue is empty): "
        f"{run['ratio']:.2f}x; {run['compilations_after_first_pass']} compilations after the "
        f"first pass, {run['compilations']} in it ({run['compile_s']:.1f} s)"
    )


def _columns_of(
    columns: dict[str, tuple[str, str, float]], runs: list[dict[str, Any]]
) -> list[str]:
    rows = [["", *(title for title, _, _ in columns.values())]]
    for run in runs:
        cells = [
            format(run[name] if unit == 1 else run[name] / unit, spec)
            for name, (_, spec, unit) in columns.items()
        ]
        rows.append([run["name"], *cells])
    return aligned(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollout_worker.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", help=f"one of {', '.join(SHAPES)}")
    model.add_argument("--model", metavar="PATH", help="HF folder, .gguf file or hub id")
    add("--random-weights", action="store_true", help="draw the weights, read none")
    add("--layers", type=int, help="cut a random model to its first LAYERS layers")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (%(default)s)")
    add("--slots", default="16", metavar="N[,N...]", help="of all lanes together (%(default)s)")
    add("--tensor", type=int, default=1, help="devices a model is cut over (%(default)s)")
    add("--prompt", type=int, default=128, help="tokens of a prompt (%(default)s)")
    add("--new", type=int, default=256, help="tokens of a completion (%(default)s)")
    add("--cache", type=int, help="columns of the widest cache (default: prompt + completion)")
    add("--repeat", type=int, default=3, help="passes that are timed, of each (%(default)s)")
    add("--seed", type=int, default=0, help="of weights, prompts, lengths, draws (%(default)s)")
    _add_variant(add)
    add("--lengths", help="lognormal:mean=220,max=1024[,sigma=0.8]: static beside continuous")
    add("--requests", type=int, default=512, help="of which --lengths are drawn (%(default)s)")
    add("--group", type=int, help="completions of a prompt, whose prefill is to be timed")
    add("--against", choices=(HF,), help="transformers on the CPU, greedily, in the same run")
    add(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the report there; without FILE to stdout, instead of the table",
    )
    return parser


def _add_variant(add) -> None:
    variant = Variant()
    add("--loop", choices=LOOPS, default=variant.loop, help="(%(default)s)")
    add("--attention", choices=ATTENTIONS, default=variant.attention, help="(%(default)s)")
    add("--compute-dtype", choices=DTYPES, default=variant.compute_dtype, help="(%(default)s)")
    for name, what in (
        ("segment_tokens", "most token steps of a segment"),
        ("prefill_tokens", "of one prefill call"),
    ):
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=int, default=getattr(variant, name), help=f"{what} (%(default)s)")
    add(
        "--compare",
        metavar="CHANGE[,CHANGE...]",
        help="further variants, such as loop=python,attention=f32+loop=python; ratios refer to "
        "the one without changes",
    )
