"""Columns of text."""

from collections.abc import Sequence


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table with its title; the first column is left, the others right."""
    cells = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([title, "", *lines])
