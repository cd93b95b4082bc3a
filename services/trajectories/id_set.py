"""A set of ids that are mostly numbered in a row, such as those of all groups ever used.

Ids like `g00000041` are kept as ranges of their numbers: a run of millions of groups takes a few of
them. Any other text is an id as well.
"""

import bisect
import re
from collections.abc import Iterable
from typing import NamedTuple

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<digits>[0-9]{1,18})", re.DOTALL)

PlainIds = list[str | list[str]]
"""JSON values: an id, or the first and the last of a range."""


class _Series(NamedTuple):
    """Ids that differ in their number only."""

    stem: str
    digits: int


class IdSet:
    """Ids can be added, and none is ever removed."""

    def __init__(self, plain: Iterable[str | Iterable[str]] = ()):
        """Args:
            plain: as `plain` returned it, or any ids.

        Raises:
            ValueError: if a range is none.
        """
        self._ranges: dict[_Series, list[list[int]]] = {}
        """Disjoint [first, last] in order, with gaps between them."""
        self._others: set[str] = set()
        for item in plain:
            if isinstance(item, str):
                self.add(item)
            else:
                first, last = map(_number, item)
                if first is None or last is None or first[0] != last[0] or first[1] > last[1]:
                    raise ValueError(f"a range of ids has a first and a last, got {item}")
                self._insert(first[0], first[1], last[1])

    def add(self, new_id: str) -> None:
        """Adds one id, as `set.add` does."""
        found = _number(new_id)
        if found is None:
            self._others.add(new_id)
        else:
            series, number = found
            self._insert(series, number, number)

    def update(self, ids: Iterable[str]) -> None:
        """Adds several ids, as `set.update` does."""
        for new_id in ids:
            self.add(new_id)

    def __contains__(self, one: str) -> bool:
        found = _number(one)
        if found is None:
            return one in self._others
        series, number = found
        ranges = self._ranges.get(series, [])
        at = bisect.bisect_right(ranges, number, key=lambda bounds: bounds[0]) - 1
        return at >= 0 and number <= ranges[at][1]

    def highest(self, stem: str) -> int:
        """The highest number of the ids that begin so, such as 41 of `g00000041`; -1 of none."""
        return max((r[-1][1] for s, r in self._ranges.items() if s.stem == stem), default=-1)

    def plain(self) -> PlainIds:
        """The set as JSON values, in an order of its own."""
        ranges = [
            [_text(series, first), _text(series, last)] if first < last else _text(series, first)
            for series, ranges in sorted(self._ranges.items())
            for first, last in ranges
        ]
        return [*ranges, *sorted(self._others)]

    def _insert(self, series: _Series, first: int, last: int) -> None:
        """Adds a range, joining those that it touches."""
        ranges = self._ranges.setdefault(series, [])
        start = bisect.bisect_left(ranges, first - 1, key=lambda bounds: bounds[1])
        end = bisect.bisect_right(ranges, last + 1, key=lambda bounds: bounds[0])
        if start < end:
            first, last = min(first, ranges[start][0]), max(last, ranges[end - 1][1])
        ranges[start:end] = [[first, last]]


def _number(one: str) -> tuple[_Series, int] | None:
    match = _NUMBERED.fullmatch(one)
    if match is None:
        return None
    return _Series(match["stem"], len(match["digits"])), int(match["digits"])


def _text(series: _Series, number: int) -> str:
    return f"{series.stem}{number:0{series.digits}d}"
