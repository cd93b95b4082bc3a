"""What the TPU compiler says of every kernel and its rivals, held to committed budgets.

    python -m kernels.tpu_report --fast
    python -m kernels.tpu_report --only 'token_logprob/*' 'head/*' --cycles --json report.json

Compiles the programs of programs.py for one chip of a TPU v6e and needs jax[tpu], no TPU.
Nothing is executed and no figure is a measured time. With --cycles, which takes minutes for each
program, libtpu's static evaluator counts the cycles of every operation, and the model of
cost.py makes a time of them to rank variants by. In a loop it counts one round, which is
multiplied by the rounds. A Pallas kernel over a large vocabulary is evaluated at smaller ones and
extrapolated: the evaluator keeps all that it executes in memory. An evaluation that stops half-way
is reported as incomplete, its missing operations at the time of their bytes, and no budget is held
to it.

Exits with 1 when a program does not compile or breaks a budget of budgets.json, and with 2
when the question is wrong.
"""

import argparse
import dataclasses
import difflib
import fnmatch
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from kernels.report_file import check_report_file
from kernels.tpu_report import budgets as tpu_budgets
from kernels.tpu_report import compile as tpu_compile
from kernels.tpu_report import cost as tpu_cost

SHOWN_OPS = 8
"""Of a program, by model time; the rest is one line."""
NOTE = (
    "model_ms is no measured time: max(cycles / 1.75 GHz, bytes / 1.64 TB/s) of each operation, "
    "summed. Programs timed on a v6e took 1.35 to 1.5 times theirs."
)


class WrongQuestion(Exception):
    """The command asks for what does not exist here."""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.child:
        return _child(arguments.child, pathlib.Path(arguments.into), arguments.small)
    try:
        check_report_file(arguments.json)
        names = _chosen(arguments.only, arguments.fast)
        versions = _versions()
        budgets = tpu_budgets.load()
    except (WrongQuestion, ValueError) as error:
        print(f"tpu_report: {error}", file=sys.stderr)
        return 2
    print(f"TPU v6e, one chip; jax {versions['jax']}, libtpu {versions['libtpu']}")
    if versions["libtpu"] != budgets.libtpu:
        print(
            f"warning: the budgets were set with libtpu {budgets.libtpu}; another compiler may "
            "break them without a change of ours"
        )
    limits = tpu_compile.Limits(arguments.deadline_s, round(arguments.memory_gib * 2**30))
    found = []
    for name in names:
        figures = tpu_compile.compile_in_child(name, limits)
        evaluation = None
        if arguments.cycles and not figures.error:
            evaluation = _evaluate(name, limits)
        entry = judge(name, figures, evaluation, budgets.programs.get(name, {}))
        found.append(entry)
        print("\n" + describe(entry), flush=True)
    if arguments.cycles:
        print(f"\n{NOTE}")
    broken, text = verdict(found)
    print(f"\n{text}")
    if arguments.json:
        report = {"versions": versions, "held": not broken, "programs": found}
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 1 if broken else 0


def judge(
    name: str,
    figures: tpu_compile.Figures,
    evaluation: tpu_compile.Evaluation | None,
    budget: dict[str, float],
) -> dict[str, Any]:
    """One program beside its budget.

    Returns:
        What --json has of it: `name`, the fields of compile.Figures (without `ops`), after an
        evaluation also `cycles`, `model_ms`, `incomplete` and `cost`, and `checks`.
    """
    entry = {"name": name, **dataclasses.asdict(figures), "checks": []}
    del entry["ops"]
    if figures.error:
        return entry
    measured = {key: entry[key] for key in tpu_budgets.FIGURES if key in entry}
    if evaluation is not None:
        cost = tpu_cost.model(figures.ops, evaluation.cycles)
        entry["cycles"], entry["model_ms"] = cost.cycles, cost.ms
        # The compiler may fail behind the evaluator, which has then seen every operation.
        entry["incomplete"] = (evaluation.stopped or "ended well") if cost.without_cycles else ""
        ops = [op._asdict() for op in cost.ops]
        entry["cost"] = {"ops": ops, "without_cycles": cost.without_cycles}
        if not cost.without_cycles:
            measured |= {"cycles": cost.cycles, "model_ms": cost.ms}
    checks = tpu_budgets.check(measured, budget)
    entry["checks"] = [{**check._asdict(), "verdict": check.verdict} for check in checks]
    return entry


def describe(entry: dict[str, Any]) -> str:
    """One program as text."""
    if entry["error"]:
        return f"{entry['name']}: DOES NOT COMPILE\n  {entry['error']}"
    lines = [f"{entry['name']}: compiled in {entry['compile_s']:.1f} s"]
    lines += [f"  {array}" for array in entry["arrays"]]
    lines.append(
        f"  arguments {entry['argument_bytes']:,}, outputs {entry['output_bytes']:,}, of these "
        f"donated {entry['alias_bytes']:,}"
    )
    if entry["uncounted_loops"]:
        lines.append(f"  one round counted of the loops {', '.join(entry['uncounted_loops'])}")
    for check in entry["checks"]:
        lines.append(
            f"  {check['figure']:<15}{_number(check['reached']):>16}"
            f"{_number(check['budget']):>16}  {check['verdict']}"
        )
    if "cost" in entry:
        lines += _describe_cost(entry)
    return "\n".join(lines)


def verdict(entries: Iterable[dict[str, Any]]) -> tuple[list[str], str]:
    """What is broken, as one phrase each, and the closing lines."""
    broken, held = [], 0
    for entry in entries:
        if entry["error"]:
            broken.append(f"{entry['name']} does not compile")
        for check in entry["checks"]:
            held += check["verdict"] == "held"
            if check["verdict"] == "BROKEN":
                broken.append(
                    f"{entry['name']}: {check['figure']} {_number(check['reached'])} is above "
                    f"{_number(check['budget'])}"
                )
    text = "\n".join([f"{held} budgets held, {len(broken)} broken", *broken])
    return broken, text


def _describe_cost(entry: dict[str, Any]) -> list[str]:
    ops, without = entry["cost"]["ops"], entry["cost"]["without_cycles"]
    lines = [f"  {'ms':>8}{'cycles':>14}{'bytes':>17}{'times':>6}  operation"]
    for op in ops[:SHOWN_OPS]:
        lines.append(
            f"  {op['ms']:8.3f}{_number(op['cycles']):>14}{op['bytes']:>17,}{op['times']:>6}  "
            f"{op['name']} ({op['opcode']})"
        )
    rest = ops[SHOWN_OPS:]
    if rest:
        lines.append(f"  {sum(op['ms'] for op in rest):8.3f}  in {len(rest)} more")
    if without:
        lines.append(
            f"  INCOMPLETE (the evaluator {entry['incomplete']}): {entry['cycles']:,} cycles and "
            f"{entry['model_ms']:.3f} ms are lower bounds, by their bytes alone "
            f"{', '.join(without)}"
        )
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def _chosen(only: list[str] | None, fast: bool) -> list[str]:
    """Names of the programs asked for."""
    from kernels.tpu_report.programs import programs

    known = programs()
    names = [name for name, program in known.items() if program.fast or not fast]
    if not only:
        return names
    chosen = []
    for pattern in only:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            kind = "fast program" if fast else "program"
            raise WrongQuestion(f"no {kind} is called {pattern!r}; nearest: {', '.join(near)}")
        chosen += [name for name in matching if name not in chosen]
    return chosen


def _versions() -> dict[str, str]:
    if importlib.util.find_spec("libtpu") is None:
        raise WrongQuestion("libtpu, the compiler, is not installed: pip install '.[tpu]'")
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def _evaluate(name: str, limits: tpu_compile.Limits) -> tpu_compile.Evaluation:
    from kernels.tpu_report.programs import programs

    program = programs()[name]
    if not program.small:
        return tpu_compile.evaluate_in_child(name, limits)
    parts = [
        tpu_compile.evaluate_in_child(name, limits, small=i) for i in range(len(program.small))
    ]
    cycles = tpu_cost.extrapolate(
        [(small.size, part.cycles) for small, part in zip(program.small, parts, strict=True)],
        program.size,
    )
    stopped = "; ".join(dict.fromkeys(part.stopped for part in parts if part.stopped))
    return tpu_compile.Evaluation(cycles, stopped)


def _child(name: str, into: pathlib.Path, small: int | None) -> int:
    from kernels.tpu_report.programs import programs

    program = programs()[name]
    lower = program.lower if small is None else program.small[small].lower
    into.write_text(json.dumps(dataclasses.asdict(tpu_compile.compile_here(lower))))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.tpu_report",
        description="Compile the TPU kernels without a TPU and hold them to their budgets.",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these programs; shell patterns are understood"
    )
    parser.add_argument(
        "--fast", action="store_true", help="no rivals, and one chunk of the head for all of it"
    )
    parser.add_argument(
        "--cycles", action="store_true", help="count cycles as well: minutes for each program"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds for one program, and again for its cycles (%(default)s)",
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=12.0,
        metavar="GIB",
        help="memory at which one evaluation is stopped; heads may need more (%(default)s)",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    parser.add_argument("--small", type=int, help=argparse.SUPPRESS)
    return parser
