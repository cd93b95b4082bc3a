"""What every bench does with its report: versions, strict JSON, `--json`, tables of text."""

import json
import math
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from driver.chip_plan.compiled.compiler_versions import compiler_versions
from services.process.whole_file import check_writable

STDOUT = "-"
INTERPRETED = "pallas is interpreted here: exact, and no measure of its speed"


def check_report_file(file: str | None) -> None:
    """Refuses what `--json` could not write.

    Args:
        file: None where nothing is written; STDOUT is no file.

    Raises:
        ValueError: naming the value, the rule and the fix.
    """
    if file is not None and file != STDOUT:
        check_writable(pathlib.Path(file), "--json")


def write_report(report: dict[str, Any], file: str | None, text: Sequence[str] = ()) -> None:
    """Prints the text, and writes the report as `--json` asks.

    Args:
        report: values that strict JSON can hold.
        file: None writes none; STDOUT prints the report instead of the text.
        text: lines for a person.
    """
    document = json.dumps(report, indent=2, allow_nan=False)
    if file == STDOUT:
        print(document)
        return
    if text:
        print("\n".join(text))
    if file is not None:
        pathlib.Path(file).write_text(document + "\n", encoding="utf-8")


def aligned(rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines with columns two blanks apart, the first to the left and the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if column else '<'}{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns under a title."""
    return "\n".join([title, "", *aligned([heads, *rows])])


def versions() -> dict[str, str | None]:
    """Of what decides about a measurement; None for what is not installed."""
    return {"python": platform.python_version(), **compiler_versions()}


def json_values(value: Any) -> Any:
    """The value as strict JSON can hold it; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value
