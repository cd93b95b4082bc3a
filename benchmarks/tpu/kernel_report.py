"""Compiles every kernel and its alternatives for a TPU, and compares their costs with budgets.

    python -m kernels.tpu_report --fast
    python -m kernels.tpu_report --only 'token_logprob/*' 'head/*' --ops --json report.json

Compiles the programs of kernel_programs.py for one chip of a TPU v6e and needs jax[tpu], no TPU.
Nothing is executed and no figure is a measured time. Cycles are counted in the compiler's own
schedule of each operation, and cost_model.py makes a time of them and of the bytes, to rank
variants by.

Exits with 1 when a program does not compile or breaks a budget of budgets.json, and with 2
when the arguments are wrong.
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

from benchmarks.report_file import check_report_file, write_report
from benchmarks.tpu import budgets as tpu_budgets
from benchmarks.tpu import compile_kernel
from driver.chip_plan.compiled import cost_model

SHOWN_OPS = 8
"""Of a program, by model time; the rest is one line."""
NOTE = (
    "model_ms is no measured time: max(cycles / 1.75 GHz, bytes / 1.64 TB/s) of each operation, "
    "summed. Programs timed on a v6e took 1.35 to 1.5 times theirs."
)


class WrongArgument(Exception):
    """An argument names something that does not exist here."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.child:
        return _child(arguments.child, pathlib.Path(arguments.into))
    try:
        check_report_file(arguments.json)
        names = _chosen(arguments.only, arguments.fast)
        versions = _versions()
        budgets = tpu_budgets.load_budgets()
    except (WrongArgument, ValueError) as error:
        print(f"tpu_report: {error}", file=sys.stderr)
        return 2
    print(f"TPU v6e, one chip; jax {versions['jax']}, libtpu {versions['libtpu']}")
    if versions["libtpu"] != budgets.libtpu:
        print(
            f"warning: the budgets were set with libtpu {budgets.libtpu}; another compiler may "
            "break them without a change of ours"
        )
    found = []
    for name in names:
        figures = compile_kernel.compile_in_child(name, arguments.deadline_s)
        entry = judge(name, figures, budgets.programs.get(name, {}))
        found.append(entry)
        print("\n" + describe(entry, with_ops=arguments.ops), flush=True)
    print(f"\n{NOTE}")
    broken, text = verdict(found)
    print(f"\n{text}")
    if arguments.json:
        report = {"versions": versions, "held": not broken, "programs": found}
        write_report(report, arguments.json)
    return 1 if broken else 0


def judge(name: str, figures: compile_kernel.Figures, budget: dict[str, float]) -> dict[str, Any]:
    """One program beside its budget.

    Returns:
        What --json has of it: `name`, the fields of `compile_kernel.Figures`, but `cycles`,
        `model_ms` and `cost` in place of `ops` and `op_cycles`; and `checks`.
    """
    entry = {"name": name, **dataclasses.asdict(figures), "checks": []}
    del entry["ops"], entry["op_cycles"]
    if figures.error:
        return entry
    cost = cost_model.program_cost(figures.ops, figures.op_cycles)
    entry |= {"cycles": cost.cycles, "model_ms": cost.ms}
    ops = [op._asdict() for op in cost.ops]
    entry["cost"] = {"ops": ops, "without_cycles": cost.without_cycles}
    measured = {key: entry[key] for key in tpu_budgets.FIGURES}
    checks = tpu_budgets.check_figures(measured, budget)
    entry["checks"] = [{**check._asdict(), "verdict": check.verdict} for check in checks]
    return entry


def describe(entry: dict[str, Any], *, with_ops: bool) -> str:
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
    lines.append(f"  {'':<15}{'reached':>16}{'budget':>16}")
    for check in entry["checks"]:
        lines.append(
            f"  {check['figure']:<15}{_number(check['reached']):>16}"
            f"{_number(check['budget']):>16}  {check['verdict']}"
        )
    if entry["cost"]["without_cycles"]:
        lines.append(f"  by their bytes alone {', '.join(entry['cost']['without_cycles'])}")
    if with_ops:
        lines += _describe_ops(entry["cost"]["ops"])
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


def _describe_ops(ops: list[dict[str, Any]]) -> list[str]:
    lines = [f"  {'ms':>8}{'cycles':>14}{'bytes':>17}{'times':>6}  operation"]
    for op in ops[:SHOWN_OPS]:
        lines.append(
            f"  {op['ms']:8.3f}{_number(op['cycles']):>14}{op['bytes']:>17,}{op['times']:>6}  "
            f"{op['name']} ({op['opcode']})"
        )
    rest = ops[SHOWN_OPS:]
    if rest:
        lines.append(f"  {sum(op['ms'] for op in rest):8.3f}  in {len(rest)} more")
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def _chosen(only: list[str] | None, fast: bool) -> list[str]:
    """Names of the programs asked for."""
    from benchmarks.tpu.kernel_programs import programs

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
            raise WrongArgument(f"no {kind} is called {pattern!r}; nearest: {', '.join(near)}")
        chosen += [name for name in matching if name not in chosen]
    return chosen


def _versions() -> dict[str, str]:
    if importlib.util.find_spec("libtpu") is None:
        raise WrongArgument("libtpu, the compiler, is not installed: pip install '.[tpu]'")
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def _child(name: str, into: pathlib.Path) -> int:
    from benchmarks.tpu.kernel_programs import programs

    figures = compile_kernel.compile_here(programs()[name].lower)
    into.write_text(json.dumps(dataclasses.asdict(figures)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.tpu_report",
        description="Compile the TPU kernels without a TPU and compare their costs with budgets.",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these programs; shell patterns are understood"
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="without log_softmax, and of the head one chunk: about two minutes",
    )
    parser.add_argument(
        "--ops", action="store_true", help="list the dearest operations of each program"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds for one program (%(default)s)",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    return parser
